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
from goldens.policy_options import averaged, bounded, by_sequence, clip_of, kind_of, loss_of, on_the_rollout
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import NotOfferedError, replays, without_effect
from goldens.views import objective, view_of_case
from goldens.weights import corrected
from lightning_rl import LossTerm, LossView, PolicyLoss
from lightning_rl.callbacks import IcePop, OffPolicyIS, PositiveNLL
from lightning_rl.corrections import Corrections as CombinedCorrections
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND, sequence_log_ratio
from lightning_rl.signal.kl import importance
from lightning_rl.signal.masked import last_true, row_mean
from lightning_rl.signal.selection import largest

WEIGHTS = ("rollout_is_weights", "importance_sampling_ratio", "weights")
RATIO_TIMES_K1 = 3  # open-instruct's number for it
FLOOR = 1e-8  # of a weight before its logarithm
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
    given = {"trained": trained_rows(case, valid)}
    if "rollout_logp" not in case:
        given["rollout_logprobs"] = case["old_logp"]
    if "old_logp" not in case:
        given["old_logprobs"] = case["rollout_logp"]
    if case.params.get("force_on_policy_ratio"):
        given["old_logprobs"] = case["logp"]
    view = view_of_case(case, valid=valid, **given)
    if kind_of(case) == "cross_entropy":
        return view.replace(advantages=torch.ones_like(view.logprobs))
    if kind_of(case) == "vespo" and "importance_sampling_ratio" in case:
        log_ratio = case["importance_sampling_ratio"].clamp(FLOOR, math.exp(LOG_RATIO_BOUND)).log()
        if log_ratio.shape[-1] == 1:  # of a whole row: at its last token
            log_ratio = torch.where(last_true(valid), log_ratio, 0.0)
        return view.replace(rollout_logprobs=case["old_logp"] - log_ratio)
    if peer_of(case).mean_advantage and by_sequence(case):
        mean = row_mean(view.require("advantages"), averaged(case, view).valid_tokens)
        return view.replace(advantages=mean[:, None].expand_as(view.logprobs))
    return view


def _stepped(case: Case, view: LossView) -> Outputs:
    loss, average, corrections = loss_of(case), average_of(case), corrections_around(case)
    _check_combination(case)
    used, scale = bounded(case, loss), average.scale(view.valid_tokens, view.trained)
    callbacks, seen = corrections, view
    if case.params.get("positive_example_nll_weight") and "rewards" in case:
        callbacks = [PositiveNLL(case.params["positive_example_nll_weight"]), *corrections]
        seen = view.replace(rewards=case["rewards"].to(view.rewards.dtype), rewarded=view.trained)
        seen = CombinedCorrections(callbacks[:1]).provide(seen)
    found = objective(seen, used, average.reduction, callbacks=callbacks, scale=scale)
    return {**found, **_per_token(case, view, loss, corrections)}


def _check_combination(case: Case) -> None:
    """Raise a NotOfferedError for terms of tokens in TRL's LUSPO, which counts masked tokens."""
    if case.params.get("loss_type") != "luspo":
        return
    if case.params.get("beta"):
        raise NotOfferedError(f"beta={case.params['beta']!r}")
    if not by_sequence(case):
        raise NotOfferedError(f"importance_sampling_level={case.params.get('importance_sampling_level')!r}")
    if case.params.get("top_entropy_quantile", 1.0) < 1.0:
        raise NotOfferedError(f"top_entropy_quantile={case.params['top_entropy_quantile']!r}")


