"""Policy losses with their corrections: the real objective on a view, value and gradient."""

import math
from dataclasses import replace

import torch
from support import callback_of
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, Corrections, corrections_of, given_weight
from goldens.logged import logged
from goldens.options import estimator_of, first_of, peer_of
from goldens.policy_options import bounded, clip_of, loss_of
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import replays
from goldens.views import objective, view_of_case
from goldens.weights import corrected
from lightning_rl import LossTerm, LossView, PolicyLoss
from lightning_rl.callbacks import IcePop, OffPolicyIS
from lightning_rl.losses import DPPO
from lightning_rl.signal.kl import importance
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.selection import largest

WEIGHTS = ("rollout_is_weights", "importance_sampling_ratio", "weights")
COEFFICIENTS = ("reference_policy_kl_penalty", "beta", "kl_loss_coef")


@replays(
    "ppo_clip", "ppo_clip_dual", "ppo_clip_two_sided_delta", "ppo_clip_with_kl", "ppo_clip_with_is_ratio",
    "gspo", "gspo_token", "cispo", "cispo_rollout_anchor", "dppo_binary_tv", "dppo_binary_kl", "clip_cov", "kl_cov",
    "gmpo", "reinforce", "policy_loss/gpg", "cross_entropy", "importance_sampling", "rollout_is",
    "cispo_decoupled",
    "importance_sampling_untruncated", "sequence_geometric_mask_times_raw_token_is", "tis_sequence_gspo",
    "geometric_sequence_mask", "icepop_token_mask", "outlier_token_veto", "product_sequence_mask",
    "sequence_product_mask", "sequence_kl_mask", "token_kl_mask", "ppo_clip_high_entropy_tokens",
    "icepop", "tis_token", "tis_sequence", "sequence_geometric_mask", "sequence_product_mis",
)  # fmt: skip
def policy_loss(case: Case) -> Outputs:
    """A loss object and callbacks through the objective, as a training step calls them."""
    if "logp" not in case:
        return corrected(case)
    if "seq_lengths" in case:
        return _packed(case)
    return _stepped(case, _view(case))


def _view(case: Case) -> LossView:
    valid = case.mask()
    if "sample_mask" in case:
        valid = valid & case.mask("sample_mask")[:, None]
    given = {"trained": trained_rows(case, valid, average_of(case))}
    if "rollout_logp" not in case and isinstance(loss_of(case), DPPO):
        given["rollout_logprobs"] = case["old_logp"]
    if "old_logp" not in case:
        given["old_logprobs"] = case["rollout_logp"]
    view = view_of_case(case, valid=valid, **given)
    if case.algorithm == "cross_entropy":
        return view.replace(advantages=torch.ones_like(view.logprobs))
    if peer_of(case).mean_advantage and _by_sequence(case):
        return view.replace(advantages=row_mean(view.required("advantages"), valid)[:, None].expand_as(view.logprobs))
    return view


def _by_sequence(case: Case) -> bool:
    return "sequence" in (case.params.get("importance_sampling_level"), case.params.get("level"))


def _stepped(case: Case, view: LossView) -> Outputs:
    loss, average, corrections = loss_of(case), average_of(case), _corrections(case)
    used = bounded(case, loss)
    found = objective(view, used, average.reduction, callbacks=corrections, scale=average.scale(view))
    return {**found, **_per_token(case, view, loss, corrections)}


def _corrections(case: Case) -> Corrections:
    found = corrections_of(case)
    found += [given_weight(case[name]) for name in WEIGHTS if name in case]
    coefficient = first_of(case.params, COEFFICIENTS, 0.0)
    if coefficient and "ref_logp" in case:
        found.append(callback_of("reference", loss_term=lambda view: _reference(case, view, coefficient)))
    if case.algorithm == "rollout_is":
        bounds = clip_of(case)
        mask = IcePop(1 - bounds["clip_low"], 1 + bounds["clip_high"])
        now = lambda view: mask.token_mask(view.replace(old_logprobs=view.logprobs.detach()))  # noqa: E731
        found += [callback_of("ice_pop_now", token_mask=now), OffPolicyIS(0.0, math.inf)]
    if "top_entropy_quantile" in case.params:
        found.append(callback_of("uncertain", token_mask=lambda view: _most_uncertain(case, view)))
    return found


def _reference(case: Case, view: LossView, coefficient: float) -> LossTerm:
    name = first_of(case.params, ("reference_policy_kl_type", "kl_loss_type", "kl_estimator"), "k3")
    weight = None
    if peer_of(case).score_function_kl:
        weight = importance(view.logprobs)
    elif case.params.get("use_bias_correction_kl"):
        weight = importance(view.logprobs, view.required("old_logprobs"), bound=peer_of(case).log_ratio)
    value = estimator_of(case, name, weight=weight)(view.logprobs, view.required("ref_logprobs"))
    return LossTerm(per_token=value, coef=coefficient)


def _most_uncertain(case: Case, view: LossView) -> Tensor:
    tokens = int(view.valid_tokens.sum())
    number = tokens - math.ceil((1 - case.params["top_entropy_quantile"]) * (tokens - 1))
    return largest([case["entropies"]], [view.valid_tokens], number)[0]


def _per_token(case: Case, view: LossView, loss: PolicyLoss, corrections: Corrections) -> Outputs:
    """The loss of each token with what the corrections did to it, and what the clips did."""
    if set(case.outputs) <= {"loss", "grad_logp"} or loss.prepares:
        return {}
    view = view.sanitised()
    done, valid = Contribution(view, corrections), view.valid_tokens
    tokens = torch.where(valid, loss(view) * done.kept_weight, 0.0).detach()
    return {
        "per_token_loss": tokens,
        "row_loss_sum": tokens.sum(-1),
        "behave_imp_weight": done.kept_weight,
        "behave_mask": valid & done.kept & (done.weight > 0),
        **logged(case, view, loss),
    }


def _packed(case: Case) -> Outputs:
    """Sequences one after the other in one row: padded, replayed and packed again."""
    lengths = case.ids("seq_lengths").tolist()
    names = [name for name, array in case.arrays.items() if array.shape == case.arrays["logp"].shape]
    padded = {name: _pad(case[name], lengths).numpy() for name in names}
    rest = {name: array for name, array in case.arrays.items() if name not in padded and name != "seq_lengths"}
    found = _stepped_case(replace(case, arrays={**rest, **padded}))
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {name: value if value.dim() == 0 else value[inside] for name, value in found.items()}


def _stepped_case(case: Case) -> Outputs:
    return _stepped(case, _view(case))


def _pad(packed: Tensor, lengths: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(packed.split(lengths)), batch_first=True)
