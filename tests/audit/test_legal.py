"""Valid configurations give no finding, or are declared in one line."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, Stat
from lightning_rl.audit import AuditError, SignalAudit
from lightning_rl.callbacks import AdaptiveKL


def alarms(*callbacks: RLCallback, deliberate: Sequence[str] = (), rollouts: int = 4, **options: Any) -> list[str]:
    audit = SignalAudit(1, deliberate=deliberate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tiny_module(**options), callbacks=[*callbacks, audit], data=tiny_prompts(4 * rollouts, 4))
    return [str(finding) for finding in audit.findings]


def batch_whitening(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Whiten over the whole batch, on purpose."""
    kept = scores[rewarded]
    return torch.where(rewarded, (scores - kept.mean()) / (kept.std() + 1e-6), 0.0)


@pytest.mark.nightly
def test_a_whitening_over_the_batch_is_declared_in_one_line() -> None:
    said = alarms(advantages=batch_whitening)
    assert said and all(text.startswith("group_isolation: estimator batch_whitening") for text in said)
    assert alarms(advantages=batch_whitening, deliberate=["group_isolation: estimator batch_whitening"]) == []


def test_what_is_not_declared_still_raises() -> None:
    audit = SignalAudit(1, "raise", deliberate=["group_isolation: estimator another"])
    with pytest.raises(AuditError, match="group_isolation: estimator batch_whitening"):
        fit(tiny_module(advantages=batch_whitening), callbacks=[audit], data=tiny_prompts(4, 4))


@pytest.mark.nightly
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


class GrowsBehindTheStep(Pull):
    """Adapts its coefficient after the step."""

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.coef *= 1.5


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [GrowsBehindTheStep])
def test_a_coefficient_that_follows_the_step_gives_no_alarm(kind: type[Pull]) -> None:
    assert alarms(kind(), minibatches_per_rollout=2, rollouts=2) == []
