"""Faults of rewards with memory, of returns and advantages, and of weights and losses that count a policy twice."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from kit.support import parity_reward, tiny_prompts, tiny_tokenizer
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

import lightning_rl.advantages.gae
import lightning_rl.rewards.scoring
from faults.fault import OLD_TO_ROLLOUT, Fault, correction, user
from faults.patches import after
from lightning_rl import GAE, LossView, PromptDataModule
from lightning_rl.advantages import Advantages, Estimator, RewardSignal
from lightning_rl.callbacks import OffPolicyIS, TruncatedIS
from lightning_rl.rewards import Rewards
from lightning_rl.samples import Trajectory
from lightning_rl.signal.discounted_returns import gae

TWICE_OVER = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}
PPO = {"critic": "shared"}
AGAIN: dict[str, Any] = {
    "data": partial(tiny_prompts, 4, 4),
    "max_steps": 6,
    "trainer": {"max_epochs": 6},
}
"""Six rollouts of the same four prompts."""


def the_same(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """Give every response the same advantage."""
    del groups
    return rewarded.to(scores.dtype)


def number_of_words(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """Count words."""
    return [float(len(completion.split())) for completion in completions]


# Rewards with a memory.


class RunningMaximum:
    """Divides by the largest value so far."""

    def __init__(self) -> None:
        self.largest = 1.0

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score the sum of the ids, relative to the maximum."""
        del prompts, completions
        sums = [float(sum(ids)) for ids in columns["completion_ids"]]
        self.largest = max([self.largest, *sums])
        return [value / self.largest for value in sums]


class MemoByPrompt:
    """Caches values by prompt, although answers differ."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, int], float] = {}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score a prompt's place in its group once."""
        fresh = parity_reward(prompts, completions, completion_ids=columns["completion_ids"])
        keys = [(tuple(prompt), place % 4) for place, prompt in enumerate(prompts)]
        return [self.known.setdefault(key, value) for key, value in zip(keys, fresh, strict=True)]


class MemoByLength:
    """Caches values by the length of an answer, ignoring the prompt."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score the number of ids of the prompt in the answer."""
        del completions
        ids = columns["completion_ids"]
        fresh = [
            len(set(prompt) & set(row)) / len(row) if row else 0.0 for prompt, row in zip(prompts, ids, strict=True)
        ]
        return [self.known.setdefault(len(row), value) for row, value in zip(ids, fresh, strict=True)]


