"""Interface between the training loop and an engine: requests, capabilities and states."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.distributed import process_objects
from lightning_rl.generation.in_flight import InFlight
from lightning_rl.generation.sessions import Asked, Checks, Episode, Sessions, give_all
from lightning_rl.policy.module_values import ModuleValues
from lightning_rl.samples import Completion, Request

Value = TypeVar("Value")
FORMER = {"_take": "load_stream", "_draw": "generate_batch"}
LINGER = 5.0  # seconds that a round waits for late requests, so that a batch hardly depends on timing


class EngineError(RuntimeError):
    """Failure of the engine. The run stops after a checkpoint and can be resumed."""


class EngineState(Enum):
    """State of an engine: asleep (memory released), awake (weights unknown) or synced (has the trainer's weights)."""

    ASLEEP = "asleep"
    AWAKE = "awake"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of an engine, known before it is started.

    Args:
        returns_logprobs: Completions can contain log-probabilities.
        filters: Supports top-k, top-p and min-p, with log-probabilities of the filtered distribution.
        scores: Implements :meth:`Engine.score`.
        extras: Names of the extras that completions can contain, see :meth:`Engine.select_extras`.
        lists_masks: Stores the sampling mask of every request as a list of token ids, which is too large for a request
            without a filter.
        shares_policy: Decodes with the module passed to ``start``, so it needs a copy only if the policy is sharded or
            trains meanwhile.
        syncs_while_generating: Can load weights while it generates; the tokens of a completion then differ in version.
        concurrent: Several threads can call ``generate`` without waiting for each other; ``close`` interrupts them.
        sleeps: Releases its memory between a rollout and the next sync.
        generates_ahead: Generates at full speed while the policy trains.
        collective: Ranks share one engine, so every rank has to call :meth:`Engine.generate`.
        max_rows: Maximum number of rows that decode together; None without a limit.
        cuts_short: A response can finish with LENGTH before ``max_new_tokens``, by a limit of the engine.
        pictures: Reads the pictures of :attr:`Request.media`.
        temperatures: Lowest temperature above 0, and highest one.
    """

    returns_logprobs: bool = True
    filters: bool = False
    scores: bool = False
    extras: frozenset[str] = frozenset()
    lists_masks: bool = False
    shares_policy: bool = False
    syncs_while_generating: bool = False
    concurrent: bool = False
    sleeps: bool = False
    generates_ahead: bool = True
    collective: bool = False
    max_rows: int | None = None
    cuts_short: bool = False
    pictures: bool = False
    temperatures: tuple[float, float] = (0.0, float("inf"))


class Engine(ABC):
    """Base class of engines, of which a subclass overrides :meth:`load_stream` and :meth:`generate_batch`.

    An engine generates only while it has the trainer's weights.

    Attributes:
        capabilities: Capabilities, set by a subclass on the class or in its constructor.
        canary: :class:`.Canary` that checks each sync of an engine that holds a copy; None to skip it.
        holds_copy: True if the weights are a copy of the trainer's, so that a sync can fail; set by the first sync.
        extras: Names of the extras in each completion.
        top_logprobs: Number of likeliest tokens of the extras ``top_ids`` and ``top_logprobs``; None for all.
        dtype: Dtype of its weights once started; None for that of the trainer.
        allows_tf32: True if it may compute float32 products in TF32 by default; set by ``start``.
        max_length: Maximum length of prompt and response together, set by ``start``; None without a limit.
        started: True from :meth:`start` to :meth:`end_stage` or :meth:`close`.
        state: Current state.
        version: Version of its weights.
        pushed: Versions of all weights that were loaded.
        environment_threads: Number of threads for environments while it generates; 0 for the thread that called it.
        in_flight: Requests that are not answered yet. :meth:`generate` adds its requests while it runs; an engine that
            answers some earlier discards those.
    """

    capabilities: Capabilities = Capabilities()
    canary: Any = None
    holds_copy: bool = False
    extras: frozenset[str] = frozenset()
    top_logprobs: int | None = None
    dtype: torch.dtype | None = None
    allows_tf32: bool = False
    max_length: int | None = None
    environment_threads: int = 0

    def __init_subclass__(cls) -> None:
        """Refuse methods under names that nothing calls any longer."""
        super().__init_subclass__()
        for former, name in FORMER.items():
            if former in vars(cls):
                raise ValueError(f"expected {cls.__name__} to define {name}, got {former}, its former name: rename it")

    def __init__(self) -> None:
        self.started = False
        self.state = EngineState.ASLEEP
        self.version = -1
        self.pushed: set[int] = set()
        self.in_flight = InFlight()

    def select_extras(self, names: frozenset[str]) -> None:
        """Set the extras that every completion has to contain. Called before ``start``.

        Raises:
            ValueError: If the engine does not support one of them.
        """
        if unknown := sorted(names - self.capabilities.extras):
            possible = sorted(self.capabilities.extras) or "nothing"
            raise ValueError(f"expected to record {possible}, got {unknown[0]}")
        self.extras = names

    def check_memory(  # noqa: B027  most engines take no share of the trainer's device
        self, model: PreTrainedModel, *, dtype: torch.dtype, resident: float
    ) -> None:
        """Check before each start that the engine fits on the device beside the trainer.

        Args:
            model: Policy.
            dtype: Dtype in which the run computes.
            resident: Bytes that the trainer holds while the engine is awake, optimizer states included.

        Raises:
            ValueError: If it does not fit; names the option to pass.
        """

    def start(  # noqa: B027  an engine may have nothing to build
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Build the part that generates. Called once the process group exists, before the first sync of each stage.

        Args:
            model: Policy, or a copy of it for an engine that decodes with the model itself.
            tokenizer: Tokenizer of the policy.
            device: Device of the trainer on this rank.
            dtype: Dtype in which the run computes: half precision under a mixed precision of the Trainer, otherwise
                that of the weights.
        """

    def expect(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027  most engines take any names
        """Compare the names and shapes of the synced tensors with the engine's, once before the first sync.

        Iterates over the whole stream or not at all.

        Raises:
            ValueError: If a tensor differs; names the first one.
        """

    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        """Return the log-probability of every token but the first of each row, at temperature 1.

        Raises:
            NotImplementedError: If the engine only generates.
        """
        raise NotImplementedError(f"{type(self).__name__} only generates")

    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        """Return the log-probabilities of one row for each copy of the weights in the engine, by a name of the copy."""
        return {"": self.score([ids])[0]}

    def record_modules(self) -> AbstractContextManager[ModuleValues]:
        """Return a context manager that records the values of the engine's modules while it generates.

        Rows are the requests in the order in which they are generated, without completions that end early.

        Raises:
            NotImplementedError: If the engine's model is not in this process.
        """
        raise NotImplementedError(f"{type(self).__name__} has no model in this process")

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint, with which a resumed run generates the same bits."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  most engines have no state
        """Load a :meth:`state_dict`, empty if the checkpoint has none, or one of an engine of another class."""

    @abstractmethod
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the full weights. Called by :meth:`load_weights`.

        Args:
            weights: Name and value of one parameter at a time; other ranks take part in gathering them, so iterate to
                the end even if an engine ignores them.
            version: Version of the weights; :attr:`version` is still the one before.
        """

    @abstractmethod
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Return one completion for each request, in order. Called by :meth:`generate`.

        Args:
            requests: Requests; each brings its sampling parameters, EOS ids and seed.
            logprobs: True if completions have to contain log-probabilities.

        Raises:
            EngineError: If the engine fails; a completion that finishes with ABORT is the failure of one sample.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the trainer's weights; afterwards the engine is synced.

        The stream is read to its end in any case, because other ranks take part in gathering it.

        Raises:
            EngineError: If :meth:`load_stream` returned before the end of the stream.
        """
        if not (self.capabilities.syncs_while_generating and self.state is EngineState.SYNCED):
            self.wake()
        self.pushed.add(version)  # before loading: tokens may come from these weights before the last rank is done
        stream = chain(weights)  # has no close(), with which a loop that ends early would end the stream
        try:
            self.load_stream(stream, version)
            if (unread := sum(1 for _ in stream)) > 0:
                raise EngineError(
                    f"expected {type(self).__name__}.load_stream to read all weights, got {unread} that it left: "
                    "iterate to the end of the stream"
                )
        except BaseException as error:
            self.state = EngineState.AWAKE
            if isinstance(error, Exception):
                deque(stream, maxlen=0)
            raise
        self.state, self.version = EngineState.SYNCED, version

    def generate(self, requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
        """Return one completion for each request, in order.

        Raises:
            EngineError: If the number of completions is wrong.
            RuntimeError: If the engine is not synced.
            ValueError: If a request has a filter that the engine does not support.
        """
        self._check_requests(requests)
        self._check_state()
        with self.in_flight.holding(requests, self.version):
            completions = self.generate_batch(requests, logprobs=logprobs)
        if len(completions) != len(requests):
            raise EngineError(
                f"expected {len(requests)} completions from {type(self).__name__}, one for each request, got "
                f"{len(completions)}: answer every request once, in order, with ABORT for failed ones"
            )
        return completions

    def converse(
        self,
        episodes: Sequence[Episode],
        *,
        logprobs: bool = False,
        answers: Checks | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Run open samples, whose requests are not all known from the start, to their end.

        A completion does not depend on the schedule or on other requests. Every rank that shares a collective engine
        (:attr:`Capabilities.collective`) has to call it, even without samples.

        Args:
            episodes: Coroutine functions, which get a :class:`.Session`.
            logprobs: True if completions have to contain log-probabilities.
            answers: Checks of the completions; None for no checks.
            executor: Threads that run environments in parallel; None for :attr:`environment_threads` threads.

        Raises:
            RuntimeError: If the engine is not synced.
            ValueError: If a request has a filter that the engine does not support.
        """
        self._check_state()
        threads = None
        if executor is None and self.environment_threads:
            executor = threads = ThreadPoolExecutor(self.environment_threads, thread_name_prefix="turn")
        try:
            with self.serving():
                Sessions(answers, executor).run(partial(self.serve, logprobs=logprobs), episodes)
        finally:
            if threads is not None:
                threads.shutdown()

    def serving(self) -> AbstractContextManager[object]:
        """Return the context of the thread that calls :meth:`converse`, which also ends requests after an error."""
        return nullcontext()

    async def serve(self, sessions: Sessions, *, logprobs: bool) -> None:
        """Answer open samples in rounds; a request that arrives too late joins the next round.

        The last bits of log-probabilities may depend on the batch, so a round waits for late requests: :data:`LINGER`
        seconds, or as long as the previous round took. An engine that overrides this method adds its requests to
        ``in_flight``.
        """
        linger, shared = LINGER, self.capabilities.collective
        while True:
            failure, asked = None, list[Asked]()
            try:
                asked = await sessions.round(linger)
            except Exception as error:  # noqa: BLE001  raised below, once every rank knows
                failure = error
            number = None if failure is not None else len(asked)
            numbers = await sessions.here(self._across, number) if shared else [number]
            if failure is not None:
                raise failure
            if None in numbers:
                raise EngineError(
                    "expected every rank that shares the engine to continue its conversations, but they failed on "
                    f"rank {numbers.index(None)} of {len(numbers)}: see its error"
                )
            if not any(numbers):
                return
            begin, requests = time.perf_counter(), [each.request for each in asked]
            give_all(asked, await sessions.here(partial(self.generate, requests, logprobs=logprobs)))
            linger = max(LINGER, time.perf_counter() - begin)

    def _across(self, value: Value) -> list[Value]:
        """Return the value of each rank that shares this engine. Every rank has to call it."""
        return process_objects(value) if self.capabilities.collective else [value]

    def _check_requests(self, requests: Sequence[Request]) -> None:
        if not self.capabilities.filters and any(request.sampling.filters for request in requests):
            raise ValueError(f"expected requests without top_k, top_p and min_p, which {type(self).__name__} ignores")

    def _check_state(self) -> None:
        if self.state is not EngineState.SYNCED:
            raise RuntimeError(f"expected a synced engine, got one that is {self.state.value}: call load_weights first")

    def wake(self) -> None:
        """Allocate memory after sleep; the weights then count as unknown."""
        self.state = EngineState.AWAKE

    def sleep(self) -> None:
        """Release memory; the engine needs new weights before it generates again."""
        self.state = EngineState.ASLEEP

    def end_stage(self) -> None:
        """Close at the end of a stage of the Trainer. An engine that is slow to build sleeps instead."""
        self.close()

    def close(self) -> None:
        """Close the engine."""
        self.started, self.state = False, EngineState.ASLEEP
        if self.canary is not None:
            self.canary.forget()
