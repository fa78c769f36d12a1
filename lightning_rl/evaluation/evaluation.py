"""Evaluation: a set of prompts, how they are answered, and what is measured of the answers."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lightning_rl.arguments import check_bools, check_counts, check_numbers
from lightning_rl.data import PromptDataset, PromptSource
from lightning_rl.generation import Sampling
from lightning_rl.rewards import Rewards, RewardSource

STAGES = ("val", "test")
TAKEN = frozenset({"reward", "length", "validation"})  # metrics and folder of the data module's validation prompts

Answer = Callable[[str], Hashable]
"""From the text of a completion to its answer, which has to be hashable; None if it has none."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Logs ``val/<name>/...`` in a validation and ``test/<name>/...`` in a test, see docs/evaluation.md.

    Args:
        name: of the metrics and of the folder with the samples.
        prompts: from any source that PromptDataModule takes, or a PromptDataset, which has options of its own.
        sampling: how answers are drawn; by default as the module draws them to train, but greedily if there is one
            sample of each prompt.
        samples: of each prompt.
        rewards: what scores the samples; by default the module's.
        pass_at: the k of ``pass@k``, none above ``samples``; by default 1 and ``samples``.
        correct: the reward, weighted and summed, from which a sample counts as solved.
        answer: from the text of a completion to its answer, which has to be hashable, for ``maj@k``; None for no vote.
            Where it fails, the sample has no vote and is counted.
        stages: where it runs: ``"val"``, ``"test"`` or both.
        save: whether the samples are kept in a file below the logger's folder.

    Raises:
        ValueError: if an option is out of range; the message names evaluation and option.

    Example:
        >>> Evaluation("gsm8k", ["1 + 1 ="], samples=8).pass_at
        (1, 8)
    """

    name: str
    prompts: PromptDataset | PromptSource
    _: KW_ONLY
    sampling: Sampling | None = None
    samples: int = 1
    rewards: RewardSource | None = None
    pass_at: int | Sequence[int] | None = None
    correct: float = 1.0
    answer: Answer | None = None
    stages: str | Sequence[str] = STAGES
    save: bool = True

    def __post_init__(self) -> None:
        """Checks the ranges and freezes the sequences."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"expected a name of letters, digits, _, . and - for an evaluation, got {self.name!r}")
        if self.name in TAKEN:
            raise ValueError(
                f"expected another name of an evaluation than {sorted(TAKEN)}, which the validation prompts of the "
                f'data module log under, got "{self.name}"'
            )
        check_counts(1, samples=self.samples)
        check_numbers(finite=True, correct=self.correct)
        check_bools(save=self.save)
        if self.rewards is not None:
            Rewards(self.rewards)  # refuses what is none
        self._check(self.answer is None or callable(self.answer), "answer to be a function of a text", self.answer)
        stages = (self.stages,) if isinstance(self.stages, str) else tuple(self.stages)
        self._check(bool(stages) and set(stages) <= set(STAGES), f"stages among {STAGES}", stages)
        sampling = self.sampling
        self._check(
            sampling is None or isinstance(sampling, Sampling),
            "sampling to be a Sampling, such as Sampling(temperature=0.6)",
            sampling,
        )
        self._check(
            self.samples == 1 or sampling is None or sampling.temperature > 0,
            f"a temperature above 0, because samples={self.samples} greedy answers would all be the same",
            sampling,
        )
        pass_at = (self.pass_at,) if isinstance(self.pass_at, int) else self.pass_at
        wanted = {1, self.samples} if pass_at is None else set(pass_at)
        self._check(
            all(_whole(k) and k <= self.samples for k in wanted),
            f"pass_at to be whole numbers from 1 to samples={self.samples}",
            self.pass_at,
        )
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "pass_at", tuple(sorted(wanted)))

    def _check(self, fits: object, expected: str, value: object) -> None:
        if not fits:
            raise ValueError(f'expected {expected}, got {value!r} in evaluation "{self.name}"')


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def evaluations_of(evaluation: Evaluation | Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """The evaluations of a module, given one or several.

    Raises:
        ValueError: if one is something else, or two share a name.
    """
    several: tuple[Any, ...] = (evaluation,)
    if isinstance(evaluation, Sequence) and not isinstance(evaluation, str):
        several = tuple(evaluation)
    for one in several:
        if not isinstance(one, Evaluation):
            raise ValueError(f"expected evaluation to be an Evaluation or a list of them, got {one!r:.200}")
    names = [one.name for one in several]
    if len(set(names)) < len(names):
        raise ValueError(f"expected evaluations with different names, got {names}: rename one")
    return several