def silent_on_some(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    return [None if len(ids) % 2 else float(sum(ids) % 2) for ids in columns["completion_ids"]]


def growing_prompts(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    values = []
    for prompt, ids in zip(prompts, columns["completion_ids"], strict=True):
        prompt.append(0)
        values.append(float((len(ids) + len(prompt)) % 2))
    return values


def popping_answers(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    values = []
    for answers, ids in zip(columns["answers"], columns["completion_ids"], strict=True):
        right = answers.pop() if answers else 0
        values.append(float(len(ids) % 2 == right % 2))
    return values


def beside_the_longest(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    lengths = [len(ids) for ids in columns["completion_ids"]]
    return [length / max([1, *lengths]) + length % 2 for length in lengths]


def answer_above(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    ids = list(columns["completion_ids"])
    return [float(len(row) % 2) for row in [*ids[-1:], *ids[:-1]]]


# Returns and advantages.


class PastTheEnd(Estimator):
    """Bootstraps from the last value after the end of the response."""

    reads = ("values",)
    per_token: ClassVar[bool] = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        values, valid = signal.values, signal.valid_tokens
        assert values is not None
        last = valid.long().cumsum(-1).argmax(-1, keepdim=True)
        end = 0.5 + values.gather(1, last)[:, 0]
        raw = gae(signal.shaped, values, valid, gamma=1.0, lam=0.95, bootstrap=end)
        return Advantages(raw, torch.where(valid, raw + values, 0.0))


class OwnReturns(Estimator):
    """Trains the critic on its own values."""

    reads = ("values",)
    per_token: ClassVar[bool] = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        values, valid = signal.values, signal.valid_tokens
        assert values is not None
        return Advantages(gae(signal.shaped, values, valid), torch.where(valid, values, 0.0))


def bootstrapped(rewards: Tensor, values: Tensor, valid: Tensor, **options: Any) -> Tensor:
    return gae(rewards, values, valid, **options | {"bootstrap": values.new_full((len(values),), 0.7)})


# Weights and losses that count a policy twice.


def log_gap(one: Tensor, other: Tensor) -> Tensor:
    """Return the bounded log-ratio of two policies, without gradient."""
    return (one - other).detach().clamp(-2, 2)


def says_old(view: LossView) -> Tensor:
    return log_gap(view.logprobs, view.require("rollout_logprobs")).exp()


def upside_down(view: LossView) -> Tensor:
    return log_gap(view.require("rollout_logprobs"), view.require("old_logprobs")).exp()


def says_nothing(view: LossView) -> Tensor:
    return log_gap(view.require("old_logprobs"), view.require("rollout_logprobs")).exp()


def squared_ratio(view: LossView) -> Tensor:
    gap = (view.logprobs - view.require("old_logprobs")).clamp(-2, 2)
    return -(2 * gap).exp() * view.require("advantages")


def own_ratio(view: LossView) -> Tensor:
    gap = (view.logprobs - view.require("rollout_logprobs")).clamp(-2, 2)
    return -gap.exp() * view.require("advantages")


def with_answers() -> PromptDataModule:
    """Return prompts with lists of answers."""
    rows = [{"prompt": [2 + place, 3], "answers": [place, place + 1, 1]} for place in range(4)]
    return PromptDataModule(rows, 4)


STALE: dict[str, Any] = {
    "options": {**TWICE_OVER, "max_staleness": 1, "optimizer": partial(AdamW, lr=0.01)},
    "data": partial(tiny_prompts, 32, 4),
    "max_steps": 16,
}
"""Rollouts of an older policy, so that that of the engine and the one before the update differ."""


FAULTS: tuple[Fault, ...] = (
    Fault(
        "a reward of token ids without the last one",
        "stage generate",
        "reward_rows",
        patches=[patch.object(Trajectory, "answer", property(lambda sample: sample.segments[-1].token_ids[:-1]))],
    ),
    Fault("a reward over the largest value so far", "RunningMaximum", fresh={"rewards": RunningMaximum}),
    Fault(
        "answers without a value rewarded with 0",
        "the rewards of its rows",
        check="reward_rows",
        options={"rewards": silent_on_some},
        patches=[after(Rewards, "fill", lambda rows, *_: rows.replace(rewarded=rows.trained))],
    ),
    Fault("a reward kept by its prompt", "MemoByPrompt", fresh={"rewards": MemoByPrompt}, **AGAIN),
    Fault("a reward kept by the length of the answer", "MemoByLength", fresh={"rewards": MemoByLength}),
    Fault(
        "a reward that edits the prompts",
        "growing_prompts",
        options={"rewards": growing_prompts},
        data=lambda: PromptDataModule([[2 + place, 3] for place in range(4)], 4),
        trainer={"max_epochs": 6},
    ),
    Fault(
        "a reward that takes answers out of the data",
        "popping_answers",
        options={"rewards": popping_answers},
        data=with_answers,
        trainer={"max_epochs": 6},
    ),
    Fault(
        "a reward beside the longest answer of the call",
        "beside_the_longest",
        options={"rewards": beside_the_longest, "max_new_tokens": 24, "eos_token_ids": [1, 5, 9]},
    ),
    Fault("a reward of the answer above", "answer_above", options={"rewards": answer_above}),
    Fault(
        "completions without their blanks",
        "call of reward number_of_words",
        options={"tokenizer": tiny_tokenizer(), "rewards": number_of_words},
        patches=[after(lightning_rl.rewards.scoring, "completion_form", lambda text, *_: text.replace(" ", ""))],
    ),
    Fault(
        "an estimator that ignores the rewards",
        "the_same",
        check="advantage_direction",
        options={"advantages": the_same},
    ),
    Fault("returns that go on past the end", "PastTheEnd", options={**PPO, "advantages": PastTheEnd()}),
    Fault(
        "a value after the end in the library's GAE",
        "GAE|estimator|signal",
        options={**PPO, "advantages": GAE(whitened=False)},
        patches=[patch.object(lightning_rl.advantages.gae, "gae", bootstrapped)],
    ),
    Fault("returns that are the critic's own values", "OwnReturns", options={**PPO, "advantages": OwnReturns()}),
    user(
        "a weight that says old and takes the current policy",
        correction(token_weight=says_old, **OLD_TO_ROLLOUT),
        options=TWICE_OVER,
    ),
    user("a weight that is upside down", correction(token_weight=upside_down, **OLD_TO_ROLLOUT), **STALE),
    user(
        "a second weight of the same ratio that declares none",
        correction(token_weight=says_nothing, reads_at_loss=("rollout_logprobs", "old_logprobs")),
        TruncatedIS,
        **STALE,
    ),
    Fault("a loss with its ratio squared", "squared_ratio", options={**TWICE_OVER, "loss": squared_ratio}),
    user(
        "a loss with the ratio of a weight",
        OffPolicyIS,
        culprit="own_ratio|off_policy_is",
        options={**TWICE_OVER, "loss": own_ratio},
    ),
)
