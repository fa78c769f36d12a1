"""Engine: what the loop asks of whoever generates, what an engine can do, and the states that it can be in."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.distributed import process_objects
from lightning_rl.generation.in_flight import InFlight
from lightning_rl.generation.sampling import Sampling
from lightning_rl.rollout import Finish

Value = TypeVar("Value")
LINGER = 5.0  # seconds that a round waits for the late, so that who takes part does not depend on time but for worse


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to draw. Its random numbers come from its own seed, so not from the batch that it is drawn in.

    Args:
        prefix_ids: the token ids to continue, at least one.
        sample_id: identity of the sample, unchanged when it is retried.
        seed: 31 bits, see :func:`request_seed`.
        sampling: how its tokens are drawn; ``eos_token_ids`` says which ones, if any, and is not None.
        turn: number of the turn in a conversation.
        rollout: that it is for; where requests have to wait, those of the lowest are drawn first.

    Raises:
        ValueError: if there is no prompt, or nobody has said which ids end a response.
    """

    prefix_ids: tuple[int, ...]
    sample_id: int
    seed: int
    sampling: Sampling
    turn: int = 0
    rollout: int = 0

    def __post_init__(self) -> None:
        """Checks what every engine relies on."""
        if not self.prefix_ids:
            raise ValueError(f"expected a prompt of at least one token for sample {self.sample_id}, got none")
        if self.sampling.eos_token_ids is None:
            raise ValueError(f"expected eos_token_ids, which may be empty, for sample {self.sample_id}, got None")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end the response, in ascending order."""
        return tuple(self.sampling.eos_token_ids or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine drew for a request.

    Args:
        token_ids: the response, EOS included when it was sampled.
        logprobs: log-probability of each under the distribution it was drawn from, float32; None if not asked for.
        finish: why it ended, as the engine knows it; ABORT for a sample that it gave up, which does not train.
        version: of the weights, pinned before the request was sent.
        versions: of the weights that each token was drawn from, where a sync came in between; None if all are
            ``version``.
        token_extras: what else is known about each token, by name, [L, ...]; see :meth:`Engine.select_extras`.
        prompt_extras: what is known about each token of the prompt, by name, [P, ...].
        sample_id: of the request that it answers, so that answers in another order are noticed; None if the engine does
            not say.

    Raises:
        ValueError: if there are not as many versions as tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: Float[Tensor, " L"] | None
    finish: Finish
    version: int
    versions: tuple[int, ...] | None = None
    token_extras: Mapping[str, Shaped[Tensor, "L ..."]] = field(default_factory=dict)
    prompt_extras: Mapping[str, Shaped[Tensor, "P ..."]] = field(default_factory=dict)
    sample_id: int | None = None

    def __post_init__(self) -> None:
        """Checks what the loop relies on."""
        sized = isinstance(self.versions, Sequence) and isinstance(self.token_ids, Sequence)  # others are refused later
        if sized and self.versions is not None and len(self.versions) != len(self.token_ids):
            raise ValueError(f"expected a version for each of {len(self.token_ids)} tokens, got {len(self.versions)}")


class EngineError(RuntimeError):
    """The engine cannot generate any more, through no fault of the run, which may go on from where it stands."""


class Exchange(Protocol):
    """What an engine draws for that does not know all requests from the start: the turns of conversations.

    One thread takes; any may give and fail.
    """

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        """The requests that have come up since the last call.

        Args:
            wait: for one at least; otherwise there may be none yet.
            linger: seconds to wait for others that may still come, once there is one.

        Returns:
            Requests; none, after waiting, if none will come any more.

        Raises:
            BaseException: what :meth:`fail` was told.
        """
        ...

    def give(self, request: Request, completion: Completion) -> None:
        """Hands back what was drawn for a request."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends it, with an error of another thread than the one that takes."""
        ...


class SyncProof(Protocol):
    """What proves syncs, and remembers the last one."""

    def forget(self) -> None:
        """Forgets it, because the engine ends."""
        ...


