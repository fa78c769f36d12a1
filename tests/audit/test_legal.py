"""What is legal gives no alarm, or can be declared in one line."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_rl import LossTerm, LossView, Normalized, RLCallback, Stat
from lightning_rl.audit import AuditError, SignalAudit
from lightning_rl.callbacks import AdaptiveKL, DynamicSampling


def fractional(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float]:
    """A reward with many digits."""
    return [sum(ids) / (7.0 + len(ids)) / 3.0 for ids in completion_ids]


def tiny(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float]:
    """The same on a scale of a thousandth."""
    return [1e-3 * value for value in fractional(prompts, completions, completion_ids=completion_ids)]


def alarms(*callbacks: RLCallback, deliberate: Sequence[str] = (), rollouts: int = 4, **options: Any) -> list[str]:
    audit = SignalAudit(1, deliberate=deliberate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tiny_module(**options), callbacks=[*callbacks, audit], data=tiny_prompts(4 * rollouts, 4))
    return [str(finding) for finding in audit.findings]


@pytest.mark.parametrize("reward", [fractional, tiny])
@pytest.mark.parametrize("estimator", ["grpo", Normalized(std="batch"), "rloo"])
def test_fractional_rewards_of_any_scale_give_no_alarm(reward: Any, estimator: Any) -> None:
    assert alarms(rewards=reward, advantages=estimator) == []


def test_a_policy_that_waits_for_its_critic_gives_no_alarm() -> None:
    def critic_first(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, [lambda step: float(step >= 2), lambda _step: 1.0])

    options: dict[str, Any] = {"advantages": "gae", "critic": "shared", "minibatches_per_rollout": 2}
    assert alarms(lr_scheduler=critic_first, **options) == []


def test_a_warm_up_from_zero_gives_no_alarm() -> None:
    def warm_up(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    assert alarms(lr_scheduler=warm_up, optimizer=partial(AdamW, lr=1e-2)) == []


class EvenTokens(RLCallback):
    """Measures a subset of the tokens, and rejects none."""

    name = "even_tokens"

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        even = view.valid_tokens & (torch.arange(view.width) % 2 == 0)
        return {"even_tokens/entropy": Stat.of(view.entropy, even), "even_tokens/number": Stat.single(even.sum()).sum()}


def test_a_metric_over_a_subset_of_tokens_gives_no_alarm() -> None:
    assert alarms(EvenTokens(), minibatches_per_rollout=2, max_tokens_per_microbatch=40) == []


def batch_whitening(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Standardised over the whole batch, on purpose."""
    kept = scores[rewarded]
    return torch.where(rewarded, (scores - kept.mean()) / (kept.std() + 1e-6), 0.0)


def test_a_whitening_over_the_batch_is_declared_in_one_line() -> None:
    said = alarms(advantages=batch_whitening)
    assert said and all(
        text.startswith(("group_isolation: estimator batch_whitening", "advantages_are")) for text in said
    )
    meant = ["group_isolation: estimator batch_whitening", "advantages_are_those_of_the_stage"]
    assert alarms(advantages=batch_whitening, deliberate=meant) == []


def test_what_is_not_declared_still_raises() -> None:
    audit = SignalAudit(1, "raise", deliberate=["group_isolation: estimator another"])
    with pytest.raises(AuditError, match="group_isolation: estimator batch_whitening"):
        fit(tiny_module(advantages=batch_whitening), callbacks=[audit], data=tiny_prompts(4, 4))


def equal(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """Nothing to learn."""
    return [1.0] * len(completions)


def test_a_rollout_of_which_every_group_was_dropped_gives_no_alarm() -> None:
    assert alarms(DynamicSampling(max_rounds=2), rewards=equal, max_idle_rollouts=None) == []


def test_the_same_without_a_filter_gives_no_alarm() -> None:
    assert alarms(rewards=equal, max_idle_rollouts=None) == []


@pytest.mark.parametrize("as_loss", [False, True])
def test_a_coefficient_that_follows_the_rollout_gives_no_alarm(as_loss: bool) -> None:
    options: dict[str, Any] = {"advantages": "gae", "critic": "shared", "minibatches_per_rollout": 2}
    quick = AdaptiveKL(0.1, target=1e-3, horizon=16, as_loss=as_loss)  # by up to a fifth after every rollout
    assert alarms(quick, optimizer=partial(AdamW, lr=0.02), **options) == []


class Pull(RLCallback):
    """Pulls every log-probability towards -1, more with every optimizer step."""

    name = "pull"  # before the audit in the order of the names

    def __init__(self) -> None:
        self.coef = 0.1

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=(view.logprobs + 1).square(), coef=self.coef)

    @override
    def metrics(self, view: LossView) -> Mapping[str, Stat]:
        return {"pull/coef": Stat.of(torch.full_like(view.logprobs, self.coef), view.valid_tokens)}


class GrowsOnceObserved(Pull):
    """The coefficient moves when a step is observed."""

    @override
    def observe_step(self, trace: Any) -> None:
        self.coef *= 1.5


class GrowsInTheStep(Pull):
    """The coefficient moves once the gradients are there."""

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.coef *= 1.5


class GrowsBehindTheStep(Pull):
    """The coefficient moves when the step is over."""

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.coef *= 1.5


@pytest.mark.parametrize("kind", [GrowsOnceObserved, GrowsInTheStep, GrowsBehindTheStep])
def test_a_coefficient_that_follows_the_step_gives_no_alarm(kind: type[Pull]) -> None:
    assert alarms(kind(), minibatches_per_rollout=2, rollouts=2) == []
