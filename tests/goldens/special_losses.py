"""Policy losses that are our losses put together in another way: per component, or on a smaller mask."""

import math

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, corrections_of, given_weight
from goldens.policy import policy_loss
from goldens.policy_options import bounded, clip_of, m2_threshold, smooth, surrogate
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import choose, only, replays, without_effect
from goldens.views import gradient, objective, reduced, view_of_case
from lightning_rl import LossView
from lightning_rl.losses import DPPO, M2PO, ClippedSurrogate, Reinforce
from lightning_rl.signal.kl import k1, k2
from lightning_rl.signal.masked import local_sum, masked_fill_invalid
from lightning_rl.signal.reductions import token_mean
from lightning_rl.signal.selection import local_values


@replays("policy_loss/get_gamma_weights")
def vespo_weights(case: Case) -> Outputs:
    """The weight of each response in VESPO."""
    return {"phi": smooth(case).weights(view_of_case(case))[:, :1]}


@replays("off_policy/grpo_loss_fn")
def areal_loss(case: Case) -> Outputs:
    """AReaL's loss of a step: PPO's surrogate, and M2PO, whose mask leaves the denominator as well."""
    only(case, prox_logp_method=("recompute",))
    without_effect(case, "current_version")
    if case.params.get("m2_threshold") is None:
        return policy_loss(case)
    view = view_of_case(case)
    loss = M2PO(**clip_of(case), threshold=m2_threshold(case))
    (kept,) = loss.prepare([view], local_sum, local_values)
    used = bounded(case, surrogate(case))
    return objective(view.replace(valid_tokens=kept), used, token_mean, callbacks=corrections_of(case))


@replays("policy_loss/compute_policy_loss_bypass_mode")
def bypass(case: Case) -> Outputs:
    """No policy in between: the engine's is the old one, and corrections compare it with the current one."""
    average = average_of(case)
    view = view_of_case(case, old_logprobs=case["rollout_logp"])
    done = Contribution(view.replace(old_logprobs=view.logprobs.detach()), corrections_of(case))
    if case.params.get("rollout_rs"):  # what is rejected leaves the denominator, too
        view = view.replace(valid_tokens=view.valid_tokens & done.kept)
    view = view.replace(trained=trained_rows(case, view.valid_tokens))
    weighs = choose(case, "loss_type", {"reinforce": True, "ppo_clip": False})  # PPO's ratio is the weight already
    if weighs:
        without_effect(case, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    loss, corrections = (Reinforce(), [given_weight(done.kept_weight)]) if weighs else (surrogate(case), [])
    scale = average.scale(view.valid_tokens, view.trained)
    return objective(view, loss, average.reduction, callbacks=corrections, scale=scale)


@replays("policy_loss/default_loss_fn", "policy_loss/ipo_loss_fn", "policy_loss/ref_kl_loss_fn")
def components(case: Case) -> Outputs:
    """prime-rl: a trust region plus the squared log-ratio to the engine, and a pull to a reference."""
    view = view_of_case(case, old_logprobs=case["rollout_logp"])
    parts = {"ipo_loss_fn": _symmetric, "ref_kl_loss_fn": _to_reference, "default_loss_fn": _region}
    per_token = next(part for name, part in parts.items() if case.calls(name))(case, view)
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


@replays("policy_loss/compute_loss")
def three_components(case: Case) -> Outputs:
    """prime-rl's whole loss: a trust region, cross entropy and a pull to a reference, each over its own tokens."""
    view = view_of_case(case, old_logprobs=case["rollout_logp"])
    without_effect(case, "scales")  # one over the number of tokens of a component
    main = choose(case, "rl", {"default": _region, "ipo": _symmetric}, default="default")
    parts = {
        "rl_weights": lambda: main(case, view),
        "ce_weights": lambda: Reinforce()(view.replace(advantages=torch.ones_like(view.logprobs))),
        "ref_kl_weights": lambda: _to_reference(case, view),
    }
    total = view.logprobs.new_zeros(())
    for name, part in parts.items():
        weight = case[name]
        chosen = view.replace(valid_tokens=(weight != 0) & (view.valid_tokens if name == "rl_weights" else True))
        total = total + reduced(chosen, part() * weight, token_mean)
    return {"loss": total, "grad_logp": gradient(total, view.logprobs)}
