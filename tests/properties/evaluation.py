"""The real loss on a view, cut into microbatches as one likes; the signal of a view; comparisons."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kit.support import an_algorithm
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossView, PolicyLoss, Reinforce, RLCallback, Rollout, ValueLoss
from lightning_rl.advantages import RewardSignal
from lightning_rl.callbacks import EntropyBonus
from lightning_rl.corrections import OUTPUTS, Corrections
from lightning_rl.corrections.stat import merge_moments
from lightning_rl.rollout import GREEDY_SCORE, SUM_PI_SQUARED, role_number, turn_numbers
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.reductions import Reduction, token_mean
from lightning_rl.signal.selection import GlobalConcat, local_values
from lightning_rl.signal.shaped_rewards import shaped_rewards

LEAVES = tuple(spec.name for spec in OUTPUTS)
Cut = Sequence[Sequence[int]]


class Found(NamedTuple):
    """Result of one optimizer step, with gradients of log-probabilities, entropy, values and the engine's KL."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    parts: dict[str, Tensor]
    metrics: dict[str, Tensor]  # moments, merged over the microbatches


def evaluate(
    view: LossView,
    *,
    loss: PolicyLoss | None = None,
    callbacks: Sequence[RLCallback] = (),
    reduction: Reduction = token_mean,
    cut: Cut | None = None,
    by_token: bool = False,
    global_sum: GlobalSum = local_sum,
    global_concat: GlobalConcat = local_values,
    entropy_coef: float = 0.1,
    value_loss: ValueLoss = ValueLoss(coef=0.5),  # noqa: B008  frozen
) -> Found:
    """Loss, gradients and metrics of one step over the view, in one microbatch or cut by row numbers or by tokens."""
    view = provided(view, *callbacks)
    leaves = {name: view.require(name).detach().requires_grad_() for name in LEAVES}
    view = view.replace(**leaves)
    bonus = EntropyBonus(entropy_coef).with_name("entropy")
    algorithm = an_algorithm(
        [*callbacks, bonus] if entropy_coef else callbacks,
        loss=loss or Reinforce(),
        reduction=reduction,
        value_loss=value_loss,
    )
    pieces = [(view, None)] if cut is None else [microbatch(view, rows) for rows in cut]
    if by_token:
        column = torch.arange(view.width)
        pieces = [(view.replace(valid_tokens=view.valid_tokens & (column % 3 == part)), None) for part in range(3)]
    if algorithm.loss.prepares and view.prepared is None:
        with torch.no_grad():
            seen = [piece.sanitize() for piece, _ in pieces]
            prepared = algorithm.loss.prepare(seen, global_sum, global_concat)
        assert prepared is not None
        pieces = [(piece.replace(prepared=own), rows) for (piece, rows), own in zip(pieces, prepared, strict=True)]

    weights: dict[Reduction, Tensor] = {}

    def weigh(how: Reduction, piece: LossView, rows: Tensor | None) -> Tensor:
        if how not in weights:
            weights[how] = how(view.valid_tokens, view.trained, view.groups, global_sum)
        if rows is None:
            return weights[how]
        return weights[how][rows, : piece.width] if len(rows) else torch.zeros(piece.valid_tokens.shape)

    found = [
        algorithm.microbatch_loss(piece, lambda how, own=piece, at=rows: weigh(how, own, at)) for piece, rows in pieces
    ]
    total = torch.stack([part.total for part in found]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    parts = {name: torch.stack([part.parts[name] for part in found]).sum() for name in found[0].parts}
    metrics = {
        name: merge_moments(torch.stack([part.stats[name].moments for part in found])) for name in found[0].stats
    }
    return Found(total.detach(), gradients, parts, metrics)


def provided(view: LossView, *callbacks: RLCallback) -> LossView:
    """The view with what corrections declare to provide, unless it has that."""
    known = {f"{field}/{key}" for field in ("extras", "token_extras") for key in getattr(view, field)}
    return Corrections([one for one in callbacks if set(one.provides) - known]).provide(view)


def microbatch(view: LossView, rows: Sequence[int]) -> tuple[LossView, Tensor]:
    """Some rows cut to their longest response, or a padding microbatch for none; with their numbers."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    if not len(index):
        padding = view.padding_rows(1).fit_width(1)
        return padding.replace(**{name: padding.require(name).requires_grad_() for name in LEAVES}), index
    return view.select(index, width=max(int(view.response_lengths[index].max()), 1)), index


def prepared_view(view: LossView, loss: PolicyLoss) -> LossView:
    """The view with the tokens that the loss chose; as it is for a loss that chooses none."""
    if not loss.prepares:
        return view
    with torch.no_grad():
        prepared = loss.prepare([view.sanitize()], local_sum, local_values)
    return view.replace(prepared=None if prepared is None else prepared[0])


def agree(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Loss, gradients, parts and moments are the same up to rounding; the largest of no numbers is -inf in both."""
    assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=False)


def same(found: Found, expected: Found) -> bool:
    """Bit for bit."""
    ours, theirs = _tensors(found), _tensors(expected)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _tensors(found: Found) -> dict[str, Tensor]:
    gradients = dict(zip(LEAVES, found.gradients, strict=True))
    return {"total": found.loss, **gradients, **found.parts, **found.metrics}


def signal_of(rollout: Rollout, global_sum: GlobalSum = local_sum, **changes: Any) -> RewardSignal:
    """Return the input of an estimator: small token rewards, and the task reward at the last valid token."""
    tokens = changes.pop("token_rewards", rollout.require("returns") / 10)
    earned = rollout.require("returns") / 5 if changes.pop("turn_rewards", False) else None
    scores = torch.where(rollout.rewarded, rollout.rewards, 0.0)
    known: dict[str, Any] = {
        "scores": scores,
        "rewarded": rollout.rewarded,
        "groups": rollout.groups,
        "token_rewards": tokens,
        "valid_tokens": rollout.valid_tokens,
        "values": rollout.values,
        "greedy": rollout.extras[GREEDY_SCORE],
        "turns": turn_numbers(rollout),
        "turn_rewards": earned,
        "roles": torch.where(turn_numbers(rollout) > 1, role_number("solver"), role_number("policy")),
        "attempts": turn_numbers(rollout),  # without a turn that continues one of its role
        "old_logprobs": rollout.old_logprobs,
        "rollout_logprobs": rollout.rollout_logprobs,
        "sum_pi_squared": rollout.token_extras[SUM_PI_SQUARED],
        "global_sum": global_sum,
        **changes,
    }
    known.setdefault("shaped", shaped_rewards(known["scores"], tokens, known["valid_tokens"], earned))
    return RewardSignal(**known)


def tensor_versions(rollout: Rollout) -> dict[str, tuple[int, int]]:
    """Return ``(id, _version)`` of every tensor by name, to detect replaced or modified tensors."""
    return {name: (id(tensor), tensor._version) for name, tensor in rollout.tensors()}  # noqa: SLF001
