"""Replies: what reward functions say when they are asked again, on copies of the process and never in the run."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from lightning_rl.audit.copies import copy_state
from lightning_rl.audit.fork import TOO_LATE, Fork, NoReplyError, ask_copy
from lightning_rl.audit.sharing import shared_memory_of
from lightning_rl.rewards import Isolated, RewardCall
from lightning_rl.rewards.call import CallStyle, Notes, Rows
from lightning_rl.rewards.values import values_of
from lightning_rl.seeding import seed_everything

MIN_ROWS, MAX_ROWS = 4, 8  # of a call that some are left out of; that are asked about
MAX_SECONDS = 0.1  # that a call may have taken in the run
PATIENCE = 2.0  # seconds for all functions of a run together

MAX_PAIRS = 6  # of rows of which one is asked about after the others
EARLY_TURNS, TURNS = (1, 2, 4, 8), 16  # audits at which rewards are asked again

Values = Sequence[float | None]


class RewardReply(NamedTuple):
    """What copies of one reward function said of a few rows of one of its calls, in plain values.

    Attributes:
        name: of the function.
        reason: why it was not asked, or said nothing; empty otherwise.
        rows: of the call that it was asked about, in the order of the question.
        samples: identities of those rows, as far as they are known.
        recorded: what it had said of them in the run.
        alone: what it says of them without the others.
        repeated: what it says of them together with the others, in the order of the run; None if nobody asked.
        edited: which of its arguments it edited.
        after: what it says of the same rows after one call about others and after a call about still others; None if
            it differs by itself.
    """

    name: str
    reason: str = ""
    rows: Sequence[int] = ()
    samples: Sequence[int] = ()
    recorded: Values = ()
    alone: Values = ()
    repeated: Values | None = None
    edited: Sequence[str] = ()
    after: tuple[Values, Values] | None = None

    @property
    def own(self) -> bool:
        """Whether the function repeats itself, so that other values come from another order or other neighbours."""
        return self.repeated is not None and equal_values(self.repeated, self.recorded)


class RewardQuestions:
    """Questions about the latest calls of every reward function, put to a copy of the process in its present state.

    Args:
        calls: of this rollout.
        samples: of the rows of each call, as far as they are known.
        fresh: copies of the functions as they were before they had scored anything, by name.
    """

    def __init__(
        self,
        calls: Sequence[RewardCall],
        samples: Sequence[Sequence[int]],
        fresh: Mapping[str, Any] | None = None,
    ) -> None:
        self._fresh = fresh or {}
        latest = {call.name: (call, ids) for call, ids in zip(calls, samples, strict=True) if len(call.values) > 1}
        self._asked = list(latest.values())
        reasons = [silence_of(call) for call, _ in self._asked]
        pairs = list(zip(self._asked, reasons, strict=True))
        self._silent = [RewardReply(call.name, reason) for (call, _), reason in pairs if reason]
        self._asked = [asked for asked, reason in pairs if not reason]
        self._fork = Fork(self._ask_all, PATIENCE) if self._asked else None

    def replies(self) -> list[RewardReply]:
        """One for each function. Waits for the copy."""
        fork, self._fork = self._fork, None
        if fork is None:
            return self._silent
        said, reason = fork.reply()
        replies = [RewardReply(*fields) for fields in said or ()]
        if reason:
            replies = [RewardReply(call.name, reason) for call, _ in self._asked]
        return [*self._silent, *replies]

    def close(self) -> None:
        """Ends the copy without an answer."""
        if self._fork is not None:
            self._fork.close()
            self._fork = None

    def _ask_all(self) -> list[RewardReply]:
        return [_ask(call, ids, self._fresh.get(call.name)) for call, ids in self._asked]


class RewardWatch:
    """Asks the rewards of a run again: once in the beginning and then now and then, for a copy of it is not cheap.

    Args:
        functions: of the run by name, which have scored nothing so far.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._fresh = {name: copy_state(function) for name, function in functions.items()}
        self._turn, self._questions = 0, cast(RewardQuestions | None, None)
        self._silent: list[RewardReply] = []

    def ask(self, calls: Sequence[RewardCall], samples: Sequence[Sequence[int]]) -> None:
        """Puts questions about the calls of a rollout, if it is time: a copy answers while the update goes on.

        What did not answer in time once is not asked again.
        """
        self._turn += 1
        if self._turn not in EARLY_TURNS and self._turn % TURNS:
            return
        self._silent = [reply for reply in self._silent if TOO_LATE in reply.reason]
        hangs = {reply.name for reply in self._silent}
        pairs = [(call, ids) for call, ids in zip(calls, samples, strict=True) if call.name not in hangs]
        self._questions = RewardQuestions([call for call, _ in pairs], [ids for _, ids in pairs], self._fresh)

    def take_replies(self) -> list[RewardReply]:
        """What was answered about this rollout; about one that nobody asked about, why nothing was."""
        if self._questions is None:
            return self._silent
        replies, self._questions = self._questions.replies(), None
        self._silent += [reply for reply in replies if reply.reason]
        return [*{reply.name: reply for reply in [*self._silent, *replies]}.values()]

    def close(self) -> None:
        """Ends a copy that nobody waits for any more."""
        if self._questions is not None:
            self._questions.close()


