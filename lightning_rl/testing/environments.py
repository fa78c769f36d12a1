"""Property checks of environments: conversations with all kinds of answers, repeated and interleaved.

Each conversation is a fixed list of answers. Environments run in this process, so one that hangs blocks the check.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import cloudpickle
import torch

from lightning_rl.environments import Action, Environment, Program, TokenEnvironment, ToolCall
from lightning_rl.environments.generators import GeneratorError, refuse_draws
from lightning_rl.environments.tools import schemas_of
from lightning_rl.environments.validation import environment_of, plain
from lightning_rl.rollout import FinishReason
from lightning_rl.testing.properties.conversations import Calls, Part, difference, play
from lightning_rl.testing.shrinking import PropertyError
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.naming import name_of
from lightning_rl.utils.seeding import fork_generators

MEANINGS = {
    "environment_accepts": "An environment accepts any answer: empty, long, nonsense, truncated, or a call of an "
    "unknown tool. An error drops the sample.",
    "environment_steps": "An environment returns valid steps: messages of users or tools with content, or token ids, "
    "with finite metrics; or the conversation is done.",
    "environment_repeats": "An environment is deterministic under the same seed and answers, so that a repeated "
    "conversation and a resumed run continue unchanged.",
    "environment_generators": "An environment uses its own random generators: the global ones belong to the run.",
    "environment_isolation": "Conversations share no state: interleaved ones return the same as separate ones.",
    "environment_closes": "An environment can be closed after any step, and before the first.",
    "environment_ships": "An environment can be sent to a subprocess, and its results come back as plain data.",
}
ACCEPTED = "a result of {} for any answer"
HUGE = 100_000  # number of characters or tokens of the longest answer
TURNS = 4  # number of answers per conversation
OURS = ("lightning_rl.environments.environment", "lightning_rl.environments.validation", "lightning_rl.utils.arguments")
NONSENSE = (
    "",
    " ",
    "\n",
    "}{<|im_end|>\x00\u202e",
    "<|im_end|>\n<|im_start|>user\nyes",
    "1e999",
    "word " * (HUGE // 5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Answers of one conversation.

    Args:
        name: Short description.
        answers: Answers in order: texts, ``Action`` objects, or token ids.
        finish: Finish reason of the last answer.
    """

    name: str
    answers: Sequence[Any]
    finish: FinishReason = FinishReason.STOP


@dataclass(slots=True)
class ScriptResult:
    """Results of a conversation.

    Attributes:
        parts: Results of its calls.
        raised: Error that ended it, or None.
        where: Call that raised; empty after the last one.
    """

    parts: list[Part] = field(default_factory=list)
    raised: BaseException | None = None
    where: str = "reset"


def check_environment(
    environment: Callable[[], Any],
    row: Mapping[str, Any] | None = None,
    *,
    answers: Sequence[str | Action | Sequence[int]] = (),
    seed: int = 0,
) -> None:
    """Check an ``environment=`` in conversations with the given answers and with unusual ones.

    Args:
        environment: Class or function that makes an ``Environment``, a ``TokenEnvironment``, or an object of TRL's
            form; called for each conversation.
        row: Row of the data: a prompt and columns.
        answers: Plausible answers of a policy, in order: texts or ``Action`` objects, or token ids for a token
            environment, whose unusual answers use the same ids.
        seed: Seed of the reset.

    Raises:
        ValueError: If it is a program, which has no conversation to repeat.
        PropertyError: With the broken property, the conversation that shows it, and the fix.
    """
    if isinstance(environment, Program):
        raise ValueError("expected an environment, got Program: check it by a fit, as with Trainer(max_steps=2)")
    lacks_row, row = row is None, {"prompt": "?"} if row is None else row
    with fork_generators(torch.device("cpu")):
        for finding, script in _findings(environment, row, answers, seed):
            if lacks_row and finding.expected == ACCEPTED.format("reset"):
                cure = "pass a row of the data as second argument, if reset reads its columns"
                finding = replace(finding, cure=f"{cure}; otherwise {finding.cure}")
            said = ", ".join(f"{answer!r:.60}" for answer in script.answers)
            lines = [f"row {dict(row)!r:.200}, seed {seed}", f"{script.name}: {said} ({script.finish.name})"]
            raise PropertyError(f"environment {name_of(environment)}", finding, lines, MEANINGS[finding.check])


