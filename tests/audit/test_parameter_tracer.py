"""The audit follows parameters through an optimizer step, from the backward to the values after it."""

import warnings
from typing import Any, cast

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, weights_of
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, RLLightningModule
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.parameter_tracer import ParameterTracer
from lightning_rl.audit.user_hooks import gradient_hooks
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.corrections import StepTrace

OPTIONS = {"minibatches_per_rollout": 2, "max_tokens_per_microbatch": 40}


def sum_reward(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Return another reward for almost every response, so that every step has a gradient."""
    return [float(sum(ids)) for ids in completion_ids]


class Keeping(SignalAudit):
    """Keeps the tracers of all steps and the weights after them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.steps: list[tuple[StepTrace, ParameterTracer]] = []
        self.after: list[dict[str, Tensor]] = []

    @override
    def observe_step(self, trace: StepTrace) -> None:
        super().observe_step(trace)
        assert self._run is not None and self._run.tracer is not None
        self.steps.append((trace, self._run.tracer))
        self.after.append(weights_of(cast(RLLightningModule, self._run.live.trainer.lightning_module)))


def spread_out(weight: Tensor) -> Tensor:
    """Return 64 entries from all over a tensor."""
    return weight.flatten()[:: max(weight.numel() // 64, 1)][:64]


@pytest.mark.nightly
def test_parameters_are_followed_from_the_backward_to_the_step() -> None:
    audit, module = Keeping(), tiny_module(rewards=sum_reward, max_grad_norm=1e-3, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, callbacks=[ReferenceKL(0.1, as_loss=True), audit])
    assert len(audit.steps) == 8
    for number, ((trace, tracer), after) in enumerate(zip(audit.steps, audit.after, strict=True)):
        assert tracer.parameters.keys() == dict(module.required_policy.named_parameters()).keys()
        assert tracer.norm is not None and trace.norm is not None
        assert tracer.norm == pytest.approx(1e-3, rel=1e-3)
        clip = tracer.norm / float(trace.norm)
        for name, entries in tracer.parameters.items():
            assert entries.gradient is not None and entries.before is not None and entries.after is not None
            assert torch.equal(entries.after, spread_out(after[f"policy.{name}"]))
            assert entries.lr == 1e-2 and entries.held
            assert entries.options["beta1"] == 0.9 and entries.dtype == torch.float32
            assert_close(entries.gradient, entries.summed * clip, atol=1e-9, rtol=1e-3)
            if number:
                assert torch.equal(entries.before, spread_out(audit.after[number - 1][f"policy.{name}"]))
                assert float(entries.state["step"]) == number and entries.passes == len(trace.microbatches)
    assert gradient_hooks(module.required_policy) == []


class Decay(RLCallback):
    """Adds the sum of a weight to the loss, whose gradient is one number expanded to the shape of the weight."""

    name = "decay"

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.weight = pl_module.policy.model.extra.weight

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=self.weight.sum().expand_as(view.logprobs), coef=0.1)


@pytest.mark.nightly
def test_an_expanded_gradient_is_traced_like_any_other() -> None:
    def policy() -> Any:
        model: Any = tiny_policy()
        model.extra = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.ones_(model.extra.weight)
        return model

    weights = []
    for audits in ([], [SignalAudit(1)]):
        module = tiny_module(policy=policy, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, callbacks=[Decay(), *audits], max_steps=2)
        weights.append(weights_of(module))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
