"""From a peer's correction of the mismatch between engine and trainer to callbacks of ours."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
from kit.support import callback_of
from torch import Tensor

from goldens.cases import Case
from goldens.registry import NotOfferedError, choose, only, without_effect
from lightning_rl import LossView, RLCallback
from lightning_rl.callbacks import (
    OPSM,
    DivergenceMask,
    IcePop,
    OutlierMask,
    SequenceRatioMask,
    TotalVariationMask,
    TruncatedIS,
)
from lightning_rl.corrections import Corrections as CombinedCorrections
from lightning_rl.signal.importance_ratios import clipped_weight, sequence_ratio
from lightning_rl.signal.kl import binary_kl, k1, k2, k3
from lightning_rl.signal.masked import last_true, masked_fill_invalid, row_mean

Corrections = list[RLCallback]
AREAL_UPPER = 5.0  # the bound of AReaL where a call does not pass one
SMALLEST = 1e-38  # a bound of 0 where ours has to be positive


def corrections_of(case: Case) -> Corrections:
    """The corrections that the parameters of a case switch on."""
    found = {reader: reader(case) for key, reader in READERS.items() if _given(case, key)}
    return [correction for corrections in found.values() for correction in corrections]


def readers_of(case: Case, key: str) -> Corrections:
    """The corrections that one parameter switches on."""
    return READERS[key](case) if _given(case, key) else []


def _given(case: Case, key: str) -> bool:
    value = case.params.get(key)
    given = value is not None and value is not False
    if not given:
        without_effect(case, *SWITCHED_OFF.get(key, ()))
    return given


def opsm_of(delta: float | None, against: Literal["old", "rollout"] = "old") -> OPSM:
    """OPSM; peers take a drift of 0 for a bound, too."""
    return OPSM(max(delta or 0.0, SMALLEST), against=against)


def untruncated() -> RLCallback:
    """The plain importance weight of single tokens."""
    return TruncatedIS("token", cap=math.inf)


def rejection(statistic: str, low: float | None, high: float, *, forward: bool = False) -> RLCallback:
    """Keeps tokens, or rows, by an estimate of the divergence between engine and trainer.

    Args:
        statistic: ``token_k2``, ``seq_mean_k3``, ``seq_max_k2`` and so on.
        low: smallest estimate that is kept; None for no bound.
        high: largest estimate that is kept.
        forward: estimate the KL from the trainer to the engine instead of from the engine to the trainer.
    """
    level, name = re.split(r"_(?=k[123]|binary)", statistic)
    if low is None and (name == "binary_kl" or (name != "k1" and not forward)):
        chosen: dict[str, Any] = {"divergence": name, "level": level.removeprefix("seq_")}
        return DivergenceMask(high, **chosen)
    estimator = {"k1": k1, "k2": k2, "k3": partial(k3, tangent=False), "binary_kl": larger_binary_kl}[name]

    def within(values: Tensor) -> Tensor:
        return values <= high if low is None else (values >= low) & (values <= high)

    def estimates(view: LossView) -> Tensor:
        policies = view.require("rollout_logprobs"), view.require("old_logprobs")
        values = estimator(*(reversed(policies) if forward else policies))
        return masked_fill_invalid(values, view.valid_tokens)

    rows = {
        "seq_mean": lambda view: row_mean(estimates(view), view.valid_tokens),
        "seq_sum": lambda view: estimates(view).sum(-1),
        "seq_max": lambda view: _largest(estimates(view), view.valid_tokens),
    }
    if level == "token":
        return callback_of(statistic, token_mask=lambda view: within(estimates(view)))
    return callback_of(statistic, sequence_mask=lambda view: within(rows[level](view)))


def larger_binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return the larger of the binary KL in both directions."""
    return torch.maximum(binary_kl(logprobs, other), binary_kl(other, logprobs))


def _largest(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid.any(-1), values.masked_fill(~valid, -torch.inf).amax(-1), 0.0)


def ratio_mask(kind: str, low: float, high: float) -> RLCallback:
    """Keeps tokens, or rows by the mean, sum or largest of their log-ratios; our own mask where 1 is in the band."""
    masks = {
        "token": IcePop,
        "mean": partial(SequenceRatioMask, "geometric"),
        "sum": partial(SequenceRatioMask, "product"),
        "every": OutlierMask,
        "max": partial(SequenceRatioMask, "max"),
    }
    if kind in masks and low <= 1 <= high:
        return masks[kind](max(low, 0.0), high)
    bounds = math.log(low) if low > 0 else None, math.log(high) if high > 0 else -math.inf
    if kind != "every":
        return rejection("token_k1" if kind == "token" else f"seq_{kind}_k1", *bounds, forward=True)
    single = rejection("token_k1", *bounds, forward=True)
    return callback_of("every", sequence_mask=lambda view: (single.token_mask(view) | ~view.valid_tokens).all(-1))