def _findings(
    factory: Callable[[], Any], row: Mapping[str, Any], answers: Sequence[Any], seed: int
) -> Iterator[tuple[Finding, Script]]:
    """Yield findings about broken properties until one makes the next checks meaningless."""
    nothing = Script(name="no answer", answers=())
    try:
        with refuse_draws(name_of(factory)):
            made = environment_of(factory())
    except GeneratorError as error:
        yield _generators(error), nothing
        return
    except Exception as raised:  # noqa: BLE001  an error of user code is a finding
        yield _finding_of("environment_accepts", "an environment", raised, "make one without arguments"), nothing
        return
    words = isinstance(made, Environment)
    yield from ((finding, nothing) for finding in _close(made))
    scripts = list(_scripts(made, answers))
    for script in scripts:
        outcome = run_conversation(factory, row, seed, script)
        if finding := _judge(outcome):
            yield finding, script
            return
        again = run_conversation(factory, row, seed, script)
        if apart := difference(outcome.parts, again.parts, metrics=True):
            yield _differs("environment_repeats", apart, "use random.Random(seed), and keep no state"), script
            return
        interleaved = run_conversation(factory, row, seed, script, scripts[-1])
        if apart := difference(outcome.parts, interleaved.parts, metrics=True):
            cure = "keep state in the object, not in its class or module"
            yield _differs("environment_isolation", apart, cure), script
            return
        yield from ((finding, script) for finding in _ship(factory, outcome, words=words))


def run_conversation(factory: Callable[[], Any], row: Mapping[str, Any], seed: int, *scripts: Script) -> ScriptResult:
    """Run the conversation of the first script, interleaved with those of others."""
    results = [ScriptResult() for _ in scripts]
    pairs = enumerate(zip(scripts, results, strict=True))
    deque(zip_longest(*(_moves(factory, row, seed + place, *pair) for place, pair in pairs)), maxlen=0)
    return results[0]


def _moves(
    factory: Callable[[], Any], row: Mapping[str, Any], seed: int, script: Script, outcome: ScriptResult
) -> Iterator[None]:
    """Run a conversation call by call; its results are added to ``outcome``."""
    answers = [partial(_calls, script=script, turn=turn) for turn in range(len(script.answers))]
    moves = play(factory, row, seed, answers, outcome.parts)
    try:
        while outcome.where:
            with refuse_draws(name_of(factory)):
                outcome.where = next(moves, "")
            yield
    except (Exception, SystemExit) as raised:  # noqa: BLE001  an error of user code is a finding
        outcome.raised = raised


def _calls(made: Environment | TokenEnvironment, script: Script, turn: int) -> Calls:
    answer, is_last = script.answers[turn], turn == len(script.answers) - 1
    finish = script.finish if is_last else FinishReason.STOP
    if not isinstance(made, Environment):
        return [(tuple(answer), finish)]
    return [(answer if isinstance(answer, Action) else Action(text=str(answer), finish=finish, turn=turn),)]


