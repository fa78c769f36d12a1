"""Estimators of the KL, and the losses and token rewards that are made of one."""

import warnings

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.options import ESTIMATOR_NAMES, estimator_of, first_of, option_of, peer_of
from goldens.registry import only, replays, without_effect
from goldens.views import gradient, reduced, view_of_case
from lightning_rl import LossView
from lightning_rl.callbacks import ReferenceKL, RolloutKL
from lightning_rl.signal.kl import SMALLEST, binary_kl, importance, k2
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.reductions import sequence_mean

TO_OLD, TO_ITSELF = "exp(logp-old_logp), differentiable", "exp(logp - stop_gradient(logp))"


@replays("kl_estimators/*")
def estimate(case: Case) -> Outputs:
    """An estimator, with an importance ratio in front where the case asks for one."""
    name = first_of(case.params, ESTIMATOR_NAMES, "k1")
    if str(name).endswith("+"):
        return straight_through(case)
    logprobs = case["logp"].requires_grad_()
    only(case, importance_ratio=(TO_OLD,), importance_sampling_weights=(TO_ITSELF,))
    weight = None
    if first_of(case.params, ("importance_ratio", "importance_sampling_weights")) is not None:
        sampled = case["old_logp"] if "old_logp" in case else None  # noqa: SIM401 - a case is no dict
        weight = importance(logprobs, sampled, bound=peer_of(case).log_ratio)
    value = estimator_of(case, name, weight=weight)(logprobs, case["ref_logp"])
    if case.params.get("loss_mask", "mask" in case):
        value = masked_fill_invalid(value, case.mask())
    return {"kl": value, "grad_logp": gradient(value.sum(), logprobs)}


def straight_through(case: Case) -> Outputs:
    """The value of one estimator with the gradient of k2."""
    logprobs, other = case["logp"].requires_grad_(), case["ref_logp"]
    value = estimator_of(case, first_of(case.params, ESTIMATOR_NAMES))(logprobs, other).detach()
    pulled = k2(logprobs, other)
    return {"kl": value + (pulled - pulled.detach()), "grad_logp": gradient(pulled.sum(), logprobs)}


@replays("kl_estimators/compute_binary_kl_divergence")
def binary(case: Case) -> Outputs:
    """The KL of "this token or another" in either direction, of probabilities that the peer rounds to float32."""
    only(case, eps=(SMALLEST,))
    logprobs, other = (case[name].exp().double().log() for name in ("logp", "ref_logp"))
    return {"kl": binary_kl(logprobs, other), "kl_reverse": binary_kl(other, logprobs)}


@replays("kl_estimators/estimate_kl")
def four_estimates(case: Case) -> Outputs:
    """Four estimators at once."""
    logprobs, other = case["logp"], case["ref_logp"]
    named = {"kl_linear": "k1", "kl_quadratic": "k2", "kl_k3": "k3"}
    values = {field: estimator_of(case, name)(logprobs, other) for field, name in named.items()}
    ratio = importance(logprobs, case["old_logp"], bound=peer_of(case).log_ratio)
    return {**values, "kl_ratio_weighted": ratio * estimator_of(case, "k1")(logprobs, other)}


@replays("rollout_kl_loss/*")
def kl_loss(case: Case) -> Outputs:
    """The loss term of our two KL corrections, reduced by rows."""
    view = view_of_case(case)
    loss = _term(case, view, case.params["base"], case.params["estimator"])
    return {"loss": loss, "grad_logp": gradient(loss, view.logprobs)}


@replays("pr_cases/compute_approx_kl")
def kl_losses(case: Case) -> Outputs:
    """The same for several estimators, and on a microbatch of padding."""
    without_effect(case, "default_estimator", "default_coef")
    found: Outputs = {}
    for name in case.params["estimators"]:
        view = view_of_case(case)
        loss = _term(case, view, "rollout_logp", name)
        found |= {f"loss_{name}": loss.detach(), f"grad_{name}": gradient(loss, view.logprobs)}
    view = view_of_case(case)
    found["padding_microbatch_loss_k2"] = _term(case, view.padding_rows(1), "rollout_logp", "k2")
    found["mean_squared_log_ratio_rowwise"] = 2 * _term(case, view, "rollout_logp", "k2")
    return found


@replays("pr_cases/_create_padding_microbatch")
def padding(case: Case) -> Outputs:
    """A row of padding carries every field, and no valid token."""
    rollout = case["rollout_logp"]
    row = (
        view_of_case(case, logprobs=torch.zeros_like(rollout)).padding_rows(1).fit_width(case.params["response_length"])
    )
    return {
        "has_rollout_logprobs": torch.tensor(row.rollout_logprobs is not None),
        "padding_loss_mask": row.valid_tokens,
        "padding_rollout_logprobs": row.require("rollout_logprobs"),
    }


def _term(case: Case, view: LossView, base: str, estimator: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k1 and abs are discouraged as a loss, which is not the question here
        makers = {
            "rollout_logp": lambda: RolloutKL(1.0, estimator=option_of(case, estimator)),
            "ref_logp": lambda: ReferenceKL(1.0, estimator=option_of(case, estimator), as_loss=True),
        }
        correction = makers[base]()
    return reduced(view, correction.loss_term(view).per_token, sequence_mean)