def silence_of(call: RewardCall) -> str:
    """Why a function cannot be asked again; empty if it can."""
    function: Any = call.function
    if function is None:
        return "its function is not at hand"
    coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    cases = {
        f"reward {call.name} runs in processes of its own": isinstance(function, Isolated),
        f"reward {call.name} is a coroutine": coroutine,
        f"a call of reward {call.name} takes more than {MAX_SECONDS} s": call.seconds > MAX_SECONDS,
        f"reward {call.name} failed on some rows": bool(call.failures),
    }
    reason = next((reason for reason, holds in cases.items() if holds), "")
    if not reason and (shared := shared_memory_of(function)):
        reason = f"reward {call.name} can reach {shared}, which a copy of the process would share with the run"
    return reason


def equal_values(ours: Values, theirs: Values) -> bool:
    """Whether two lists of rewards are the same, up to rounding."""
    return len(ours) == len(theirs) and all(map(same_value, ours, theirs))


def same_value(value: float | None, other: float | None) -> bool:
    """Whether two rewards are the same, up to rounding."""
    if value is None or other is None:
        return value is other
    return bool(torch.isclose(torch.tensor(float(value)), torch.tensor(float(other)), equal_nan=True))


def _ask(call: RewardCall, samples: Sequence[int], fresh: Any) -> RewardReply:
    """What copies of this process, which is one itself, say about a few rows of a call."""
    number = len(call.values)
    stride = 1 if number < MIN_ROWS else max(2, number // MAX_ROWS)  # without some of the others, if there are enough
    rows = list(range(number - 1, -1, -stride))[:MAX_ROWS]
    known = samples if len(samples) == number else []
    try:
        alone, edited = ask_copy(lambda: _watch_call(call, call.rows.select(rows)), PATIENCE)
        after = _ask_after(call, call.rows.select(rows), fresh)
        for row in _ends(call):  # beside nobody at all
            alone = [*alone, *_last_values(call, call.rows.select([row]))]
            rows = [*rows, row]
        recorded, repeated = [call.values[row] for row in rows], None
        if not equal_values(alone, recorded):
            everything = ask_copy(lambda: _values(call, call.rows), PATIENCE)
            repeated = [everything[row] for row in rows]
    except NoReplyError as none:
        return RewardReply(call.name, f"reward {call.name} could not be asked again: {none}")
    return RewardReply(
        call.name, "", rows, [known[row] for row in rows] if known else [], recorded, alone, repeated, edited, after
    )


def _ends(call: RewardCall) -> list[int]:
    """The shortest and the longest row of a call, if they differ."""
    lengths = [len(ids) for ids in call.completion_ids]
    ends = [lengths.index(min(lengths)), lengths.index(max(lengths))]
    return ends if lengths[ends[0]] < lengths[ends[1]] else []


def _ask_after(call: RewardCall, rows: Rows, fresh: Any) -> tuple[Values, Values] | None:
    """The values of some rows after two different calls, which differ if the function remembers what it scored; the
    first pair that does, if any.
    """
    if getattr(call.function, "remembers", False):
        return None
    after = _ask_after_others(call, rows)
    if after is None or not equal_values(*after):
        return after
    questions = [(call, _of_equal_length(rows, max(map(len, call.completion_ids))))]
    questions += [] if fresh is None else [(call._replace(function=fresh), rows)]
    for asked, few in questions:
        reply = Fork(lambda asked=asked, few=few: _ask_one_by_one(asked, few), PATIENCE).reply()
        if reply.value is not None and not equal_values(*reply.value):
            return reply.value
    return after


def _ask_one_by_one(call: RewardCall, rows: Rows) -> tuple[Values, Values] | None:
    """The values of single rows after a call about the others, and after one about copies of themselves.

    Whatever the function keeps a value by, an answer that shares it with an earlier one gets the value of that one.
    None if it differs by itself.
    """
    number, after_others, after_itself = len(rows), list[float | None](), list[float | None]()
    pairs = [(rows.select([row] * (number - 1)), rows.select([row])) for row in range(min(number, MAX_PAIRS))]
    for row, (itself, alone) in enumerate(pairs):
        if len({str(value) for value in _values_of_twin(call, itself)}) > 1:
            return None
        others = rows.select([other for other in range(number) if other != row])
        after_others += _values_of_twin(call, others, alone)
        after_itself += _values_of_twin(call, itself, alone)
    again = _values_of_twin(call, *pairs[0])
    return (after_others, after_itself) if equal_values(again, after_itself[:1]) else None


def _values_of_twin(call: RewardCall, *batches: Rows) -> Values:
    """The values of the last of several calls of a copy of the function; of one process many can be asked."""
    twin = call._replace(function=copy_state(call.function))
    return [_values(twin, rows) for rows in batches][-1]


def _of_equal_length(rows: Rows, longest: int) -> Rows:
    """Answers to one prompt that nobody has seen, different ones of one length that no answer has had."""
    length = 2 * longest + 1
    texts = [text for text in rows.completions if isinstance(text, str)]
    characters = 2 * max(map(len, texts), default=0) + 1
    completions = [_cut(text, characters) if isinstance(text, str) else text for text in rows.completions]
    first = rows.select([0] * len(rows))
    ids = [_cut(list(row), length) for row in rows.completion_ids]
    return replace(_other_prompts(first), completions=completions, completion_ids=ids)


def _cut(part: Any, length: int) -> Any:
    """A text or list again and again, up to a length."""
    return (part * (length // max(len(part), 1) + 1))[:length]


def _ask_after_others(call: RewardCall, rows: Rows) -> tuple[Values, Values] | None:
    """The values of some rows after a call about other ones and after a call about still others.

    All have prompts that the function has not seen, and every call has the same number of rows, begins from the same
    global generators and is the same in number: neither noise nor a curriculum makes a difference, but a memory of
    what was scored does.
    """
    rows = _other_prompts(rows)
    turned, longer = _turn_completions(rows, 1), _turn_completions(rows, 2, twice=True)
    first, second = _last_values(call, turned, rows), _last_values(call, longer, rows)
    if equal_values(first, second):
        return first, second
    if not equal_values(first, _last_values(call, turned, rows)):
        return None  # it differs by itself
    if len(set(_last_values(call, rows.select([0] * len(rows))))) > 1:  # noise, of which other rows may draw more
        second = _last_values(call, turned.select(range(len(rows))[::-1]), rows)
    return first, second


def _last_values(call: RewardCall, *batches: Rows) -> Values:
    """The values of the last of several calls, one after the other, in a copy of this process."""
    return ask_copy(lambda: [_values(call, rows) for rows in batches][-1], PATIENCE)


def _values(call: RewardCall, rows: Rows) -> Values:
    """What the function says of some rows, here and now."""
    seed_everything(0, torch.device("cpu"))
    function: Any = call.function
    returned = CallStyle.of(call.name, function, list(rows.columns)).call(
        function, copy.deepcopy(rows), Notes(len(rows))
    )
    if inspect.isawaitable(returned):
        raise NoReplyError("it is a coroutine")
    return values_of(returned, len(rows))


def _watch_call(call: RewardCall, rows: Rows) -> tuple[Values, list[str]]:
    """What the function says of some rows, and which of its arguments it edits."""
    seed_everything(0, torch.device("cpu"))
    function: Any = call.function
    before, shown = _arguments(copy.deepcopy(rows)), copy.deepcopy(rows)
    returned = CallStyle.of(call.name, function, list(rows.columns)).call(function, shown, Notes(len(rows)))
    if inspect.isawaitable(returned):
        raise NoReplyError("it is a coroutine")
    after = _arguments(shown)
    return values_of(returned, len(rows)), [name for name, value in before.items() if not _same(value, after[name])]


def _arguments(rows: Rows) -> dict[str, Any]:
    named = {"prompts": rows.prompts, "completions": rows.completions, "completion_ids": rows.completion_ids}
    return {**named, **rows.columns}


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # columns of arrays
        return True


def _other_prompts(rows: Rows) -> Rows:
    """The rows with prompts that nobody has seen, as far as their form is known."""
    return Rows(
        prompts=[_other_prompt(prompt) for prompt in rows.prompts],
        completions=rows.completions,
        completion_ids=rows.completion_ids,
        columns=rows.columns,
    )


def _other_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt + " "
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(token, int) for token in prompt):
        return [*prompt, prompt[-1]]
    if (
        isinstance(prompt, list)
        and prompt
        and isinstance(prompt[-1], dict)
        and isinstance(prompt[-1].get("content"), str)
    ):
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + " "}]
    return prompt


def _turn_completions(rows: Rows, places: int, *, twice: bool = False) -> Rows:
    """The rows with each other's completions, some places on; each of them said twice, if wanted."""
    order = [(row + places) % len(rows) for row in range(len(rows))]
    completions = [rows.completions[row] for row in order]
    ids = [list(rows.completion_ids[row]) for row in order]
    if twice:
        completions = [_said_twice(completion) for completion in completions]
        ids = [each * 2 for each in ids]
    return Rows(prompts=rows.prompts, completions=completions, completion_ids=ids, columns=rows.columns)


def _said_twice(completion: Any) -> Any:
    if isinstance(completion, str):
        return completion * 2
    return [{**message, "content": message["content"] * 2} for message in completion]
