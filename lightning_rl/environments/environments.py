"""Environments: what the samples of a run talk to, and the conversations that begin with a request."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lightning_rl.data import Prompt
from lightning_rl.data.form import is_token_ids
from lightning_rl.environments.bridge import KINDS, Bridge, BridgeError
from lightning_rl.environments.conversation import Conversation, Limits, close_quietly
from lightning_rl.environments.environment import Environment, Message, TokenEnvironment
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.outcome import DEFAULT, REWARD_COLUMNS
from lightning_rl.environments.parsing import AnswerParser, ParserSource, parser_for, plain_text
from lightning_rl.environments.play import Opening
from lightning_rl.environments.tools import ObjectEnvironment, Tool, ToolEnvironment, schemas_of
from lightning_rl.environments.workers import RemoteEnvironment, WorkerPool
from lightning_rl.generation import Request, request_seed

Factory = Callable[[], Any]
"""Makes what one conversation talks to: an :class:`Environment`, a :class:`TokenEnvironment`, an object like TRL's."""

EnvironmentSource = Factory | Mapping[str, Factory]
STARTS = 2**61  # where the seeds of environments begin, far from those of samples


class CheckedEnvironments(NamedTuple):
    """What is known of environments once one of each was made.

    Attributes:
        parse: what tells tool calls apart, if some environment has tools or a parser was asked for.
        spoken: names of those that speak in messages.
    """

    parse: AnswerParser | None
    spoken: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What the samples of a run talk to.

    Args:
        factories: by name; a single one is called ``environment``.
        column: of the data that names the environment of a row, if there are several.
        limits: where conversations end.
        tokenizer: for environments in messages; None if all speak in token ids.
        close: ids that end an answer.
        template_options: further arguments of the chat template.
        parse: what tells the parts of an answer apart; by default all of it is text.
        seed: of the run.
        workers: where environments run; None for in this process.
    """

    factories: Mapping[str, Factory]
    column: str = "environment"
    limits: Limits = field(default_factory=Limits)
    tokenizer: PreTrainedTokenizerBase | None = None
    close: frozenset[int] = frozenset()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    parse: AnswerParser | None = None
    seed: int = 0
    workers: WorkerPool | None = None

    def open(self, prompt: Prompt, request: Request) -> Opening:
        """A conversation that begins where an answer to a request would."""
        if taken := set(REWARD_COLUMNS) & set(prompt.columns):
            raise ValueError(
                f"expected data without a column {min(taken)!r}, which rewards get from environments: rename it"
            )
        row, name = {**prompt.columns, "prompt": prompt.content}, self.name_for(prompt)
        make = self._maker(name, prompt)
        conversation = Conversation(None, request, self.limits, name, make)
        return Opening(conversation, row, request_seed(self.seed, 0, STARTS + prompt.index))

    def _maker(self, name: str, prompt: Prompt) -> Callable[[], TokenEnvironment]:
        """What makes the environment of a conversation, for each try."""
        workers = self.workers
        if workers is None:
            return lambda: self.in_tokens(self.factories[name](), prompt)
        budget = workers.budget()
        return lambda: self.in_tokens(workers.open(name, budget), prompt)

    def name_for(self, prompt: Prompt) -> str:
        """Which environment a row of the data talks to.

        Raises:
            ValueError: naming the row's value and what it may be.
        """
        if len(self.factories) == 1:
            return next(iter(self.factories))
        name = prompt.columns.get(self.column)
        if name not in self.factories:
            raise ValueError(
                f"expected column {self.column!r} of prompt {prompt.index} to name one of "
                f"{sorted(self.factories)}, got {name!r}"
            )
        return str(name)

    def in_tokens(self, made: Any, prompt: Prompt) -> TokenEnvironment:
        """An environment of any form as one in token ids."""
        made = environment_of(made)
        if not isinstance(made, Environment):
            return made
        bridge = self._bridge(type(made).__name__)
        schemas = _schemas(made)
        parse = self.parse or plain_text(bridge.tokenizer)
        return MessageEnvironment(made, bridge, parse, schemas, messages_of(prompt))

    def _bridge(self, name: str) -> Bridge:
        if self.tokenizer is None:
            raise BridgeError(f"expected a tokenizer for environment {name}, which speaks in messages, got none")
        return Bridge(self.tokenizer, self.close, self.template_options)

    def check(self, tool_parser: ParserSource | None = None, prompt: Prompt | None = None) -> CheckedEnvironments:
        """Refuses what cannot work before anything is generated.

        Args:
            tool_parser: of the run's options.
            prompt: one of the data; None if unknown.

        Returns:
            What reads their answers, and which of them speak in messages.

        Raises:
            BridgeError: naming the environment, the kind of message, and what is wrong with its bridge.
            ParserError: if nobody reads the tool calls that the chat template writes.
            ValueError: if an environment in messages begins with the row's own prompt, and that is token ids.
        """
        calls, spoken = tool_parser is not None, set[str]()
        for name, factory in self.factories.items():
            made = environment_of(factory() if self.workers is None else self.workers.open(name, self.workers.budget()))
            close_quietly(made)  # it may have nothing to close: nobody has reset it
            if not isinstance(made, Environment):
                continue
            spoken.add(name)
            if prompt is not None and is_token_ids(prompt.content) and not begins_itself(made):
                raise ValueError(
                    f"expected prompts of text or of chat messages for environment {name}, which speaks in messages "
                    "and begins with the row's own prompt, got token ids: write the prompts as text, return messages "
                    "from its reset, or use an environment in token ids"
                )
            bridge = self._bridge(name)
            for kind in KINDS if _schemas(made) else ("user",):
                if wrong := bridge.check(kind):
                    raise BridgeError(f"no bridge over {kind} messages for environment {name}: {'; '.join(wrong)}")
            calls = calls or bool(_schemas(made))
        if not calls or self.tokenizer is None:
            return CheckedEnvironments(None, frozenset(spoken))
        return CheckedEnvironments(parser_for(self.tokenizer, tool_parser, self.template_options), frozenset(spoken))


def factories_of(environment: EnvironmentSource | None, tools: Sequence[Tool]) -> dict[str, Factory]:
    """The environments of a run by name, none if there are neither environments nor tools.

    Args:
        environment: a factory, or several by name.
        tools: functions, instead of an environment.

    Raises:
        ValueError: if both are given, or something is no factory; the message says which.
    """
    if tools and environment is not None:
        raise ValueError(
            "expected environment= or tools=, got both: an environment has tools of its own, "
            "such as ToolEnvironment(tools)"
        )
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not all(map(callable, tools)):
        raise ValueError(f"expected tools to be a list of functions, got {tools!r}")
    if tools:
        environment = partial(ToolEnvironment, tuple(tools))
    if environment is None:
        return {}
    named = environment if isinstance(environment, Mapping) else {DEFAULT: environment}
    for name, factory in named.items():
        if not callable(factory):
            raise ValueError(
                f"expected environment {name} to be a class or a function that makes one for each conversation, got "
                f"{factory!r}: write environment={type(factory).__name__}, or a lambda around it"
            )
    if not named:
        raise ValueError("expected an environment or several by name, got an empty mapping: pass environment=None")
    return dict(named)


def messages_of(prompt: Prompt) -> Sequence[Message]:
    """The prompt of a row as chat messages; none for a prompt of token ids."""
    if isinstance(prompt.content, str):
        return [{"role": "user", "content": prompt.content}]
    content = prompt.content if isinstance(prompt.content, Sequence) else ()
    return [message for message in content if isinstance(message, Mapping)]


def environment_of(made: Any) -> Environment | TokenEnvironment:
    """What a factory made, as an environment: an object of TRL's shape becomes one."""
    if isinstance(made, Environment):
        return made
    if isinstance(made, TokenEnvironment) and len(inspect.signature(made.step).parameters) == 2:
        return made
    return ObjectEnvironment(made)


def begins_itself(environment: Environment) -> bool:
    """Whether an environment may begin with messages of its own, and not with the row's prompt."""
    if isinstance(environment, RemoteEnvironment):
        return environment.begins_itself
    return type(environment).reset is not Environment.reset and not isinstance(environment, ObjectEnvironment)


def _schemas(environment: Environment) -> Sequence[Mapping[str, Any]]:
    return environment.schemas if isinstance(environment, RemoteEnvironment) else schemas_of(environment.tools)