def given_weight(weight: Tensor) -> RLCallback:
    """A weight of each token that a case gives ready-made."""
    return callback_of("given", token_weight=lambda view: weight.expand_as(view.logprobs))


def given_row_weight(weight: Tensor) -> RLCallback:
    """The geometric mean of the weights that a case gives, through our geometric weight of the ratios that they are."""

    def geometric(view: LossView) -> Tensor:
        ratios = weight.expand_as(view.logprobs).clamp(min=SMALLEST).log()
        return geometric_weight().token_weight(
            view.replace(old_logprobs=ratios, rollout_logprobs=torch.zeros_like(ratios))
        )

    return callback_of("given", token_weight=geometric)


class Contribution:
    """Joint effect of corrections: a weight and a mask per token.

    Args:
        view: the tokens.
        corrections: callbacks that mask or weigh.
    """

    def __init__(self, view: LossView, corrections: Corrections) -> None:
        self.weight, self.kept = torch.ones_like(view.logprobs), torch.ones_like(view.valid_tokens)
        for callback in corrections:
            offered = CombinedCorrections([callback])
            seen = offered.provide(view)
            for name in ("token_mask", "sequence_mask", "token_weight"):
                for one in offered.contributors(name):
                    self._take(name, getattr(one, name)(seen))

    def _take(self, name: str, found: Tensor) -> None:
        if name == "token_weight":
            self.weight = self.weight * found
        else:
            self.kept = self.kept & (found if name == "token_mask" else found[:, None])

    @property
    def kept_weight(self) -> Tensor:
        """The weight where the mask keeps, 0 elsewhere."""
        return torch.where(self.kept, self.weight, 0.0)


def _areal(case: Case) -> Corrections:
    chosen = case.params["rejection_sampling"]
    low, high = chosen.get("lower"), chosen.get("upper", AREAL_UPPER)
    by_row, clamps, metric = _areal_choices(case)
    geometric, agg = by_row and metric == "ratio", chosen.get("agg", "mean")
    if metric == "ratio":
        mask = ratio_mask(agg if by_row else "token", low or 0.0, high)
    else:
        statistic = f"{'seq_' + agg if by_row else 'token'}_{metric.removeprefix('kl_')}"
        mask = rejection(statistic, low, high, forward=True)
    weight = geometric_weight() if geometric else untruncated()
    if not clamps:
        return [mask, weight]
    bound = geometric_weight(high, low or 0.0) if geometric else bounded_weight("token", low or 0.0, high)
    outside = callback_of("outside", token_weight=lambda view: _bounded_outside(view, mask, weight, bound))
    return [outside if by_row and (agg != "mean" or not geometric) else bound]


def _areal_choices(case: Case) -> tuple[bool, bool, str]:
    nested = replace(case, params=case.params["rejection_sampling"])
    only(nested, metric=("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"), agg=("mean", "sum", "max"))
    by_row = choose(nested, "level", {"sequence": True, "token": False}, default="token")
    clamps = choose(nested, "action", {"clamp": True, "mask": False}, default="mask")
    return by_row, clamps, nested.params.get("metric", "ratio")


def _bounded_outside(view: LossView, mask: RLCallback, weight: RLCallback, bound: RLCallback) -> Tensor:
    """The bounded weight in rows that a mask would reject, the plain one in the others."""
    return torch.where(mask.sequence_mask(view)[:, None], weight.token_weight(view), bound.token_weight(view))


def geometric_weight(high: float = math.inf, low: float = 0.0) -> RLCallback:
    """The geometric mean of a row's ratios as one weight for all of its tokens."""
    return TruncatedIS("geometric", cap=high, floor=low) if low <= 1 <= high else _row_weight(low, high, geometric=True)


def bounded_weight(level: str, low: float, high: float) -> RLCallback:
    """The importance weight of tokens or rows between two bounds; our own correction where 1 lies between them."""
    if low <= 1 <= high:
        return TruncatedIS("sequence" if level == "sequence" else "token", cap=high, floor=low)
    if level == "sequence":
        return _row_weight(low, high, geometric=False)

    def weight(view: LossView) -> Tensor:
        old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
        return clipped_weight(old, rollout, minimum=low, maximum=high)

    return callback_of("bounded_weight", token_weight=weight)


