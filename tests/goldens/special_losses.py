"""Policy losses that are our losses put together in another way: per component, per sequence, on a shrunk mask."""

import math

import torch
from kit.losses import with_bound
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, corrections_of, given_weight
from goldens.policy import policy_loss
from goldens.policy_options import bounded, clip_of, m2_threshold, surrogate, temperatures
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import replays
from goldens.views import gradient, objective, reduced, view_of_case
from lightning_rl import LossView
from lightning_rl.losses import DPPO, M2PO, SAPO, ClippedSurrogate, FunctionLoss, Reinforce
from lightning_rl.signal.importance_ratios import sequence_log_ratio
from lightning_rl.signal.kl import k1, k2
from lightning_rl.signal.masked import local_sum, masked_fill_invalid, row_mean
from lightning_rl.signal.reductions import token_mean
from lightning_rl.signal.selection import local_values


@replays("rloo_sequence_ppo")
def one_ratio_per_row(case: Case) -> Outputs:
    """PPO's surrogate on the product of a row's ratios."""

    def per_token(view: LossView) -> Tensor:
        product = _row_log_ratio(view, geometric=False)
        loss = with_bound(ClippedSurrogate(**clip_of(case)), math.inf)
        return loss(view.replace(logprobs=product, old_logprobs=torch.zeros_like(product)))

    return objective(view_of_case(case), FunctionLoss(per_token), average_of(case).reduction)


@replays("policy_loss/sapo")
def gated(case: Case) -> Outputs:
    """SAPO, of tokens or of whole rows."""
    if "sequence" not in (case.params.get("level"), case.params.get("importance_sampling_level")):
        return policy_loss(case)
    view = view_of_case(case)
    mean = row_mean(view.require("advantages"), view.valid_tokens)[:, None].expand_as(view.logprobs)
    loss = SAPO(**temperatures(case))

    def per_token(seen: LossView) -> Tensor:
        ratio = _row_log_ratio(seen, geometric=True)
        return loss(seen.replace(logprobs=ratio, old_logprobs=torch.zeros_like(ratio), advantages=mean))

    found = objective(view, FunctionLoss(per_token), average_of(case).reduction)
    values = masked_fill_invalid(per_token(view), view.valid_tokens)
    return {**found, "per_token_loss": values, "clip_mask": torch.zeros_like(view.valid_tokens)}


def _row_log_ratio(view: LossView, *, geometric: bool) -> Tensor:
    old = view.require("old_logprobs")
    return sequence_log_ratio(view.logprobs, old, view.valid_tokens, geometric=geometric)[:, None].expand_as(old)


@replays("m2po")
def m2po(case: Case) -> Outputs:
    """M2PO; the peer takes what it leaves out from the denominator as well."""
    view = view_of_case(case)
    loss = M2PO(**clip_of(case), threshold=m2_threshold(case))
    (kept,) = loss.prepare([view], local_sum, local_values)
    return objective(view.replace(valid_tokens=kept), surrogate(case), token_mean, callbacks=corrections_of(case))


@replays("rollout_bypass_ppo_clip", "rollout_bypass_reinforce")
def bypass(case: Case) -> Outputs:
    """No policy in between: the engine's is the old one, and corrections compare it with the current one."""
    average = average_of(case)
    rollout = case["rollout_logp"]
    view = view_of_case(case, old_logprobs=rollout)
    done = Contribution(view.replace(old_logprobs=view.logprobs.detach()), corrections_of(case))
    if case.params.get("rollout_rs"):  # what is rejected leaves the denominator, too
        view = view.replace(valid_tokens=view.valid_tokens & done.kept)
    view = view.replace(trained=trained_rows(case, view.valid_tokens, average))
    if case.params["loss_type"] == "reinforce":
        return objective(view, Reinforce(), average.reduction, callbacks=[given_weight(done.kept_weight)])
    return objective(view, surrogate(case), average.reduction)  # its ratio is the weight already


@replays(
    "dppo_binary_tv_plus_squared_log_ratio",
    "ipo_symmetric_probability_mask",
    "reference_kl_policy_gradient",
    "three_component_loss",
)
def components(case: Case) -> Outputs:
    """prime-rl: a trust region plus the squared log-ratio to the engine, cross entropy, and a pull to a reference."""
    view = view_of_case(case, old_logprobs=case["rollout_logp"])
    if case.algorithm == "three_component_loss":
        return _three(case, view)
    per_token = {"ipo_symmetric_probability_mask": _symmetric, "reference_kl_policy_gradient": _to_reference}.get(
        case.algorithm, _region
    )(case, view)
    if "weights" in case:
        per_token = per_token * case["weights"]
    loss = reduced(view, per_token, token_mean)
    rows = masked_fill_invalid(per_token, view.valid_tokens).sum(-1)
    return {"loss": loss, "grad_logp": gradient(loss, view.logprobs), "row_loss_sum": rows}


def _squared(case: Case, view: LossView) -> Tensor:
    return 2 * case.params["kl_tau"] * k2(view.logprobs, view.require("rollout_logprobs"))


def _region(case: Case, view: LossView) -> Tensor:
    loss = bounded(case, DPPO(low=case.params["dppo_mask_low"], high=case.params["dppo_mask_high"]))
    scaled = view.replace(advantages=case.params["adv_tau"] * view.require("advantages"))
    return loss(scaled) + _squared(case, view)


def _symmetric(case: Case, view: LossView) -> Tensor:
    bound, ones = case.params["ipo_threshold"], torch.ones_like(view.logprobs)
    outside = [DPPO(low=bound, high=bound).outside(view.replace(advantages=sign * ones)) for sign in (1, -1)]
    scaled = view.replace(advantages=case.params["adv_tau"] * view.require("advantages"))
    return torch.where(outside[0] | outside[1], 0.0, _plain(case, scaled)) + _squared(case, view)


def _to_reference(case: Case, view: LossView) -> Tensor:
    pull = k1(view.require("ref_logprobs"), view.logprobs).detach()
    low = case.params.get("low_threshold", case.params.get("dppo_mask_low"))
    shrunk = DPPO(low=low, high=math.inf).outside(view.replace(advantages=-torch.ones_like(pull)))
    return torch.where(shrunk, 0.0, _plain(case, view.replace(advantages=pull))) + _squared(case, view)


def _plain(case: Case, view: LossView) -> Tensor:
    return bounded(case, ClippedSurrogate(clip_low=1.0, clip_high=math.inf))(view)


def _three(case: Case, view: LossView) -> Outputs:
    parts = {
        "rl_weights": lambda: _region(case, view),
        "ce_weights": lambda: Reinforce()(view.replace(advantages=torch.ones_like(view.logprobs))),
        "ref_kl_weights": lambda: _to_reference(case, view),
    }
    total = view.logprobs.new_zeros(())
    for name, part in parts.items():
        weight = case[name]
        chosen = view.replace(valid_tokens=(weight != 0) & (view.valid_tokens if name == "rl_weights" else True))
        total = total + reduced(chosen, part() * weight, token_mean)
    return {"loss": total, "grad_logp": gradient(total, view.logprobs)}
