"""Conversations of a run repeated with the recorded answers, in new environments.

Messages of an environment follow from the row, the seed and the answers of one conversation. So conversations repeated
one by one, interleaved, and with answers that no conversation contains must agree, with each other and with the run.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch

from lightning_rl.audit.conversation_evidence import AuditedConversation
from lightning_rl.audit.outside import refuse_outside
from lightning_rl.audit.sampling_statistics import Pair
from lightning_rl.audit.schedule import calls_again
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.data.row_schema import TOOLS, own_variables
from lightning_rl.environments import Action, Environment, ObjectEnvironment, ToolEnvironment
from lightning_rl.environments.messages import message_of
from lightning_rl.environments.parsing import truncated_parser
from lightning_rl.environments.run_environments import Environments, environment_of, messages_of
from lightning_rl.environments.tools import schemas_of
from lightning_rl.policy.processor import Pixels
from lightning_rl.rollout import FinishReason
from lightning_rl.samples.seeds import environment_seed
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.testing.properties.conversations import (
    REWRITES,
    Calls,
    Part,
    difference,
    plain_copy,
    play,
    same_pictures,
)
from lightning_rl.testing.properties.copies import copy_apart
from lightning_rl.testing.properties.reward_repeats import same_value
from lightning_rl.testing.properties.subsample import order_of
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.seeding import fork_generators

MAX_CONVERSATIONS = 8  # conversations per audit
MAX_SECONDS = 2.0  # duration of all replays of an environment
CPU = torch.device("cpu")
UNKNOWN_ANSWER = "unheard-of-answer-{}"
NOT_REPLAYABLE = "is not replayable"


class ReplayWatch:
    """Repeats conversations of a run, see :func:`calls_again`."""

    def __init__(self) -> None:
        self._audit = 0
        self._skips: dict[str, Skip] = {}

    def ask(
        self,
        environments: Environments | None,
        data: PromptDataModule,
        conversations: Sequence[AuditedConversation],
        number: int,
    ) -> list[Finding | Skip]:
        """Return the findings about each environment, and in all audits the reasons why some are not repeated."""
        self._audit += 1
        findings = list[Finding]()
        if environments is None or not calls_again(self._audit):
            return list(self._skips.values())
        for name in environments.factories:
            ours = [one for one in conversations if one.environment == name and one.is_over]
            if ours and name not in self._skips:
                chosen = _some(ours, number)
                result = replay_of(environments, name, _with_rows(data, chosen))
                if isinstance(result, Skip):
                    self._skips[name] = result
                else:
                    findings += result
        return [*findings, *self._skips.values()]


def _with_rows(data: PromptDataModule, conversations: Sequence[AuditedConversation]) -> list[AuditedConversation]:
    """Return conversations with rows and pictures as the data holds them; as the run has them if it is a stream."""
    if data.pass_length is None:
        return [*conversations]
    prompts = data.at([conversation.group for conversation in conversations])
    return [
        one._replace(
            row={**prompt.columns, "prompt": prompt.content},
            pictures=() if prompt.media is None else prompt.media.pictures,
        )
        for one, prompt in zip(conversations, prompts, strict=True)
    ]


def replay_of(
    environments: Environments, name: str, conversations: Sequence[AuditedConversation]
) -> list[Finding] | Skip:
    """Repeat conversations with the environment of a name; return the findings, or why there are none."""
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
                return list(_repeat(environments, factory, conversations))
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code
        reason = f"could not be repeated: {hide_secrets(f'{type(error).__name__}: {error}')}"
    return Skip(f"environment {name} {reason}: test it with lightning_rl.testing.check_environment")


def _some(conversations: Sequence[AuditedConversation], number: int) -> list[AuditedConversation]:
    """Return a few conversations, up to half with a truncated answer, and one of most turns; others in each rollout."""
    conversations = sorted(conversations, key=lambda conversation: order_of(conversation.sample, number))
    cut = [
        conversation
        for conversation in conversations
        if any(completion.finish is FinishReason.LENGTH for _, completion in conversation.turns)
    ]
    longest = max(conversations, key=lambda conversation: len(conversation.turns))
    chosen = {one.sample: one for one in [*cut[: MAX_CONVERSATIONS // 2], longest, *conversations]}
    return list(chosen.values())[:MAX_CONVERSATIONS]


def _repeat(
    environments: Environments, factory: Callable[[], Any], conversations: Sequence[AuditedConversation]
) -> Iterator[Finding]:
    end = time.monotonic() + MAX_SECONDS

    def make() -> Any:
        made = environment_of(factory())
        if not getattr(_owner_of(made), "replayable", True):
            raise ValueError(NOT_REPLAYABLE)
        return made

    def run(some: Sequence[AuditedConversation], words: str | None = None) -> list[list[Part]]:
        """Run conversations interleaved, turn by turn; ``words`` replace their answers."""
        results = [list[Part]() for _ in some]
        turns = list[Iterator[str]]()
        for one, parts in zip(some, results, strict=True):
            answers = [partial(_calls, environments, one.row, pair, turn, words) for turn, pair in enumerate(one.turns)]
            seed = environment_seed(environments.seed, one.group)
            turns.append(play(make, one.row, seed, answers, parts, one.pictures))
        for _ in zip_longest(*turns):
            if time.monotonic() > end:
                raise TimeoutError(f"its replays take more than {MAX_SECONDS:g} s")
        return results

    name = type(_owner_of(make())).__name__
    samples = [conversation.sample for conversation in conversations]
    alone = [run([conversation])[0] for conversation in conversations]
    moving = _moving(alone, run(conversations[::-1])[::-1])
    if not moving and conversations[0].messages:
        words = UNKNOWN_ANSWER.format(" ".join(map(str, samples)))
        moving = _moving(run(conversations[:1], words), run(conversations[:1], words))
    if moving:
        yield Finding(
            culprit=f"environment {name}",
            expected="the same conversation for a row, a seed and answers, independent of others",
            observed=f"other {moving} when it is repeated",
            samples=samples[:4],
        )
        return
    slips = {one.sample: kind for one, parts in zip(conversations, alone, strict=True) if (kind := _slip(one, parts))}
    if slips:
        yield Finding(
            culprit="stage generate, the turns of conversations and their calls of tools, rows and seeds",
            expected=f"the conversation of {name} for this row, seed and answers",
            observed=f"others in {len(slips)} of {len(samples)}: {', '.join(dict.fromkeys(slips.values()))}",
            cure="pass to every environment the row and seed of its sample, each answer once and in order, join each "
            "tool result to its call, and pass the pictures of its row and replies to every later turn, in order",
            samples=list(slips)[:4],
        )


def _owner_of(made: Any) -> Any:
    return made.thing if isinstance(made, ObjectEnvironment) else made


def _calls(
    environments: Environments, row: Mapping[str, Any], pair: Pair, turn: int, words: str | None, made: Any
) -> Calls:
    """Return the calls for one answer of a conversation; ``words`` replace it."""
    (request, completion), variables = pair, own_variables(row, "a row")
    ids, finish = completion.token_ids, completion.finish
    if not isinstance(made, Environment):
        return [(ids, finish)]
    parse = environments.parser(variables)
    if finish == FinishReason.LENGTH:
        parse = truncated_parser(parse, cast(Any, environments.tokenizer), environments.close)
    parsed = parse(ids, request.prefix_ids, schemas_of(made.tools) or variables.get(TOOLS, ()))
    parsed = parsed if words is None else replace(parsed, text=words, tool_calls=(), errors=())
    return _one_by_one(made, replace(parsed, finish=finish, turn=turn, token_ids=tuple(ids)))


def _one_by_one(made: Environment, answer: Action) -> Calls:
    """Split an answer to tools into answers of one call each, since each result belongs to one call."""
    calls, errors = answer.tool_calls, answer.errors
    if type(made).step is not ToolEnvironment.step or answer.truncated or len(calls) + bool(errors) < 2:
        return [(answer,)]
    if any(inspect.iscoroutinefunction(tool) for tool in made.tools):
        raise ValueError("its tools are coroutines")
    parts = [(replace(answer, tool_calls=(call,), errors=()),) for call in calls]
    return [*parts, *([(replace(answer, tool_calls=(), errors=errors),)] if errors else [])]


def _moving(ours: Sequence[Sequence[Part]], theirs: Sequence[Sequence[Part]]) -> str:
    """Return the kind of the first value that differs between replays; empty if none does."""
    return next((apart[0] for pair in zip(ours, theirs, strict=True) if (apart := difference(*pair))), "")


def _slip(conversation: AuditedConversation, parts: Sequence[Part]) -> str:
    """Return the kind of value of a conversation that was recorded with another value; empty if none was."""
    rewards = [part.reward for part in parts if part.reward is not None]
    said = [part.words for part in parts if part.words is not None]
    if len(said) - 1 != len(conversation.turns) or (conversation.finish is FinishReason.TURNS and parts[-1].done):
        return "end"
    if conversation.messages:
        whole = said[0] or plain_copy(messages_of(Prompt(0, (), conversation.row["prompt"], {})))
        for part in parts[1:]:
            if part.words is not None:
                calls = [call for (answer,) in part.calls for call in answer.tool_calls]
                whole += [plain_copy(message_of(replace(part.calls[0][0], tool_calls=calls))), *part.words]
        if whole != plain_copy(conversation.messages):
            return "messages"
    elif not _continues(conversation, said):
        return "token ids"
    if not _shows_pictures(conversation, parts):
        return "pictures"
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


def _shows_pictures(conversation: AuditedConversation, parts: Sequence[Part]) -> bool:
    """Return True if the request of each turn has the pictures of its context in order."""
    shown = list[Pixels]()
    for (request, _), part in zip(conversation.turns, parts, strict=False):
        read = () if request.media is None else request.media.pictures
        shown = [*([] if part.rewrites else shown), *part.pictures]
        if not same_pictures(read, shown):
            return False
    return True
