"""Reductions of a given loss per token, and the value loss."""

import math

import torch

from goldens.cases import Case, Outputs
from goldens.options import first_of, peer_of
from goldens.reduction_options import ROW_SUM, Average, average_of, trained_rows
from goldens.registry import choose, replays
from goldens.views import gradient
from lightning_rl import ValueLoss
from lightning_rl.signal.reductions import sequence_mean

VALUE_CLIPS = ("value_eps_clip", "cliprange", "clip_eps", "value_clip", "cliprange_value")


@replays("loss_aggregation/*")
def aggregated(case: Case) -> Outputs:
    """One number of a loss per token; SkyRL multiplies the advantages with the weights instead."""
    values = (case["loss_mat"] if "loss_mat" in case else case["adv"]).requires_grad_()
    mask, average = case.mask(), average_of(case)
    weights = average.weights(mask, trained_rows(case, mask))
    if case.params.get("sample_denoms") and average.total_of == "rows":
        weights = Average(reduction=ROW_SUM, total_of="rows").weights(mask, mask.new_ones(len(mask)))
        weights = weights / case["denoms"].clamp(min=1)[:, None]
    scaled = torch.where(mask, values * weights, 0.0)
    loss = scaled.sum()
    return {"loss": loss, "grad_loss_mat": gradient(loss, values), "scaled_advantages": scaled}


@replays("value_loss/*")
def critic(case: Case) -> Outputs:
    """Our value loss; slime leaves the factor of one half out."""
    values, mask = case["values"].requires_grad_(), case.mask()
    bounds = {"mse": math.inf, "huber": case.params.get("huber_delta") or 10.0}
    huber = choose(case, "loss_fn_type", bounds, default="mse")
    error = ValueLoss(clip=first_of(case.params, VALUE_CLIPS), huber=huber)(values, case["old_values"], case["returns"])
    average = Average(reduction=sequence_mean) if case.peer == "SkyRL" else average_of(case)
    weights = average.weights(mask, trained_rows(case, mask))
    loss = (torch.where(mask, error, 0.0) * weights).sum() * _factor(case)
    return {"loss": loss, "grad_values": gradient(loss, values)}


def _factor(case: Case) -> float:
    return 2 * peer_of(case).value_factor * case.params.get("scale", 1.0)
