"""Values that compare prompts cover all ranks, and greedy scores belong to their prompt."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import fit, tiny_module, tiny_prompts

from lightning_rl import RLCallback
from lightning_rl.audit import SignalAudit
from lightning_rl.rollouts.sample import Sampler


def mean_of_rank(own: Any, rollout: Any) -> Any:
    return {"extras/ease": (rollout.rewards - rollout.rewards.mean()).abs()}


def mean_of_all(own: Any, rollout: Any) -> Any:
    total, number = own.collectives.sum(torch.stack([rollout.rewards.sum(), torch.tensor(float(len(rollout)))]))
    return {"extras/ease": (rollout.rewards - total / number).abs()}


@pytest.mark.parametrize(("provide", "wrong"), [(mean_of_rank, True), (mean_of_all, False)])
def test_a_provided_field_that_compares_prompts_covers_all_ranks(provide: Any, wrong: bool) -> None:
    members = {"name": "ease", "provide": provide, "provides": ("extras/ease",), "batch_statistics": True}
    callback = type("Ease", (RLCallback,), members)()
    assert culprits("contribution_ranks", evidence_of(callback)) == (["callback ease.provide"] if wrong else [])


def of_the_next_prompt(sampler: Any, rollout: Any, greedy: Any) -> Any:
    return BASELINE(sampler, rollout, greedy.replace(rewards=greedy.rewards.roll(1)))


BASELINE = Sampler._with_baseline  # noqa: SLF001


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.filterwarnings("ignore:.*the audit of rollout:UserWarning")
def test_the_greedy_score_of_a_row_is_that_of_its_own_prompt(wrong: bool) -> None:
    audit = SignalAudit(1, checks=["reward_rows"])
    with patch.object(Sampler, "_with_baseline", of_the_next_prompt) if wrong else patch.dict({}):
        fit(tiny_module(advantages="remax"), callbacks=[audit], data=tiny_prompts(16, 4), max_steps=4)
    assert {finding.culprit for finding in audit.findings} == (
        {"stage generate, the greedy scores of its rows"} if wrong else set()
    )
