"""Conversations: environments or tools of a run, and the limits of its conversations."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.data import PromptDataModule
from lightning_rl.environments.conversation import ConversationLimits
from lightning_rl.environments.parsing import ParserSource, check_source
from lightning_rl.environments.run_environments import Environments, EnvironmentSource, Factory, factories_of
from lightning_rl.environments.tools import Tool
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.policy.build import max_prompt_length
from lightning_rl.processes.ray_pool import RayWorkers
from lightning_rl.serialization import import_by_name
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.utils.places import MODULE, check_place


@dataclass(frozen=True)
class Conversations:
    """Conversations of several turns with environments or tools.

    Args:
        source: Class or function that creates an ``Environment`` for each conversation, a mapping from names to such
            factories, or a list of functions that the policy may call; see :class:`ToolEnvironment`. With a mapping,
            the data column ``environment`` selects the name.
        tool_parser: Parser of the policy's tool calls: ``"hermes"``, ``"json"``, a name known to the package
            ``renderers``, a response template of transformers, or a function. Default: derived from the chat template.
        max_turns: Maximum number of answers per conversation. ``sampling.max_new_tokens`` limits their tokens in total.
        max_turn_tokens: Maximum number of tokens per answer; None for no separate limit.
        workers: Number of concurrent conversations, each in a subprocess that is killed if its environment hangs, or
            :class:`RayWorkers` for subprocesses on the nodes of a Ray cluster; 0 runs all conversations in this
            process.
        step_timeout: Time limit in seconds of a reset or step in a subprocess.
        timeout: Time limit in seconds of a conversation in a subprocess, including its retry.
        max_failure_rate: The run ends with a checkpoint if at least this fraction of a rollout's conversations failed;
            None disables the check.

    Raises:
        ValueError: If an option is out of range.
    """

    source: EnvironmentSource | Sequence[Tool]
    _: KW_ONLY
    tool_parser: ParserSource | None = None
    max_turns: int = 8
    max_turn_tokens: int | None = None
    workers: int | RayWorkers = 0
    step_timeout: float = 60.0
    timeout: float = 600.0
    max_failure_rate: float | None = 0.5

    def __post_init__(self) -> None:
        """Check the options, and warn of timeouts without effect."""
        check_place(f"environment={MODULE}", self.source)
        check_counts(1, max_turns=self.max_turns)
        check_counts(1, optional=True, max_turn_tokens=self.max_turn_tokens)
        if not isinstance(self.workers, RayWorkers):
            check_counts(0, workers=self.workers)
        check_numbers(above=0, finite=True, step_timeout=self.step_timeout)
        check_numbers(at_least=self.step_timeout, finite=True, timeout=self.timeout)
        check_numbers(above=0, at_most=1, optional=True, max_failure_rate=self.max_failure_rate)
        for name in ("step_timeout", "timeout") if not self.workers else ():
            if getattr(self, name) != getattr(Conversations, name):
                warnings.warn(
                    f"{name}={getattr(self, name):g} has no effect, because environments run in this process: pass "
                    f"workers=, or remove {name}",
                    stacklevel=3,
                )

    @classmethod
    def of(cls, environment: Any) -> Self | None:
        """Return conversations for conversations, a source or None."""
        return environment if environment is None or isinstance(environment, cls) else cls(environment)

    def build(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        engine_length: int | None,
        close: Iterable[int],
        data: PromptDataModule | None,
        seed: int,
        workers: WorkerPool | None,
    ) -> Environments:
        """Return the environments of a run; check that the data and the chat template fit them.

        Args:
            model: Model of the policy.
            tokenizer: Tokenizer of the policy.
            engine_length: Maximum number of tokens of a sequence of the engine; None for no limit.
            close: Ids that end an answer.
            data: Data module of the run, connected to the tokenizer; None for no data.
            seed: Seed of the run.
            workers: Pool of :meth:`pool`.
        """
        lengths = [length for length in (max_prompt_length(model, 0), engine_length) if length is not None]
        limits = ConversationLimits(
            turns=self.max_turns,
            turn_tokens=self.max_turn_tokens,
            length=min(lengths, default=None),
            vocabulary=model.config.get_text_config().vocab_size,
        )
        environments = Environments(
            factories=self.factories,
            limits=limits,
            tokenizer=tokenizer,
            close=frozenset(close),
            template_options={} if data is None else data.template_options,
            seed=seed,
            workers=workers,
            max_failure_rate=self.max_failure_rate,
        )
        return environments.check(self.tool_parser, None if data is None else data.first())

    def resolve(self) -> Self:
        """Return a copy in which functions given by name are imported.

        Raises:
            ValueError: If a name, a factory, a tool or the parser is invalid.
        """
        source = import_by_name(environment=self.source)
        factories_of(source)
        return replace(self, source=source, tool_parser=check_source(import_by_name(tool_parser=self.tool_parser)))

    @property
    def factories(self) -> dict[str, Factory]:
        """Environments by name."""
        return factories_of(self.source)

    def pool(self) -> WorkerPool | None:
        """Return the pool of the subprocesses; None to run conversations in this process.

        Raises:
            ValueError: If a factory cannot be pickled.
        """
        if not self.workers:
            return None
        seconds = {"step_seconds": self.step_timeout, "conversation_seconds": self.timeout}
        return WorkerPool(self.factories, workers=self.workers, **seconds)
