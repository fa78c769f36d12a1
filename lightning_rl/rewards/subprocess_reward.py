"""Rewards in separate processes, which may crash, hang or leak without harm to the run."""

import asyncio
import inspect
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import cloudpickle
from lightning.pytorch.utilities import rank_zero_info
from transformers import TrainerState

from lightning_rl.processes.errors import DEATH
from lightning_rl.processes.pool import Pool, dump
from lightning_rl.processes.ray_pool import RayWorkers, pool_of
from lightning_rl.processes.timeouts import CLOCK, RewardTimeoutError
from lightning_rl.rewards.reward_call import EXTRAS, Reward
from lightning_rl.rewards.submitted import Submitted
from lightning_rl.samples import Rows
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.utils.naming import name_of
from lightning_rl.utils.tracing import carrier

STARTING = threading.Lock()  # concurrent rollouts may start their rewards at the same time


class SubprocessReward:
    """Reward in a pool of processes; a hanging process is killed and replaced, a crash fails only its rows.

    The processes start at the first call and stay until the trainer exits; they see no GPU. Each process has its own
    state of the reward. Arguments and results are pickled by cloudpickle, so lambdas, closures and functions of the
    main script work. For cheap functions the transfer takes longer than the call. Calls start as soon as there are
    completions, also for prefetched rollouts, unless the reward takes ``trainer_state``.

    Args:
        reward: Any reward function.
        processes: Number of processes, or :class:`RayWorkers` for processes on the nodes of a Ray cluster.
        seconds: Time limit of a call on all rows; with ``per_sample``, of a call on one row. Loading the reward in a
            process has a limit of 120 s.
        per_sample: Call the reward on one row at a time, each a separate task; for a reward that does not compare rows.
        memory: Address space of each process in bytes; None for no limit.
        environment: Environment variables of the processes, added to those of the trainer; by default no GPU and one
            thread.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        processes: int | RayWorkers = 2,
        seconds: float = 60.0,
        per_sample: bool = False,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not callable(reward) or isinstance(reward, type):
            raise ValueError(
                f"expected reward to be a function, got {reward!r:.200}: put a weight beside SubprocessReward, as in "
                '{"name": (SubprocessReward(function), 0.5)}'
            )
        known = isinstance(environment, Mapping | None)
        if not known or not all(isinstance(text, str) for pair in (environment or {}).items() for text in pair):
            raise ValueError(
                f'expected environment to map names to strings, such as {{"HOME": "/tmp"}}, got {environment!r}'
            )
        if not isinstance(processes, RayWorkers):
            check_counts(1, processes=processes)
        check_counts(1, optional=True, memory=memory)
        check_numbers(above=0, finite=True, seconds=seconds)
        self.reward, self.processes, self.seconds = reward, processes, seconds
        self.per_sample, self.memory, self.environment = per_sample, memory, dict(environment or {})
        self.__name__ = name_of(reward)
        self.__signature__ = inspect.signature(reward)
        self._pool: Pool | None = None

    def on(self, workers: RayWorkers) -> "SubprocessReward":
        """Return a copy whose processes are workers of a Ray cluster."""
        limits: dict[str, Any] = {"memory": self.memory, "environment": self.environment, "seconds": self.seconds}
        return SubprocessReward(self.reward, processes=workers, per_sample=self.per_sample, **limits)

    @property
    def starts_early(self) -> bool:
        """True if a call may start before the trainer state exists: the reward does not take ``trainer_state``."""
        return "trainer_state" not in self.__signature__.parameters

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Call the reward outside of a run and return its values; NaN and a warning for failed rows."""
        ids = columns.pop("completion_ids", [()] * len(prompts))
        columns = {name: values for name, values in columns.items() if name not in EXTRAS}
        rows = Rows(prompts=prompts, completions=completions, completion_ids=ids, columns=columns)
        call = self.submit(Submitted.of(self.__name__, self, rows))
        self.collect(call)
        for failure in call.finish().failures:
            text = f"reward {self.__name__} {failure.cause} for rows {list(failure.rows)}\n{failure.traceback}"
            warnings.warn(text.rstrip(), stacklevel=2)
        return call.values

    def submit(self, call: Submitted, state: TrainerState | None = None) -> Submitted:
        """Start a call and return it at once."""
        parts = [(row,) for row in call.all_rows] if self.per_sample else [call.all_rows]
        state = None if self.starts_early else state
        with STARTING:
            pool = self._start()
        with call.span.current():
            call.tasks = [(part, pool.submit(_task(call, part, state), self.seconds)) for part in parts]
        for _, future in call.tasks:
            future.add_done_callback(call.span.stop)
        return call

    def collect(self, call: Submitted) -> None:
        """Wait for a call."""
        begin, late, kind = time.perf_counter(), "was cancelled", DEATH
        try:
            CLOCK.run(lambda: wait([future for _, future in call.tasks]), None)
        except RewardTimeoutError as error:
            late, kind = str(error), error.kind
        except BaseException:  # Ctrl-C: at exit Python waits for the threads of the tasks
            self.close()
            raise
        call.seconds = time.perf_counter() - begin
        call.collect([future for _, future in call.tasks if not future.done() or future.cancelled()], late, kind)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()

    def pids(self) -> list[int]:
        """Process ids of the pool: server and workers, each with its guard."""
        return [] if self._pool is None else self._pool.pids()

    def _start(self) -> Pool:
        """Return the pool; pickle the reward at the first call."""
        if self._pool is None:
            function = dump(with_notes(self.reward), f"a reward {self.__name__}", "create its state inside of it")
            self._pool = pool_of(function, self.processes, memory=self.memory, environment=self.environment)
            place = " of the Ray cluster" if isinstance(self.processes, RayWorkers) else ""
            rank_zero_info(f"reward {self.__name__} runs in {self._pool.processes} separate processes{place}")
        return self._pool


def with_notes(function: Reward) -> Callable[..., tuple[Any, list[tuple[str, Any]], list[tuple[str, float]]]]:
    """Return a function that calls a reward and returns its result with the extras and metrics that it logs.

    It is nested, and thus pickled by value: a process loads the reward without this library, which takes seconds.
    """

    def call(arguments: Any, keywords: Any, extras: Any, rows: int) -> Any:
        async def result_of(awaitable: Any) -> Any:
            return await awaitable

        columns, metrics = [], []
        known = {
            "log_extra": lambda column, values: columns.append((str(column), list(values))),
            "log_metric": lambda name, value: metrics.append((str(name), float(value))),
        }
        returned = function(*arguments, **keywords, **{name: known[name] for name in extras if name in known})
        if inspect.isawaitable(returned):
            returned = asyncio.run(result_of(returned))
        if hasattr(returned, "__next__"):
            returned = list(itertools.islice(returned, rows + 1))
        return returned, columns, metrics

    return call


def _task(call: Submitted, part: Sequence[int], state: TrainerState | None) -> bytes:
    """Return the pickled arguments of a call on some of its rows."""
    rows, style, given = call.rows.select(part), call.style, dict[str, Any]()
    if "trainer_state" in style.extras and state is not None:
        given["trainer_state"] = SimpleNamespace(
            global_step=state.global_step, max_steps=state.max_steps, epoch=state.epoch
        )
    arguments, keywords = style.arguments(rows, given)
    try:
        return cloudpickle.dumps(((arguments, keywords, sorted(style.extras), len(rows)), {}, carrier()))
    except Exception:
        for name, values in rows.columns.items():
            dump(values, f"a column {name}", "pass plain values to a SubprocessReward")
        raise
