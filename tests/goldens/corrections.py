"""From a peer's correction of the mismatch between engine and trainer to callbacks of ours."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from support import callback_of
from torch import Tensor

from goldens.cases import Case
from goldens.registry import NotOfferedError
from lightning_rl import Contributions, LossView, RLCallback
from lightning_rl.callbacks import OPSM, GeometricMask, IcePop, OutlierMask, ProductMask, TruncatedIS
from lightning_rl.signal.corrections import clipped_weight
from lightning_rl.signal.kl import k2, k3
from lightning_rl.signal.masked import masked_fill_invalid, row_mean
from lightning_rl.signal.ratios import sequence_ratio

Corrections = list[RLCallback]


def corrections_of(case: Case) -> Corrections:
    """The corrections that the parameters of a case switch on."""
    found = {reader: reader(case) for key, reader in READERS.items() if case.params.get(key)}
    return [correction for corrections in found.values() for correction in corrections]


def readers_of(case: Case, key: str) -> Corrections:
    """The corrections that one parameter switches on."""
    return READERS[key](case) if case.params.get(key) else []


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
    estimator = {"k2": k2, "k3": k3}[name]

    def within(values: Tensor) -> Tensor:
        return values <= high if low is None else (values >= low) & (values <= high)

    def estimates(view: LossView) -> Tensor:
        policies = view.required("rollout_logprobs"), view.required("old_logprobs")
        values = estimator(*(reversed(policies) if forward else policies))
        return masked_fill_invalid(values, view.valid_tokens)

    rows = {
        "seq_mean": lambda view: row_mean(estimates(view), view.valid_tokens),
        "seq_sum": lambda view: estimates(view).sum(-1),
        "seq_max": lambda view: estimates(view).amax(-1),
    }
    if level == "token":
        return callback_of(statistic, token_mask=lambda view: within(estimates(view)))
    return callback_of(statistic, sequence_mask=lambda view: within(rows[level](view)))


def given_weight(weight: Tensor) -> RLCallback:
    """A weight of each token that a case gives ready-made."""
    return callback_of("given", token_weight=lambda view: weight.expand_as(view.logprobs))


class Contribution:
    """What corrections do together: a weight and a mask of each token.

    Args:
        view: the tokens.
        corrections: callbacks that mask or weigh.
    """

    def __init__(self, view: LossView, corrections: Corrections) -> None:
        self.weight, self.kept = torch.ones_like(view.logprobs), torch.ones_like(view.valid_tokens)
        for callback in corrections:
            offered = Contributions([callback])
            for name in ("token_mask", "sequence_mask", "token_weight"):
                for one in offered.offering(name):
                    self._take(name, getattr(one, name)(view))

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
    if chosen.get("action") == "clamp":
        if metric != "ratio":
            raise NotOfferedError("a divergence that is cut off")
        return [geometric_weight(high, low) if by_row else bounded_weight("token", low, high)]
    weight = geometric_weight() if by_row and metric == "ratio" else untruncated()
    if metric == "ratio":
        masks = {"mean": GeometricMask, "sum": ProductMask, "max": OutlierMask}
        return [masks[agg](low, high) if by_row else IcePop(low, high), weight]
    statistic = f"{'seq_' + agg if by_row else 'token'}_{metric.removeprefix('kl_')}"
    return [rejection(statistic, chosen.get("lower"), high, forward=True), weight]


def geometric_weight(high: float = math.inf, low: float = 0.0) -> RLCallback:
    """The geometric mean of a row's ratios as one weight for all of its tokens."""
    return _row_weight(low, high, geometric=True)


def bounded_weight(level: str, low: float, high: float) -> RLCallback:
    """The importance weight of tokens or rows between two bounds; our own correction where the lower one is 0."""
    if not low > 0:
        return TruncatedIS("sequence" if level == "sequence" else "token", cap=high)
    if level == "sequence":
        return _row_weight(low, high, geometric=False)

    def weight(view: LossView) -> Tensor:
        old, rollout = view.required("old_logprobs"), view.required("rollout_logprobs")
        return clipped_weight(old, rollout, minimum=low, maximum=high)

    return callback_of("bounded_weight", token_weight=weight)


def _row_weight(low: float, high: float, *, geometric: bool) -> RLCallback:
    def weight(view: LossView) -> Tensor:
        old, rollout = view.required("old_logprobs"), view.required("rollout_logprobs")
        ratio = sequence_ratio(old, rollout, view.valid_tokens, geometric=geometric)
        return ratio.clamp(low, high)[:, None].expand_as(old)

    return callback_of("row_weight", token_weight=weight)


def _nemo(case: Case) -> Corrections:
    low = case.params.get("truncated_importance_sampling_ratio_min") or 0.0
    high = case.params.get("truncated_importance_sampling_ratio") or math.inf
    kind = case.params.get("truncated_importance_sampling_type")
    if kind == "tis":
        return [
            bounded_weight("sequence" if case.params.get("sequence_level_importance_ratios") else "token", low, high)
        ]
    masks: dict[str | None, Corrections] = {"icepop": [IcePop(low, high)], "seq-mask-tis": [GeometricMask(low, high)]}
    return [*masks.get(kind, []), untruncated()]


