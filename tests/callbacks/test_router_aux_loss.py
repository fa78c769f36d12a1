"""RouterAuxLoss: the loss of transformers over the valid tokens of an optimizer step, for any layout and ranks."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import (
    an_algorithm,
    differing,
    fit,
    in_lockstep,
    ragged_rollout,
    tiny_model,
    tiny_module,
    tiny_policy,
)
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import RLCallback, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import RouterAuxLoss, RouterReplay
from lightning_rl.corrections import Corrections, StepTrace
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import build_policy
from lightning_rl.policy.expert_routes import routers_of
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import EXPERT_LOAD
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.update import accumulate_gradient

MODELS = ("qwen3_moe", "mixtral", "qwen2_moe")
moe = partial(tiny_model, "qwen3_moe", dtype=torch.float32)
WHOLE = [[list(range(12))]]
Plans = Sequence[Sequence[Sequence[int]]]


def routed_rollout() -> Rollout:
    """Ragged rows; those of a group share their prompt, which is long enough to be packed once."""
    rollout = ragged_rollout(dtype=torch.float64)
    first = rollout.groups * 3
    return rollout.replace(prompt_ids=rollout.prompt_ids[first], prompt_lengths=rollout.prompt_lengths[first])


def a_policy(
    family: str = "qwen3_moe", *, packed: bool = True, checkpointing: Checkpointing | None = None
) -> PolicyModel:
    model = partial(tiny_model, family, num_experts_per_tok=2)
    return build_policy(model, None, temperature=0.7, packed=packed, checkpointing=checkpointing)


def step_of(
    policy: PolicyModel,
    rollout: Rollout,
    cut: Plans = WHOLE,
    *,
    step: int = 0,
    global_sum: GlobalSum = local_sum,
    coef: float = 1.0,
) -> tuple[float, dict[str, Tensor]]:
    """The logged loss and its gradient alone, over the microbatches of one optimizer step."""
    rows = [[list(rows) for rows in step] for step in cut]
    plan = plan_of_rows(rollout, rows, packed=policy.packed)
    rollout = add_logprobs(rollout, plan, policy, None, Corrections(), old=True, loads=True, global_sum=global_sum)
    rollout = rollout.replace(advantages=torch.zeros_like(rollout.require("advantages")))
    policy.zero_grad()
    found = accumulate_gradient(
        rollout,
        plan_of_rows(rollout, rows, packed=policy.packed).step(step),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm([RouterAuxLoss(coef)]),
        backward=lambda total: total.backward(),
    )
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return float(found.parts["router_aux_loss/loss"]), gradients


def routers_in(policy: PolicyModel, rollout: Rollout) -> tuple[list[Tensor], Tensor]:
    """Logits of each router in a plain padded forward, and the mask of the inputs that predict a valid token."""
    layout = pack(rollout, packed=False)
    mask = torch.zeros(layout.input_ids.numel(), dtype=torch.float64).index_add(
        0, layout.source, torch.ones(len(layout.source), dtype=torch.float64)
    )
    outputs: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output: outputs.append(output[0]))
        for router in routers_of(policy.model).values()
    ]
    policy.model.base_model(input_ids=layout.input_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return outputs, mask


def no_reward(prompts: Sequence[Any], **_: Any) -> list[float]:
    return [0.0] * len(prompts)


class Keep(RLCallback):
    """Keeps logged losses and gradients of steps."""

    name = "keep"

    def __init__(self) -> None:
        self.losses: list[float] = []

    @override
    def observe_step(self, trace: StepTrace) -> None:
        self.losses.append(sum(float(one.parts["router_aux_loss/loss"]) for one in trace.microbatches))


@pytest.mark.parametrize("family", MODELS)
def test_it_is_the_loss_of_transformers_over_the_inputs_that_predict_a_valid_token(family: str) -> None:
    policy, rollout = a_policy(family, packed=False), routed_rollout()
    value, gradients = step_of(policy, rollout)
    logits, mask = routers_in(policy, rollout)
    policy.zero_grad()
    experts_per_token = policy.model.config.num_experts_per_tok
    theirs = sys.modules[type(policy.model).__module__].load_balancing_loss_func(
        tuple(one.detach() for one in logits), 4, experts_per_token, mask
    )
    assert value == pytest.approx(float(theirs), rel=1e-6), "which adds in float32"
    probabilities = torch.stack(logits).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(experts_per_token).indices, 1.0)
    number = mask.sum() * len(logits)
    loads, shares = ((part * mask[:, None]).sum((0, 1)) / number for part in (chosen, probabilities))
    exact = 4 * (loads * shares).sum()
    assert value == pytest.approx(float(exact.detach()), rel=1e-12)
    assert abs(value - experts_per_token) > 1e-3, "the load is uneven"
    exact.backward()
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gate.weight" in name for name in found)
    for name, gradient in found.items():
        assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-14)
    assert not any(one.any() for name, one in gradients.items() if name not in found)


@pytest.mark.parametrize("checkpointing", [None, "full", "selective"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("cut", [WHOLE, [[[11, 2, 5], [], [0, 1, 3], [4, 10, 9, 8, 7, 6]]]], ids=["whole", "cut"])
def test_no_layout_moves_it(cut: Plans, packed: bool, checkpointing: Checkpointing | None) -> None:
    rollout = routed_rollout()
    assert (pack(rollout, packed=packed).shared is not None) == packed
    value, gradients = step_of(a_policy(packed=False), rollout)
    found, ours = step_of(a_policy(packed=packed, checkpointing=checkpointing), rollout, cut)
    assert found == pytest.approx(value, rel=1e-12)
    for name, gradient in gradients.items():
        assert_close(ours[name], gradient)  # routers round to float32


def test_each_optimizer_step_has_its_own_load_and_denominator() -> None:
    policy, rollout, halves = a_policy(), routed_rollout(), [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8, 9, 10, 11]]]
    for step, rows in enumerate([range(6), range(6, 12)]):
        alone = step_of(policy, rollout.select(torch.tensor(rows)), [[list(range(6))]])
        assert step_of(policy, rollout, halves, step=step)[0] == pytest.approx(alone[0], rel=1e-12)


def test_the_load_is_that_of_all_ranks() -> None:
    rollout, loads = routed_rollout(), []

    def load_of(rows: range, global_sum: GlobalSum) -> Tensor:
        part = rollout.select(torch.tensor(rows))
        plan = plan_of_rows(part, [[list(range(len(rows)))]])
        passes = {"old": False, "loads": True, "global_sum": global_sum}
        return add_logprobs(part, plan, a_policy(), None, Corrections(), **passes).extras[EXPERT_LOAD]

    (whole,) = in_lockstep(partial(load_of, range(12)))
    loads = in_lockstep(partial(load_of, range(4)), partial(load_of, range(4, 12)))
    assert_close(torch.cat(loads), whole, rtol=1e-12, atol=0.0)
    assert_close(whole.sum(-1), torch.full((12,), 2.0, dtype=torch.float64))


def test_a_coefficient_of_zero_trains_as_without_it_bit_for_bit() -> None:
    runs = [tiny_module(policy=moe, minibatches_per_rollout=2) for _ in range(3)]
    for module, callbacks in zip(runs, ([], [RouterAuxLoss(0.0)], [RouterAuxLoss(0.5)]), strict=True):
        fit(module, callbacks=callbacks, max_steps=4)
    assert differing(runs[0], runs[1]) == [] != differing(runs[0], runs[2])


def test_it_balances_the_experts() -> None:
    keep = Keep()
    module = tiny_module(policy=moe, rewards=no_reward, patience=None)
    fit(module, callbacks=[RouterAuxLoss(1.0), keep], max_epochs=2)
    assert len(keep.losses) == 8 and keep.losses[-1] < keep.losses[0]
    assert all(later > 1.9 for later in keep.losses)


def test_replayed_experts_leave_its_load_to_the_routers() -> None:
    policy, rollout = a_policy(), routed_rollout()
    value, gradients = step_of(policy, rollout)
    for router in routers_of(policy.model).values():  # as RouterReplay does

        def reroute(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return output[0], output[1], torch.zeros_like(output[2]) + torch.arange(2)

        router.register_forward_hook(reroute)
    replayed, others = step_of(policy, rollout)
    assert 1.9 < replayed < 3.0, "with all tokens at two experts it could be 4"
    assert value != replayed and any(not torch.equal(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("beside", [[], [RouterReplay()]], ids=["alone", "replayed"])
def test_the_audit_goes_along_with_it(beside: list[Callback]) -> None:
    audit = SignalAudit(1, mode="raise")
    module = tiny_module(policy=moe, minibatches_per_rollout=2)
    fit(module, callbacks=[RouterAuxLoss(0.1), *beside, audit], max_steps=4)
    assert audit.findings == []


def without_a_loss() -> nn.Module:
    """A mixture whose modeling file does not define the loss."""
    model = moe()
    model.__class__ = type(type(model).__name__, (type(model),), {"__module__": __name__})
    return model


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        pytest.param(tiny_policy, "a mixture of experts, got Qwen2ForCausalLM.*leave RouterAuxLoss out", id="dense"),
        pytest.param(without_a_loss, "balances its experts in another way: leave RouterAuxLoss out", id="no-loss"),
    ],
)
def test_a_policy_without_the_loss_is_refused_before_anything_is_drawn(policy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(policy=policy), callbacks=[RouterAuxLoss()])


def test_routers_of_another_form_are_refused() -> None:
    policy, rollout = a_policy(), routed_rollout()
    next(iter(routers_of(policy.model).values())).register_forward_hook(lambda _m, _i, output: [*output])
    with pytest.raises(ValueError, match="routers that return logits, weights and experts"):
        step_of(policy, rollout)
