"""From a peer's correction of the mismatch between engine and trainer to callbacks of ours."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
from kit.support import callback_of
from torch import Tensor

from goldens.cases import Case
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
from lightning_rl.signal.kl import k1, k2, k3
from lightning_rl.signal.masked import masked_fill_invalid, row_mean

Corrections = list[RLCallback]
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
    return value is not None and value is not False


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
    level, _, name = statistic.rpartition("_")
    if low is None and name != "k1" and not forward:
        chosen: dict[str, Any] = {"divergence": name, "level": level.removeprefix("seq_")}
        return DivergenceMask(high, **chosen)
    estimator = {"k1": k1, "k2": k2, "k3": partial(k3, tangent=False)}[name]

    def within(values: Tensor) -> Tensor:
        return values <= high if low is None else (values >= low) & (values <= high)

    def estimates(view: LossView) -> Tensor:
        policies = view.require("rollout_logprobs"), view.require("old_logprobs")
        values = estimator(*(reversed(policies) if forward else policies))
        return masked_fill_invalid(values, view.valid_tokens)

    rows = {
        "seq_mean": lambda view: row_mean(estimates(view), view.valid_tokens),
        "seq_sum": lambda view: estimates(view).sum(-1),
    }
    if level == "token":
        return callback_of(statistic, token_mask=lambda view: within(estimates(view)))
    return callback_of(statistic, sequence_mask=lambda view: within(rows[level](view)))


def ratio_mask(kind: str, low: float, high: float) -> RLCallback:
    """Keeps tokens, or rows by the mean, sum or largest of their log-ratios."""
    masks = {
        "token": IcePop,
        "mean": partial(SequenceRatioMask, "geometric"),
        "sum": partial(SequenceRatioMask, "product"),
        "every": OutlierMask,
        "max": partial(SequenceRatioMask, "max"),
    }
    return masks[kind](max(low, 0.0), high)


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
    low, high = chosen.get("lower") or 0.0, chosen.get("upper") or math.inf
    metric, by_row, agg = chosen.get("metric", "ratio"), chosen.get("level") == "sequence", chosen.get("agg", "mean")
    clamps, geometric = chosen.get("action") == "clamp", by_row and metric == "ratio"
    if metric == "ratio":
        mask = ratio_mask(agg if by_row else "token", low, high)
    elif metric == "binary_kl":
        mask = DivergenceMask(high, divergence="binary_kl", level=agg if by_row else "token")
    else:
        statistic = f"{'seq_' + agg if by_row else 'token'}_{metric.removeprefix('kl_')}"
        mask = rejection(statistic, chosen.get("lower"), high, forward=True)
    weight = geometric_weight() if geometric else untruncated()
    if not clamps:
        return [mask, weight]
    bound = geometric_weight(high, low) if geometric else bounded_weight("token", low, high)
    return [bound]


def geometric_weight(high: float = math.inf, low: float = 0.0) -> RLCallback:
    """The geometric mean of a row's ratios as one weight for all of its tokens."""
    return TruncatedIS("geometric", cap=high, floor=low)


def bounded_weight(level: str, low: float, high: float) -> RLCallback:
    """The importance weight of tokens or rows between two bounds."""
    return TruncatedIS("sequence" if level == "sequence" else "token", cap=high, floor=low)


def _nemo(case: Case) -> Corrections:
    low = case.params.get("truncated_importance_sampling_ratio_min") or 0.0
    high = case.params.get("truncated_importance_sampling_ratio") or math.inf
    kind = case.params.get("truncated_importance_sampling_type")
    by_row = bool(case.params.get("sequence_level_importance_ratios"))
    level = "sequence" if by_row else "token"
    if kind == "tis":
        return [bounded_weight(level, low, high)]
    masks = {"icepop": "sum" if by_row else "token", "seq-mask-tis": "mean"}
    return [*([ratio_mask(masks[kind], low, high)] if kind in masks else []), bounded_weight(level, 0.0, math.inf)]


def _openrlhf(case: Case) -> Corrections:
    low, high = case.params.get("vllm_is_truncated_threshold") or (0.5, 5.0)
    low, high = low or 0.0, high or math.inf
    kind = case.params.get("vllm_is_correction_type", "tis")
    if kind == "tis":
        return [bounded_weight("token", low, high)]
    return [ratio_mask("token" if kind == "icepop" else "mean", low, high), untruncated()]