class EngineState(Enum):
    """Asleep: holds no memory. Awake: could generate, but from which weights? Synced: holds the trainer's weights."""

    ASLEEP = "asleep"
    AWAKE = "awake"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do, known before it is started.

    Args:
        returns_logprobs: completions can carry log-probabilities.
        filters: top-k, top-p and min-p are kept to; log-probabilities then are of what is left.
        scores: :meth:`Engine.score` works.
        extras: what completions can carry about their tokens besides, by name; see :meth:`Engine.select_extras`.
        lists_masks: while it records sampling masks, it holds those of every request as lists of token ids, which are
            too large for a request without a filter.
        shares_policy: it decodes with the module that it is started with, so it needs a copy only of a policy that is
            sharded or trains meanwhile.
        syncs_while_generating: it may take weights while it generates; a completion's tokens then differ in version.
        concurrent: several threads may have it generate at a time, none of which waits for another, and closing it cuts
            all of them short.
        sleeps: it gives its memory back between a rollout and the next sync.
        generates_ahead: it generates at full speed while the policy trains.
        collective: ranks draw from one engine together, so all have to call :meth:`Engine.generate` alike.
        max_rows: that decode together; None for no limit of its own.
        cuts_short: a response may end for its length before ``max_new_tokens``, by a limit of the engine's own.
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