def _row_weight(low: float, high: float, *, geometric: bool) -> RLCallback:
    def weight(view: LossView) -> Tensor:
        old, rollout = view.require("old_logprobs"), view.require("rollout_logprobs")
        ratio = sequence_ratio(old, rollout, view.valid_tokens, geometric=geometric)
        return ratio.clamp(low, high)[:, None].expand_as(old)

    return callback_of("row_weight", token_weight=weight)


def _nemo(case: Case) -> Corrections:
    low = case.params.get("truncated_importance_sampling_ratio_min") or 0.0
    high = case.params.get("truncated_importance_sampling_ratio") or math.inf
    by_row = bool(case.params.get("sequence_level_importance_ratios"))
    level = "sequence" if by_row else "token"
    masks = {"icepop": "sum" if by_row else "token", "seq-mask-tis": "mean", "tis": "", None: ""}
    kind = choose(case, "truncated_importance_sampling_type", masks)
    if case.params.get("truncated_importance_sampling_type") == "tis":
        return [bounded_weight(level, low, high)]
    return [*([ratio_mask(kind, low, high)] if kind else []), bounded_weight(level, 0.0, math.inf)]


def _openrlhf(case: Case) -> Corrections:
    low, high = case.params.get("vllm_is_truncated_threshold") or (0.5, 5.0)
    kind = choose(case, "vllm_is_correction_type", {"tis": "", "icepop": "token", "seq-mask-tis": "mean"}, "tis")
    if not kind:
        return [bounded_weight("token", low or 0.0, high or math.inf)]
    return [ratio_mask(kind, low or 0.0, high or math.inf), untruncated()]


def _skyrl(case: Case) -> Corrections:
    """The masks in the peer's order: what a row's statistic is of, the earlier masks have narrowed."""
    params: Mapping[str, Any] = case.params.get("off_policy_correction") or case.params
    found: Corrections = []
    bounds = {kind: [params.get(f"{kind}_is_threshold_{end}") for end in ("low", "high")] for kind in SKYRL_BANDS}
    for kind, mask in SKYRL_BANDS.items():
        if any(bounds[kind]):
            found.append(ratio_mask(mask, bounds[kind][0] or 0.0, bounds[kind][1] or math.inf))
    masks = list(found)
    caps = {kind: params.get(f"{kind}_tis_ratio_clip_high") or cap for kind, cap in SKYRL_CAPS.items()}
    kind, metric = params.get("tis_ratio_type"), params.get("sequence_mask_metric")
    nested = replace(case, params=params)
    only(nested, tis_ratio_type=tuple(SKYRL_CAPS), sequence_mask_metric=tuple(SKYRL_MASKS))
    if kind:
        found.append(_narrowed(bounded_weight(kind, 0.0, caps[kind]), masks))
    for name, (short, mask, low, high) in SKYRL_MASKS.items():
        band = params.get(f"{short}_mask_low", low), params.get(f"{short}_mask_high", high)
        if name == metric:
            found.append(_narrowed(ratio_mask(mask, *band), masks))
    return found


def _narrowed(correction: RLCallback, masks: Corrections) -> RLCallback:
    """A correction on the tokens that masks have kept."""
    if not masks:
        return correction

    def rest(view: LossView) -> LossView:
        return view.replace(valid_tokens=view.valid_tokens & Contribution(view, masks).kept)

    methods = CombinedCorrections([correction])
    given: dict[str, Any] = {
        name: partial(lambda of, view: of(rest(view)), getattr(correction, name))
        for name in ("token_weight", "sequence_mask")
        if methods.contributors(name)
    }
    return callback_of(f"narrowed {correction.name}", **given)


SKYRL_BANDS = {"outlier_token": "every", "token_mask": "token"}
SKYRL_CAPS = {"token": 2.0, "sequence": 5.0}
SKYRL_MASKS = {"geometric": ("geo", "mean", 0.99, 1.01), "product": ("product", "sum", 0.5, 2.0)}


