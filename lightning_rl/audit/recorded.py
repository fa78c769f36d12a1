"""What the audit writes down while a run samples and scores: engine and reward calls."""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_rl.generation import Completion, Engine, Request, request_seed
from lightning_rl.rewards import Rewards

MAX_BATCHES = 64


class RewardCall(NamedTuple):
    """One call of one reward function; what is not plain is left out of saved files.

    Attributes:
        name: of the function.
        completion_ids: as it was given them.
        values: as it gave them.
        seconds: how long it took.
        prompts: as it was given them.
        completions: as it was given them.
        columns: as it was given them.
        function: itself.
    """

    name: str
    completion_ids: Sequence[Sequence[int]]
    values: Sequence[float | None]
    seconds: float
    prompts: Sequence[Any] = ()
    completions: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    function: Callable[..., Any] | None = None


class RecordedRewards:
    """Keeps what reward functions were given and said, until somebody takes it.

    Args:
        rewards: of the run; its functions are wrapped until :meth:`release`.
    """

    def __init__(self, rewards: Rewards) -> None:
        self._rewards, self._own = rewards, dict(rewards.functions)
        self._calls: list[RewardCall] = []
        rewards.functions.update({name: self._recorded(name, function) for name, function in self._own.items()})

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def called(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> Any:
            begin = time.perf_counter()
            given = function(prompts, completions, completion_ids=completion_ids, **columns)
            seconds, values = time.perf_counter() - begin, list(given)
            plain = [None if value is None else float(value) for value in values]
            call = RewardCall(name, completion_ids, plain, seconds, prompts, completions, columns, function)
            self._calls.append(call)
            return values

        return called

    def take(self) -> list[RewardCall]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def release(self) -> None:
        """Puts the functions back."""
        self._rewards.functions.update(self._own)


class RecordedEngine:
    """Keeps what an engine was last asked and returned.

    Args:
        engine: of the run; its ``generate`` is wrapped until :meth:`release`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, generate = engine, engine.generate
        self._batches: deque[list[tuple[Request, Completion]]] = deque(maxlen=MAX_BATCHES)

        def recorded(requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
            completions = generate(requests, logprobs=logprobs)
            self._batches.append(list(zip(requests, completions, strict=False)))
            return completions

        engine.generate = recorded

    def batches_of(self, seed: int, number: int) -> list[list[tuple[Request, Completion]]]:
        """What was drawn for a rollout, batch by batch; a request's seed says which rollout it is for.

        Args:
            seed: of the run.
            number: of the rollout.
        """
        batches = [
            [pair for pair in batch if pair[0].seed == request_seed(seed, number, pair[0].sample_id)]
            for batch in list(self._batches)  # at once, because a thread may be adding others
        ]
        return [batch for batch in batches if batch]

    def release(self) -> None:
        """Puts the method back."""
        vars(self._engine).pop("generate", None)