def _skyrl(case: Case) -> Corrections:
    params: Mapping[str, Any] = case.params.get("off_policy_correction") or case.params
    found: Corrections = []
    if params.get("outlier_token_is_threshold_low") is not None or params.get("outlier_token_is_threshold_high"):
        low, high = params.get("outlier_token_is_threshold_low"), params.get("outlier_token_is_threshold_high")
        found.append(ratio_mask("every", low or 0.0, high or math.inf))
    if params.get("token_mask_is_threshold_low") is not None or params.get("token_mask_is_threshold_high"):
        low, high = params.get("token_mask_is_threshold_low"), params.get("token_mask_is_threshold_high")
        found.append(ratio_mask("token", low or 0.0, high or math.inf))
    kind = params.get("tis_ratio_type")
    if kind in ("token", "sequence"):
        found.append(bounded_weight(kind, 0.0, params.get(f"{kind}_tis_ratio_clip_high") or SKYRL_CAPS[kind]))
    metric = params.get("sequence_mask_metric")
    if metric in SKYRL_MASKS:
        short, mask, low, high = SKYRL_MASKS[metric]
        found.append(ratio_mask(mask, params.get(f"{short}_mask_low", low), params.get(f"{short}_mask_high", high)))
    return found


SKYRL_CAPS = {"token": 2.0, "sequence": 5.0}
SKYRL_MASKS = {"geometric": ("geo", "mean", 0.99, 1.01), "product": ("product", "sum", 0.5, 2.0)}


def _trl(case: Case) -> Corrections:
    level, action = case.params["mode"].split("_")
    low, high = case.params.get("clip_min") or 0.0, case.params.get("clip_max") or math.inf
    if action == "truncate":
        return [bounded_weight(level, low, high)]
    kept = ratio_mask("token" if level == "token" else "sum", low, high)
    return [kept, bounded_weight(level, 0.0, math.inf)]


def _verl_weight(case: Case) -> Corrections:
    level, threshold = case.params["rollout_is"], str(case.params.get("rollout_is_threshold") or 2.0)
    low, _, high = threshold.rpartition("_")
    if not low:
        normalized = bool(case.params.get("rollout_is_batch_normalize"))
        return [TruncatedIS(level, cap=float(high), normalized=normalized)]
    kept = ratio_mask("token" if level == "token" else "sum", float(low), float(high))
    return [kept, bounded_weight(level, 0.0, math.inf)]


def _verl_rejection(case: Case) -> Corrections:
    found: Corrections = []
    thresholds = [one.strip() for one in str(case.params.get("rollout_rs_threshold") or 2.0).split(",")]
    for statistic, threshold in zip(case.params["rollout_rs"].split(","), cycle(thresholds), strict=False):
        low, _, high = threshold.rpartition("_")
        if statistic.endswith("_k1"):  # the peer compares log(rollout / old) with the logarithms of the bounds
            lower, upper = 1 / float(high), 1 / float(low) if low else float(high)
            kind = {"token": "token", "seq_mean": "mean", "seq_sum": "sum", "seq_max": "every"}
            found.append(ratio_mask(kind[statistic.removesuffix("_k1")], lower, upper))
        else:
            found.append(rejection(statistic, float(low) if low else None, float(high)))
    return found


def _slime(case: Case) -> Corrections:
    low, high = case.params.get("tis_clip_low") or 0.0, case.params["tis_clip"]
    if case.algorithm == "icepop":
        return [ratio_mask("token", low, high), untruncated()]
    return [bounded_weight("token", low, high)]


def _open_instruct(case: Case) -> Corrections:
    params = case.params
    low, high = params.get("rho_mask_lower_bound") or 0.0, params.get("rho_mask_upper_bound") or math.inf
    bounds = params.get("rho_clamp_lower_bound") or 0.0, params.get("rho_clamp_upper_bound") or math.inf
    by_row = params.get("rho_mask_sequence_level")
    weight = geometric_weight(bounds[1], bounds[0]) if by_row else bounded_weight("token", *bounds)
    if params.get("rho_mask_tv_divergence"):
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