def _scripts(made: Environment | TokenEnvironment, answers: Sequence[Any]) -> Iterator[Script]:
    """Yield the given answers, all of them and the first truncated, then repetitions of each unusual answer."""
    if answers:
        yield Script(name="the given answers", answers=answers)
        yield Script(name="the first of them, truncated", answers=answers[:1], finish=FinishReason.LENGTH)
    if not isinstance(made, Environment):
        known = sorted({int(token) for answer in answers for token in answer}) or [0]
        for ids in ((known[0],), (known[-1],), known, known[::-1], known * (HUGE // len(known))):
            yield Script(name=f"{len(ids)} tokens", answers=[ids] * TURNS)
        yield Script(name="tokens, truncated", answers=[known], finish=FinishReason.LENGTH)
        return
    for text in NONSENSE:
        yield Script(name=f"{len(text)} characters", answers=[text] * TURNS)
    yield Script(name="an answer that was truncated", answers=["The answer is"], finish=FinishReason.LENGTH)
    names = [schema["function"]["name"] for schema in schemas_of(made.tools)]
    for name in [*names, "no_such_tool"] if names else ():
        for arguments in ({}, {"x": None, "y": "word " * 100}):
            call = Action(text="", tool_calls=[ToolCall(name=name, arguments=arguments)])
            said = f"a call of {name} with {len(arguments)} possibly unknown arguments"
            yield Script(name=said, answers=[call] * TURNS)
    if names:
        yield Script(name="an unreadable call", answers=[Action(text="", errors=["no JSON"])] * TURNS)


def _judge(outcome: ScriptResult) -> Finding | None:
    """Return the finding about an error in a conversation, or None."""
    raised = outcome.raised
    if raised is None:
        return None
    if isinstance(raised, GeneratorError):
        return _generators(raised)
    if outcome.where == "close":
        return _finding_of("environment_closes", "an environment that can be closed", raised, "close only what is open")
    if _is_ours(raised):
        cure = "return StepResult(messages=[...]) or StepResult(done=True), with finite metrics"
        return _finding_of("environment_steps", f"a valid result of {outcome.where}", raised, cure)
    cure = "describe the error in a message, or end with StepResult(done=True)"
    return _finding_of("environment_accepts", ACCEPTED.format(outcome.where), raised, cure)


def _is_ours(raised: BaseException) -> bool:
    """Return True if the library's validation raised, and not code of the environment."""
    trace, last = raised.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return last.startswith(OURS)


def _close(made: Environment | TokenEnvironment) -> Iterator[Finding]:
    """Yield a finding if an environment cannot be closed before its reset."""
    try:
        made.close()
    except Exception as raised:  # noqa: BLE001  as above
        cure = "open nothing in __init__ that close needs: a run makes one environment at setup and closes it"
        yield _finding_of("environment_closes", "an environment that can be closed before it is reset", raised, cure)


def _ship(factory: Callable[[], Any], outcome: ScriptResult, *, words: bool) -> Iterator[Finding]:
    """Yield a finding if the environment cannot be pickled, or if its results are not plain data."""
    try:
        cloudpickle.loads(cloudpickle.dumps(factory))
    except Exception as raised:  # noqa: BLE001  as above
        cure = "create its resources in reset, or run with Conversations(workers=0)"
        yield _finding_of("environment_ships", "a class or function that can be pickled by cloudpickle", raised, cure)
        return
    try:
        plain([part._replace(calls=(), pictures=()) for part in outcome.parts])
    except TypeError as raised:
        cure = f"return {'messages' if words else 'token ids'} of plain values: numbers, lists and mappings"
        yield _finding_of("environment_ships", "plain values", raised, cure)


def _differs(check: str, apart: tuple[str, object, object], cure: str) -> Finding:
    kind, ours, theirs = apart
    return _finding(check, f"the same {kind}, {ours!r:.200}", f"{theirs!r:.200}", cure)


def _generators(error: GeneratorError) -> Finding:
    cure = "use random.Random(seed) with the seed that reset gets, or run with Conversations(workers=)"
    return _finding("environment_generators", "its own generators", str(error).partition(", which")[0], cure)


def _finding_of(check: str, expected: str, raised: BaseException, cure: str) -> Finding:
    return _finding(check, expected, f"{type(raised).__name__}: {raised}"[:300], cure)


def _finding(check: str, expected: str, observed: str, cure: str) -> Finding:
    return Finding(check=check, culprit="the environment", expected=expected, observed=observed, cure=cure)
