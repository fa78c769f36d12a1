"""From a peer's parameters to a reduction of ours and the rows that count."""

from dataclasses import dataclass, replace

from torch import Tensor

from goldens.cases import Case
from goldens.options import peer_of
from lightning_rl import LossView
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm, sequence_mean, token_mean

OVER_ALL_ROWS = ("gmpo", "rloo_sequence_ppo")
"""Algorithms that are always a mean over rows and count rows without valid tokens."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Reduction of a case from tokens to a scalar."""

    reduction: Reduction = token_mean
    empty_rows: bool = True  # whether rows without valid tokens count
    total_of: str = ""  # "tokens" or "rows" where the peer returns the sum
    divisor: float = 1.0  # what the peer divides its number by

    def scale(self, view: LossView) -> float:
        """Return the factor from our mean to the peer's scalar."""
        totals = {"tokens": float(view.valid_tokens.sum()), "rows": float(view.trained.sum()), "": 1.0}
        return totals[self.total_of] / self.divisor


def average_of(case: Case) -> Average:
    """The reduction of a case, from its parameters alone."""
    params = case.params
    by_tokens = Average(empty_rows=peer_of(case).empty_rows)
    by_rows = replace(by_tokens, reduction=sequence_mean)
    if case.algorithm in OVER_ALL_ROWS:
        return Average(reduction=sequence_mean)
    if peer_of(case).total:
        return Average(total_of=peer_of(case).total)
    if "calculate_per_token_loss" in params:
        tokens = params["calculate_per_token_loss"]
        return Average(total_of="tokens") if tokens else Average(reduction=sequence_mean, total_of="rows")
    if params.get("policy_loss_type") == "gspo" and "token_level_loss" in params:  # always by rows
        return by_rows
    if "token_level_loss" in params:
        return by_tokens if params["token_level_loss"] else by_rows
    longest = int(params.get("max_completion_length") or params.get("loss_scale_factor") or case.mask().shape[-1])
    steps = float(params.get("gradient_accumulation_steps") or 1)
    by_rows, by_tokens = replace(by_rows, divisor=steps), replace(by_tokens, divisor=steps)
    modes = {
        "seq-mean-token-mean": by_rows,
        "seq-mean-token-sum": replace(by_rows, reduction=SequenceSumNorm(1)),
        "seq-mean-token-sum-norm": replace(by_rows, reduction=SequenceSumNorm(longest)),
        "token-sum": Average(total_of="tokens"),
        "grpo": by_rows,
        "sapo": by_rows,
        "dapo": by_tokens,
        "cispo": by_tokens,
        "dr_grpo": Average(reduction=SequenceSumNorm(longest), divisor=steps),
    }
    mode = params.get("aggregation") or params.get("loss_agg_mode") or params.get("loss_type")
    return modes.get(str(mode), by_tokens)


def trained_rows(case: Case, valid: Tensor, average: Average) -> Tensor:
    """The rows that count in a mean over rows."""
    rows = case.mask("sample_mask") if "sample_mask" in case else valid.new_ones(len(valid))
    return rows if average.empty_rows else rows & valid.any(-1)
