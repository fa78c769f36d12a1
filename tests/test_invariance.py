"""One optimizer step is the same however its rows are cut, packed, padded or ordered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, ragged_rollout, tiny_policy
from torch import Tensor
from torch.nn import functional

from lightning_rl import ClippedSurrogate, RLCallback, Rollout, SequenceSumNorm, prompt_mean, sequence_mean, token_mean
from lightning_rl.callbacks import OPSM, ReferenceKL, RolloutKL
from lightning_rl.corrections.stat import merge_moments
from lightning_rl.policy import Plan, PolicyModel
from lightning_rl.policy.plan import RowLists, plan_of_rows
from lightning_rl.update import accumulate_gradient

TOLERANCE = {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.float64: 1e-10}
SPLITS = {
    "one": [list(range(12))],
    "halves": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
    "unequal": [[5], [0, 11, 3, 4, 2, 7, 8], [1, 10], [6, 9]],
    "single rows": [[row] for row in range(12)],
    "with padding microbatches": [list(range(7)), [], list(range(7, 12)), []],
}
REDUCTIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "sequence_sum_norm": SequenceSumNorm(7),
}
Found = dict[str, Tensor]


def near_the_policy(dtype: torch.dtype) -> Rollout:
    """A ragged rollout whose log-probabilities are the tiny policy's own, with some drift; NaN outside cleaned."""
    rollout = ragged_rollout(dtype=dtype).sanitize()
    microbatch = plan_of_rows(rollout, [SPLITS["one"]]).step(0)[0]
    with torch.no_grad():
        own = PolicyModel(tiny_policy(dtype=dtype), None, temperature=0.7, packed=True)(microbatch.layout).logprobs
    own = functional.pad(own, (0, rollout.width - own.shape[1]))
    draw = torch.Generator().manual_seed(3)
    fields = {"rollout_logprobs": 0.4, "old_logprobs": 0.2, "ref_logprobs": 0.4}
    drift = {name: scale * torch.randn(own.shape, generator=draw, dtype=dtype) for name, scale in fields.items()}
    return rollout.replace(**{name: own + noise for name, noise in drift.items()}).sanitize()


def corrections() -> list[RLCallback]:
    return [OPSM(0.05, against="rollout"), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]


def one_step(rollout: Rollout, plan: Plan, *, packed: bool, reduction: Any, dtype: torch.dtype) -> Found:
    """Loss parts, the gradient of all weights as one vector, and the moments of every metric of one optimizer step."""
    model = tiny_policy(dtype=dtype)
    policy = PolicyModel(model, model, temperature=0.7, packed=packed)
    step = accumulate_gradient(
        rollout,
        plan.step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm(corrections(), loss=ClippedSurrogate(), reduction=reduction, entropy_coef=0.01),
        backward=lambda loss: loss.backward(),
    )
    found: Found = dict(step.parts)
    for name in step.stats[0]:
        found[name] = merge_moments(torch.stack([stats[name].moments for stats in step.stats]))
    gradients = [weight.grad for weight in policy.parameters()]
    assert all(gradient is not None for gradient in gradients)
    found["gradient"] = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
    return found


def largest_difference(found: Found, expected: Found) -> float:
    """The largest difference of any loss part, metric or the gradient, relative to its own largest entry."""
    assert found.keys() == expected.keys()
    differences = []
    for name, value in expected.items():
        finite = torch.isfinite(value)
        assert torch.equal(torch.isfinite(found[name]), finite), name
        scale = value[finite].abs().max().clamp(min=1e-3)
        differences.append(float((found[name] - value)[finite].abs().max() / scale))
    return max(differences)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_microbatches_add_up_to_the_whole(split: str, reduction: Callable[..., Tensor], dtype: torch.dtype) -> None:
    rollout = near_the_policy(dtype)
    whole, cut = (plan_of_rows(rollout, [rows]) for rows in (SPLITS["one"], SPLITS[split]))
    expected = one_step(rollout, whole, packed=True, reduction=reduction, dtype=dtype)
    found = one_step(rollout, cut, packed=True, reduction=reduction, dtype=dtype)
    assert largest_difference(found, expected) < TOLERANCE[dtype]


def test_packed_equals_padded(dtype: torch.dtype) -> None:
    rollout, rows = near_the_policy(dtype), [SPLITS["unequal"]]
    found, expected = (
        one_step(rollout, plan_of_rows(rollout, rows, packed=packed), packed=packed, reduction=token_mean, dtype=dtype)
        for packed in (True, False)
    )
    assert largest_difference(found, expected) < TOLERANCE[dtype]


def test_wider_padding_changes_nothing(dtype: torch.dtype) -> None:
    rollout, rows = near_the_policy(dtype), [SPLITS["halves"]]
    wider = rollout.fit_width(rollout.width + 5)
    found, expected = (
        one_step(each, plan_of_rows(each, rows), packed=True, reduction=token_mean, dtype=dtype)
        for each in (wider, rollout)
    )
    assert largest_difference(found, expected) < TOLERANCE[dtype]


def test_order_of_the_rows_changes_nothing(dtype: torch.dtype) -> None:
    rollout = near_the_policy(dtype)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    rows: RowLists = [SPLITS["halves"]]
    found, expected = (
        one_step(each, plan_of_rows(each, rows), packed=True, reduction=prompt_mean, dtype=dtype)
        for each in (rollout.select(order), rollout)
    )
    assert largest_difference(found, expected) < TOLERANCE[dtype]


def test_a_rollout_of_only_padding_gives_zero_gradient_to_every_weight(dtype: torch.dtype) -> None:
    rollout = ragged_rollout(dtype=dtype).sanitize()
    plan = plan_of_rows(rollout, [[[], []]])
    found = one_step(rollout, plan, packed=True, reduction=token_mean, dtype=dtype)
    assert len(found["gradient"]) and not found["gradient"].any()
