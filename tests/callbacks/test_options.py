"""Errors for options of corrections that are out of range: one case for each check."""

import math
from functools import partial
from typing import Any

import pytest

from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DivergenceMask,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    LinearLengthPenalty,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    PositiveNLL,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    ScoreCentering,
    SequenceRatioMask,
    StopProperly,
    TeacherKL,
    TotalVariationMask,
    TruncatedIS,
)

NAN = math.nan
bounded = partial(DivergenceMask, 1.0)
CASES: list[tuple[Any, dict[str, Any], str]] = [
    (AdaptiveKL, {"target": 0.0}, "expected target > 0, got 0.0"),
    (AdaptiveKL, {"horizon": 0}, "expected horizon to be a whole number above 0, got 0"),
    (AdaptiveKL, {"beta": -0.1}, "expected beta >= 0, got -0.1"),
    (AdaptiveKL, {"beta": 0.0}, "expected beta > 0, got 0.0"),
    (AdaptiveKL, {"unbiased": True}, "expected as_loss=True with unbiased=True"),
    (AdaptiveKL, {"estimator": "k4"}, "expected a KL estimator out of k1"),
    (DivergenceMask, {"bound": -0.1}, "expected bound >= 0, got -0.1"),
    (bounded, {"divergence": "tv"}, "expected divergence binary_kl or k2 or k3, got 'tv'"),
    (bounded, {"level": "row"}, "expected level token or mean or sum or max, got 'row'"),
    (DynamicSampling, {"tolerance": NAN}, "expected tolerance > 0, got nan"),
    (DynamicSampling, {"max_rounds": 0}, "expected max_rounds to be a whole number above 0, got 0"),
    (EntropyBonus, {"coef": -0.1}, "expected coef >= 0, got -0.1"),
    (EntropyBonus, {"step": 0.0}, "expected step > 0, got 0.0"),
    (EntropyBonus, {"target": 0.0}, "expected target > 0 or None, got 0.0"),
    (IcePop, {"low": 1.1, "high": 2.0}, r"expected low in \[0, 1\], got 1.1"),
    (IcePop, {"low": 0.5, "high": 0.9}, "expected high >= 1, got 0.9"),
    (LinearLengthPenalty, {"tokens": -0.1}, "expected tokens >= 0.*, got -0.1"),
    (LinearLengthPenalty, {"context": math.inf}, "expected context >= 0.*, got inf"),
    (LinearLengthPenalty, {"turns": NAN}, "expected turns >= 0.*, got nan"),
    (NoEOSMask, {"action": "drop"}, "action zero_reward or drop_tokens, got 'drop'"),
    (OffPolicyIS, {"min_ratio": -0.1}, r"expected min_ratio in \[0, 1\], got -0.1"),
    (OffPolicyIS, {"max_ratio": 0.9}, "expected max_ratio >= 1, got 0.9"),
    (OPSM, {"delta": 0.0}, "expected delta > 0, got 0.0"),
    (OPSM, {"against": "ref"}, "against old or rollout, got 'ref'"),
    (OutlierMask, {"low": 2.0}, r"expected low in \[0, 1\], got 2.0"),
    (OverlongPenalty, {"max_length": 10, "cache": 0}, "expected"),
    (OverlongPenalty, {"max_length": 10, "cache": 11}, "expected"),
    (OverlongPenalty, {"max_length": 10, "cache": 4, "coef": -1.0}, "expected coef >= 0"),
    (PositiveNLL, {"coef": -0.1}, "expected coef >= 0, got -0.1"),
    (PositiveNLL, {"threshold": NAN}, "expected threshold to be a number, got nan"),
    (ReferenceKL, {"beta": NAN}, "expected beta >= 0"),
    (ReferenceKL, {"estimator": "k4"}, "out of k1, .*, binary_kl, an object or a function, got 'k4'"),
    (ReferenceKL, {"unbiased": True}, "expected as_loss=True with unbiased=True: a reward has no gradient"),
    (RewardNormalization, {"mean": "row"}, "expected mean and std out of batch, group, none, got 'row' and 'batch'"),
    (RewardNormalization, {"std": "rows"}, "got 'batch' and 'rows'"),
    (RewardNormalization, {"mean": "none", "leave_one_out": True}, 'expected leave_one_out=False with mean="none"'),
    (RewardNormalization, {"epsilon": -1.0}, "expected epsilon >= 0, got -1.0"),
    (RewardNormalization, {"clip": 0.0}, "expected clip > 0, got 0.0"),
    (RolloutKL, {"coef": -1e-9}, "expected coef >= 0"),
    (RolloutKL, {"estimator": "kl"}, "out of k1, .*, binary_kl, an object or a function, got 'kl'"),
    (ScoreCentering, {"k": 0}, "expected k to be a whole number above 0 or None, got 0"),
    (SequenceRatioMask, {"statistic": "geometric", "low": 1.2, "high": 2}, r"expected low in \[0, 1\], got 1\.2"),
    (SequenceRatioMask, {"statistic": "sum"}, "expected statistic geometric or product or max, got 'sum'"),
    (StopProperly, {"scale": 1.5}, r"expected scale in \[0, 1\], got 1.5"),
    (StopProperly, {"reward": NAN}, "expected reward to be a number or None, got nan"),
    (StopProperly, {"reward": math.inf}, "expected reward to be a number or None and finite, got inf"),
    (TeacherKL, {"beta": -0.1}, "expected beta >= 0, got -0.1"),
    (TeacherKL, {"unbiased": True}, "expected as_loss=True with unbiased=True: a reward has no gradient to correct"),
    (TeacherKL, {"estimator": "k4"}, "expected a KL estimator out of k1"),
    (TotalVariationMask, {"bound": NAN}, "expected bound >= 0, got nan"),
    (TotalVariationMask, {"bound": 0.1, "policy": "ref"}, "expected policy old or current, got 'ref'"),
    (TruncatedIS, {"level": "row"}, "expected level"),
    (TruncatedIS, {"level": "token", "cap": 0.5}, "expected cap"),
    (TruncatedIS, {"floor": 1.5}, r"expected floor in \[0, 1\], got 1.5"),
    (TruncatedIS, {"normalized": 1}, "expected normalized to be True or False, got 1"),
]


@pytest.mark.parametrize(("correction", "options", "message"), CASES, ids=[message for _, _, message in CASES])
def test_an_option_out_of_range_is_refused(correction: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correction(**options)