def _openrlhf(case: Case) -> Corrections:
    low, high = case.params["vllm_is_truncated_threshold"]
    known: dict[str, Corrections] = {
        "tis": [bounded_weight("token", low, high)],
        "icepop": [IcePop(low, high), untruncated()],
        "seq-mask-tis": [GeometricMask(low, high), untruncated()],
    }
    return known[case.params["vllm_is_correction_type"]]


def _skyrl(case: Case) -> Corrections:
    params: Mapping[str, Any] = case.params.get("off_policy_correction") or case.params
    found: Corrections = []
    if params.get("outlier_token_is_threshold_low") is not None or params.get("outlier_token_is_threshold_high"):
        low, high = params.get("outlier_token_is_threshold_low"), params.get("outlier_token_is_threshold_high")
        found.append(OutlierMask(low or 0.0, high or math.inf))
    if params.get("token_mask_is_threshold_low") is not None or params.get("token_mask_is_threshold_high"):
        low, high = params.get("token_mask_is_threshold_low"), params.get("token_mask_is_threshold_high")
        found.append(IcePop(low or 0.0, high or math.inf))
    kind = params.get("tis_ratio_type")
    if kind in ("token", "sequence"):
        found.append(TruncatedIS(kind, cap=params[f"{kind}_tis_ratio_clip_high"]))
    metric = params.get("sequence_mask_metric")
    if metric in ("geometric", "product"):
        short, mask = ("geo", GeometricMask) if metric == "geometric" else ("product", ProductMask)
        found.append(mask(params[f"{short}_mask_low"], params[f"{short}_mask_high"]))
    return found


def _trl(case: Case) -> Corrections:
    level, action = case.params["mode"].split("_")
    low, high = case.params.get("clip_min") or 0.0, case.params.get("clip_max") or math.inf
    if action == "truncate":
        return [bounded_weight(level, low, high)]
    if level == "token":
        return [IcePop(low, high), untruncated()]
    return [ProductMask(low, high), TruncatedIS("sequence", cap=math.inf)]


def _verl_weight(case: Case) -> Corrections:
    level, threshold = case.params["rollout_is"], str(case.params["rollout_is_threshold"])
    low, _, high = threshold.rpartition("_")
    if not low:
        return [TruncatedIS(level, cap=float(high))]
    masks = {"token": IcePop, "sequence": ProductMask}
    return [masks[level](float(low), float(high)), TruncatedIS(level, cap=math.inf)]


def _verl_rejection(case: Case) -> Corrections:
    found: Corrections = []
    thresholds = str(case.params["rollout_rs_threshold"]).split(",")
    statistics = case.params["rollout_rs"].split(",")
    for statistic, threshold in zip(statistics, thresholds * (len(statistics) // len(thresholds)), strict=True):
        low, _, high = threshold.rpartition("_")
        if statistic.endswith("_k1"):  # the peer compares log(rollout / old) with the logarithms of the bounds
            lower, upper = 1 / float(high), 1 / float(low) if low else float(high)
            masks = {
                "token_k1": IcePop,
                "seq_mean_k1": GeometricMask,
                "seq_sum_k1": ProductMask,
                "seq_max_k1": OutlierMask,
            }
            found.append(masks[statistic](lower, upper))
        else:
            found.append(rejection(statistic, float(low) if low else None, float(high)))
    return found


def _slime(case: Case) -> Corrections:
    low, high = case.params.get("tis_clip_low") or 0.0, case.params["tis_clip"]
    if case.algorithm == "icepop":
        return [IcePop(low, high), untruncated()]
    return [bounded_weight("token", low, high)]


def _open_instruct(case: Case) -> Corrections:
    params = case.params
    low, high = params["rho_mask_lower_bound"], params["rho_mask_upper_bound"]
    if params.get("rho_mask_tv_divergence"):
        raise NotOfferedError("a weight masked by total variation")
    bounds = params.get("rho_clamp_lower_bound") or 0.0, params.get("rho_clamp_upper_bound") or math.inf
    by_row = params["rho_mask_sequence_level"]
    weight = geometric_weight(bounds[1], bounds[0]) if by_row else bounded_weight("token", *bounds)
    if not high > 0:
        return [weight]
    return [GeometricMask(low, high) if by_row else IcePop(low, high), weight]


READERS = {
    "rejection_sampling": _areal,
    "use_importance_sampling_correction": _nemo,
    "enable_vllm_is_correction": _openrlhf,
    "off_policy_correction": _skyrl,
    "sequence_mask_metric": _skyrl,
    "token_mask_is_threshold_high": _skyrl,
    "outlier_token_is_threshold_high": _skyrl,
    "tis_ratio_type": _skyrl,
    "mode": _trl,
    "rollout_is": _verl_weight,
    "rollout_rs": _verl_rejection,
    "tis_clip": _slime,
    "use_rho_correction": _open_instruct,
    "off_policy_mask_threshold": lambda case: [OPSM(case.params["off_policy_mask_threshold"], against="rollout")],
}
"""By the parameter that switches a peer's correction on."""
