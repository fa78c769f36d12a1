"""A recipe of the smallest size, for resume-check: validation inside, shuffled prompts, two epochs in eight steps."""

import argparse
from functools import partial
from random import SystemRandom
from typing import Any

import torch
from kit.ranks import STRATEGIES
from kit.support import tiny_module, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, Rollout, warmup_then_linear
from lightning_rl.callbacks import OPSM, AdaptiveKL, NoEOSMask, ReferenceKL, RewardNormalization, RolloutKL, TruncatedIS

PPO: dict[str, Any] = {"advantages": "gae", "critic": "shared", "group_size": 2}


class Unseeded(RLCallback):
    """Adds noise from the operating system to the rewards."""

    name = "unseeded"

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return torch.tensor([SystemRandom().random() for _ in range(len(rollout))])


class Forgetful(RLCallback):
    """A loss term that grows with a count that no checkpoint holds."""

    name = "forgetful"

    def __init__(self) -> None:
        self.count = 0

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        self.count += 1
        return LossTerm(per_token=view.logprobs, coef=0.01 * self.count)


FAULTS: dict[str, type[Callback]] = {"unseeded": Unseeded, "forgetful": Forgetful}


def corrections(algorithm: str, max_staleness: int) -> list[Callback]:
    """Return corrections with state, with a reference, and one for samples of earlier weights."""
    stale = [TruncatedIS()] * bool(max_staleness)
    if algorithm == "ppo":
        return [NoEOSMask(), AdaptiveKL(0.05, target=0.01, horizon=20), RewardNormalization(clip=1.0), *stale]
    return [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True), *stale]


def main(
    strategy: str = "",
    algorithm: str = "grpo",
    ranks: int = 1,
    fault: str = "",
    max_staleness: int = 0,
    policy: str = "",
) -> None:
    """Four optimizer steps for each rollout and pass over the prompts; the policy may lie in a folder."""
    given: dict[str, Any] = {"policy": policy, "tokenizer": tiny_tokenizer()} if policy else {}
    module = tiny_module(
        minibatches_per_rollout=2, epochs_per_rollout=2, max_tokens_per_microbatch=30, max_new_tokens=12,
        lr_scheduler=warmup_then_linear(2, 20), max_staleness=max_staleness, **given,
        **(PPO if algorithm == "ppo" else {}),
    )  # fmt: skip
    where: dict[str, Any] = {"strategy": STRATEGIES[strategy]()} if strategy else {}
    quiet = partial(Trainer, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = quiet(
        accelerator="cpu", devices=ranks, max_epochs=2, val_check_interval=3, check_val_every_n_epoch=None,
        callbacks=[*corrections(algorithm, max_staleness), *([FAULTS[fault]()] if fault else [])], logger=False,
        **where,
    )  # fmt: skip
    trainer.fit(module, tiny_prompts(4, 4, validation=[[2, 3], [5]]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("strategy", "algorithm", "fault", "policy"):
        parser.add_argument(f"--{option}", default={"algorithm": "grpo"}.get(option, ""))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max_staleness", type=int, default=0)
    main(**vars(parser.parse_args()))
