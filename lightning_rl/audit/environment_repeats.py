"""Conversations of a run repeated with the recorded answers, in new environments.

Messages of an environment follow from the row, the seed and the answers of one conversation. So conversations repeated
one by one, interleaved, and with answers that no conversation contains must agree, with each other and with the run.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch

from lightning_rl.audit.conversation_evidence import AuditedConversation
from lightning_rl.audit.outside import refuse_outside
from lightning_rl.audit.schedule import calls_again
from lightning_rl.data import PromptDataModule
from lightning_rl.data.row_schema import TOOLS, own_variables
from lightning_rl.environments import Action, Environment, ObjectEnvironment, ToolEnvironment
from lightning_rl.environments.messages import REWRITTEN, message_of
from lightning_rl.environments.parsing import truncated_parser
from lightning_rl.environments.run_environments import Environments, environment_of
from lightning_rl.environments.tools import schemas_of
from lightning_rl.generation import Completion
from lightning_rl.rollout import FinishReason
from lightning_rl.samples.seeds import environment_seed
from lightning_rl.testing.properties.copies import copy_apart
from lightning_rl.testing.properties.reward_repeats import same_value
from lightning_rl.testing.properties.subsample import order_of
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.mutation_guard import copy_plain
from lightning_rl.utils.seeding import fork_generators

MAX_CONVERSATIONS = 8  # conversations per audit
MAX_SECONDS = 2.0  # duration of all replays of an environment
CPU = torch.device("cpu")
UNKNOWN_ANSWER = "unheard-of-answer-{}"
REWRITES = -1  # precedes the token ids of a rewritten context
NOT_REPLAYABLE = "is not replayable"


class Replay(NamedTuple):
    """Repeated conversations with one environment, in plain values.

    Attributes:
        environment: Name of its class.
        reason: Reason why it was not replayed; empty if it was.
        samples: Ids of the samples of the conversations.
        moving: Kind of value that differs between replays; empty if none does.
        others: Ids of samples whose recorded conversation differs, each with the kind of value.
    """

    environment: str
    reason: str = ""
    samples: Sequence[int] = ()
    moving: str = ""
    others: Sequence[tuple[int, str]] = ()


class Part(NamedTuple):
    """Result of a reset, a step or a final reward.

    Attributes:
        words: Messages or token ids; None for a final reward.
        reward: Reward, or None.
        done: True if the conversation ended.
    """

    words: list[Any] | None
    reward: float | None = None
    done: bool = False


class ReplayWatch:
    """Repeats conversations of a run, see :func:`calls_again`."""

    def __init__(self) -> None:
        self._audit = 0
        self._silent: dict[str, Replay] = {}

    def ask(
        self,
        environments: Environments | None,
        data: PromptDataModule,
        conversations: Sequence[AuditedConversation],
        number: int,
    ) -> list[Replay]:
        """Return one replay per environment; in audits that repeat nothing, the replays with a reason."""
        self._audit += 1
        if environments is None or not calls_again(self._audit):
            return list(self._silent.values())
        replays = list[Replay]()
        for name in [name for name in environments.factories if name not in self._silent]:
            chosen = _some(
                [
                    conversation
                    for conversation in conversations
                    if conversation.environment == name and conversation.is_over
                ],
                number,
            )
            if chosen:
                rows = _rows_of(data, chosen)
                chosen = [conversation._replace(row=row) for conversation, row in zip(chosen, rows, strict=True)]
                replays.append(replay_of(environments, name, chosen))
                self._silent |= {name: replays[-1]} if replays[-1].reason else {}
        return [*(replay for replay in replays if not replay.reason), *self._silent.values()]


def _rows_of(data: PromptDataModule, conversations: Sequence[AuditedConversation]) -> list[Mapping[str, Any]]:
    """Return rows as the data holds them, or as rewards see them if the data is a stream."""
    if data.pass_length is None:
        return [conversation.row for conversation in conversations]
    prompts = data.at([conversation.group for conversation in conversations])
    return [{**prompt.columns, "prompt": prompt.content} for prompt in prompts]


def replay_of(environments: Environments, name: str, conversations: Sequence[AuditedConversation]) -> Replay:
    """Repeat conversations with the environment of a name."""
    factory = copy_apart(environments.factories[name])
    try:
        if environments.workers is not None:
            reason = "runs in processes"
        elif factory is None:
            reason = "holds state that cannot be copied"
        elif not getattr(factory, "replayable", True):
            reason = NOT_REPLAYABLE
        else:
            with fork_generators(CPU), refuse_outside():
                return _repeat(environments, factory, conversations)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        reason = f"could not be repeated: {hide_secrets(f'{type(error).__name__}: {error}')}"
    return Replay(name, f"environment {name} {reason}: test it with lightning_rl.testing.check_environment")


def _some(conversations: Sequence[AuditedConversation], number: int) -> list[AuditedConversation]:
    """Return a few conversations, up to half of them with a truncated answer; others in each rollout."""
    conversations = sorted(conversations, key=lambda conversation: order_of(conversation.sample, number))
    cut = [
        conversation
        for conversation in conversations
        if any(completion.finish is FinishReason.LENGTH for _, completion in conversation.turns)
    ]
    first = cut[: MAX_CONVERSATIONS // 2]
    return [*first, *(conversation for conversation in conversations if conversation not in first)][:MAX_CONVERSATIONS]


def _repeat(
    environments: Environments, factory: Callable[[], Any], conversations: Sequence[AuditedConversation]
) -> Replay:
    end = time.monotonic() + MAX_SECONDS

    def run(some: Sequence[AuditedConversation], words: str | None = None) -> list[list[Part]]:
        """Run conversations interleaved, turn by turn."""
        results = [list[Part]() for _ in some]
        turns = [
            _play(environments, factory(), conversation, parts, words)
            for conversation, parts in zip(some, results, strict=True)
        ]
        for _ in zip_longest(*turns):
            if time.monotonic() > end:
                raise TimeoutError(f"its replays take more than {MAX_SECONDS:g} s")
        return results

    name, samples = (
        type(_owner_of(environment_of(factory()))).__name__,
        [conversation.sample for conversation in conversations],
    )
    alone = [run([conversation])[0] for conversation in conversations]
    moving = _difference(alone, run(conversations[::-1])[::-1])
    if not moving and conversations[0].messages:
        words = UNKNOWN_ANSWER.format(" ".join(map(str, samples)))
        moving = _difference(run(conversations[:1], words), run(conversations[:1], words))
    others = [
        (conversation.sample, kind)
        for conversation, parts in zip(conversations, alone, strict=True)
        if (kind := _slip(conversation, parts))
    ]
    return Replay(name, samples=samples, moving=moving, others=[] if moving else others)


def _owner_of(made: Any) -> Any:
    return made.thing if isinstance(made, ObjectEnvironment) else made


def _play(
    environments: Environments, new: Any, conversation: AuditedConversation, parts: list[Part], words: str | None
) -> Iterator[None]:
    """Run one conversation turn by turn and append its results to ``parts``; ``words`` replace its answers."""
    made: Any = environment_of(new)
    if not getattr(_owner_of(made), "replayable", True):
        raise ValueError(NOT_REPLAYABLE)
    seed = environment_seed(environments.seed, conversation.group)
    parts.append(Part(_plain(made.reset(copy_plain(dict(conversation.row)), seed))))
    yield
    for turn, (request, completion) in enumerate(conversation.turns):
        if parts[-1].done:
            break
        if isinstance(made, Environment):
            variables = own_variables(conversation.row, "a row")
            answer = _answer(environments, made, variables, request.prefix_ids, completion, turn)
            answer = answer if words is None else replace(answer, text=words, tool_calls=(), errors=())
            steps = [made.step(part) for part in _one_by_one(made, answer)]
            messages = [message for step in steps for message in step.messages]
            messages += [{**message, REWRITTEN: True} for step in steps for message in step.rewritten]
            rewards = [step.reward for step in steps if step.reward is not None]
            said = [message_of(answer), *messages]
            parts.append(Part(_plain(said), sum(rewards) if rewards else None, bool(steps[-1].done)))
        else:
            step = made.step(completion.token_ids, completion.finish)
            said = [REWRITES, *step.rewritten] if step.rewritten else list(step.token_ids)
            parts.append(Part(said, step.reward, bool(step.done)))
        yield
    if not parts[-1].done and callable(score := getattr(made, "reward", None)):
        parts.append(Part(None, cast(float | None, score())))
    made.close()


def _answer(
    environments: Environments,
    made: Environment,
    variables: Mapping[str, Any],
    prefix: Sequence[int],
    completion: Completion,
    turn: int,
) -> Action:
    ids, finish = completion.token_ids, completion.finish
    parse = environments.parser(variables)
    if finish == FinishReason.LENGTH:
        parse = truncated_parser(parse, cast(Any, environments.tokenizer), environments.close)
    schemas = schemas_of(made.tools) or variables.get(TOOLS, ())
    return replace(parse(ids, prefix, schemas), finish=finish, turn=turn, token_ids=tuple(ids))


def _one_by_one(made: Environment, answer: Action) -> list[Action]:
    """Split an answer to tools into answers of one call each, since each result belongs to one call."""
    calls, errors = answer.tool_calls, answer.errors
    if type(made).step is not ToolEnvironment.step or answer.truncated or len(calls) + bool(errors) < 2:
        return [answer]
    if any(inspect.iscoroutinefunction(tool) for tool in made.tools):
        raise ValueError("its tools are coroutines")
    parts = [replace(answer, tool_calls=(call,), errors=()) for call in calls]
    return [*parts, *([replace(answer, tool_calls=(), errors=errors)] if errors else [])]


def _difference(ours: Sequence[Sequence[Part]], theirs: Sequence[Sequence[Part]]) -> str:
    """Return the kind of the first value that differs between replays; empty if none does."""
    for one, other in zip(ours, theirs, strict=True):
        for mine, yours in zip(one, other, strict=False):
            if mine.words != yours.words:
                return "words"
            if not same_value(mine.reward, yours.reward):
                return "rewards"
            if mine.done != yours.done:
                return "ends"
        if len(one) != len(other):
            return "ends"
    return ""


def _slip(conversation: AuditedConversation, parts: Sequence[Part]) -> str:
    """Return the kind of value of a conversation that was recorded with another value; empty if none was."""
    rewards = [part.reward for part in parts if part.reward is not None]
    said = [part.words for part in parts if part.words is not None]
    if len(said) - 1 != len(conversation.turns) or (conversation.finish is FinishReason.TURNS and parts[-1].done):
        return "end"
    if conversation.messages:
        opening = said[0] or _plain(_messages_of(conversation.row["prompt"]))
        if [*opening, *(message for words in said[1:] for message in words)] != _plain(conversation.messages):
            return "messages"
    elif not _continues(conversation, said):
        return "token ids"
    return "" if same_value(sum(rewards) if rewards else None, conversation.reward) else "reward"


def _continues(conversation: AuditedConversation, said: Sequence[list[Any]]) -> bool:
    """Return True if each prefix of a conversation in token ids consists of the turns before it."""
    for (request, completion), (following, _), words in zip(
        conversation.turns, conversation.turns[1:], said[1:], strict=False
    ):
        whole = words[1:] if words[:1] == [REWRITES] else [*request.prefix_ids, *completion.token_ids, *words]
        if whole != list(following.prefix_ids):
            return False
    return not said[0] or said[0] == list(conversation.turns[0][0].prefix_ids)


def _messages_of(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [message for message in content or () if isinstance(message, Mapping)]


def _plain(value: Any) -> list[Any]:
    """Return messages or token ids in new containers, for comparisons."""
    return [copy_plain(dict(part)) if isinstance(part, Mapping) else int(part) for part in value or ()]
