"""Presets: functions that return the options of published recipes.

Example::

    recipe = presets.dapo(max_new_tokens=1024)
    module = RLLightningModule(policy, rewards, **recipe.options)
    trainer = Trainer(callbacks=[*recipe.callbacks, ModelCheckpoint()])

Options that depend on the task are not set: models, sizes, learning rate, epochs. Replace an option as in any mapping:
``**{**recipe.options, "reduction": "prompt_mean"}``. Omit a correction to switch it off.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_rl.advantages import (
    GAE,
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    LengthAdaptive,
    MaxRL,
    Normalized,
    OptimalTokenBaseline,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from lightning_rl.callbacks import DynamicSampling, OverlongPenalty, PositiveNLL, ReferenceKL, TruncatedIS
from lightning_rl.corrections import RLCallback
from lightning_rl.generation import SamplingParams
from lightning_rl.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    ClippedSurrogate,
    Critic,
    KLCov,
    Reinforce,
    ValueLoss,
)
from lightning_rl.signal.reductions import SequenceSumNorm, sequence_mean, token_mean
from lightning_rl.utils.arguments import check_counts


@dataclass(frozen=True, slots=True)
class Preset:
    """Options of a recipe.

    Attributes:
        options: Arguments of :class:`lightning_rl.RLLightningModule`.
        callbacks: Corrections for the Trainer.
    """

    options: Mapping[str, Any]
    callbacks: tuple[RLCallback, ...] = ()

    def __post_init__(self) -> None:
        """Freeze the options."""
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __iter__(self) -> Iterator[RLCallback]:
        """Raise an error if a preset is used as a list of callbacks.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "expected callbacks, got a preset: pass **preset.options to the module and callbacks=[*preset.callbacks] "
            "to the Trainer"
        )


def ppo(*, beta: float = 0.05) -> Preset:
    """Return PPO: a critic, advantages per token, and the KL to the reference in the reward.

    Source: Schulman et al. 2017, arXiv:1707.06347; for language models: Ziegler et al. 2019, arXiv:1909.08593.
    """
    options = {"advantages": GAE(gamma=1.0, lam=0.95), "critic": Critic("shared", loss=ValueLoss(coef=0.1))}
    return Preset({**options, "loss": ClippedSurrogate(), "reduction": token_mean}, (ReferenceKL(beta),))


def grpo(*, beta: float = 0.04) -> Preset:
    """Return GRPO: rewards standardized per group, PPO's clip, a KL in the loss, equal weights of responses.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300.
    """
    options = {"advantages": GRPO(), "loss": ClippedSurrogate(), "reduction": sequence_mean}
    return Preset(options, (ReferenceKL(beta, as_loss=True),))


def dr_grpo(*, max_new_tokens: int = 256) -> Preset:
    """Return Dr. GRPO: GRPO without division by the deviation, a constant instead of the length, no KL.

    Source: Liu et al. 2025, arXiv:2503.20783.
    """
    sampling, reduction = SamplingParams(max_new_tokens=max_new_tokens), SequenceSumNorm(max_new_tokens)
    return Preset({"advantages": DrGRPO(), "loss": ClippedSurrogate(), "sampling": sampling, "reduction": reduction})