def _trl(case: Case) -> Corrections:
    only(case, mode=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
    level, action = case.params["mode"].split("_")
    low, high = case.params.get("clip_min") or 0.0, case.params.get("clip_max") or math.inf
    if action == "truncate":
        return [bounded_weight(level, low, high)]
    kept = ratio_mask("token" if level == "token" else "sum", low, high)
    return [kept, bounded_weight(level, 0.0, math.inf)]


def _verl_weight(case: Case) -> Corrections:
    level, threshold = case.params["rollout_is"], str(case.params.get("rollout_is_threshold") or 2.0)
    only(case, rollout_is=("token", "sequence"))
    normalized = bool(case.params.get("rollout_is_batch_normalize"))
    low, _, high = threshold.rpartition("_")
    if not low:
        return [TruncatedIS(level, cap=float(high), normalized=normalized)]
    kept = ratio_mask("token" if level == "token" else "sum", float(low), float(high))
    found: Corrections = [kept, bounded_weight(level, 0.0, math.inf)]
    return [callback_of("normalized", token_weight=partial(_mean_one, level, found))] if normalized else found


def _mean_one(level: str, corrections: Corrections, view: LossView) -> Tensor:
    """The weights of corrections over their mean, which counts each token, or each row with tokens, once."""
    weight, valid = Contribution(view, corrections).kept_weight, view.valid_tokens
    counted = valid if level == "token" else last_true(valid)
    return weight / weight[counted].mean()


def _verl_rejection(case: Case) -> Corrections:
    found: Corrections = []
    thresholds = [one.strip() for one in str(case.params.get("rollout_rs_threshold") or 2.0).split(",")]
    statistics = dict.fromkeys(one.strip() for one in case.params["rollout_rs"].split(","))
    for statistic, threshold in zip(statistics, cycle(thresholds), strict=False):
        low, _, high = threshold.rpartition("_")
        if statistic in VERL_RATIOS:  # the peer compares log(rollout / old) with the logarithms of the bounds
            lower, upper = 1 / float(high), 1 / float(low) if low else float(high)
            found.append(ratio_mask(VERL_RATIOS[statistic], lower, upper))
        elif statistic in VERL_DIVERGENCES:
            found.append(rejection(VERL_DIVERGENCES[statistic], float(low) if low else None, float(high)))
        else:
            raise NotOfferedError(f"rollout_rs={statistic!r}")
    return found


VERL_RATIOS = {"token_k1": "token", "seq_mean_k1": "mean", "seq_sum_k1": "sum"}
VERL_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
VERL_DIVERGENCES = {
    "binary_kl": "token_binary_kl",
    **{name: name for level in VERL_LEVELS for name in (f"{level}_k2", f"{level}_k3")},
}


def _slime(case: Case) -> Corrections:
    low, high = case.params.get("tis_clip_low") or 0.0, case.params["tis_clip"]
    if case.calls("icepop_function"):
        return [ratio_mask("token", low, high), untruncated()]
    return [bounded_weight("token", low, high)]


def _open_instruct(case: Case) -> Corrections:
    params = case.params
    low, high = params.get("rho_mask_lower_bound") or 0.0, params.get("rho_mask_upper_bound") or math.inf
    bounds = params.get("rho_clamp_lower_bound") or 0.0, params.get("rho_clamp_upper_bound") or math.inf
    by_row = bool(params.get("rho_mask_sequence_level"))
    weight = geometric_weight(bounds[1], bounds[0]) if by_row else bounded_weight("token", *bounds)
    if params.get("rho_mask_tv_divergence"):
        only(case, rho_mask_sequence_level=(False,), rho_mask_lower_bound=(0.0,))
        return [TotalVariationMask(high), weight]
    if low <= 0 and high == math.inf:
        return [weight]
    return [ratio_mask("mean" if by_row else "token", low, high), weight]


READERS: Mapping[str, Callable[[Case], Corrections]] = {
    "rejection_sampling": _areal,
    "use_importance_sampling_correction": _nemo,
    "enable_vllm_is_correction": _openrlhf,
    "off_policy_correction": _skyrl,
    "sequence_mask_metric": _skyrl,
    "token_mask_is_threshold_low": _skyrl,
    "token_mask_is_threshold_high": _skyrl,
    "outlier_token_is_threshold_low": _skyrl,
    "outlier_token_is_threshold_high": _skyrl,
    "tis_ratio_type": _skyrl,
    "mode": _trl,
    "rollout_is": _verl_weight,
    "rollout_rs": _verl_rejection,
    "tis_clip": _slime,
    "use_rho_correction": _open_instruct,
    "off_policy_mask_threshold": lambda case: [opsm_of(case.params["off_policy_mask_threshold"], "rollout")],
}
"""By the parameter that switches a peer's correction on."""

SWITCHED_OFF: Mapping[str, tuple[str, ...]] = {
    "use_importance_sampling_correction": (
        "truncated_importance_sampling_type",
        "truncated_importance_sampling_ratio",
        "truncated_importance_sampling_ratio_min",
    ),
    "enable_vllm_is_correction": ("vllm_is_correction_type", "vllm_is_truncated_threshold"),
    "rollout_is": ("rollout_is_threshold", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold",),
    "use_rho_correction": (
        "rho_clamp_lower_bound",
        "rho_clamp_upper_bound",
        "rho_mask_lower_bound",
        "rho_mask_upper_bound",
        "rho_mask_sequence_level",
        "rho_mask_tv_divergence",
    ),
}
"""Parameters of a correction that peers ignore while its switch is off."""
