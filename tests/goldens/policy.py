"""Policy losses with their corrections: the real objective on a view, value and gradient."""

import math
from dataclasses import replace

import torch
from kit.support import callback_of
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, Corrections, corrections_of, given_row_weight, given_weight
from goldens.logged import logged
from goldens.options import estimator_of, first_of, peer_of
from goldens.policy_options import averaged, bounded, by_sequence, clip_of, loss_of
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import replays
from goldens.views import objective, view_of_case
from goldens.weights import corrected
from lightning_rl import LossTerm, LossView, PolicyLoss
from lightning_rl.callbacks import IcePop, OffPolicyIS
from lightning_rl.signal.kl import importance
from lightning_rl.signal.masked import row_mean
from lightning_rl.signal.selection import largest

WEIGHTS = ("rollout_is_weights", "importance_sampling_ratio", "weights")
RATIO_TIMES_K1 = 3  # open-instruct's number for it
COEFFICIENTS = ("reference_policy_kl_penalty", "beta", "kl_loss_coef")


@replays("policy_loss/*", "off_policy/*")
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
    if "rollout_logp" not in case:
        given["rollout_logprobs"] = case["old_logp"]
    if "old_logp" not in case:
        given["old_logprobs"] = case["rollout_logp"]
    view = view_of_case(case, valid=valid, **given)
    if case.algorithm == "cross_entropy":
        return view.replace(advantages=torch.ones_like(view.logprobs))
    if peer_of(case).mean_advantage and by_sequence(case):
        mean = row_mean(view.require("advantages"), averaged(case, view).valid_tokens)
        return view.replace(advantages=mean[:, None].expand_as(view.logprobs))
    return view


def _stepped(case: Case, view: LossView) -> Outputs:
    loss, average, corrections = loss_of(case), average_of(case), corrections_around(case)
    used = bounded(case, loss)
    found = objective(view, used, average.reduction, callbacks=corrections, scale=average.scale(view))
    return {**found, **_per_token(case, view, loss, corrections)}


def corrections_around(case: Case) -> Corrections:
    """Return masks, weights and the reference term of a case."""
    found = corrections_of(case)
    given = given_row_weight if case.algorithm == "gmpo" else given_weight  # inside the geometric mean
    found += [given(case[name]) for name in WEIGHTS if name in case]
    coefficient = first_of(case.params, COEFFICIENTS, 0.0)
    if coefficient and "ref_logp" in case and not case.params.get("use_kl_in_reward"):
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
    weight = _kl_weight(case, view, name)
    value = estimator_of(case, name, weight=weight)(view.logprobs, view.require("ref_logprobs"))
    return LossTerm(per_token=value, coef=coefficient)


def _kl_weight(case: Case, view: LossView, name: str | int) -> Tensor | None:
    if peer_of(case).score_function_kl:
        return importance(view.logprobs)
    if not case.params.get("use_bias_correction_kl") and name != RATIO_TIMES_K1:
        return None
    return importance(view.logprobs, view.require("old_logprobs"), bound=peer_of(case).log_ratio)


def _most_uncertain(case: Case, view: LossView) -> Tensor:
    tokens = int(view.valid_tokens.sum())
    number = tokens - math.ceil((1 - case.params["top_entropy_quantile"]) * (tokens - 1))
    return largest([case["entropies"]], [view.valid_tokens], number)[0]


def _per_token(case: Case, view: LossView, loss: PolicyLoss, corrections: Corrections) -> Outputs:
    """The loss of each token with what the corrections did to it, and what the clips did."""
    if set(case.outputs) <= {"loss", "grad_logp"} or loss.prepares:
        return {}
    view = view.sanitize()
    done, valid = Contribution(view, corrections), view.valid_tokens
    tokens = torch.where(valid, loss(view) * done.kept_weight, 0.0).detach()
    return {
        "per_token_loss": tokens,
        "row_loss_sum": tokens.sum(-1),
        "behave_imp_weight": done.kept_weight,
        "behave_mask": valid & done.kept & (done.weight > 0),
        **logged(case, view, loss, done),
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
