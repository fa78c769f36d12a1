"""Repeated reward calls on copies: memory and dependence on order are found, noise is not, and the functions do not
change.
"""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.evidence import evidence_of
from typing_extensions import override

from lightning_rl.audit import CHECKS
from lightning_rl.audit.reward_repeats import RewardReply, RewardWatch, ask_again
from lightning_rl.rewards import RewardCall, SubprocessReward
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.testing.properties.copies import copy_state

IDS = [[1], [2, 3], [4, 5, 6], [7, 8, 9, 1], [1, 2, 3, 4, 5], [2, 2]]
NAMES = ["a", "a", "b", "b", "c", "c"]
SAMPLES = [10, 11, 12, 13, 14, 15]


def plain(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def lengths(ids: Any) -> list[float]:
    return [float(len(row)) for row in ids]


class Judge:
    """A reward with state."""

    def __call__(self, prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        """Return the value of each row."""
        del completions
        return self.score(prompts, completion_ids)

    def score(self, prompts: Any, ids: Any) -> list[float]:
        """Return the values."""
        raise NotImplementedError


class Scaled(Judge):
    """Divides by the largest value so far."""

    def __init__(self) -> None:
        self.largest = 1.0

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        values = lengths(ids)
        self.largest = max(self.largest, *values)
        return [value / self.largest for value in values]


class Remembered(Judge):
    """Returns the first value of a prompt for all its completions."""

    def __init__(self) -> None:
        self.memo: dict[str, float] = {}

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        return [self.memo.setdefault(str(p), float(len(row))) for p, row in zip(prompts, ids, strict=True)]


class Cached(Remembered):
    """Caches the value of a completion."""

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        return [self.memo.setdefault(str(row), float(len(row))) for row in ids]


class Checked:
    """Caches whether an answer is right by some of its arguments."""

    def __init__(self, *key: str) -> None:
        self.key, self.memo = key, dict[str, float]()

    def __call__(self, prompts: Any, *_: Any, completion_ids: Any, answer: Any, unit: Any, **__: Any) -> list[float]:
        """Return the value of each row, by its completion, prompt, answer and unit."""
        values = list[float]()
        for prompt, ids, wanted, name in zip(prompts, completion_ids, answer, unit, strict=True):
            value = float(len(ids) == wanted) + 0.1 * "abc".index(prompt) + 0.01 * (name == "kg")
            known = {"completion": ids, "prompt": prompt, "answer": wanted, "unit": name}
            values.append(self.memo.setdefault(str([known[one] for one in self.key]), value))
        return values


COLUMNS = {"answer": [1, 1, 3, 4, 7, 8], "unit": ["m", "m", "m", "m", "kg", "kg"]}


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (("completion",), True),
        (("completion", "prompt"), True),
        (("completion", "answer"), True),
        (("prompt", "answer", "unit"), True),
        (("completion", "prompt", "answer", "unit"), False),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_memo_keyed_without_an_argument_that_counts_is_found(key: tuple[str, ...], found: bool, seed: int) -> None:
    order = random.Random(seed).sample(range(6), 6)
    rows = RewardCall("judge", IDS, (), 0.0, NAMES, [""] * 6, COLUMNS).rows.select(order)
    values = Checked(*key)(rows.prompts, rows.completions, completion_ids=rows.completion_ids, **rows.columns)
    call = RewardCall(
        "judge", rows.completion_ids, values, 0.0, rows.prompts, rows.completions, rows.columns, Checked(*key)
    )
    reply = ask_again(call, SAMPLES)
    assert reason_of(reply) == "" and ("reward_memory" in checks_that_fail(reply)) is found


def test_the_memory_of_a_sparse_reward_is_asked_about_a_row_with_a_value_and_several_prompts() -> None:
    number = 64
    ids, answers = [[row] for row in range(number)], [place // 16 for place in range(number)]

    class Memo:
        """Caches whether an answer is the wanted one by the answer alone."""

        def __init__(self) -> None:
            self.memo: dict[str, float] = {}

        def __call__(self, *_: Any, completion_ids: Any, answer: Any, **__: Any) -> list[float]:
            """Return 1 for the token 3 as an answer to 0."""
            pairs = zip(completion_ids, answer, strict=True)
            return [self.memo.setdefault(str(row), float(row == [3] and one == 0)) for row, one in pairs]

    columns = {"answer": answers}
    values = Memo()([], [], completion_ids=ids, answer=answers)
    call = RewardCall("judge", ids, values, 0.0, answers, [""] * number, columns, Memo())
    assert sum(map(float, values)) == 1 and "reward_memory" in checks_that_fail(ask_again(call, range(number)))


def test_a_reward_whose_columns_belong_together_is_asked_with_those_of_other_rows() -> None:
    def joined(prompts: Any, completions: Any, *, completion_ids: Any, answer: Any, unit: Any, **_: Any) -> list[float]:
        if any(
            dict(zip(COLUMNS["answer"], COLUMNS["unit"], strict=True))[one] != name
            for one, name in zip(answer, unit, strict=True)
        ):
            raise ValueError("expected the unit of the answer")
        return [float(len(row) == one) for row, one in zip(completion_ids, answer, strict=True)]

    values = joined([], [], completion_ids=IDS, **COLUMNS)
    reply = ask_again(RewardCall("judge", IDS, values, 0.0, NAMES, [""] * 6, COLUMNS, joined), SAMPLES)
    assert reason_of(reply) == "" and checks_that_fail(reply) == []


class Shared:
    """A number that refuses to be pickled, as one in the shared memory of multiprocessing does."""

    value = 0.0

    def __reduce__(self) -> Any:
        """Refuse."""
        raise RuntimeError("Synchronized objects should only be shared between processes through inheritance")


class Moody(Judge):
    """Adds noise to each row, twice as much for long ones."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        return [sum(self.random.random() for _ in row) for row in ids]


class Stricter(Judge):
    """A curriculum by the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        self.calls += 1
        return [len(row) / self.calls for row in ids]


def global_noise(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    return [random.random() for _ in completion_ids]


class Novelty(Cached):
    """Rewards new completions, and declares that it remembers."""

    remembers = True

    @override
    def score(self, prompts: Any, ids: Any) -> list[float]:
        new = [str(row) not in self.memo for row in ids]
        self.memo |= {str(row): 1.0 for row in ids}
        return [float(one) for one in new]


def call_of(function: Any, prompts: Sequence[Any] = NAMES, **changes: Any) -> RewardCall:
    """Return a call as in a run."""
    values = function(list(prompts), [""] * 6, completion_ids=IDS)
    return RewardCall("judge", IDS, values, 0.0, list(prompts), [""] * 6, {}, function)._replace(**changes)


def reason_of(reply: RewardReply) -> str:
    """Return the reason why a function was not called again; empty if it was."""
    skip = reply.get("reward_inputs")
    return skip.why if isinstance(skip, Skip) else ""


def checks_that_fail(*replies: RewardReply) -> list[str]:
    """Return the names of the checks with a finding."""
    evidence = replace(evidence_of(), replies=replies)
    return [name for name in ("reward_order", "reward_memory", "reward_inputs") if CHECKS[name](evidence)]


@pytest.mark.parametrize(
    ("function", "failing"),
    [
        (plain, []),
        (Cached(), []),
        (Moody(), []),
        (Stricter(), []),
        (global_noise, []),
        (Novelty(), []),
        (Scaled(), ["reward_memory"]),
        (Remembered(), ["reward_memory"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else getattr(value, "__name__", type(value).__name__),
)
def test_memory_and_order_are_told_from_noise_and_curricula(function: Any, failing: list[str]) -> None:
    fresh = copy_state(function)
    call = call_of(function)
    before = {name: str(value) for name, value in getattr(function, "__dict__", {}).items()}
    reply = ask_again(call, SAMPLES, fresh)
    assert reason_of(reply) == "" and checks_that_fail(reply) == failing
    assert {name: str(value) for name, value in getattr(function, "__dict__", {}).items()} == before, "asked in the run"


def test_noise_of_a_run_seeded_with_0_is_no_dependence_on_order() -> None:
    random.seed(0)
    assert checks_that_fail(ask_again(call_of(global_noise), SAMPLES)) == []


def test_a_function_that_cannot_be_asked_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def writing(prompts: Any, completions: Any, **_: Any) -> list[float]:
        Path("log").write_text("a")
        return [0.0] * len(prompts)

    async def awaited(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [0.0] * len(prompts)

    call = call_of(plain)
    locked, modelled, shared = Cached(), Cached(), Shared()
    vars(locked)["lock"], vars(modelled)["model"] = threading.Lock(), torch.nn.Linear(1, 1)
    cases = {
        "unavailable": call._replace(function=None),
        "coroutine": call._replace(function=awaited),
        "runs in processes": call._replace(function=SubprocessReward(plain)),
        "a call of reward judge takes more than 0.1 s": call._replace(seconds=0.5),
    }
    asked = list(cases.items())
    state = "reward judge holds state that cannot be copied"
    asked += [(state, call._replace(function=each)) for each in (locked, modelled, lambda **_: [shared.value] * 6)]
    asked += [("it accesses something outside of its process (open)", call._replace(function=writing))]
    for reason, other in asked:
        reply = ask_again(other, SAMPLES)
        assert reason in reason_of(reply) and checks_that_fail(reply) == []
    assert not Path("log").exists()


def test_a_run_is_asked_in_its_first_audits_and_says_between_them_who_was_not() -> None:
    watch, call = RewardWatch({"judge": plain}), call_of(plain)
    replies = [watch.ask([call], [SAMPLES]) for _ in range(9)]
    assert [len(each) for each in replies] == [1, 1, 0, 1, 0, 0, 0, 1, 0]
    slow = call._replace(seconds=1.0)
    watch = RewardWatch({"judge": plain})
    assert all(reason_of(watch.ask([slow], [SAMPLES])[0]) for _ in range(3))


def test_generators_are_where_they_were() -> None:
    call = call_of(global_noise)
    before = random.getstate(), torch.get_rng_state()
    ask_again(call, SAMPLES)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
