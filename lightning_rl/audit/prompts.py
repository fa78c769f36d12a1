"""Prompts: what the training data has at the places of a rollout, what the rewards see of it, and what is held out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl.data import PromptDataModule
from lightning_rl.data.encoding import Encoder
from lightning_rl.data.form import is_token_ids
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import Rollout

MAX_HELD_OUT, MAX_GROUPS = 4096, 4

Ids = tuple[int, ...]


class HeldOut(NamedTuple):
    """What trains of the validation set.

    Attributes:
        number: of its prompts, each counted once.
        trained: how many of them have trained so far.
        longest: tokens of the longest of those in this rollout.
        samples: of this rollout that answer them.
    """

    number: int
    trained: int
    longest: int
    samples: Sequence[int]


class PromptWatch:
    """Looks up the prompts of a run's rollouts again, where the data has a length.

    Args:
        module: the run.
    """

    def __init__(self, module: RLLightningModule) -> None:
        self._module, self._data = module, module.prompt_stream
        self._held_out: frozenset[Ids] | None = None
        self._trained = set[Ids]()

    def of_stream(self, rollout: Rollout) -> dict[int, Ids]:
        """The token ids that the training data has for a few samples of a rollout, by identity."""
        if self._data.pass_length is None:
            return {}
        groups = rollout.groups[rollout.real].unique().tolist()[:MAX_GROUPS]
        prompts = dict(zip(groups, self._data.at(groups), strict=True))
        rows = zip(rollout.sample_ids.tolist(), rollout.groups.tolist(), strict=True)
        return {sample: prompts[group].token_ids for sample, group in rows if group in prompts}

    def of_rewards(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> dict[int, Ids]:
        """The token ids of what the rewards see of a few prompts, by sample."""
        contents = dict[int, Any]()
        for call, ids in zip(calls, samples, strict=True):
            stride = max(len(ids) // MAX_GROUPS, 1)
            contents |= dict(list(zip(ids, call.prompts, strict=False))[::stride][:MAX_GROUPS])
        return {sample: self._encode(content) for sample, content in list(contents.items())[:MAX_GROUPS]}

    def _encode(self, content: Any) -> Ids:
        tokenizer = self._module.tokenizer
        if is_token_ids(content):
            return tuple(int(token) for token in content)
        if isinstance(content, str) and tokenizer is not None:
            return tuple(tokenizer(content)["input_ids"])  # pyright: ignore[reportArgumentType]
        return Encoder.of(self._data.prompts.form, None, tokenizer, None, None).encode([content], ["a prompt"])[0]

    def held_out(self, rollout: Rollout) -> HeldOut | None:
        """What a rollout trains of the validation set; None without one, or where it is the training set on purpose."""
        held_out = self._validation_prompts()
        if not held_out:
            return None
        samples, longest = list[int](), 0
        lengths = rollout.prompt_lengths.tolist()
        for row, (sample, ids) in enumerate(zip(rollout.sample_ids.tolist(), rollout.prompt_ids.tolist(), strict=True)):
            prompt = tuple(ids[: lengths[row]])
            if sample >= 0 and prompt in held_out:
                self._trained.add(prompt)
                samples.append(sample)
                longest = max(longest, len(prompt))
        return HeldOut(len(held_out), len(self._trained), longest, samples[:4])

    def _validation_prompts(self) -> frozenset[Ids]:
        if self._held_out is None:
            self._held_out = frozenset(() if _is_on_purpose(self._data) else _first_prompts(self._data))
        return self._held_out


def _first_prompts(data: PromptDataModule) -> Mapping[Ids, None]:
    validation = data.validation
    if validation is None:
        return {}
    prompts = validation.prompts(range(min(len(validation), MAX_HELD_OUT)))
    return dict.fromkeys(prompt.token_ids for prompt in prompts)


def _is_on_purpose(data: PromptDataModule) -> bool:
    """Whether the validation set is the training set itself."""
    return data.validation is None or data.validation.fingerprint == data.fingerprint
