"""Replays: a few conversations held again with the answers that were drawn.

An environment is one conversation's own, so what it says follows from its row, its seed and the answers. It is asked
again alone, beside others in another order, and with answers that nobody has given, and has to say the same each time;
what it says then is what the run has to have recorded. An environment that reaches out of the process is not asked.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from lightning_rl.audit.conversation_evidence import Talk
from lightning_rl.audit.copies import copy_apart
from lightning_rl.audit.outside import refuse_outside
from lightning_rl.audit.reward_repeats import EARLY_TURNS, TURNS, same_value
from lightning_rl.audit.subsample import order_of
from lightning_rl.environments import Action, Environment, ObjectEnvironment, ToolEnvironment
from lightning_rl.environments.messages import REWRITTEN, message_of
from lightning_rl.environments.parsing import plain_text
from lightning_rl.environments.run_environments import STARTS, Environments, environment_of
from lightning_rl.environments.tools import schemas_of
from lightning_rl.generation import request_seed
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import FinishReason
from lightning_rl.utils.mutation_guard import copy_plain
from lightning_rl.utils.seeding import fork_generators

MAX_TALKS = 8  # of an audit
MAX_SECONDS = 2.0  # of all replays of an environment together
CPU = torch.device("cpu")
UNHEARD = "unheard-of-answer-{}"
REWRITES = -1  # before the token ids of a whole context
NOTHING_SHOWN: tuple[Any, ...] = ()
NOT_REPLAYABLE = "is not replayable"


class Replay(NamedTuple):
    """Conversations with an environment that were held again, in plain values.

    Attributes:
        environment: name of its class.
        reason: why it was not asked, or said nothing; empty otherwise.
        samples: whose conversations they were.
        moving: what differs from replay to replay, in words; empty if nothing does.
        others: samples whose conversation was recorded otherwise, with what of it.
    """

    environment: str
    reason: str = ""
    samples: Sequence[int] = ()
    moving: str = ""
    others: Sequence[tuple[int, str]] = ()


class ReplayWatch:
    """Holds conversations of a run again, in its first audits and in every 16th.

    Args:
        module: The run.
    """

    def __init__(self, module: RLLightningModule) -> None:
        self._module, self._turn = module, 0
        self._silent: dict[str, Replay] = {}

    def ask(self, talks: Sequence[Talk], number: int) -> list[Replay]:
        """Returns a replay for each environment; between the audits that ask, those with a reason."""
        self._turn += 1
        conversations = self._module.sampler.environments
        if conversations is None or (self._turn not in EARLY_TURNS and self._turn % TURNS):
            return list(self._silent.values())
        replays = list[Replay]()
        for name in conversations.factories:
            chosen = _some([talk for talk in talks if talk.environment == name and talk.is_over], number)
            if name in self._silent or not chosen:
                continue
            chosen = [talk._replace(row=row) for talk, row in zip(chosen, self._rows_of(chosen), strict=True)]
            replay = replay_of(conversations, name, chosen)
            replays.append(replay)
            if replay.reason:
                self._silent[name] = replay
        return [*(replay for replay in replays if not replay.reason), *self._silent.values()]

    def _rows_of(self, talks: Sequence[Talk]) -> list[Mapping[str, Any]]:
        """The rows of the data, as it has them, where it can be asked again; else as rewards see them."""
        stream = self._module.prompt_stream
        if stream.pass_length is None:
            return [talk.row for talk in talks]
        prompts = stream.at([talk.group for talk in talks])
        return [{**prompt.columns, "prompt": prompt.content} for prompt in prompts]


def replay_of(conversations: Environments, name: str, talks: Sequence[Talk]) -> Replay:
    """Holds conversations with one environment again.

    Args:
        conversations: The environments of the run.
        name: Name of the environment.
        talks: Conversations with it.
    """
    factory = copy_apart(conversations.factories[name])
    try:
        if conversations.workers is not None:
            reason = "runs in processes"
        elif factory is None:
            reason = "holds state that cannot be copied"
        elif not getattr(factory, "replayable", True):
            reason = NOT_REPLAYABLE
        else:
            with fork_generators(CPU), refuse_outside():
                return hold_all(conversations, factory, talks)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        reason = f"could not be asked again: {type(error).__name__}: {error}"
    return Replay(name, f"environment {name} {reason}: lightning_rl.testing.check_environment holds it again")


def _some(talks: Sequence[Talk], number: int) -> list[Talk]:
    """Some conversations, of other samples in each rollout; half of them with a cut answer, if any has one."""
    talks = sorted(talks, key=lambda talk: order_of(talk.sample, number))
    cut = [talk for talk in talks if any(completion.finish is FinishReason.LENGTH for _, completion in talk.turns)]
    cut = cut[: MAX_TALKS // 2]
    samples = {talk.sample for talk in cut}
    return [*cut, *(talk for talk in talks if talk.sample not in samples)][:MAX_TALKS]


Said = list[tuple[Any, float | None, bool]]  # of each turn: messages or token ids, reward, whether it was the end


class _Held:
    """A conversation with a fresh environment.

    Args:
        conversations: of the run.
        factory: makes the environment.
        talk: that is held once more.
        words: in the place of those of the answers; None for the recorded ones.
    """

    def __init__(
        self, conversations: Environments, factory: Callable[[], Any], talk: Talk, words: str | None = None
    ) -> None:
        self._conversations, self._factory, self.talk, self._words = conversations, factory, talk, words
        self.said: Said = []
        self._made: Any = None

    def begin(self) -> None:
        """Makes and resets the environment."""
        seed = request_seed(self._conversations.seed, 0, STARTS + self.talk.group)
        self._made = environment_of(self._factory())
        owner = self._made.thing if isinstance(self._made, ObjectEnvironment) else self._made
        if not getattr(owner, "replayable", True):
            raise ValueError(NOT_REPLAYABLE)
        said = self._made.reset(copy_plain(dict(self.talk.row)), seed)
        self.said.append((_plain(said), None, False))

    def step(self, turn: int) -> None:
        """Gives it the answer of a turn, unless it has ended."""
        if self.said[-1][2] or turn >= len(self.talk.turns):
            return
        request, completion = self.talk.turns[turn]
        if not isinstance(self._made, Environment):
            step = self._made.step(completion.token_ids, completion.finish)
            words = [REWRITES, *step.rewritten] if step.rewritten else list(step.token_ids)
            self.said.append((words, step.reward, bool(step.done)))
            return
        answer = self._answer(turn, request.prefix_ids, completion.token_ids, completion.finish)
        parts = [self._made.step(part) for part in _one_by_one(self._made, answer)]
        messages = [message for part in parts for message in part.messages]
        messages += [{**message, REWRITTEN: True} for part in parts for message in part.rewritten]
        rewards = [part.reward for part in parts if part.reward is not None]
        said = [message_of(answer), *messages]
        self.said.append((_plain(said), sum(rewards) if rewards else None, bool(parts[-1].done)))

    def _answer(self, turn: int, prefix: Sequence[int], ids: Sequence[int], finish: FinishReason) -> Action:
        conversations = self._conversations
        plain = plain_text(cast(Any, conversations.tokenizer))
        schemas = schemas_of(self._made.tools)
        parse = plain if finish == FinishReason.LENGTH else conversations.parse or plain
        answer = replace(parse(ids, prefix, schemas), finish=finish, turn=turn, token_ids=tuple(ids))
        return answer if self._words is None else replace(answer, text=self._words, tool_calls=(), errors=())

    def end(self) -> None:
        """Asks what it is worth if a limit ended it, and closes it."""
        if not self.said[-1][2] and callable(score := getattr(self._made, "reward", None)):
            self.said.append((NOTHING_SHOWN, cast(float | None, score()), False))
        self._made.close()


def _one_by_one(made: Environment, answer: Action) -> list[Action]:
    """An answer to tools as answers of one call each, for the results of several calls are those of each."""
    calls, errors = answer.tool_calls, answer.errors
    if type(made).step is not ToolEnvironment.step or answer.cut_off or len(calls) + bool(errors) < 2:
        return [answer]
    if any(inspect.iscoroutinefunction(tool) for tool in made.tools):
        raise ValueError("its tools are coroutines")
    parts = [replace(answer, tool_calls=(call,), errors=()) for call in calls]
    return [*parts, *([replace(answer, tool_calls=(), errors=errors)] if errors else [])]


def hold_all(conversations: Environments, factory: Callable[[], Any], talks: Sequence[Talk]) -> Replay:
    """Holds every conversation alone, then beside the others, then one twice with unheard answers."""
    held, end = partial(_Held, conversations, factory), time.monotonic() + MAX_SECONDS
    alone = [_hold([held(talk)], end)[0] for talk in talks]
    beside = _hold([held(talk) for talk in reversed(talks)], end)[::-1]
    samples = [talk.sample for talk in talks]
    name = _class_of(factory)
    moving = _difference(alone, beside)
    if not moving and talks[0].messages:
        words = UNHEARD.format(" ".join(str(sample) for sample in samples))
        once, again = ([_hold([held(talks[0], words)], end)[0]] for _ in range(2))
        moving = _difference(once, again)
    if moving:
        return Replay(name, samples=samples, moving=moving)
    others = [(talk.sample, what) for talk, said in zip(talks, alone, strict=True) if (what := _slip(talk, said))]
    return Replay(name, samples=samples, others=others)


def _class_of(factory: Any) -> str:
    made = environment_of(factory())
    owner = made.thing if isinstance(made, ObjectEnvironment) else made
    return type(owner).__name__


def _hold(held: Sequence[_Held], end: float) -> list[Said]:
    """Returns what is said in some conversations, turn by turn beside each other, before a point in time."""
    for one in held:
        one.begin()
    for turn in range(max(len(one.talk.turns) for one in held)):
        for one in held:
            one.step(turn)
            if time.monotonic() > end:
                raise TimeoutError(f"its replays take more than {MAX_SECONDS:g} s")
    for one in held:
        one.end()
    return [one.said for one in held]


def _difference(ours: Sequence[Said], theirs: Sequence[Said]) -> str:
    """What differs between replays of some conversations; empty if nothing does."""
    for one, other in zip(ours, theirs, strict=True):
        for (words, reward, done), (further, another, end) in zip(one, other, strict=False):
            if words != further:
                return "words"
            if not same_value(reward, another):
                return "rewards"
            if done != end:
                return "ends"
        if len(one) != len(other):
            return "ends"
    return ""


def _slip(talk: Talk, said: Said) -> str:
    """What of a conversation was recorded otherwise than its environment says; empty if nothing was."""
    rewards = [reward for _, reward, _ in said if reward is not None]
    turns = sum(words != NOTHING_SHOWN for words, _, _ in said) - 1
    if turns != len(talk.turns) or (talk.finish is FinishReason.TURNS and said[-1][2]):
        return "end"
    if talk.messages:
        opening = said[0][0] or _plain(_messages_of(talk.row["prompt"]))
        if [*opening, *(message for words, _, _ in said[1:] for message in words)] != _plain(talk.messages):
            return "messages"
    elif not _continues(talk, said):
        return "token ids"
    return "" if same_value(sum(rewards) if rewards else None, talk.reward) else "reward"


def _continues(talk: Talk, said: Said) -> bool:
    """Whether each turn of a conversation in token ids continues what was said in the one before."""
    for (request, completion), (following, _), (words, _, _) in zip(talk.turns, talk.turns[1:], said[1:], strict=False):
        whole = words[1:] if words[:1] == [REWRITES] else [*request.prefix_ids, *completion.token_ids, *words]
        if whole != list(following.prefix_ids):
            return False
    return not said[0][0] or said[0][0] == list(talk.turns[0][0].prefix_ids)


def _messages_of(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [message for message in content or () if isinstance(message, Mapping)]


def _plain(value: Any) -> list[Any]:
    """Messages or token ids in containers of their own, as they are compared."""
    return [copy_plain(dict(part)) if isinstance(part, Mapping) else int(part) for part in value or ()]
