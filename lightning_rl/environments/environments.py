"""Environments: what the samples of a run talk to, and the conversations that begin with a request."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

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
from lightning_rl.environments.shapes import environment_of
from lightning_rl.environments.tools import ObjectEnvironment, Tool, ToolEnvironment, schemas_of
from lightning_rl.environments.workers import RemoteEnvironment, WorkerPool
from lightning_rl.generation import Request, request_seed
from lightning_rl.naming import name_of

Factory = Callable[[], Any]
"""Makes what one conversation talks to: an :class:`Environment`, a :class:`TokenEnvironment`, an object like TRL's."""

EnvironmentSource = Factory | Mapping[str, Factory]
STARTS = 2**61  # where the seeds of environments begin, far from those of samples


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Refuses rows of the data that no conversation can begin with.

    Args:
        names: of the environments.
        column: of the data that names the environment of a row, if there are several; a single one that has a name of
            its own is held against the column as well.
    """

    names: tuple[str, ...]
    column: str = DEFAULT

    def __call__(self, columns: Mapping[str, Any], row: str) -> str:
        """The name of the environment that a row talks to.

        Args:
            columns: of the row.
            row: what errors call it.

        Raises:
            ValueError: naming the row, what it has, and what it may have.
        """
        if taken := set(REWARD_COLUMNS) & set(columns):
            raise ValueError(
                f"expected data without a column {min(taken)!r}, which rewards get from environments, got one in "
                f"{row}: rename it"
            )
        if len(self.names) == 1 and (self.names[0] == DEFAULT or self.column not in columns):
            return self.names[0]
        if self.column not in columns:
            raise ValueError(
                f"expected a column {self.column!r} in {row} that names one of {sorted(self.names)}, got "
                f"{sorted(columns) or 'no columns'}: add it, or pass a single environment"
            )
        name = columns[self.column]
        if not (isinstance(name, str) and name in self.names):
            raise ValueError(
                f"expected column {self.column!r} of {row} to name one of {sorted(self.names)}, got {name!r}"
            )
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What the samples of a run talk to.

    Args:
        factories: by name; a single one is called ``environment``.
        limits: where conversations end.
        tokenizer: for environments in messages; None if all speak in token ids.
        close: ids that end an answer.
        template_options: further arguments of the chat template.
        parse: what tells the parts of an answer apart; by default all of it is text.
        schemas: of the tools of each environment in messages, as they were at setup.
        seed: of the run.
        workers: where environments run; None for in this process.
    """

    factories: Mapping[str, Factory]
    limits: Limits = field(default_factory=Limits)
    tokenizer: PreTrainedTokenizerBase | None = None
    close: frozenset[int] = frozenset()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    parse: AnswerParser | None = None
    schemas: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    seed: int = 0
    workers: WorkerPool | None = None

    def open(self, prompt: Prompt, request: Request) -> Opening:
        """A conversation that begins where an answer to a request would."""
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
        return RowCheck(tuple(self.factories))(prompt.columns, f"prompt {prompt.index}")

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

    def check(self, tool_parser: ParserSource | None = None, prompt: Prompt | None = None) -> Self:
        """Refuses what cannot work before anything is generated.

        Args:
            tool_parser: of the run's options.
            prompt: one of the data; None if unknown.

        Returns:
            The same, knowing the tools of each and what tells their calls apart, if there are any or a parser was asked
            for.

        Raises:
            BridgeError: naming the environment, the kind of message, and what is wrong with its bridge.
            ParserError: if nobody reads the tool calls that the chat template writes.
            ValueError: if an environment in messages begins with the row's own prompt, and that is token ids.
        """
        found = dict[str, Sequence[Mapping[str, Any]]]()
        for name, factory in self.factories.items():
            made = environment_of(factory() if self.workers is None else self.workers.open(name, self.workers.budget()))
            close_quietly(made)  # it may have nothing to close: nobody has reset it
            if not isinstance(made, Environment):
                continue
            if prompt is not None and is_token_ids(prompt.content) and not begins_itself(made):
                raise ValueError(
                    f"expected prompts of text or of chat messages for environment {name}, which speaks in messages "
                    "and begins with the row's own prompt, got token ids: write the prompts as text, return messages "
                    "from its reset, or use an environment in token ids"
                )
            bridge, found[name] = self._bridge(name), _schemas(made)
            for kind in KINDS if found[name] else ("user",):
                if wrong := bridge.check(kind):
                    raise BridgeError(f"no bridge over {kind} messages for environment {name}: {'; '.join(wrong)}")
        parse = None
        if self.tokenizer is not None and (tool_parser is not None or any(found.values())):
            parse = parser_for(self.tokenizer, tool_parser, self.template_options)
        return replace(self, parse=parse, schemas=found)