def dapo(*, max_new_tokens: int = 256, correct_by: str | None = None) -> Preset:
    """Return DAPO: clip-higher, token mean, dynamic sampling, overlong penalty in the last fifth of the length; no KL.

    Source: Yu et al. 2025, arXiv:2503.14476.
    """
    check_counts(1, max_new_tokens=max_new_tokens)
    options = {"advantages": GRPO(), "loss": ClippedSurrogate(clip_high=0.28), "reduction": token_mean}
    callbacks = (DynamicSampling(correct_by=correct_by), OverlongPenalty(max_new_tokens, max(max_new_tokens // 5, 1)))
    return Preset({**options, "sampling": SamplingParams(max_new_tokens=max_new_tokens)}, callbacks)


def gspo() -> Preset:
    """Return GSPO: one ratio per response, clipped tightly; no KL.

    Source: Zheng et al. 2025, arXiv:2507.18071.
    """
    return Preset({"advantages": GRPO(), "loss": GSPO(), "reduction": sequence_mean})


def luspo() -> Preset:
    """Return LUSPO: GSPO with responses weighted by length, without a bias towards short ones; no KL.

    Source: Liu et al. 2026, arXiv:2602.05261.
    """
    return Preset({"advantages": GRPO(), "loss": GSPO(), "reduction": SequenceSumNorm(1)})


def vespo() -> Preset:
    """Return VESPO: a smooth weight per response that decays on both sides of 1, for many steps per rollout; no KL.

    Source: Shen et al. 2026, arXiv:2602.10693.
    """
    return Preset({"advantages": GRPO(), "loss": VESPO(), "reduction": token_mean})


def cispo() -> Preset:
    """Return CISPO: a clipped weight that keeps the gradient of every token; no KL.

    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585.
    """
    return Preset({"advantages": GRPO(), "loss": CISPO(), "reduction": token_mean})


def rloo(*, beta: float = 0.05, max_new_tokens: int = 256) -> Preset:
    """Return RLOO: the mean of the other responses as baseline, plain policy gradient, for one update per rollout.

    The KL is in the loss; the paper adds it to the reward.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    options = {"advantages": RLOO(), "loss": Reinforce(), "reduction": SequenceSumNorm(max_new_tokens)}
    callbacks = (ReferenceKL(beta, as_loss=True, estimator="k2"),)
    return Preset({**options, "sampling": SamplingParams(max_new_tokens=max_new_tokens)}, callbacks)


def reinforce_plus_plus(*, beta: float = 0.01) -> Preset:
    """Return REINFORCE++: discounted returns whitened over the batch, PPO's clip, the KL in the reward; without groups.

    Source: Hu et al. 2025, arXiv:2501.03262.
    """
    options = {"advantages": ReinforcePlusPlus(gamma=1.0), "loss": ClippedSurrogate(), "reduction": token_mean}
    return Preset(options, (ReferenceKL(beta),))


def reinforce_plus_plus_baseline(*, beta: float = 0.01) -> Preset:
    """Return REINFORCE++ with the mean of the group as baseline.

    Source: Hu et al. 2025, arXiv:2501.03262.
    """
    options = {"advantages": ReinforcePlusPlusBaseline(), "loss": ClippedSurrogate(), "reduction": token_mean}
    return Preset(options, (ReferenceKL(beta),))


def remax(*, beta: float = 0.05, max_new_tokens: int = 256) -> Preset:
    """Return ReMax: a greedy answer as baseline, plain policy gradient, the KL in the reward; without groups.

    Source: Li et al. 2023, arXiv:2310.10505.
    """
    options = {"advantages": ReMax(), "loss": Reinforce(), "reduction": SequenceSumNorm(max_new_tokens)}
    return Preset({**options, "sampling": SamplingParams(max_new_tokens=max_new_tokens)}, (ReferenceKL(beta),))


def opo() -> Preset:
    """Return OPO: a length-weighted baseline, plain policy gradient on policy; no KL, no entropy bonus.

    Source: Hao et al. 2025, arXiv:2505.23585.
    """
    options = {"advantages": OPO(), "loss": Reinforce(), "reduction": token_mean}
    return Preset({**options, "minibatches_per_rollout": 1, "epochs_per_rollout": 1})


def maxrl() -> Preset:
    """Return MaxRL: rewards relative to their mean, which approximates maximum likelihood; plain policy gradient, no
    KL.

    Source: Tajwar et al. 2026, arXiv:2602.02710.
    """
    return Preset({"advantages": MaxRL(), "loss": Reinforce(), "reduction": sequence_mean})


def sapo() -> Preset:
    """Return SAPO: a soft gate on the ratio instead of a clip; no KL.

    Source: Gao et al. 2025, arXiv:2511.20347.
    """
    return Preset({"advantages": GRPO(), "loss": SAPO(), "reduction": sequence_mean})


def dppo() -> Preset:
    """Return DPPO: a trust region on the probability of each token, anchored on the engine; no KL.

    Source: Qi et al. 2026, arXiv:2602.04879.
    """
    return Preset({"advantages": DrGRPO(), "loss": DPPO(), "reduction": token_mean})


def gmpo() -> Preset:
    """Return GMPO: the geometric mean of a response's ratios, clipped widely; no KL.

    Source: Zhao et al. 2025, arXiv:2507.20673.
    """
    return Preset({"advantages": GRPO(), "loss": GMPO(), "reduction": sequence_mean})


def m2po() -> Preset:
    """Return M2PO: tokens masked until the second moment of the engine's log-ratio is small, for stale rollouts.

    Source: Zheng et al. 2025, arXiv:2510.01161.
    """
    options = {"advantages": GRPO(), "loss": M2PO(threshold=0.04), "reduction": token_mean}
    return Preset(options, (TruncatedIS(),))


def clip_cov() -> Preset:
    """Return Clip-Cov: a few tokens of high covariance masked, against entropy collapse; no KL.

    Source: Cui et al. 2025, arXiv:2505.22617.
    """
    return Preset({"advantages": GRPO(), "loss": ClipCov(), "reduction": token_mean})


def kl_cov() -> Preset:
    """Return KL-Cov: the drift of a few tokens of high covariance penalized, against entropy collapse; no other KL.

    Source: Cui et al. 2025, arXiv:2505.22617.
    """
    return Preset({"advantages": GRPO(), "loss": KLCov(), "reduction": token_mean})


def lite_ppo() -> Preset:
    """Return LitePPO: rewards minus the group mean, divided by the batch deviation; token mean.

    Source: Liu et al. 2025 (Tricks or traps), arXiv:2508.08221.
    """
    options = {"advantages": Normalized(mean="group", std="batch"), "loss": ClippedSurrogate()}
    return Preset({**options, "reduction": token_mean})


def vapo(*, correct_by: str | None = None) -> Preset:
    """Return VAPO: a decay by length, Monte Carlo returns for the critic, clip-higher, positive NLL; no KL.

    The paper also pretrains the critic.

    Source: Yue et al. 2025, arXiv:2504.05118.
    """
    advantages = GAE(lam=LengthAdaptive(0.05), lam_critic=1.0)
    options = {"advantages": advantages, "critic": Critic("shared", loss=ValueLoss(coef=0.1))}
    callbacks = (PositiveNLL(0.1, correct_by=correct_by),)
    return Preset({**options, "loss": ClippedSurrogate(clip_high=0.28), "reduction": token_mean}, callbacks)


def gpg() -> Preset:
    """Return GPG: centered rewards divided by the fraction of rows with an advantage, plain policy gradient; no KL.

    Source: Chu et al. 2025, arXiv:2504.02546.
    """
    return Preset({"advantages": GPG(), "loss": Reinforce(), "reduction": token_mean})


def optimal_token_baseline() -> Preset:
    """Return the optimal token baseline: a baseline per step of a group, one update per rollout, plain policy
    gradient, no KL.

    Source: Li et al. 2026, arXiv:2602.07078.
    """
    options = {"advantages": OptimalTokenBaseline(), "loss": Reinforce(), "reduction": token_mean}
    return Preset({**options, "minibatches_per_rollout": 1, "epochs_per_rollout": 1})


PRESETS: dict[str, Callable[..., Preset]] = {
    name: make for name, make in list(globals().items()) if inspect.isfunction(make) and make.__module__ == __name__
}
