"""The host does not synchronize with an accelerator between the microbatches of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.host_reads import CUT, count_reads, reads_within
from kit.support import an_algorithm, callback_of, ragged_rollout, tiny_model
from torch import Tensor

from lightning_rl import LossTerm, LossView, RLCallback, Rollout, SequenceSumNorm, ValueLoss
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, ReferenceKL, RolloutKL
from lightning_rl.corrections import Corrections
from lightning_rl.losses import LOSSES
from lightning_rl.policy import Outputs, PolicyModel
from lightning_rl.policy.model import FrozenModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.signal.reductions import REDUCTIONS, Reduction
from lightning_rl.update import Forward, from_table
from lightning_rl.utils.naming import name_of


def a_rollout() -> Rollout:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    return rollout.replace(values=torch.zeros(rollout.response_ids.shape), returns=rollout.require("advantages"))


def an_everyday_algorithm(*callbacks: RLCallback) -> Algorithm:
    usual: list[RLCallback] = [ReferenceKL(0.1, as_loss=True), RolloutKL(0.2), EntropyBonus(0.3), NoEOSMask()]
    return an_algorithm([*usual, *callbacks], value_loss=ValueLoss(coef=0.5))


def a_policy(family: str = "qwen2", *, packed: bool = True) -> PolicyModel:
    model = tiny_model(family)
    return PolicyModel(model, model, temperature=0.7, packed=packed).to("meta")


def a_forward(family: str = "qwen2", *, packed: bool = True) -> Forward:
    policy = a_policy(family, packed=packed)
    return lambda microbatch: policy(microbatch.layout)


def a_table(rollout: Rollout) -> Forward:
    """Return a forward that takes its outputs from a table, for what does not depend on a model."""
    values = torch.zeros(rollout.response_ids.shape, dtype=torch.float64, device="meta")
    logprobs, entropy = values.clone().requires_grad_(), values.clone().requires_grad_()
    return from_table(Outputs(logprobs, entropy, values))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_nothing_waits_for_the_device_until_the_last_backward_is_on_its_way(family: str) -> None:
    first, rest, after = reads_within(a_rollout(), a_forward(family), an_everyday_algorithm())
    assert first + rest == []
    assert len(after) == 1  # reads if all outputs were finite


def test_without_packing_transformers_waits_once_for_each_microbatch() -> None:
    first, rest, after = reads_within(a_rollout(), a_forward(packed=False), an_everyday_algorithm(), packed=False)
    assert len(first) == 1 and len(rest) == len(CUT) - 1
    assert len(after) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("reduction", [*REDUCTIONS.values(), SequenceSumNorm(8)], ids=name_of)
def test_no_reduction_waits_for_the_device(reduction: Reduction) -> None:
    first, rest, _ = reads_within(a_rollout(), a_forward(), an_algorithm(reduction=reduction))
    assert first + rest == []


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_waits_for_the_device_but_to_look_at_a_whole_step(loss: str) -> None:
    first, rest, _ = reads_within(a_rollout(), a_table(a_rollout()), an_algorithm(loss=LOSSES[loss]))
    assert rest == []
    assert bool(first) is LOSSES[loss].prepares


def test_scoring_waits_once_at_its_end() -> None:
    rollout, policy, reference = a_rollout(), a_policy(), tiny_model("qwen2", 1)
    plan = plan_of_rows(rollout, [CUT]).to("meta")
    scorer = FrozenModel(reference, temperature=0.7, packed=True)
    scorer.to(torch.device("meta"))
    rollout = rollout.to("meta")
    with count_reads() as names:
        add_logprobs(rollout, plan, policy, scorer, Corrections(), old=True, squares=True)
    assert names == ["aten._local_scalar_dense.default"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "read",
    [
        lambda values: float(values.sum()),
        lambda values: bool(values.any()),
        lambda values: values.tolist(),
        lambda values: values[values > 0],
        lambda values: values.cpu(),
        lambda values: values[:, [0]],
        lambda values: values + torch.tensor([1.0], device=values.device),
    ],
    ids=["a number", "a decision", "a list", "a mask as index", "a copy", "a list as index", "a new tensor"],
)
def test_the_stand_in_counts_what_a_correction_reads(read: Callable[[Tensor], Any]) -> None:
    def term(view: LossView) -> LossTerm:
        read(view.logprobs.detach())
        return LossTerm(per_token=view.logprobs, coef=0.1)

    first, rest, _ = reads_within(
        a_rollout(), a_forward(), an_everyday_algorithm(callback_of("reader", loss_term=term))
    )
    assert first and len(first + rest) >= len(CUT)
