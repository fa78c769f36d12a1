"""Evaluation: a set of prompts, how to sample completions, and how to score them."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from lightning_rl.data import PromptDataset, PromptSource
from lightning_rl.generation import SamplingParams
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.utils.arguments import check_bools, check_counts, check_numbers, check_signature, check_text

STAGES = ("val", "test")
TAKEN = frozenset({"reward", "length", "validation"})  # names used by the data module's validation prompts

Answer = Callable[[str], Hashable]
"""Function from the text of a completion to its hashable answer; None for no answer."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluation that logs ``val/<name>/...`` in validation and ``test/<name>/...`` in a test; see docs/evaluation.md.

    Args:
        name: Name of the metrics and of the folder with the samples.
        prompts: Any source of PromptDataModule, or a PromptDataset, which has its own options.
        sampling: Sampling parameters; default to those of training, but greedy for one sample per prompt.
        samples: Number of samples per prompt.
        rewards: Reward functions; default to those of the module.
        pass_at: Values of k in ``pass@k``, at most ``samples``; default to 1 and ``samples``.
        correct: Minimum score of a solved sample, by the function ``correct_by``.
        correct_by: Name of the reward function that decides if a sample is solved; None for the first that applies to
            the sample. Several without a name print a line.
        answer: Function from the text of a completion to its hashable answer, for ``maj@k``; None for no vote.
            Samples on which it fails have no vote and are counted.
        stages: Stages to run in: ``"val"``, ``"test"`` or both.
        save: True to save the samples in a file below the logger's folder.

    Raises:
        ValueError: If an option is out of range; with the evaluation and the option.

    Example:
        >>> Evaluation("gsm8k", ["1 + 1 ="], samples=8).pass_at
        (1, 8)
    """

    name: str
    prompts: PromptDataset | PromptSource
    _: KW_ONLY
    sampling: SamplingParams | None = None
    samples: int = 1
    rewards: RewardSource | None = None
    pass_at: int | Sequence[int] | None = None
    correct: float = 1.0
    correct_by: str | None = None
    answer: Answer | None = None
    stages: str | Sequence[str] = STAGES
    save: bool = True

    def __post_init__(self) -> None:
        """Check the options and convert sequences to tuples."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(f"expected a name of letters, digits, _, . and - for an evaluation, got {self.name!r}")
        if self.name in TAKEN:
            raise ValueError(
                f"expected another name of an evaluation than {sorted(TAKEN)}, which the validation prompts of the "
                f'data module log under, got "{self.name}"'
            )
        check_counts(1, samples=self.samples)
        check_numbers(finite=True, correct=self.correct)
        check_text(optional=True, correct_by=self.correct_by)
        check_bools(save=self.save)
        if self.rewards is not None:
            Rewards(self.rewards)  # raises for invalid rewards
        self._check(self.answer is None or callable(self.answer), "answer to be a function of a text", self.answer)
        check_signature("answer", self.answer, "text")
        stages = (self.stages,) if isinstance(self.stages, str) else tuple(self.stages)
        self._check(bool(stages) and set(stages) <= set(STAGES), f"stages among {STAGES}", stages)
        sampling = self.sampling
        self._check(
            sampling is None or isinstance(sampling, SamplingParams),
            "sampling to be a SamplingParams, such as SamplingParams(temperature=0.6)",
            sampling,
        )
        if self.samples > 1 and sampling is not None:
            sampling.check_random(f"samples={self.samples} of evaluation {self.name}")
        pass_at = (self.pass_at,) if isinstance(self.pass_at, int) else self.pass_at
        wanted = {1, self.samples} if pass_at is None else set(pass_at)
        self._check(
            all(_whole(k) and k <= self.samples for k in wanted),
            f"pass_at to be whole numbers from 1 to samples={self.samples}",
            self.pass_at,
        )
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "pass_at", tuple(sorted(wanted)))

    @property
    def shares(self) -> tuple[str, ...]:
        """Names of the metrics that are shares of prompts, such as ``pass@1``."""
        several = (f"avg@{self.samples}",) if self.samples > 1 else ()
        votes = () if self.answer is None else (f"maj@{self.samples}",)
        return (*(f"pass@{k}" for k in cast(Sequence[int], self.pass_at)), *several, *votes)

    def _check(self, fits: object, expected: str, value: object) -> None:
        if not fits:
            raise ValueError(f'expected {expected}, got {value!r} in evaluation "{self.name}"')


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def evaluations_of(evaluation: Evaluation | Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Return the evaluations of a module as a tuple, given one or several.

    Raises:
        ValueError: If one has another type, or if two share a name.
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
