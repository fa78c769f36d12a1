"""Reductions of a given loss per token, and the value loss."""

import math

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.options import first_of, peer_of
from goldens.reduction_options import average_of
from goldens.registry import replays
from goldens.views import gradient
from lightning_rl import ValueLoss
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm, prompt_mean, sequence_mean, token_mean

VALUE_CLIPS = ("value_eps_clip", "cliprange", "clip_eps", "value_clip", "cliprange_value")


@replays("loss_aggregation/*")
def aggregated(case: Case) -> Outputs:
    """One number of a loss per token; SkyRL multiplies the advantages with the weights instead."""
    values = (case["loss_mat"] if "loss_mat" in case else case["adv"]).requires_grad_()
    mask = case.mask()
    weights = _weights(case, mask)
    scaled = torch.where(mask, values * weights, 0.0)
    loss = scaled.sum()
    return {"loss": loss, "grad_loss_mat": gradient(loss, values), "scaled_advantages": scaled}


def _weights(case: Case, mask: Tensor) -> Tensor:
    rows, tokens = float(len(mask)), float(mask.sum())
    longest = case.params.get("max_seq_len") or case.params.get("loss_scale_factor") or mask.shape[1]
    known: dict[str, tuple[Reduction, float]] = {
        "token-mean": (token_mean, 1.0),
        "token-sum": (token_mean, tokens),
        "seq-mean-token-mean": (sequence_mean, 1.0),
        "seq-sum-token-mean": (sequence_mean, rows),
        "group-sum-token-mean": (SequenceSumNorm(1), rows),
        "seq-mean-token-sum": (SequenceSumNorm(1), 1.0),
        "seq-mean-token-sum-norm": (SequenceSumNorm(int(longest)), 1.0),
        "prompt-mean": (prompt_mean, 1.0),
    }
    reduction, total = known[case.algorithm]
    trained = mask.new_ones(len(mask)) if peer_of(case).empty_rows else mask.any(-1)
    weights = reduction(mask, trained, _groups(case, len(mask)), _counted_elsewhere(case))
    if "denoms" in case:
        weights = weights / case["denoms"].clamp(min=1)[:, None]
    return weights * total * (case.params.get("dp_size") or 1)


def _counted_elsewhere(case: Case) -> GlobalSum:
    """Stands for the other ranks: a peer is told the counts of the whole batch; ours adds them up."""
    names = {"token-mean": "batch_num_tokens", "token-sum": ""}
    total = case.params.get(names.get(case.algorithm, "global_batch_size"))
    return local_sum if total is None else lambda own: torch.full_like(own, total)


def _groups(case: Case, rows: int) -> Tensor:
    boundaries = case.params.get("prompt_boundaries") or []
    groups = torch.arange(rows)
    for start, end in boundaries:
        groups[start:end] = start
    return groups


@replays("value_loss/*")
def critic(case: Case) -> Outputs:
    """Our value loss; slime leaves the factor of one half out."""
    values, mask = case["values"].requires_grad_(), case.mask()
    clip = first_of(case.params, VALUE_CLIPS)
    huber = (case.params.get("huber_delta") or 10.0) if case.params.get("loss_fn_type") == "huber" else math.inf
    error = ValueLoss(clip=clip, huber=huber)(values, case["old_values"], case["returns"])
    reduction, scale = _critic_average(case, mask)
    trained = mask.new_ones(len(mask)) if peer_of(case).empty_rows else mask.any(-1)
    weights = reduction(mask, trained, torch.arange(len(mask)), local_sum)
    loss = (torch.where(mask, error, 0.0) * weights).sum() * scale
    return {"loss": loss, "grad_values": gradient(loss, values)}


def _critic_average(case: Case, mask: Tensor) -> tuple[Reduction, float]:
    peer, average = peer_of(case), average_of(case)
    scale = 2 * peer.value_factor * case.params.get("scale", 1.0)
    known = {"mean": (sequence_mean, scale), "sum": (sequence_mean, scale * len(mask))}
    return known.get(peer.value_rows, (average.reduction, scale))
