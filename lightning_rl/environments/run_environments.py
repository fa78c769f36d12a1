"""Environments of a run and creation of their conversations."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self, cast

from transformers import PreTrainedTokenizerBase

from lightning_rl.data import Prompt
from lightning_rl.data.row_schema import CONTINUES, TOOLS, is_token_ids
from lightning_rl.environments.chat_template import KINDS, Bridge, BridgeError
from lightning_rl.environments.conversation import Conversation, ConversationLimits, close_quietly
from lightning_rl.environments.environment import Environment, TokenEnvironment
from lightning_rl.environments.generators import refuse_draws
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.outcome import DEFAULT, REWARD_COLUMNS
from lightning_rl.environments.parsing import QUESTION, AnswerParser, ParserError, ParserSource, parser_for, plain_text
from lightning_rl.environments.program import Program, ProgramConversation
from lightning_rl.environments.tools import ObjectEnvironment, Tool, ToolEnvironment, begins_itself, schemas_of
from lightning_rl.environments.validation import environment_of
from lightning_rl.environments.workers import RemoteEnvironment, WorkerPool
from lightning_rl.samples import Message, Trajectory
from lightning_rl.samples.seeds import environment_seed
from lightning_rl.utils.mutation_guard import copy_plain
from lightning_rl.utils.naming import name_of

Factory = Callable[[], Any]
"""Function that creates an :class:`Environment`, a :class:`TokenEnvironment` or an object as in TRL."""

EnvironmentSource = Factory | Mapping[str, Factory]
MEASURED = 64  # maximum number of resets before the first rollout, to measure their messages


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Check that rows of the data name one of the environments in the column ``environment``."""

    names: tuple[str, ...]

    def __call__(self, columns: Mapping[str, Any], row: str) -> str:
        """Return the name of the environment of a row, which is called ``row`` in messages.

        Raises:
            ValueError: If it has none; names row, value and alternatives.
        """
        if taken := set(REWARD_COLUMNS) & set(columns):
            raise ValueError(
                f"expected data without a column {min(taken)!r}, which rewards get from environments, got one in "
                f"{row}: rename it"
            )
        if len(self.names) == 1 and (self.names[0] == DEFAULT or DEFAULT not in columns):
            return self.names[0]
        if DEFAULT not in columns:
            raise ValueError(
                f"expected a column {DEFAULT!r} in {row} that names one of {sorted(self.names)}, got "
                f"{sorted(columns) or 'no columns'}: add it, or pass a single environment"
            )
        name = columns[DEFAULT]
        if not (isinstance(name, str) and name in self.names):
            raise ValueError(f"expected column {DEFAULT!r} of {row} to name one of {sorted(self.names)}, got {name!r}")
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Environments of a run.

    Args:
        factories: Factories by name; a single one is called ``environment``.
        limits: Limits of conversations.
        tokenizer: Tokenizer for environments in messages; None if all use token ids.
        close: Ids that end an answer.
        template_options: Further arguments of the chat template.
        tool_parser: Source of the parser of answers.
        parses: True if answers are parsed; otherwise all of an answer is text.
        schemas: Schemas of the tools of each environment in messages, as they were at setup.
        seed: Seed of the run.
        workers: Pool of worker processes; None to run environments in this process.
        own_prompts: Names of the environments in messages that begin with the row's prompt.
        own_resets: Names of the environments in messages that may begin with other messages than the prompt.
        max_failure_rate: Fraction of failed conversations in a rollout that ends the run; None for never.
    """

    factories: Mapping[str, Factory]
    limits: ConversationLimits = field(default_factory=ConversationLimits)
    tokenizer: PreTrainedTokenizerBase | None = None
    close: frozenset[int] = frozenset()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: ParserSource | None = None
    parses: bool = False
    schemas: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    seed: int = 0
    workers: WorkerPool | None = None
    own_prompts: frozenset[str] = frozenset()
    max_failure_rate: float | None = 0.5
    own_resets: frozenset[str] = frozenset()
    _measured: list[int] = field(default_factory=list, repr=False, compare=False)
    _parsers: dict[str, AnswerParser] = field(default_factory=dict, repr=False, compare=False)

    def first_length(self, prompt: Prompt) -> int | None:
        """Return the number of tokens with which the conversation of a row begins; None if it is not known.

        The messages of an environment's own reset are measured for the first :data:`MEASURED` rows, in an environment
        that is closed again, if it is replayable.

        Raises:
            ParserError: If no parser reads the tool calls of the chat template with the row's own variables.
            ValueError: If the prompt ends with an answer.
        """
        name = self.name_for(prompt)
        if name in self.schemas:
            self.parser(prompt.variables)
        if (length := self._reset_length(name, prompt)) is not None:
            return length
        if name not in self.own_prompts or is_token_ids(prompt.content):
            return None
        bridge, schemas = self.bridge(name, prompt.variables), self.schemas[name] or prompt.variables.get(TOOLS, ())
        further = 0 if prompt.media is None else len(prompt.token_ids) - len(prompt.media.engine_ids)
        return len(bridge.render(_question_of(prompt, name), schemas)) + further

    def _reset_length(self, name: str, prompt: Prompt) -> int | None:
        """Return the number of tokens of the first messages of an environment's own reset; None if it is not known."""
        if len(self._measured) >= MEASURED or name not in self.own_resets:
            return None
        self._measured.append(prompt.index)
        made = environment_of(self._maker(name)())
        if not getattr(made.thing if isinstance(made, ObjectEnvironment) else made, "replayable", True):
            return None
        row = copy_plain({**prompt.columns, "prompt": prompt.content})
        try:
            with refuse_draws(f"environment {name}"):
                return len(self.in_tokens(made, prompt).reset(row, environment_seed(self.seed, prompt.index)))
        except (Exception, SystemExit):  # noqa: BLE001  its conversation reports it
            return None
        finally:
            close_quietly(made)

    def parser(self, variables: Mapping[str, Any] = MappingProxyType({})) -> AnswerParser:
        """Return the parser of answers to a row with these variables of the chat template.

        Raises:
            ParserError: If no parser reads the tool calls of the chat template.
        """
        if callable(self.tool_parser):
            return self.tool_parser
        options = self._options(variables)
        if self.tokenizer is None or not self.parses:
            return plain_text(cast(Any, self.tokenizer), self.close)
        key = repr(sorted(options.items()))
        if key not in self._parsers:
            self._parsers[key] = parser_for(self.tokenizer, self.tool_parser, options)
        return self._parsers[key]

    def open(self, wanted: Trajectory, model: str = "") -> Conversation | ProgramConversation:
        """Return the conversation of a sample without segments; ``model`` is the name of the policy in spans."""
        name, seed = self.name_for(wanted.prompt), environment_seed(self.seed, wanted.prompt.index)
        if isinstance(program := self.factories[name], Program):
            variables, workers = wanted.prompt.variables, self.workers
            place: dict[str, Any] = (
                {} if workers is None else {"start": partial(workers.start, name), "address": workers.pool.address}
            )
            bridge, parser = self.bridge(name, variables), partial(self._program_parser, variables)
            return ProgramConversation(program, wanted, self.limits, bridge, parser, name, model=model, **place)
        make = self._maker(name)
        again = lambda: self.in_tokens(make(), wanted.prompt)  # noqa: E731
        return Conversation(None, wanted, self.limits, name, again, seed=seed, model=model)

    def _program_parser(self, variables: Mapping[str, Any], tools: Sequence[Message]) -> AnswerParser:
        """Return the parser of answers to a call; without tools they are text if nothing reads tool calls.

        Raises:
            ParserError: If no parser reads the tool calls of the chat template.
        """
        try:
            return replace(self, parses=True).parser(variables)
        except ParserError:
            if tools:
                raise
            return plain_text(cast(PreTrainedTokenizerBase, self.tokenizer), self.close)

    def _check_program(self, name: str, variables: Mapping[str, Any]) -> None:
        """Check that the chat template writes messages of users between answers; raise BridgeError if not."""
        if wrong := self.bridge(name, variables).check("user"):
            raise BridgeError(f"no bridge over user messages for environment {name}: {'; '.join(wrong)}")

    def _maker(self, name: str) -> Factory:
        """Return the function that creates the environment of a conversation, for each try."""
        workers = self.workers
        return self.factories[name] if workers is None else partial(workers.open, name, workers.budget())

    def name_for(self, prompt: Prompt) -> str:
        """Return the name of a row's environment; see :class:`RowCheck`."""
        return RowCheck(tuple(self.factories))(prompt.columns, f"prompt {prompt.index}")

    def in_tokens(self, made: Any, prompt: Prompt) -> TokenEnvironment:
        """Return any kind of environment as one in token ids."""
        made = environment_of(made)
        if not isinstance(made, Environment):
            return made
        bridge, parse = self.bridge(type(made).__name__, prompt.variables), self.parser(prompt.variables)
        pictures = () if prompt.media is None else prompt.media.pictures
        return MessageEnvironment(made, bridge, parse, _schemas(made, prompt), messages_of(prompt), pictures)

    def bridge(self, name: str, variables: Mapping[str, Any] = MappingProxyType({})) -> Bridge:
        """Return the bridge of an environment for a row with these variables of the chat template.

        Raises:
            BridgeError: If there is no tokenizer, or it has no template.
        """
        if self.tokenizer is None:
            raise BridgeError(f"expected a tokenizer for environment {name}, which uses messages, got none")
        return Bridge(self.tokenizer, self.close, self._options(variables))

    def _options(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        options = {**self.template_options, **variables}
        return {key: options[key] for key in options if key not in (TOOLS, CONTINUES)}

    def check(self, tool_parser: ParserSource | None = None, prompt: Prompt | None = None) -> Self:
        """Check the environments, with a prompt of the data if there is one, before anything is generated.

        Returns:
            A copy with the schemas of tools, and a parser if there are tools or one was requested.

        Raises:
            BridgeError: If a bridge is unreliable, or the template drops tools or messages; names the environment and
                the fault.
            ParserError: If no parser reads the tool calls of the chat template.
            ValueError: If an environment in messages begins with the row's prompt, which is token ids or ends with an
                answer.
        """
        found, own, resets, calls = dict[str, Sequence[Mapping[str, Any]]](), set[str](), set[str](), False
        for name, factory in self.factories.items():
            if isinstance(factory, Program):
                self._check_program(name, {} if prompt is None else prompt.variables)
                continue
            made = environment_of(self._maker(name)())
            close_quietly(made)  # it was never reset
            if not isinstance(made, Environment):
                continue
            if prompt is not None and is_token_ids(prompt.content) and not _begins_itself(made):
                raise ValueError(
                    f"expected prompts of text or of chat messages for environment {name}, which uses messages "
                    "and begins with the row's own prompt, got token ids: write the prompts as text, return messages "
                    "from its reset, or use an environment in token ids"
                )
            bridge = self.bridge(name, {} if prompt is None else prompt.variables)
            found[name], shown = _schemas(made), _schemas(made, prompt)
            calls |= bool(shown)
            own |= set() if _begins_itself(made) else {name}
            resets |= {name} if _begins_itself(made) or isinstance(made, ObjectEnvironment) else set()
            for kind in KINDS if shown else ("user",):
                if wrong := bridge.check(kind):
                    raise BridgeError(f"no bridge over {kind} messages for environment {name}: {'; '.join(wrong)}")
            first = [QUESTION]  # other messages of its reset are checked when a conversation begins
            if prompt is not None and not _begins_itself(made):
                first = _question_of(prompt, name)
            _check_first(bridge, first, shown, name)
        parses = self.tokenizer is not None and (tool_parser is not None or calls)
        own_options: dict[str, Any] = {"own_prompts": frozenset(own), "own_resets": frozenset(resets)}
        checked = replace(
            self, tool_parser=tool_parser, parses=parses, schemas=found, **own_options, _measured=[], _parsers={}
        )
        checked.parser({} if prompt is None else prompt.variables)
        return checked


def factories_of(source: EnvironmentSource | Sequence[Tool]) -> dict[str, Factory]:
    """Return the environments of a source by name.

    Raises:
        ValueError: If a factory or a tool is invalid; says which.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        _check_tools(source)
        return {DEFAULT: partial(ToolEnvironment, tuple(source))}
    named: dict[str, Any] = dict(source) if isinstance(source, Mapping) else {DEFAULT: source}
    if not named:
        raise ValueError("expected an environment or several by name, got an empty mapping: pass environment=None")
    for name, factory in named.items():
        _check_factory(name, factory)
    return named


def _check_tools(tools: Sequence[Any]) -> None:
    if not tools or not all(map(callable, tools)):
        raise ValueError(
            f"expected tools to be a list of at least one function, got {tools!r:.200}: pass functions, or "
            "JsonTool(function, schema)"
        )


def _check_factory(name: Any, factory: Any) -> None:
    """Check that a factory can create the environment of a name, without arguments.

    Raises:
        ValueError: If not; says what to pass.
    """
    if not (isinstance(name, str) and name) or "/" in name:
        raise ValueError(
            f"expected a name without / for each environment, as the column of the data has it, got {name!r}: its "
            "metrics are env/<name>/..."
        )
    if not callable(factory):
        cure = "pass the class itself, or a lambda that makes one"
        if isinstance(factory, str):
            cure = "pass the class itself, or its name with its module, such as my_package.Guess"
        raise ValueError(
            f"expected environment {name} to be a class or a function that makes one for each conversation, got "
            f"{factory!r:.200}: {cure}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        got = name_of(factory)
        tool = "" if isinstance(factory, type) else f", [{got}] if it is a tool, or Program({got}) if it is a program"
        raise ValueError(
            f"expected environment {name} to be made without arguments for each conversation, got "
            f"{got}, {error}: pass functools.partial({got}, ...) or a lambda{tool}"
        ) from error


def _check_first(bridge: Bridge, messages: Sequence[Message], schemas: Sequence[Any], name: str) -> None:
    """Check that the template writes the first messages of an environment and its tools."""
    try:
        bridge.check_parts(messages, schemas)
    except BridgeError as error:
        raise BridgeError(f"no first prompt for environment {name}: {error}") from error


def messages_of(prompt: Prompt) -> Sequence[Message]:
    """Return the prompt of a row as chat messages; empty for token ids."""
    if isinstance(prompt.content, str):
        return [{"role": "user", "content": prompt.content}]
    content = prompt.content if isinstance(prompt.content, Sequence) else ()
    return [message for message in content if isinstance(message, Mapping)]


def _question_of(prompt: Prompt, name: str) -> Sequence[Message]:
    """Return the prompt of a row as chat messages.

    Raises:
        ValueError: If it ends with an answer that the policy should continue.
    """
    messages = messages_of(prompt)
    if messages and messages[-1].get("role") == "assistant":
        raise ValueError(
            f"expected prompts that end with a question for environment {name}, got an answer at the end of prompt "
            f"{prompt.index}, which is continued only without an environment: remove it, as with preprocess="
        )
    return messages


def _schemas(environment: Environment, prompt: Prompt | None = None) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of an environment's tools, or else those of a row."""
    schemas = environment.schemas if isinstance(environment, RemoteEnvironment) else schemas_of(environment.tools)
    return schemas or ([] if prompt is None else prompt.variables.get(TOOLS, []))


def _begins_itself(environment: Environment) -> bool:
    return environment.begins_itself if isinstance(environment, RemoteEnvironment) else begins_itself(environment)
