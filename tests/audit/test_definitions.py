"""Estimators on made-up rewards: formulas of the audit, two ranks, ties and constants."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from typing_extensions import override

import lightning_rl.advantages.normalized as normalized_module
import lightning_rl.advantages.reinforce_plus_plus as plus_plus_module
from lightning_rl import RLCallback
from lightning_rl.advantages import (
    ESTIMATORS,
    GPG,
    GRPO,
    RLOO,
    Advantages,
    DrGRPO,
    HierarchicalGRPO,
    Normalized,
    PassAtK,
    ReinforcePlusPlus,
    resolve_advantages,
)
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollouts import collector
from lightning_rl.signal import statistics
from lightning_rl.signal.masked import local_sum

MORE = [
    Normalized(std="batch"),
    Normalized(mean="batch", std="batch", unbiased=False),
    Normalized(std="none", leave_one_out=True),
    Normalized(mean="none", std="group"),
    GRPO(unbiased=False, epsilon=0.1),
    GPG(teaches="nonzero"),
    PassAtK(scaled=True),
    ReinforcePlusPlus(gamma=0.9),
    HierarchicalGRPO(role="player", comparison=RLOO()),
    HierarchicalGRPO(comparison=DrGRPO()),
]


def with_estimator(advantages: Any, ranks: int = 1, size: int = 4) -> Evidence:
    evidence = evidence_of(ranks=ranks)
    algorithm = evidence.algorithm.replace(advantages=resolve_advantages(advantages))
    return replace(evidence, algorithm=algorithm, facts=replace(evidence.facts, group_size=size))


def found(advantages: Any, ranks: int = 1, size: int = 4) -> list[str]:
    evidence = with_estimator(advantages, ranks, size)
    return [check for check in ("advantage_formula", "advantage_ranks") if culprits(check, evidence)]


class Renamed(GRPO):
    """A subclass with the formula of its parent."""


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("estimator", [*ESTIMATORS.values(), *MORE, Renamed()], ids=repr)
def test_an_estimator_of_the_library_has_its_formula_on_any_number_of_ranks(estimator: Any, size: int) -> None:
    assert found(estimator, ranks=2, size=size) == []


class OwnRank(ReinforcePlusPlus):
    """Whitens on each rank separately."""

    @override
    def __call__(self, signal: Any) -> Any:
        return super().__call__(replace(signal, global_sum=local_sum))


def zeros_count(scores: Tensor, rewarded: Tensor, global_sum: Any) -> Any:
    everything = torch.ones_like(rewarded)
    return BATCH(torch.where(rewarded, scores, 0.0), everything, global_sum)._replace(spread=rewarded)


def penalty_as_bonus(_: Any, signal: Any) -> Any:
    centered = plus_plus_module.DrGRPO().per_row(signal.scores, signal.groups, signal.rewarded)
    return plus_plus_module._whiten(signal.spread_out(centered) - signal.token_rewards, signal)  # noqa: SLF001


def without_roles(own: Any, signal: Any) -> Any:
    return Advantages(signal.spread_out(own.comparison.per_row(signal.scores, signal.groups, signal.rewarded)))


def variance(own: Any, *, unbiased: bool = True) -> Tensor:
    return own.squares / (own.number - int(unbiased)).clamp(min=1)


BATCH = normalized_module.batch_statistics
PLUS_PLUS = plus_plus_module.ReinforcePlusPlusBaseline


@pytest.mark.parametrize(
    ("estimator", "wrong"),
    [
        (GRPO(), patch.object(statistics.Population, "std", variance)),
        (Renamed(), patch.object(statistics.Population, "std", variance)),
        (Normalized(std="batch"), patch.object(normalized_module, "batch_statistics", zeros_count)),
        (HierarchicalGRPO(), patch.object(HierarchicalGRPO, "__call__", without_roles)),
        (PLUS_PLUS(), patch.object(PLUS_PLUS, "__call__", penalty_as_bonus)),
        (ReinforcePlusPlus(gamma=0.5), patch.object(plus_plus_module, "discounted_returns", lambda r, *_, **__: r)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_formula_of_the_library_is_found(estimator: Any, wrong: Any) -> None:
    with wrong:
        assert "advantage_formula" in found(estimator)


def test_an_own_estimator_that_whitens_on_each_rank_is_found_on_several() -> None:
    assert found(OwnRank()) == [] and found(OwnRank(), ranks=2) == ["advantage_ranks"]


def grouped(of_group: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def estimate(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
        advantages = torch.zeros_like(scores)
        for group in groups.unique():
            rows = (groups == group) & rewarded
            advantages[rows] = of_group(scores[rows]) if rows.sum() > 1 else 0.0
        return advantages

    return estimate


def one_too_many(scores: Tensor) -> Tensor:
    return scores - (scores.sum() - scores) / len(scores)


def over_different(scores: Tensor) -> Tensor:
    return (scores - scores.unique().mean()) / (scores.std() + 1e-6)


@pytest.mark.parametrize(
    ("of_group", "wrong"),
    [
        (one_too_many, True),
        (lambda scores: scores - 0.9 * scores.mean(), True),
        (over_different, True),
        (lambda scores: scores - scores.unique().mean(), True),
        (lambda scores: scores - scores.median(), False),
        (lambda scores: scores - (scores.sum() - scores) / (len(scores) - 1), False),
        (lambda scores: (scores - scores.mean()) / (scores.std() + 1e-6), False),
        (lambda scores: scores / scores.mean() - 1, False),
        (lambda scores: (scores[:, None] > scores).double().sum(-1) / len(scores) - 0.5, False),
        (lambda scores: (scores > scores.mean()).double() - 0.5, False),
        (lambda scores: scores, False),
        (lambda scores: scores - 1.0, False),
        (lambda scores: (scores - scores.mean()).clamp(-0.5, 0.5), False),
        (lambda scores: scores - scores.max(), False),
    ],
)
def test_a_function_that_compares_rows_takes_a_whole_mean(of_group: Any, wrong: bool) -> None:
    assert found(grouped(of_group)) == (["advantage_formula"] if wrong else [])


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


def of_the_next_prompt(rollout: Any, greedy: Any, corrections: Any) -> Any:
    return BASELINE(rollout, greedy.replace(rewards=greedy.rewards.roll(1)), corrections)


BASELINE = collector.with_baseline


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.filterwarnings("ignore:.*the audit of rollout:UserWarning")
def test_the_greedy_score_of_a_row_is_that_of_its_own_prompt(wrong: bool) -> None:
    audit = SignalAudit(1, checks=["reward_rows"])
    with patch.object(collector, "with_baseline", of_the_next_prompt) if wrong else patch.dict({}):
        fit(tiny_module(advantages="remax"), callbacks=[audit], data=tiny_prompts(16, 4), max_steps=4)
    assert {finding.culprit for finding in audit.findings} == (
        {"stage generate, the greedy scores of its rows"} if wrong else set()
    )
