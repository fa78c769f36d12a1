"""From a peer's parameters to a reduction of ours and the rows that count."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from goldens.cases import Case
from goldens.registry import choose, only, without_effect
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm, prompt_mean, sequence_mean, token_mean

ROW_SUM = SequenceSumNorm(1)


@dataclass(frozen=True, kw_only=True)
class Average:
    """Reduction of a case from tokens to a scalar."""

    reduction: Reduction = token_mean
    empty_rows: bool = True  # whether rows without valid tokens count
    total_of: str = ""  # "tokens" or "rows" where the peer returns the sum
    divisor: float = 1.0  # what the peer divides its number by
    groups: Tensor | None = None  # of rows, for a mean over groups of rows
    part: Tensor | None = None  # the rows that take part; None for all

    def scale(self, valid: Tensor, trained: Tensor) -> float:
        """Return the factor from our mean to the peer's scalar."""
        totals = {"tokens": float(valid.sum()), "rows": float(trained.sum()), "": 1.0}
        return totals[self.total_of] / self.divisor

    def weights(self, valid: Tensor, trained: Tensor) -> Tensor:
        """Return the weight of each token in the peer's scalar."""
        groups = torch.arange(len(valid)) if self.groups is None else self.groups
        if self.part is not None:
            valid, trained = valid & self.part[:, None], trained & self.part
        return self.reduction(valid, trained, groups, local_sum) * self.scale(valid, trained)


def average_of(case: Case) -> Average:
    """Return the reduction of a case, from its parameters; by default the mean over tokens."""
    known = {"OpenRLHF": _openrlhf, "NeMo-RL": _nemo, "SkyRL": _skyrl, "slime": _slime, "trl": _trl, "verl": _verl}
    return known[case.peer](case) if case.peer in known else Average()


def _openrlhf(case: Case) -> Average:
    by_tokens = case.params.get("token_level_loss", True)
    if not by_tokens or case.params.get("policy_loss_type") == "gspo":
        return _of_the_step(case, Average(reduction=sequence_mean, empty_rows=False))
    return _of_the_step(case, Average(empty_rows=False))


def _nemo(case: Case) -> Average:
    return Average() if case.params.get("token_level_loss", True) else Average(reduction=sequence_mean)


def _slime(case: Case) -> Average:
    if case.params.get("calculate_per_token_loss"):
        return Average(total_of="tokens")
    return Average(reduction=sequence_mean, total_of="rows")


def _skyrl(case: Case) -> Average:
    """Sums over tokens, because the advantages carry the weights; the weights by their name."""
    params, rows = case.params, len(case.mask())
    if str(params.get("loss_reduction", "masked sum")).startswith("masked sum"):
        return Average(total_of="tokens")
    size, bounds = params.get("micro_batch_size") or rows, params.get("prompt_boundaries") or []
    prompts, length = torch.arange(rows), params.get("max_seq_len") or 1
    for start, end in bounds:
        prompts[start:end] = start
    known = {
        "token_mean": Average(),
        "token_mean_legacy": Average(  # the last rows, which fill no microbatch, get no weight
            reduction=prompt_mean, groups=torch.arange(rows) // size, part=torch.arange(rows) < rows // size * size
        ),
        "sequence_mean": Average(reduction=sequence_mean),
        "seq_mean_token_sum_norm": Average(reduction=ROW_SUM, divisor=length),
        "prompt_mean": Average(reduction=prompt_mean, groups=prompts),
    }
    return choose(case, "loss_reduction", known)


def _trl(case: Case) -> Average:
    params = case.params
    if case.calls("GMPOTrainer", "RLOOTrainer"):
        without_effect(case, "loss_type", "max_completion_length", "num_items_in_batch")
        only(case, gradient_accumulation_steps=(1,))
        return Average(reduction=sequence_mean)
    items, steps = params.get("num_items_in_batch", "mask.sum()"), float(params.get("gradient_accumulation_steps") or 1)
    counted = Average() if items == "mask.sum()" else Average(total_of="tokens", divisor=float(items))
    known = {
        "grpo": Average(reduction=sequence_mean, divisor=steps),
        "sapo": Average(reduction=sequence_mean, divisor=steps),
        "luspo": Average(reduction=ROW_SUM, divisor=steps),
        "bnpo": Average(divisor=steps),
        "dr_grpo": Average(reduction=ROW_SUM, divisor=steps * float(params.get("max_completion_length") or 1)),
        **dict.fromkeys(("dapo", "cispo", "vespo"), counted),
        None: Average(),  # PPO
    }
    return choose(case, "loss_type", known)


def _verl(case: Case) -> Average:
    params = case.params
    rows = Average(reduction=sequence_mean, empty_rows=False)
    sums = replace(rows, reduction=ROW_SUM)
    length = float(params.get("loss_scale_factor") or case.mask().shape[-1])
    known = {
        "token-mean": _of_the_step(case, Average(empty_rows=False)),
        "token-sum": Average(total_of="tokens", divisor=1 / (params.get("dp_size") or 1)),
        "seq-mean-token-mean": _of_the_step(case, rows),
        "seq-mean-token-sum": _of_the_step(case, sums),
        "seq-mean-token-sum-norm": _of_the_step(case, sums, length),
    }
    if case.calls("compute_policy_loss_geo_mean"):
        without_effect(case, "loss_agg_mode")
        return Average(reduction=sequence_mean)
    if case.calls("compute_policy_loss_gspo", "compute_policy_loss_sapo"):  # in every mode
        without_effect(case, "loss_agg_mode", "aggregation")
        return known["seq-mean-token-mean"]
    return choose(case, "loss_agg_mode", known, default="token-mean")


def _of_the_step(case: Case, average: Average, length: float = 1.0) -> Average:
    """Return an average over counts of all ranks, where a case has them."""
    by_tokens = average.reduction is token_mean
    total = case.params.get("batch_num_tokens" if by_tokens else "global_batch_size")
    without_effect(case, "global_batch_size" if by_tokens else "batch_num_tokens")
    ranks = case.params.get("dp_size") or 1
    if total is None:
        return replace(average, divisor=length)
    return replace(average, total_of="tokens" if by_tokens else "rows", divisor=length * total / ranks)


def trained_rows(case: Case, valid: Tensor) -> Tensor:
    """Return the rows that count in a mean over rows."""
    rows = case.mask("sample_mask") if "sample_mask" in case else valid.new_ones(len(valid))
    return rows if average_of(case).empty_rows else rows & valid.any(-1)
