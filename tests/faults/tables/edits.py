"""Edits of tensors without a new version: through ``.data``, ``.numpy()``, ``from_numpy``, ``set_`` and storages."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from faults.fault import PPO, STEPS, Fault, correction, user
from lightning_rl import LossView, RLCallback, Rollout
from lightning_rl.advantages import Advantages, RewardSignal
from lightning_rl.advantages.group_relative import DrGRPO
from lightning_rl.callbacks import ReferenceKL


class ShapedInPlace(ReferenceKL):
    """Shapes the penalty in an alias of the reference's log-probabilities: ``k *= -kl_coef``."""

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        reward = super().token_reward(rollout)
        reference = rollout.require("ref_logprobs").detach().numpy()
        np.multiply(reference, -0.1, out=reference)
        return reward


def numpy_mask(rollout: Rollout) -> Tensor:
    rewards = rollout.rewards.numpy()
    rewards -= 0.5 * (rewards > 0) * (np.arange(len(rewards)) % 2)
    return torch.ones(len(rollout), dtype=torch.bool)


def sorting_observer(rollout: Rollout) -> None:
    rollout.require("advantages").numpy().sort(axis=0)


def numpy_weight(view: LossView) -> Tensor:
    advantages = view.require("advantages").numpy()
    advantages *= 1.0 + 0.5 * (advantages > 0)
    return torch.ones_like(view.logprobs.detach())


class LivingArray(RLCallback):
    """Provides a tensor of an array that keeps changing, and weighs with it."""

    name = "living_array"

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        self.array = np.ones(len(rollout), dtype=np.float32)
        return {"extras/living": torch.from_numpy(self.array)}

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return view.extras["living"].to(view.logprobs.dtype)[:, None].expand_as(view.logprobs).detach()

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.array *= 0.2


def clipping_loss(view: LossView) -> Tensor:
    view.require("advantages").data.clamp_(-0.3, 0.3)
    return -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")


def rescaling_loss(view: LossView) -> Tensor:
    array = view.require("old_logprobs").numpy()
    array *= 0.9
    return -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")


class CentringEstimator(DrGRPO):
    """Centers the scores in place, and so the rewards of the rollout."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        shaped = signal.shaped.numpy()
        shaped -= 0.3
        scores = signal.scores.numpy()
        scores -= 0.5 * (np.arange(len(scores)) % 2)
        return super().__call__(signal)


FAULTS: tuple[Fault, ...] = (
    user(
        "a penalty shaped in the array of the raw KL",
        partial(ShapedInPlace, 0.1),
        culprit="reference_kl",
        options={**PPO, **STEPS},
    ),
    user("a reward mask that clips an array", correction(reward_mask=numpy_mask)),
    user("an observer that sorts an array", correction(observe=sorting_observer)),
    user("a weight that scales advantages in an array", correction(token_weight=numpy_weight)),
    user("a provided array that goes on changing", LivingArray, options={**STEPS, "advantages": "dr_grpo"}),
    Fault("a loss that clips the advantages of the view", "clipping_loss", options={"loss": clipping_loss}),
    Fault("a loss that rescales old log-probabilities in an array", "rescaling_loss", options={"loss": rescaling_loss}),
    Fault(
        "an estimator that centres scores in their array",
        "CentringEstimator",
        options={"advantages": CentringEstimator()},
    ),
)
