"""ReasoningGym and ReasoningGymScore: tasks of reasoning-gym as data, and their scorers as a reward.

Source: Stojanovski et al., Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards,
arXiv:2505.24760.
"""

import math
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from typing_extensions import override

from adapters import reasoning_gym_worker
from adapters.foreign import check_name, check_options, load
from lightning_rl.processes.errors import CallError
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_bools, check_counts, check_text

EXTRA = "reasoning-gym"


class ReasoningGym(Sequence[Mapping[str, Any]]):
    """The questions of a task as rows: ``prompt``, and ``entry``, which its scorer asks for.

    Row i is a function of task, config, seed and i alone. A subprocess with a fixed hash seed makes the rows when the
    first one is read, so a resumed run has the same questions, and so has every rank. The rows stay in memory.

    Args:
        task: its name, such as ``"chain_sum"``; ``"composite"`` for a mixture.
        size: how many rows.
        seed: of the questions; take another one for questions to validate on.
        config: further options of the task, such as ``{"max_terms": 3}``.

    Raises:
        ImportError: if reasoning-gym is missing; the message says how to install it.
        ValueError: if there is no such task, or it does not take the options.
    """

    def __init__(self, task: str, *, size: int = 500, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
        check_counts(1, size=size)
        check_counts(0, seed=seed)
        check_options(config=config)
        load("reasoning_gym", extra=EXTRA)
        check_name(task, load("reasoning_gym.factory", extra=EXTRA).DATASETS, option="task", library="reasoning-gym")
        self.task, self.size, self.seed, self.config = task, size, seed, dict(config or {})
        _ = self._scorer

    @override
    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    @override
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """The row of a number, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.size))]
        entry = self._entries[index]
        return {"prompt": entry["question"], "entry": entry}

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the score of an answer by the scorer of the task.

        Args:
            answer: alone, without words around it.
            entry: of the row.
        """
        return float(self._scorer.score_answer(answer, dict(entry)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments that make the rows again."""
        return {name: value for name, value in vars(self).items() if name not in ("_entries", "_scorer")}

    @property
    def _options(self) -> dict[str, Any]:
        return {**self.config, "seed": self.seed}

    @cached_property
    def _scorer(self) -> Any:
        """The task, which makes no question here."""
        create = load("reasoning_gym", extra=EXTRA).create_dataset
        try:
            return create(self.task, size=self.size, **self._options)
        except (TypeError, ValueError, AssertionError) as error:  # its configurations assert
            raise ValueError(
                f"expected config to hold options of the task {self.task}, got {self.config} ({error}): see "
                f"reasoning_gym.create_dataset({self.task!r}).config for what there is"
            ) from error

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        """Return the entries that the subprocess makes."""
        script = str(Path(reasoning_gym_worker.__file__))
        made = subprocess.run(
            [sys.executable, "-P", script],
            input=pickle.dumps((self.task, self._options, self.size)),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,
        )
        answer: Any = pickle.loads(made.stdout) if made.stdout else ("error", f"exit status {made.returncode}")
        kind, said = answer
        if kind == "error":
            raise RuntimeError(f"expected the questions of the task {self.task} with {self._options}, got {said}")
        return said


class ReasoningGymScore:
    """Reward of a completion by the scorer of its task.

    Scorers give part of the reward to an answer that holds the right one among other text, as much as its share of the
    letters. ``strict`` takes that away: an answer with the reference in it, in upper or lower case and with or without
    commas, earns 0 unless the scorer gives it all or it is the reference alone. Other parts, such as for the cells of a
    grid that are right, stay as the scorer gives them.

    A completion on which the scorer raises an error gets no reward, counts as failed, and the first is shown in a
    warning.

    Args:
        questions: whose scorer it is.
        strict: whether an answer that merely contains the right one earns nothing.
        tag: of the answer in a completion, such as ``"answer"`` for the last ``<answer>...</answer>``, without which it
            scores 0; None for the whole completion.
        entry: the column that holds the entries.

    Raises:
        ValueError: if an argument is none of this.
    """

    def __init__(
        self, questions: ReasoningGym, *, strict: bool = True, tag: str | None = None, entry: str = "entry"
    ) -> None:
        if not isinstance(questions, ReasoningGym):
            raise ValueError(f"expected questions to be a ReasoningGym, got {questions!r:.200}: pass that of the data")
        check_bools(strict=strict)
        check_text(optional=True, tag=tag)
        check_text(entry=entry)
        self.questions, self.strict, self.tag, self.entry = questions, strict, tag, entry

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, NaN where the scorer fails; None for a row without an entry."""
        del prompts, completion_ids
        texts = texts_of(completions)
        entries = column_of(columns, self.entry, len(texts), option="entry", reward=self)
        values: list[float | None] = []
        errors: list[Exception] = []
        for text, entry in zip(texts, entries, strict=True):
            try:
                values.append(None if entry is None else self.score(text, entry))
            except Exception as error:  # noqa: BLE001  code of another library
                errors.append(error)
                values.append(math.nan)
        if errors:
            warnings.warn(
                f"the scorer of {self.questions.task} failed on {len(errors)} of {len(texts)} completions, which get "
                f"no reward: {CallError.of(errors[0])}",
                stacklevel=2,
            )
        return values

    def score(self, text: str, entry: Mapping[str, Any]) -> float:
        """The value of one completion."""
        answer = self._answer(text)
        if answer is None:
            return 0.0
        value = self.questions.score(answer, entry)
        return 0.0 if self.strict and value < 1 and _contains(answer, entry.get("answer")) else value

    def _answer(self, text: str) -> str | None:
        if self.tag is None:
            return text.strip()
        tag = re.escape(self.tag)
        answers = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return answers[-1].strip() if answers else None


def _contains(answer: str, reference: Any) -> bool:
    """Return True if an answer contains the reference and further text."""
    if not isinstance(reference, str) or not reference.strip():
        return False
    reference, answer = (text.replace(",", "").strip().casefold() for text in (reference, answer))
    return reference in answer and reference != answer
