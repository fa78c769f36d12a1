"""Evidence by hand: a few rows, without a run."""

import torch
from torch import Tensor

from kit.support import an_algorithm
from lightning_rl import RLCallback, Rollout
from lightning_rl.audit import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.testing.properties.copies import repeatable

LENGTHS = (3, 1, 2, 4, 2, 5, 3, 1, 4)
REWARDS = (1.0, 0.0, 3.0, 2.0, 2.5, 0.5, -1.0, 4.0, 1.5)


def evidence_of(*callbacks: RLCallback, ranks: int = 1, **provided: Tensor) -> Evidence:
    """Three prompts with three answers each, of different lengths and rewards, without an update."""
    rollout = Rollout.of_samples(
        [[2 + row // 3] * (1 + row // 3) for row in range(9)],
        [[5 + row] * length for row, length in enumerate(LENGTHS)],
        groups=[row // 3 for row in range(9)],
    )
    nothing = torch.zeros(rollout.response_ids.shape)
    known = {"old_logprobs": nothing - 1.0, "advantages": nothing, "extras": provided}
    rollout = rollout.replace(rewards=torch.tensor(REWARDS), **known)
    algorithm = repeatable(an_algorithm(()), callbacks)
    return Evidence(algorithm=algorithm, facts=RunFacts(ranks=ranks), rollout=rollout, groups=rollout, rows=rollout)


def culprits(check: str, evidence: Evidence) -> list[str]:
    """Return the culprits of the findings of a check."""
    return [finding.culprit for finding in CHECKS[check](evidence)]
