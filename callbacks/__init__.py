"""Corrections: Lightning callbacks that change the training signal, one per file."""

from lightning_rl.callbacks.adaptive_kl import AdaptiveKL
from lightning_rl.callbacks.curriculum import Curriculum
from lightning_rl.callbacks.divergence_mask import DivergenceMask
from lightning_rl.callbacks.dynamic_sampling import DynamicSampling
from lightning_rl.callbacks.entropy_bonus import EntropyBonus
from lightning_rl.callbacks.ice_pop import IcePop
from lightning_rl.callbacks.linear_length_penalty import LinearLengthPenalty
from lightning_rl.callbacks.no_eos_mask import NoEOSMask
from lightning_rl.callbacks.off_policy_is import OffPolicyIS
from lightning_rl.callbacks.opsm import OPSM
from lightning_rl.callbacks.outlier_mask import OutlierMask
from lightning_rl.callbacks.overlong_penalty import OverlongPenalty
from lightning_rl.callbacks.positive_nll import PositiveNLL
from lightning_rl.callbacks.reference_kl import ReferenceKL
from lightning_rl.callbacks.reward_normalization import RewardNormalization
from lightning_rl.callbacks.rollout_kl import RolloutKL
from lightning_rl.callbacks.router_aux_loss import RouterAuxLoss
from lightning_rl.callbacks.router_replay import RouterReplay
from lightning_rl.callbacks.score_centering import ScoreCentering
from lightning_rl.callbacks.sequence_ratio_mask import SequenceRatioMask
from lightning_rl.callbacks.stop_properly import StopProperly
from lightning_rl.callbacks.teacher_kl import TeacherKL
from lightning_rl.callbacks.total_variation_mask import TotalVariationMask
from lightning_rl.callbacks.truncated_is import TruncatedIS

__all__ = [
    "OPSM",
    "AdaptiveKL",
    "Curriculum",
    "DivergenceMask",
    "DynamicSampling",
    "EntropyBonus",
    "IcePop",
    "LinearLengthPenalty",
    "NoEOSMask",
    "OffPolicyIS",
    "OutlierMask",
    "OverlongPenalty",
    "PositiveNLL",
    "ReferenceKL",
    "RewardNormalization",
    "RolloutKL",
    "RouterAuxLoss",
    "RouterReplay",
    "ScoreCentering",
    "SequenceRatioMask",
    "StopProperly",
    "TeacherKL",
    "TotalVariationMask",
    "TruncatedIS",
]

if __name__ != "lightning_rl.callbacks":
    raise ImportError(
        f"expected import lightning_rl.callbacks, got import {__name__}, which makes a second copy of every class: "
        "write from lightning_rl.callbacks import ...",
        name=__name__,
    )
