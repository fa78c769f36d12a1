"""slime's whole policy loss: from packed logits to one number, through our vocabulary head and objective."""

from typing import Any

import torch
from kit.support import an_algorithm, callback_of, view_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, bounded_weight, given_weight, opsm_of, ratio_mask, untruncated
from goldens.entropy import head, truncated
from goldens.options import estimator_of, peer_of
from goldens.policy_options import bounded, loss_of
from goldens.reduction_options import average_of
from goldens.registry import NotOfferedError, replays, without_effect
from goldens.views import gradient
from lightning_rl import LossTerm, LossView, RLCallback
from lightning_rl.signal.kl import importance
from lightning_rl.signal.masked import local_sum

PER_TOKEN = {
    "old_logprobs": "old_logp",
    "rollout_logprobs": "rollout_logp",
    "ref_logprobs": "ref_logp",
    "advantages": "advantages",
}


@replays("policy_loss/policy_loss_function")
def pipeline(case: Case) -> Outputs:
    """Head, loss, corrections, KL and entropy of rows that are packed one after the other."""
    logits = case["logits"].requires_grad_()
    view = _view(case, logits)
    average = average_of(case)
    algorithm = an_algorithm(
        _corrections(case),
        loss=bounded(case, loss_of(case)),
        reduction=average.reduction,
        entropy_coef=case.params.get("entropy_coef", 0.0),
    )
    found = algorithm.microbatch_loss(
        view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, local_sum)
    )
    loss = found.total * average.scale(view.valid_tokens, view.trained)
    return {"loss": loss, "grad_logits": gradient(loss, logits)}


def _view(case: Case, logits: Tensor) -> LossView:
    totals, lengths = case.ids("total_lengths"), case.ids("response_lengths")
    ends = totals.cumsum(0)
    spans = [torch.arange(end - length, end) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    places = torch.cat(spans)
    seen, labels = logits[places - 1], case.ids("tokens")[places]
    temperature = case.params.get("rollout_temperature", 1.0)
    found, entropies = head(seen, labels, temperature)
    if case.params.get("rollout_top_p", 1.0) != 1.0:  # the entropy stays that of all entries
        keep = case.mask("keep_mask") if "keep_mask" in case else torch.ones_like(seen, dtype=torch.bool)
        keep = keep[places - 1] if len(keep) == len(logits) else keep
        found = head(truncated(seen, labels, keep), labels, temperature)[0]
    logprobs, entropy = _padded(found, lengths), _padded(entropies, lengths)
    fields: dict[str, Any] = {ours: _padded(case[theirs], lengths) for ours, theirs in PER_TOKEN.items()}
    if case.params.get("use_rollout_logprobs"):
        fields["old_logprobs"] = fields["rollout_logprobs"]
    view = view_of(logprobs, valid=_padded(case["mask"], lengths), dtype=logprobs.dtype, **fields)
    return view.replace(logprobs=logprobs, entropy=entropy)


def _padded(packed: Tensor, lengths: Tensor) -> Tensor:
    return pad_sequence(list(packed.split(lengths.tolist())), batch_first=True)


def _corrections(case: Case) -> list[RLCallback]:
    params = case.params
    found: list[RLCallback] = []
    delta, low, high = (params.get(name) for name in ("opsm_delta", "tis_clip_low", "tis_clip"))
    path, coefficient = str(params.get("custom_tis_function_path")), params.get("kl_loss_coef", 0.0)
    without_effect(case, "kl_loss_type", "use_unbiased_kl")
    if params.get("use_opsm"):
        found.append(opsm_of(delta))
    if any([params.get("use_tis"), params.get("get_mismatch_metrics")]):  # the metrics weigh the loss, too
        if path != "None" and not path.endswith("icepop_function"):
            raise NotOfferedError(f"custom_tis_function_path={path!r}")
        band = low or 0.0, high or 2.0
        weights = [bounded_weight("token", *band)] if path == "None" else [ratio_mask("token", *band), untruncated()]
        found.append(given_weight(_weights(case, weights)))
    if params.get("use_kl_loss"):
        found.append(callback_of("reference", loss_term=lambda view: _reference(case, view, coefficient)))
    return found


def _weights(case: Case, corrections: list[RLCallback]) -> Tensor:
    """Weights of the trainer's policy before the update over the engine's, also where the latter stands in for it."""
    lengths = case.ids("response_lengths")
    old, rollout = (_padded(case[name], lengths) for name in ("old_logp", "rollout_logp"))
    view = view_of(old, valid=_padded(case["mask"], lengths), old_logprobs=old, rollout_logprobs=rollout)
    return Contribution(view, corrections).kept_weight


def _reference(case: Case, view: LossView, coefficient: float) -> LossTerm:
    weight = None
    if case.params.get("use_unbiased_kl"):
        weight = importance(view.logprobs, view.require("old_logprobs"), bound=peer_of(case).log_ratio)
    value = estimator_of(case, case.params["kl_loss_type"], weight=weight)(view.logprobs, view.require("ref_logprobs"))
    return LossTerm(per_token=value, coef=coefficient)
