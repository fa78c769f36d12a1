"""The kit for environments: conversations with answers of every kind, held twice and beside each other.

Each conversation is a list of answers that a policy may give; the same are held every time. An environment that can
hang does so here as well: this kit runs it in this process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch

from lightning_rl.audit import Finding
from lightning_rl.environments import Answer, Environment, TokenEnvironment, ToolCall
from lightning_rl.environments.environment import check_figures
from lightning_rl.environments.form import check_reset, check_step, plain
from lightning_rl.environments.generators import GeneratorError, refuse_draws
from lightning_rl.environments.shapes import environment_of
from lightning_rl.environments.tools import schemas_of
from lightning_rl.rollout import Finish
from lightning_rl.seeding import keep_generators
from lightning_rl.testing.smallest import PropertyError

MEANINGS = {
    "environment_accepts": "An environment answers whatever a policy says: empty, long, nonsense, cut off, or a call "
    "of a tool that it does not have. What it raises costs the sample.",
    "environment_steps": "What an environment says means something: messages of users or tools with content, or token "
    "ids, with finite figures; or the conversation is done.",
    "environment_repeats": "Under the same seed and answers an environment says the same, so that a conversation that "
    "is begun anew, and a run that is resumed, go on as they were.",
    "environment_generators": "An environment draws from generators of its own: the global ones belong to the run.",
    "environment_isolation": "Conversations share nothing: one says the same whatever another one does beside it.",
    "environment_closes": "An environment can be closed after any step, and before the first.",
    "environment_ships": "An environment can be sent to a process of its own, and what it says comes back as data.",
}
HUGE = 100_000  # characters, or tokens, of the longest answer
TURNS = 4  # answers of a conversation
OURS = ("lightning_rl.environments.environment", "lightning_rl.environments.form", "lightning_rl.arguments")
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
    """The answers of one conversation.

    Args:
        name: in a few words.
        answers: in their order; texts, answers of an environment in messages, or token ids.
        finish: why the last of them ended.
    """

    name: str
    answers: Sequence[Any]
    finish: Finish = Finish.STOP


@dataclass(slots=True)
class Held:
    """What was said in a conversation.

    Attributes:
        said: of the reset and of each step.
        raised: what ended it; None if nothing did.
        where: the call that raised, or the last one.
    """

    said: list[Any] = field(default_factory=list)
    raised: BaseException | None = None
    where: str = "reset"


def check_environment(
    environment: Callable[[], Any],
    row: Mapping[str, Any] | None = None,
    *,
    answers: Sequence[str | Answer | Sequence[int]] = (),
    seed: int = 0,
) -> None:
    """Checks what would be passed as ``environment=``, in conversations with the given answers and with odd ones.

    Args:
        environment: a class or function that makes an ``Environment``, a ``TokenEnvironment``, or an object of TRL's
            shape; it is called for each conversation.
        row: a row of the data: a prompt and columns.
        answers: examples of what a policy says, in an order that makes sense: texts or ``Answer`` for an environment in
            messages, token ids for one in token ids, whose odd answers are made of the same ids.
        seed: of the reset.

    Raises:
        PropertyError: naming the property that it breaks, with the conversation that shows it and what to do.
    """
    row = {"prompt": "?"} if row is None else row
    with keep_generators(torch.device("cpu")):
        for finding, script in _findings(environment, row, answers, seed):
            lines = [f"row {dict(row)!r:.200}, seed {seed}", f"{script.name}: {_answers_of(script)}"]
            raise PropertyError(f"environment {_name_of(environment)}", finding, lines, MEANINGS[finding.check])


def _findings(
    factory: Callable[[], Any], row: Mapping[str, Any], answers: Sequence[Any], seed: int
) -> Iterator[tuple[Finding, Script]]:
    """The properties that are broken, until one makes the next senseless."""
    nothing = Script(name="no answer", answers=())
    try:
        with refuse_draws(_name_of(factory)):
            made = environment_of(factory())
    except GeneratorError as error:
        yield _generators(error), nothing
        return
    except Exception as raised:  # noqa: BLE001  code of the user: what it raises is the finding
        yield _finding_of("environment_accepts", "an environment", raised, "make one without arguments"), nothing
        return
    words = isinstance(made, Environment)
    yield from ((finding, nothing) for finding in _close(made))
    scripts = list(_scripts(made, answers))
    for script in scripts:
        held = hold(factory, row, script, seed)
        if finding := _judge(held):
            yield finding, script
            return
        again = hold(factory, row, script, seed)
        if repr(again.said) != repr(held.said):
            yield (
                _differs("environment_repeats", held, again, "draw from random.Random(seed), and keep no state"),
                script,
            )
            return
        beside = _hold_beside(factory, row, script, scripts[-1], seed)
        if repr(beside.said) != repr(held.said):
            cure = "keep state in the object, not in its class or module"
            yield _differs("environment_isolation", held, beside, cure), script
            return
        yield from ((finding, script) for finding in _ship(factory, held, words=words))


def hold(factory: Callable[[], Any], row: Mapping[str, Any], script: Script, seed: int) -> Held:
    """A conversation of its own."""
    held = Held()
    for _ in _moves(factory, row, script, seed, held):
        pass
    return held


def _hold_beside(factory: Callable[[], Any], row: Mapping[str, Any], script: Script, other: Script, seed: int) -> Held:
    """The same conversation, with another one that moves on after each of its steps."""
    held, beside = Held(), Held()
    ours, theirs = _moves(factory, row, script, seed, held), _moves(factory, row, other, seed + 1, beside)
    more = True
    while more:
        more = next(ours, None) is not None
        next(theirs, None)
    for _ in theirs:
        pass
    return held


def _moves(factory: Callable[[], Any], row: Mapping[str, Any], script: Script, seed: int, held: Held) -> Iterator[str]:
    """Moves a conversation on, call by call; what it says goes to ``held``."""
    try:
        with refuse_draws(_name_of(factory)):
            made: Any = environment_of(factory())
            held.said.append(_copy(check_reset(made, made.reset(dict(row), seed))))
        yield "reset"
        done, held.where = False, "step"
        for number, answer in enumerate(script.answers):
            finish = script.finish if number == len(script.answers) - 1 else Finish.STOP
            with refuse_draws(_name_of(factory)):
                step = check_step(made, made.step(*_arguments(made, answer, finish, number)))
            held.said.append(_copy((list(step.messages), step.reward, step.done, dict(step.metrics))))
            held.said.append(_copy(list(getattr(step, "token_ids", ()))))
            done = bool(step.done)
            yield "step"
            if done:
                break
        held.where = "reward"
        if not done:
            with refuse_draws(_name_of(factory)):
                score = getattr(made, "reward", lambda: None)()
                check_figures(score, {})
                held.said.append(score)
        held.where = "close"
        with refuse_draws(_name_of(factory)):
            made.close()
    except (Exception, SystemExit) as raised:  # noqa: BLE001  code of the user: what it raises is the finding
        held.raised = raised


def _arguments(made: Environment | TokenEnvironment, answer: Any, finish: Finish, turn: int) -> tuple[Any, ...]:
    if not isinstance(made, Environment):
        return tuple(answer), finish
    if isinstance(answer, Answer):
        return (answer,)
    return (Answer(text=str(answer), finish=finish, turn=turn),)


def _scripts(made: Environment | TokenEnvironment, answers: Sequence[Any]) -> Iterator[Script]:
    """The given answers first, as a whole and cut off after each; then every odd one again and again."""
    if answers:
        yield Script(name="the given answers", answers=answers)
        yield Script(name="the first of them, cut off", answers=answers[:1], finish=Finish.LENGTH)
    if not isinstance(made, Environment):
        known = sorted({int(token) for answer in answers for token in answer}) or [0]
        for ids in ((known[0],), (known[-1],), known, known[::-1], known * (HUGE // len(known))):
            yield Script(name=f"{len(ids)} tokens", answers=[ids] * TURNS)
        yield Script(name="tokens, cut off", answers=[known], finish=Finish.LENGTH)
        return
    for text in NONSENSE:
        yield Script(name=f"{len(text)} characters", answers=[text] * TURNS)
    yield Script(name="an answer that was cut off", answers=["The answer is"], finish=Finish.LENGTH)
    names = [schema["function"]["name"] for schema in schemas_of(made.tools)]
    for name in [*names, "no_such_tool"] if names else ():
        for arguments in ({}, {"x": None, "y": "word " * 100}):
            call = Answer(text="", tool_calls=[ToolCall(name=name, arguments=arguments)])
            yield Script(
                name=f"a call of {name} with {len(arguments)} arguments that it may not know", answers=[call] * TURNS
            )
    if names:
        yield Script(name="a call that nobody could read", answers=[Answer(text="", errors=["no JSON"])] * TURNS)


def _judge(held: Held) -> Finding | None:
    """What is wrong with what was said, by itself."""
    raised = held.raised
    if raised is None:
        return None
    if isinstance(raised, GeneratorError):
        return _generators(raised)
    if held.where == "close":
        return _finding_of(
            "environment_closes", "an environment that can be closed", raised, "close what is there alone"
        )
    meant = _is_ours(raised)
    if meant:
        cure = "return Step(messages=[...]) or Step(done=True), with finite figures"
        return _finding_of("environment_steps", f"something that means something from {held.where}", raised, cure)
    cure = "say what is wrong with the answer in a message, or end with Step(done=True)"
    return _finding_of("environment_accepts", f"an answer to anything from {held.where}", raised, cure)


def _is_ours(raised: BaseException) -> bool:
    """Whether the library refused what was said, and no code of the environment raised."""
    trace, last = raised.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return last.startswith(OURS)


def _close(made: Environment | TokenEnvironment) -> Iterator[Finding]:
    """Whether an environment that nobody has reset can be closed."""
    try:
        made.close()
    except Exception as raised:  # noqa: BLE001  as above
        cure = "begin with nothing to close: a run makes one at setup and closes it"
        yield _finding_of("environment_closes", "an environment that can be closed before it is reset", raised, cure)


def _ship(factory: Callable[[], Any], held: Held, *, words: bool) -> Iterator[Finding]:
    """Whether the environment can be sent to a process, and what it says comes back."""
    try:
        cloudpickle.loads(cloudpickle.dumps(factory))
    except Exception as raised:  # noqa: BLE001  as above
        cure = "make what it holds inside of it, or run with environment_workers=0"
        yield _finding_of("environment_ships", "a class or function that can be pickled by cloudpickle", raised, cure)
        return
    try:
        plain(held.said)
    except TypeError as raised:
        cure = f"say {'messages' if words else 'token ids'} of plain values, numbers, lists and mappings"
        yield _finding_of("environment_ships", "plain values", raised, cure)


def _copy(value: Any) -> Any:
    """A value as it is now, whatever is done to it later."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) else value


def _differs(check: str, held: Held, other: Held, cure: str) -> Finding:
    pairs = zip(held.said, other.said, strict=False)
    place = next((pair for pair in pairs if repr(pair[0]) != repr(pair[1])), (len(held.said), len(other.said)))
    return _finding(check, f"the same, {place[0]!r:.200}", f"{place[1]!r:.200}", cure)


def _generators(error: GeneratorError) -> Finding:
    cure = "use random.Random(seed) with the seed that reset gets, or run with environment_workers="
    return _finding("environment_generators", "generators of its own", str(error).partition(", which")[0], cure)


def _finding_of(check: str, expected: str, raised: BaseException, cure: str) -> Finding:
    return _finding(check, expected, f"{type(raised).__name__}: {raised}"[:300], cure)


def _finding(check: str, expected: str, observed: str, cure: str) -> Finding:
    return Finding(check=check, culprit="the environment", expected=expected, observed=observed, cure=cure)


def _name_of(factory: Callable[[], Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)


def _answers_of(script: Script) -> str:
    said = ", ".join(f"{answer!r:.60}" for answer in script.answers)
    return f"{said} ({script.finish.name})"