class Engine(ABC):
    """Generates for the loop, and refuses to unless it holds the trainer's weights.

    Attributes:
        capabilities: what it can do; a subclass says so, for the class or in its constructor.
        canary: proves each sync of an engine that holds a copy, see :class:`.weights.canary.Canary`; None for no proof.
        holds_copy: whether its weights are a copy of the trainer's, so that a sync can go wrong; known after the first.
        extras: what completions carry about their tokens, by name.
        dtype: of its weights, once it is started; None for that of the trainer.
        allows_tf32: whether it may compute products of float32 in TF32 without being told to, once it is started.
        max_length: of prompt and response together, once it is started; None for no limit.
        block_size: tokens that its prefix cache keeps together, once it is started; 0 without such a cache.
        started: whether :meth:`start` was called since the last :meth:`end_stage` or :meth:`close`.
        state: asleep, awake or synced.
        version: of the weights it holds.
        pushed: versions of all weights that it was given.
        conversing: whether it is in the midst of :meth:`converse`.
        in_flight: what it has been asked for and has not answered. :meth:`generate` counts its requests as long as it
            draws; an engine that answers some before others discards those.
    """

    capabilities: Capabilities = Capabilities()
    canary: SyncProof | None = None
    holds_copy: bool = False
    extras: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    allows_tf32: bool = False
    max_length: int | None = None
    block_size: int = 0

    def __init__(self) -> None:
        self.started = False
        self.state = EngineState.ASLEEP
        self.version = -1
        self.pushed: set[int] = set()
        self.conversing = False
        self.in_flight = InFlight()

    def select_extras(self, names: frozenset[str]) -> None:
        """Says before the start what every completion has to carry in its extras.

        Raises:
            ValueError: if one of them is not among what it can.
        """
        possible = self.capabilities.extras
        if unknown := sorted(names - possible):
            raise ValueError(f"expected to record {sorted(possible) or 'nothing'}, got {unknown[0]}")
        self.extras = names

    def check_memory(  # noqa: B027  most engines take no share of the trainer's device
        self, model: PreTrainedModel, *, dtype: torch.dtype, resident: float
    ) -> None:
        """Check before each start that the engine fits on the device beside the trainer.

        Args:
            model: policy.
            dtype: dtype in which the run computes.
            resident: bytes that the trainer holds while the engine is awake: weights, reference, and the states of the
                optimizer, which its first step makes.

        Raises:
            ValueError: with the option to pass.
        """

    @abstractmethod
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Build the part that generates. Called once the process group exists, before the first sync of each stage.

        Args:
            model: policy, or a copy of it for an engine that decodes with the model itself.
            tokenizer: tokenizer of the policy.
            device: device of the trainer on this rank.
            dtype: dtype in which the run computes: half precision under a mixed precision of the Trainer, else that of
                the weights.
        """

    def expect(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027  most engines take any names
        """Compares the names and shapes that syncs will bring with its own, once, before the first.

        Reads the stream to its end or not at all.

        Raises:
            ValueError: naming the first tensor that differs.
        """

    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        """Log-probability of every token of each row but the first, given all before, at temperature 1.

        Raises:
            NotImplementedError: if the engine only generates.
        """
        raise NotImplementedError(f"{type(self).__name__} only generates")

    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        """The same for one row, by every copy of the weights that the engine has, under a name for each."""
        return {"": self.score([ids])[0]}

    def count_cached_tokens(self, ids: Sequence[int]) -> int:
        """Runs a prompt, which then is cached, and says how many tokens of it came out of the prefix cache."""
        del ids
        return 0

    def layer_outputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What each layer puts out for a prompt, by name; empty if unknown."""
        del ids
        return {}

    @abstractmethod
    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Loads the full weights, one parameter at a time, under their version."""

    @abstractmethod
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Draws one completion for each request, in their order.

        What comes back is held against the requests (:mod:`lightning_rl.generation.answers`) before it trains.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes over the trainer's weights under a version number; afterwards the engine is synced.

        Raises:
            RuntimeError: in the midst of conversations, if the engine takes weights only while it is idle: between two
                turns nothing is being drawn, and yet nothing has ended.
        """
        if self.conversing and not self.capabilities.syncs_while_generating:
            raise RuntimeError(
                f"expected conversations to have ended before {type(self).__name__} takes weights, got version "
                f"{version} in the midst of some: wait for them"
            )
        if not (self.capabilities.syncs_while_generating and self.state is EngineState.SYNCED):
            self.wake()
        self.pushed.add(version)  # first: while it generates, tokens may come from them before the last rank is done
        try:
            with refuse_exit(self, "weights to be loaded"):
                self._take(weights, version)
        except BaseException:
            self.state = EngineState.AWAKE
            raise
        self.state, self.version = EngineState.SYNCED, version

    def generate(self, requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
        """One completion for each request, in their order.

        Raises:
            RuntimeError: if the engine is not synced.
            ValueError: if a request has a filter that the engine would ignore.
            EngineError: if it would end the program.
        """
        self._check_requests(requests)
        self._check_state()
        with refuse_exit(self, "completions"), self.in_flight.holding(requests, self.version):
            return self._draw(requests, logprobs=logprobs)

    def converse(self, exchange: Exchange, *, logprobs: bool = False) -> None:
        """Draws for an exchange until nobody there asks any more, in the way that suits the engine.

        What is drawn for a request depends neither on the way nor on what else is drawn. Ranks that share an engine
        (:attr:`Capabilities.collective`) all call it, those without requests as well.

        Raises:
            RuntimeError: if the engine is not synced.
            ValueError: if a request has a filter that the engine would ignore.
        """
        self._check_state()
        self.conversing = True
        counted = _Counted(exchange, self)
        try:
            self._converse(counted, logprobs=logprobs)
        finally:
            self.conversing = False
            counted.end()

    def _converse(self, exchange: Exchange, *, logprobs: bool) -> None:
        """In rounds: who asks draws together, and who comes too late joins the next.

        The last bits of log-probabilities may depend on who is in a batch, so a round waits for the late for a while:
        :data:`LINGER` seconds, or as long as the round before took to draw.
        """
        linger, requests, completions = LINGER, list[Request](), list[Completion]()
        while True:
            failure = None
            try:
                give_all(exchange, requests, completions)
                requests = exchange.take(linger=linger)
            except Exception as error:  # noqa: BLE001  raised below, once every rank knows
                failure = error
            if not self._agree(len(requests), failure):
                return
            begin = time.perf_counter()
            completions = self.generate(requests, logprobs=logprobs)
            linger = max(LINGER, time.perf_counter() - begin)

    def _agree(self, number: int, failure: Exception | None) -> bool:
        """Whether anybody who shares this engine has a number of requests; ranks without any take part with none."""
        numbers = self._across(None if failure is not None else number)
        if failure is not None:
            raise failure
        if None in numbers:
            raise EngineError(
                "expected every rank that shares the engine to go on with its conversations, but they failed on "
                f"rank {numbers.index(None)} of {len(numbers)}: see its error"
            )
        return any(numbers)

    def _across(self, value: Value) -> list[Value]:
        """What each rank that shares this engine says; all of them call it."""
        return process_objects(value) if self.capabilities.collective else [value]

    def _check_requests(self, requests: Sequence[Request]) -> None:
        if not self.capabilities.filters and any(request.sampling.filters for request in requests):
            raise ValueError(f"expected requests without top_k, top_p and min_p, which {type(self).__name__} ignores")

    def _check_state(self) -> None:
        if self.state is not EngineState.SYNCED:
            raise RuntimeError(
                f"expected a synced engine, got one that is {self.state.value}: load_weights comes first"
            )

    def wake(self) -> None:
        """Takes memory again after sleep; the weights it then holds count as unknown."""
        self.state = EngineState.AWAKE

    def sleep(self) -> None:
        """Gives memory back; needs new weights before it generates again."""
        self.state = EngineState.ASLEEP

    def end_stage(self) -> None:
        """End with a stage of the Trainer; an engine that takes long to build sleeps until the next stage instead."""
        self.close()

    def close(self) -> None:
        """Ends the engine."""
        self.started, self.state = False, EngineState.ASLEEP
        if self.canary is not None:
            self.canary.forget()


class _Counted:
    """An exchange whose requests an engine counts as in flight, from when it takes them to when it gives them back."""

    def __init__(self, exchange: Exchange, engine: Engine) -> None:
        self._exchange, self._engine = exchange, engine
        self._open: dict[int, Request] = {}  # by their identity

    def take(self, *, wait: bool = True, linger: float = 0.0) -> list[Request]:
        requests = self._exchange.take(wait=wait, linger=linger)
        for request in requests:
            self._open[id(request)] = request
            self._engine.in_flight.add(request, self._engine.version)
        return requests

    def give(self, request: Request, completion: Completion) -> None:
        self._engine.in_flight.discard(request)
        self._open.pop(id(request), None)
        self._exchange.give(request, completion)

    def fail(self, error: BaseException) -> None:
        self._exchange.fail(error)

    def end(self) -> None:
        """Nothing more is drawn."""
        for request in self._open.values():
            self._engine.in_flight.discard(request)


@contextmanager
def refuse_exit(engine: Engine, expected: str) -> Iterator[None]:
    """An engine that ends the program, as a library of a command line does, has failed; the run says so.

    Raises:
        EngineError: naming the engine, in the place of SystemExit.
    """
    try:
        yield
    except SystemExit as ended:
        raise EngineError(
            f"expected {expected} from {type(engine).__name__}, got sys.exit({ended.code!r}), which would end the run "
            "in silence: raise an error that says what is wrong"
        ) from ended


def give_all(exchange: Exchange, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Hands back what was drawn for several requests, in their order.

    Raises:
        EngineError: if there is not one for each.
    """
    if not isinstance(completions, Sequence) or len(completions) != len(requests):
        got = f"{len(completions)}" if isinstance(completions, Sequence) else f"a {type(completions).__name__}"
        raise EngineError(
            f"expected {len(requests)} completions, one for each request, got {got}: an engine answers every request "
            "once, in their order, and says ABORT for what it cannot"
        )
    for request, completion in zip(requests, completions, strict=True):
        exchange.give(request, completion)


def request_seed(run_seed: int, rollout: int, sample_id: int) -> int:
    """A 31-bit seed that depends on the request alone, equal in every process.

    Example:
        >>> request_seed(0, 0, 0) == request_seed(0, 0, 0), request_seed(0, 0, 0) == request_seed(0, 0, 1)
        (True, False)
    """
    identity = repr((run_seed, rollout, sample_id, 0)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest(), "big") >> 1


def turn_seed(first: int, turn: int) -> int:
    """The 31-bit seed of a turn of a conversation, from that of its first turn, which is turn 0.

    Example:
        >>> turn_seed(5, 0), turn_seed(5, 1) == turn_seed(5, 1), turn_seed(5, 1) == turn_seed(5, 2)
        (5, True, False)
    """
    if turn == 0:
        return first
    identity = repr(("turn", first, turn)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest(), "big") >> 1