def corrections_around(case: Case) -> Corrections:
    """Return masks, weights and the reference term of a case."""
    kind, found = kind_of(case), []
    if on_the_rollout(case):
        without_effect(case, "vllm_is_truncated_threshold", "vllm_is_correction_type")
    elif case.calls("GMPOTrainer"):
        without_effect(case, "off_policy_mask_threshold", "use_vllm")
    elif kind in ("clip_cov", "kl_cov", "cross_entropy", "unclipped") and case.peer == "SkyRL":
        without_effect(case, "off_policy_correction")
    else:
        found = [*corrections_of(case), *_given_weights(case)]
    coefficient, in_reward = first_of(case.params, COEFFICIENTS, 0.0), case.params.get("use_kl_in_reward")
    if coefficient and "ref_logp" in case and not in_reward:
        found.append(callback_of("reference", loss_term=lambda view: _reference(case, view, coefficient)))
    else:
        without_effect(case, "reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value")
        without_effect(case, "kl_estimator", "use_on_policy_kl_approximation", "use_bias_correction_kl")
    if kind == "rollout_is":
        bounds = clip_of(case)
        mask = IcePop(1 - bounds["clip_low"], 1 + bounds["clip_high"])
        now = lambda view: mask.token_mask(view.replace(old_logprobs=view.logprobs.detach()))  # noqa: E731
        found += [callback_of("ice_pop_now", token_mask=now), OffPolicyIS(0.0, math.inf)]
    if case.params.get("top_entropy_quantile", 1.0) < 1.0:
        found.append(callback_of("uncertain", token_mask=lambda view: _most_uncertain(case, view)))
    return found


def _given_weights(case: Case) -> Corrections:
    if case.peer == "trl" and (not case.params.get("use_vllm") or kind_of(case) == "vespo"):
        return []
    given = given_row_weight if kind_of(case) == "gmpo" else given_weight  # inside the geometric mean
    return [given(case[name]) for name in WEIGHTS if name in case]


def _reference(case: Case, view: LossView, coefficient: float) -> LossTerm:
    name = first_of(case.params, ("reference_policy_kl_type", "kl_loss_type", "kl_estimator"), "k3")
    weight = _kl_weight(case, view, name)
    value = estimator_of(case, name, weight=weight)(view.logprobs, view.require("ref_logprobs"))
    return LossTerm(per_token=value, coef=coefficient)


def _kl_weight(case: Case, view: LossView, name: str | int) -> Tensor | None:
    if case.params.get("use_on_policy_kl_approximation"):
        return importance(view.logprobs, view.require("rollout_logprobs"), bound=math.inf)
    if peer_of(case).score_function_kl:
        return importance(view.logprobs)
    if not case.params.get("use_bias_correction_kl") and name != RATIO_TIMES_K1:
        return None
    old = view.require("old_logprobs")
    if not by_sequence(case):
        return importance(view.logprobs, old, bound=peer_of(case).log_ratio)
    row = sequence_log_ratio(view.logprobs, old, view.valid_tokens, geometric=True).exp()[:, None]
    per_token = case.params["importance_sampling_level"] == "sequence_token"
    return row.detach() * importance(view.logprobs) if per_token else row


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
    tokens = torch.where(valid, loss(averaged(case, view)) * done.kept_weight, 0.0).detach()
    return {
        "per_token_loss": tokens,
        "row_loss_sum": tokens.sum(-1),
        "behave_imp_weight": done.kept_weight,
        "behave_mask": valid & done.kept & (done.weight > 0),
        **logged(case, view, loss, done),
    }


def _packed(case: Case) -> Outputs:
    """Sequences one after the other in one row: padded, replayed and packed again."""
    without_effect(case, "layout")
    lengths = case.ids("seq_lengths").tolist()
    names = [name for name, array in case.arrays.items() if array.shape == case.arrays["logp"].shape]
    padded = {name: _pad(case[name], lengths).numpy() for name in names}
    rest = {name: array for name, array in case.arrays.items() if name not in padded and name != "seq_lengths"}
    unpacked = replace(case, arrays={**rest, **padded})
    found = _stepped(unpacked, _view(unpacked))
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {name: value if value.dim() == 0 else value[inside] for name, value in found.items()}


def _pad(packed: Tensor, lengths: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(packed.split(lengths)), batch_first=True)