def factories_of(environment: EnvironmentSource | None, tools: Sequence[Tool] | None = None) -> dict[str, Factory]:
    """The environments of a run by name, none if there are neither environments nor tools.

    Args:
        environment: a factory, or several by name.
        tools: functions, instead of an environment; None for none.

    Raises:
        ValueError: if both are given, or something is no factory; the message says which.
    """
    if tools is not None and environment is not None:
        raise ValueError(
            "expected environment= or tools=, got both: an environment has tools of its own, "
            "such as ToolEnvironment(tools)"
        )
    if tools is not None:
        _check_tools(tools)
        environment = partial(ToolEnvironment, tuple(tools))
    if environment is None:
        return {}
    named = environment if isinstance(environment, Mapping) else {DEFAULT: environment}
    for name, factory in named.items():
        _check_factory(name, factory)
    if not named:
        raise ValueError("expected an environment or several by name, got an empty mapping: pass environment=None")
    return dict(named)


def _check_tools(tools: Any) -> None:
    if isinstance(tools, str) or not isinstance(tools, Sequence) or not all(map(callable, tools)):
        raise ValueError(f"expected tools to be a list of functions, got {tools!r}")
    if not tools:
        raise ValueError(f"expected tools to be a list of at least one function, got {tools!r}: leave tools out")


def _check_factory(name: Any, factory: Any) -> None:
    """Refuses what cannot make the environment of a name.

    Raises:
        ValueError: naming it, and what to pass.
    """
    if not (isinstance(name, str) and name) or "/" in name:
        raise ValueError(
            f"expected a name without / for each environment, as the column of the data has it, got {name!r}: its "
            "metrics are env/<name>/..."
        )
    if callable(factory):
        _check_arguments(name, factory)
        return
    got, cure = repr(factory), "pass the class itself, or a lambda that makes one"
    if isinstance(factory, str):
        cure = "pass the class itself, or its name with its module, such as my_package.Guess"
    elif hasattr(factory, "step"):
        got = f"an object of {type(factory).__name__}"
        cure = f"pass {type(factory).__name__} itself, or a lambda that makes one"
    raise ValueError(
        f"expected environment {name} to be a class or a function that makes one for each conversation, got {got}: "
        f"{cure}"
    )


def _check_arguments(name: str, factory: Factory) -> None:
    """Refuses a factory that cannot be called without arguments."""
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # of something written in C, which does not say
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            f"expected environment {name} to be made without arguments for each conversation, got "
            f"{name_of(factory)}, {error}: pass functools.partial({name_of(factory)}, ...) or a lambda"
        ) from error


def messages_of(prompt: Prompt) -> Sequence[Message]:
    """The prompt of a row as chat messages; none for a prompt of token ids."""
    if isinstance(prompt.content, str):
        return [{"role": "user", "content": prompt.content}]
    content = prompt.content if isinstance(prompt.content, Sequence) else ()
    return [message for message in content if isinstance(message, Mapping)]


def begins_itself(environment: Environment) -> bool:
    """Whether an environment may begin with messages of its own, and not with the row's prompt."""
    if isinstance(environment, RemoteEnvironment):
        return environment.begins_itself
    return type(environment).reset is not Environment.reset and not isinstance(environment, ObjectEnvironment)


def _schemas(environment: Environment) -> Sequence[Mapping[str, Any]]:
    return environment.schemas if isinstance(environment, RemoteEnvironment) else schemas_of(environment.tools)
