"""Accounting of samples and tokens that do not train: each is charged once, to the first stage that removes it."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lightning_rl.corrections import POLICY_LOSS_FACTORS, Corrections, LossView
from lightning_rl.losses import PolicyLoss
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties.comparisons import gradient_of

SCORED = "ledger/scored"


@dataclass
class Charges:
    """Remaining rows and tokens, and the amounts that each stage removed.

    Args:
        tokens: Remaining tokens, [B, T].
        rows: Remaining rows, [B].
        weight: Weight of each token, [B, T] float64.

    Attributes:
        taken: Number of rows, number of tokens and weight that each stage removed. The weight is negative for a stage
            that increases weights.
        lost: Tokens that each stage removed, [B, T].
    """

    tokens: Bool[Tensor, "B T"]
    rows: Bool[Tensor, " B"]
    weight: Float[Tensor, "B T"]
    taken: dict[str, Tensor] = field(default_factory=dict)
    lost: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(rollout: Rollout) -> "Charges":
        """Return all sampled tokens of a rollout, each with a weight of 1."""
        tokens = rollout.action_mask & rollout.real[:, None]
        return Charges(tokens, rollout.real, tokens.double())

    def remainder(self) -> Tensor:
        """Return the number of remaining rows and tokens and their weight, [3] float64."""
        weight = torch.where(self.tokens, self.weight, 0.0).sum()
        return torch.stack([self.rows.sum().double(), self.tokens.sum().double(), weight])

    def take_rows(self, stage: str, gone: Bool[Tensor, " B"]) -> None:
        """Remove rows with their remaining tokens."""
        self._take(stage, self.rows & ~gone, self.tokens & ~gone[:, None], self.weight)

    def weigh(self, stage: str, factor: Shaped[Tensor, "B T"]) -> None:
        """Multiply the weight of each token by the absolute value of a factor, which may be a mask.

        A factor of 0 removes the token. A row is removed with its last token.
        """
        tokens = self.tokens & (factor != 0)
        emptied = self.tokens.any(-1) & ~tokens.any(-1)
        self._take(stage, self.rows & ~emptied, tokens, self.weight * factor.double().abs())

    def _take(self, stage: str, rows: Tensor, tokens: Tensor, weight: Tensor) -> None:
        gone, less = self.tokens & ~tokens, (self.rows & ~rows).sum().double()
        self.lost[stage] = gone | self.lost[stage] if stage in self.lost else gone
        lighter = torch.where(self.tokens, self.weight, 0.0) - torch.where(tokens, weight, 0.0)  # 0 for a weight of 1
        taken = torch.stack([less, gone.sum().double(), lighter.sum()])
        self.taken[stage] = taken + self.taken[stage] if stage in self.taken else taken
        self.rows, self.tokens, self.weight = rows, tokens, weight


def _stages(corrections: Corrections, *methods: str) -> list[str]:
    return [f"{callback.name}.{method}" for method in methods for callback in corrections.contributors(method)]


def sampling_stages(corrections: Corrections) -> list[str]:
    """Return the names of the stages from the engine to the signal, in order."""
    filters, excluding, masks = (_stages(corrections, name) for name in ("keep_groups", "exclude", "reward_mask"))
    return [*filters, "aborted", *excluding, "unscored", *masks, "zero_advantage"]


def update_stages(corrections: Corrections) -> list[str]:
    """Return the names of the stages of an update, in order."""
    return [*_stages(corrections, *POLICY_LOSS_FACTORS), "clip"]


def sampling_charges(part: Rollout, corrections: Corrections) -> tuple[Charges, Rollout]:
    """Return the charges of the group filters in one round, and the remaining samples with their reward masks.

    The masks are in ``extras["ledger/<callback>.reward_mask"]`` and ``extras["ledger/scored"]``.
    """
    masks, rewarded = {SCORED: part.rewarded}, part.rewarded
    for callback in corrections.contributors("reward_mask"):
        masks[f"ledger/{callback.name}.reward_mask"] = mask = callback.reward_mask(part)
        rewarded = rewarded & mask
    charges, masked = Charges.of(part), part.replace(rewarded=rewarded)
    for callback in corrections.contributors("keep_groups"):
        charges.take_rows(f"{callback.name}.keep_groups", ~callback.keep_groups(masked))
    return charges, masked.replace(extras={**part.extras, **masks}).select(charges.rows)


def signal_charges(rollout: Rollout, sampled: Rollout, corrections: Corrections) -> Charges:
    """Return the charges of a finished rollout before its first update: rows, then tokens without an advantage."""
    charges, device = Charges.of(rollout), rollout.groups.device
    charges.take_rows("aborted", rollout.failed)
    row_of = {sample: row for row, sample in enumerate(sampled.sample_ids.tolist())}
    before = sampled.select(torch.tensor([row_of[sample] for sample in rollout.sample_ids.tolist()], dtype=torch.int64))
    for callback in corrections.contributors("exclude"):
        charges.take_rows(f"{callback.name}.exclude", callback.exclude(before).to(device))
    idle = rollout.require("advantages") == 0
    without = (idle | ~rollout.valid_tokens).all(-1)
    charges.take_rows("unscored", without & ~before.extras[SCORED].to(device))
    for stage in _stages(corrections, "reward_mask"):
        charges.take_rows(stage, without & ~before.extras[f"ledger/{stage}"].to(device))
    charges.take_rows("zero_advantage", without)
    charges.weigh("zero_advantage", ~idle)  # single tokens of rows that remain
    return charges


def update_charges(view: LossView, corrections: Corrections, loss: PolicyLoss) -> Charges:
    """Return the charges of masks, weights and the loss in a microbatch; tokens weigh the size of their advantage.

    The loss ("clip") removes tokens whose log-probability gets no gradient from the policy loss.
    """
    view = view.sanitize()
    size = view.require("advantages").double().abs()
    tokens = view.valid_tokens & (size > 0)
    charges = Charges(tokens, tokens.any(-1), torch.where(tokens, size, 0.0))
    for method in POLICY_LOSS_FACTORS:
        for callback in corrections.contributors(method):
            factor = getattr(callback, method)(view)
            factor = factor if factor.dim() == 2 else factor[:, None].expand_as(tokens)
            charges.weigh(f"{callback.name}.{method}", factor)
    leaf = view.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        gradient = gradient_of(torch.where(charges.tokens, loss(view.replace(logprobs=leaf)), 0.0), leaf)
    charges.weigh("clip", gradient != 0)
    return charges
