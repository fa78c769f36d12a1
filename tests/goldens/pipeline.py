"""slime's whole policy loss: from packed logits to one number, through our vocabulary head and objective."""

from typing import Any

import torch
from kit.support import an_algorithm, callback_of, view_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from goldens.cases import Case, Outputs
from goldens.corrections import bounded_weight, opsm_of
from goldens.entropy import head
from goldens.options import estimator_of, peer_of
from goldens.policy_options import bounded, clip_of, surrogate
from goldens.reduction_options import average_of
from goldens.registry import replays
from goldens.views import gradient
from lightning_rl import LossTerm, LossView, PolicyLoss, RLCallback
from lightning_rl.losses import CISPO, GSPO
from lightning_rl.signal.kl import importance
from lightning_rl.signal.masked import local_sum

PER_TOKEN = {
    "old_logprobs": "old_logp",
    "rollout_logprobs": "rollout_logp",
    "ref_logprobs": "ref_logp",
    "advantages": "advantages",
}


@replays("policy_loss_pipeline")
def pipeline(case: Case) -> Outputs:
    """Head, loss, corrections, KL and entropy of rows that are packed one after the other."""
    logits = case["logits"].requires_grad_()
    view = _view(case, logits)
    average = average_of(case)
    algorithm = an_algorithm(
        _corrections(case),
        loss=bounded(case, _loss(case)),
        reduction=average.reduction,
        entropy_coef=case.params.get("entropy_coef", 0.0),
    )
    found = algorithm.microbatch_loss(
        view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, local_sum)
    )
    loss = found.total * average.scale(view)
    return {"loss": loss, "grad_logits": gradient(loss, logits)}


def _view(case: Case, logits: Tensor) -> LossView:
    totals, lengths = case.ids("total_lengths"), case.ids("response_lengths")
    ends = totals.cumsum(0)
    spans = [torch.arange(end - length, end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    places = torch.cat(spans)
    seen, labels = logits[places - 1], case.ids("tokens")[places]
    temperature = case.params.get("rollout_temperature", 1.0)
    found, entropies = head(seen, labels, temperature)
    logprobs, entropy = _padded(found, lengths), _padded(entropies, lengths)
    fields: dict[str, Any] = {ours: _padded(case[theirs], lengths) for ours, theirs in PER_TOKEN.items()}
    view = view_of(logprobs, valid=_padded(case["mask"], lengths), dtype=logprobs.dtype, **fields)
    return view.replace(logprobs=logprobs, entropy=entropy)


def _padded(packed: Tensor, lengths: Tensor) -> Tensor:
    return pad_sequence(list(packed.split(lengths.tolist())), batch_first=True)


def _loss(case: Case) -> PolicyLoss:
    clip = clip_of(case)
    return {"cispo": lambda: CISPO(**clip), "gspo": lambda: GSPO(**clip)}.get(
        case.params["advantage_estimator"], lambda: surrogate(case)
    )()


def _corrections(case: Case) -> list[RLCallback]:
    params = case.params
    found: list[RLCallback] = []
    if params.get("use_opsm"):
        found.append(opsm_of(params.get("opsm_delta")))
    if params.get("use_tis"):
        found.append(bounded_weight("token", params.get("tis_clip_low") or 0.0, params.get("tis_clip", 2.0)))
    if params.get("use_kl_loss"):
        found.append(callback_of("reference", loss_term=lambda view: _reference(case, view)))
    return found


def _reference(case: Case, view: LossView) -> LossTerm:
    weight = None
    if case.params.get("use_unbiased_kl"):
        weight = importance(view.logprobs, view.require("old_logprobs"), bound=peer_of(case).log_ratio)
    value = estimator_of(case, case.params["kl_loss_type"], weight=weight)(view.logprobs, view.require("ref_logprobs"))
    return LossTerm(per_token=value, coef=case.params.get("kl_loss_coef", 0.0))
