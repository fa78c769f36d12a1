"""Charges: who takes samples and tokens away, each of them charged once, to the first stage that takes it."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.corrections import Corrections, LossView
from lightning_rl.losses import PolicyLoss
from lightning_rl.rollout import Finish, Rollout

SCORED = "ledger/scored"


@dataclass
class Charges:
    """What is left of some rows, and what each stage took.

    Args:
        tokens: the tokens that there are, [B, T].
        rows: the rows that there are, [B].
        weight: of each token, [B, T] float64; 1 each by default.

    Attributes:
        taken: by stage, how many rows, how many tokens and what weight it took; the weight of a stage that makes tokens
            heavier is negative.
    """

    tokens: Bool[Tensor, "B T"]
    rows: Bool[Tensor, " B"]
    weight: Float[Tensor, "B T"]
    taken: dict[str, Tensor] = field(default_factory=dict)

    def left(self) -> Tensor:
        """Rows, tokens and weight that nobody has taken, shape [3] float64."""
        weight = torch.where(self.tokens, self.weight, 0.0).sum()
        return torch.stack([self.rows.sum().double(), self.tokens.sum().double(), weight])

    def take_rows(self, stage: str, gone: Bool[Tensor, " B"]) -> None:
        """Takes whole rows, and with them what is left of their tokens."""
        self._take(stage, self.rows & ~gone, self.tokens & ~gone[:, None], self.weight)

    def take_tokens(self, stage: str, gone: Bool[Tensor, "B T"]) -> None:
        """Takes tokens; a row goes with its last one."""
        tokens = self.tokens & ~gone
        emptied = self.tokens.any(-1) & ~tokens.any(-1)
        self._take(stage, self.rows & ~emptied, tokens, self.weight)

    def weigh(self, stage: str, factor: Float[Tensor, "B T"]) -> None:
        """Multiplies the weight of each token with the size of a factor; a factor of 0 takes the token."""
        tokens = self.tokens & (factor != 0)
        emptied = self.tokens.any(-1) & ~tokens.any(-1)
        self._take(stage, self.rows & ~emptied, tokens, self.weight * factor.double().abs())

    def _take(self, stage: str, rows: Tensor, tokens: Tensor, weight: Tensor) -> None:
        before = self.left()
        self.rows, self.tokens, self.weight = rows, tokens, weight
        self.taken[stage] = self.taken.get(stage, 0.0) + before - self.left()


def drawn_stages(contributions: Corrections) -> list[str]:
    """The stages from the engine to the signal, in their order."""
    filters = [f"{callback.name}.keep_groups" for callback in contributions.contributors("keep_groups")]
    excluded = [f"{callback.name}.exclude" for callback in contributions.contributors("exclude")]
    masks = [f"{callback.name}.reward_mask" for callback in contributions.contributors("reward_mask")]
    return [*filters, "aborted", *excluded, "unscored", *masks, "zero_advantage"]


def update_stages(contributions: Corrections) -> list[str]:
    """The stages of an update, in their order."""
    methods = ("sequence_mask", "token_mask", "token_weight")
    return [*(f"{one.name}.{method}" for method in methods for one in contributions.contributors(method)), "clip"]


def charged_at_draw(part: Rollout, contributions: Corrections) -> tuple[Charges, Rollout]:
    """What the filters of groups take of the samples of one round, and the same samples with their reward masks.

    Each mask is an extra of the rows, ``extras["ledger/<callback>.reward_mask"]``, as is ``extras["ledger/scored"]``.
    """
    masks = {SCORED: part.rewarded}
    masks |= {
        f"ledger/{one.name}.reward_mask": one.reward_mask(part) for one in contributions.contributors("reward_mask")
    }
    rewarded = part.rewarded
    for mask in masks.values():
        rewarded = rewarded & mask
    charges = _counted(part, part.action_mask)
    seen = part.replace(rewarded=rewarded)
    for callback in contributions.contributors("keep_groups"):
        charges.take_rows(f"{callback.name}.keep_groups", ~callback.keep_groups(seen))
    return charges, seen.replace(extras={**part.extras, **masks}).select(charges.rows)


def charged_at_signal(rollout: Rollout, drawn: Rollout, contributions: Corrections) -> Charges:
    """What is taken of a finished rollout before its first update: rows, then tokens without an advantage.

    Args:
        rollout: finished.
        drawn: the same rows in any order, from :func:`charged_at_draw`.
        contributions: the corrections.
    """
    charges = _counted(rollout, rollout.action_mask)
    charges.take_rows("aborted", rollout.finish == Finish.ABORT)
    row_of = {sample: row for row, sample in enumerate(drawn.sample_ids.tolist())}
    before = drawn.select(torch.tensor([row_of[sample] for sample in rollout.sample_ids.tolist()], dtype=torch.int64))
    flags = {name: flag.to(rollout.groups.device) for name, flag in before.extras.items() if name.startswith("ledger/")}
    for callback in contributions.contributors("exclude"):
        charges.take_rows(f"{callback.name}.exclude", callback.exclude(before).to(charges.rows.device))
    idle = rollout.required("advantages") == 0
    without = (idle | ~rollout.valid_tokens).all(-1)
    charges.take_rows("unscored", without & ~flags[SCORED])
    for callback in contributions.contributors("reward_mask"):
        stage = f"{callback.name}.reward_mask"
        charges.take_rows(stage, without & ~flags[f"ledger/{stage}"])
    charges.take_rows("zero_advantage", without)
    charges.take_tokens("zero_advantage", idle)  # single tokens of rows that go on
    return charges


def charged_at_update(view: LossView, contributions: Corrections, loss: PolicyLoss) -> Charges:
    """What masks, weights and the loss itself take of a microbatch; the weight of a token is its advantage's size.

    Tokens are taken by the loss ("clip") if the policy loss has no gradient with respect to their log-probability.
    """
    view = view.sanitize()
    size = view.required("advantages").double().abs()
    tokens = view.valid_tokens & (size > 0)
    charges = Charges(tokens, tokens.any(-1), torch.where(tokens, size, 0.0))
    for callback in contributions.contributors("sequence_mask"):
        charges.take_rows(f"{callback.name}.sequence_mask", ~callback.sequence_mask(view))
    for callback in contributions.contributors("token_mask"):
        charges.take_tokens(f"{callback.name}.token_mask", ~callback.token_mask(view))
    for callback in contributions.contributors("token_weight"):
        charges.weigh(f"{callback.name}.token_weight", callback.token_weight(view))
    charges.take_tokens("clip", ~_reaches_policy(view, loss, charges.tokens))
    return charges


def _counted(rollout: Rollout, tokens: Tensor) -> Charges:
    own = tokens & rollout.real[:, None]
    return Charges(own, rollout.real, own.double())


def _reaches_policy(view: LossView, loss: PolicyLoss, tokens: Tensor) -> Tensor:
    """Tokens whose log-probability has a gradient of the policy loss over the given tokens, [b, T] bool."""
    leaf = view.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        total = torch.where(tokens, loss(view.replace(logprobs=leaf)), 0.0).sum()
    if not total.requires_grad:
        return torch.zeros_like(tokens)
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    return torch.zeros_like(tokens) if gradient is None else gradient != 0
