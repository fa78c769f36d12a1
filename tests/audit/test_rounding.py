"""Tolerance of the checks follows from dtype and size, so no scale of rewards gives a finding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from faults.parts import mean_minus_score
from kit.support import an_algorithm, ragged_rollout
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages.estimator import RowEstimator
from lightning_rl.audit import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.recomputed_metrics import kl_values
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.corrections import Stat
from lightning_rl.policy import Outputs
from lightning_rl.signal.kl import k3
from lightning_rl.testing.properties.comparisons import differences, rounding
from lightning_rl.testing.properties.definitions import population
from lightning_rl.testing.properties.subsample import some_rows

SIGNAL = ("reward_shift", "row_order", "group_isolation", "excluded_rows", "masked_values", "reward_conservation")
SIGNAL += ("advantage_direction",)


def evidence_of(rewards: Tensor, **options: Any) -> Evidence:
    """Return evidence of four groups of four with given rewards."""
    rollout = (
        ragged_rollout(16, group_size=4).sanitize().replace(rewards=rewards, rewards_by_function={"task": rewards})
    )
    algorithm = an_algorithm(**options)
    return Evidence(algorithm=algorithm, facts=RunFacts(), rollout=rollout, groups=rollout, rows=some_rows(rollout, 0))


def test_an_operation_errs_by_half_a_unit_in_the_last_place() -> None:
    assert rounding(torch.bfloat16, 2.0, 1) == 2 * 2**-7
    assert rounding(torch.float64, 1.0, 1) == rounding(torch.float32, 1.0, 1) == 2**-23


def test_what_differs_by_rounding_is_the_same_and_what_differs_by_more_is_not() -> None:
    ours, ids = torch.tensor([1000.0, 1.0]), torch.arange(2)
    assert not list(differences(ours, ours + torch.tensor([0.005, 0.0]), ids))
    assert [list(one.samples) for one in differences(ours, ours + torch.tensor([0.0, 0.02]), ids)] == [[1]]
    nan = torch.tensor([torch.nan, torch.inf])
    assert not list(differences(nan, nan, ids)) and list(differences(nan, ours, ids))


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_no_scale_of_rewards_gives_a_false_alarm(estimator: str) -> None:
    for seed, (scale, offset) in enumerate([(1e-6, 0.0), (1e-3, 0.0), (0.37, 0.0), (1e4, 0.0), (0.01, 1000.0)]):
        rewards = torch.rand(16, generator=torch.Generator().manual_seed(seed)) * scale + offset
        evidence = evidence_of(rewards, advantages=estimator)
        assert [name for name in SIGNAL if CHECKS[name](evidence)] == []


class MostOfTheMean(RowEstimator):
    """Subtracts nine tenths of the mean, and declares that it subtracts all."""

    within_groups = shift_invariant = True

    @override
    def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
        return torch.stack([scores[row] - 0.9 * scores[groups == group].mean() for row, group in enumerate(groups)])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_a_mean_that_is_not_subtracted_whole_is_found_at_every_scale(scale: float) -> None:
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0)) * scale
    (finding,) = CHECKS["reward_shift"](evidence_of(rewards, advantages=MostOfTheMean()))
    assert finding.culprit == "estimator MostOfTheMean"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_advantages_of_the_wrong_sign_are_found_at_every_scale(scale: float) -> None:
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0)) * scale
    (finding,) = CHECKS["advantage_direction"](evidence_of(rewards, advantages=mean_minus_score))
    assert finding.culprit == "estimator mean_minus_score" and "unlearns" in finding.observed
    (finding,) = CHECKS["advantage_direction"](evidence_of((rewards > scale / 2).float(), advantages=mean_minus_score))
    assert len(finding.samples) == 4


def test_advantages_that_do_not_depend_on_rewards_are_found() -> None:
    def constant(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
        return torch.where(rewarded, 1.0, 0.0)

    (finding,) = CHECKS["advantage_direction"](evidence_of(torch.arange(16.0), advantages=constant))
    assert finding.culprit == "estimator constant" and "do not depend" in finding.observed


def without_easy_groups(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Return advantages that are 0 in groups of a mean of 0.8 or more."""
    same = (groups[:, None] == groups[None]) & rewarded[None]
    mean = torch.where(same, scores[None], 0.0).sum(-1) / same.sum(-1).clamp(min=1)
    return torch.where(rewarded & (mean < 0.8), scores - mean, 0.0)


def test_an_estimator_that_drops_easy_groups_gives_no_alarm() -> None:
    good = torch.arange(16) % 4 > 0
    evidence = evidence_of(0.9 * good.float(), advantages=without_easy_groups)
    assert CHECKS["advantage_direction"](evidence) == []
    rollout = evidence.groups  # the worst row without a token: a higher reward of the next one ends its advantage
    rollout = rollout.replace(valid_tokens=rollout.valid_tokens & good[:, None])
    assert CHECKS["advantage_direction"](replace(evidence, groups=rollout)) == []


@pytest.mark.parametrize(("logged", "alarms"), [("k3", []), ("k1", ["metric kl/rollout"])])
def test_the_kl_of_a_policy_that_is_sure_of_every_token_is_judged_by_the_other_policy(
    logged: str, alarms: list[str]
) -> None:
    rows = ragged_rollout(8).sanitize()
    sure, other = torch.zeros_like(rows.require("old_logprobs")), torch.zeros_like(rows.require("old_logprobs"))
    other[rows.valid_tokens] = -torch.linspace(1e-5, 2e-5, int(rows.valid_tokens.sum()))
    rows = rows.replace(rollout_logprobs=other, old_logprobs=sure, ref_logprobs=None)
    values = k3(other, sure) if logged == "k3" else sure - other
    step = StepEvidence(
        rows=rows,
        outputs=Outputs(sure, sure, None),
        gradient=sure,
        masks=(),
        logged={"kl/rollout": [Stat.of(values, rows.valid_tokens).moments]},
        figures={"kl/rollout": population(kl_values(rows, sure)["kl/rollout"][rows.valid_tokens])},
    )
    evidence = Evidence(algorithm=an_algorithm(), facts=RunFacts(), rollout=rows, groups=rows, rows=rows, step=step)
    assert [finding.culprit for finding in CHECKS["logged_metrics"](evidence)] == alarms
