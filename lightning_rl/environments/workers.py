"""Environments in worker processes, which are killed at a timeout and replaced when they die.

A conversation leases a worker of the pool (:mod:`lightning_rl.processes.pool`) from reset to close; processes that it
started are killed with it.
"""

import contextlib
import dataclasses
import os
import pickle
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from typing_extensions import override

from lightning_rl.environments.conversation import close_quietly
from lightning_rl.environments.environment import (
    Action,
    Environment,
    StepResult,
    TokenEnvironment,
    TokenStep,
    check_figures,
)
from lightning_rl.environments.outcome import FailedEnvironmentsError
from lightning_rl.environments.program import PolicyEndpoint, ProgramResult, result_of
from lightning_rl.environments.tools import begins_itself, schemas_of
from lightning_rl.environments.validation import check_reset, check_step, environment_of, name_of, plain
from lightning_rl.processes.errors import DEATH, INTERRUPT, TIMEOUT, CallError
from lightning_rl.processes.pool import STARTUP_SECONDS, Worker, dump
from lightning_rl.processes.ray_pool import RayWorkers, pool_of
from lightning_rl.processes.worker import adopt_orphans, children, reap
from lightning_rl.rollout import FinishReason
from lightning_rl.utils.tracing import carrier

UNLIMITED = 1e7  # seconds
CLOSE_SECONDS = 5.0  # for an environment to close after a failure


class Description(NamedTuple):
    """Properties of the environments of a factory.

    Attributes:
        uses_messages: True for messages, False for token ids.
        schemas: Schemas of their tools.
        begins_itself: True if they may begin with their own messages.
        name: Name of their class, for errors.
    """

    uses_messages: bool
    schemas: Sequence[Mapping[str, Any]]
    begins_itself: bool
    name: str


@dataclass(slots=True)
class Budget:
    """Seconds left for the environment of one sample, for both tries together."""

    left: float


class WorkerPool:
    """Worker processes for environments.

    Args:
        factories: Factories by name, pickled with cloudpickle, so lambdas and functions of the main script are
            supported.
        workers: Number of workers and thus of open conversations, on this machine or on a Ray cluster.
        step_seconds: Timeout of a reset or a step.
        conversation_seconds: Timeout of all resets and steps of a conversation, for both tries together.

    Attributes:
        pool: Pool of the processes.

    Raises:
        ValueError: If a factory cannot be pickled.
    """

    def __init__(
        self,
        factories: Mapping[str, Any],
        *,
        workers: int | RayWorkers,
        step_seconds: float = 60.0,
        conversation_seconds: float = 600.0,
    ) -> None:
        for name, factory in factories.items():
            advice = "create its state inside of it, or run with Conversations(workers=0)"
            dump(factory, f"a factory for environment {name}", advice)
        self.pool = pool_of(cloudpickle.dumps(Host(factories)), workers)
        self.pool.tries = 1  # a conversation starts over as a whole
        self.step_seconds, self.conversation_seconds = step_seconds, conversation_seconds
        self.descriptions: dict[str, Description] = {}

    def describe(self, name: str) -> Description:
        """Return the description of a factory's environments, from one created in a worker.

        Raises:
            ValueError: If none can be created; names the environment and the error.
        """
        if name not in self.descriptions:
            try:
                found = self.pool.submit(_task("describe", name), STARTUP_SECONDS).result()
            except CallError as error:
                raise ValueError(
                    f"expected environment {name} to be created in a worker process, got {error}\n{error.log}"
                ) from error
            self.descriptions[name] = Description(**pickle.loads(found))
        return self.descriptions[name]

    def open(self, name: str, budget: Budget) -> "RemoteEnvironment | RemoteTokenEnvironment":
        """Return an environment of a factory that runs in a worker from its reset to its close."""
        description = self.describe(name)
        kind = RemoteEnvironment if description.uses_messages else RemoteTokenEnvironment
        return kind(self, name, description, budget)

    def start(self, name: str, row: Mapping[str, Any], model: PolicyEndpoint) -> "Future[Any]":
        """Run a program for one sample in a worker, which is killed if the future is cancelled."""
        task = _task("run", name, dict(row), model)
        return self.pool.submit(task, UNLIMITED, lambda said: ProgramResult(**pickle.loads(said)))

    def budget(self) -> Budget:
        """Return the time of the environment of one sample."""
        return Budget(self.conversation_seconds)

    def executor(self) -> ThreadPoolExecutor:
        """Return an executor with a thread for every worker."""
        return ThreadPoolExecutor(self.workers, thread_name_prefix="environment")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.pool.processes

    def pids(self) -> list[int]:
        """Return the ids of all processes."""
        return self.pool.pids()

    def close(self) -> None:
        """End every process; later conversations start new ones."""
        self.pool.close()


class Host:
    """Runs one environment of the factories at a time, in a worker, and returns plain values."""

    def __init__(self, factories: Mapping[str, Any]) -> None:
        self._factories = factories
        self._environment: Environment | TokenEnvironment | None = None

    def __call__(self, call: str, *arguments: Any) -> bytes:
        """Call a method and return its pickled result; raise TypeError if it is not plain."""
        return pickle.dumps(plain(getattr(self, call)(*arguments)))

    def describe(self, name: str) -> Mapping[str, Any]:
        """Return the fields of :class:`Description` for a factory."""
        environment = environment_of(self._factories[name]())
        close_quietly(environment)
        words = isinstance(environment, Environment)
        return {
            "uses_messages": words,
            "schemas": schemas_of(environment.tools) if words else [],
            "begins_itself": begins_itself(environment) if words else True,
            "name": name_of(environment),
        }

    def reset(self, name: str, row: Mapping[str, Any], seed: int) -> Any:
        """Create an environment and begin a conversation, after seeding the global generators of this process."""
        adopt_orphans()  # so that close finds all that a conversation has started
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        self._environment = made = environment_of(self._factories[name]())
        return check_reset(made, made.reset(row, seed))

    def run(self, name: str, row: Mapping[str, Any], model: PolicyEndpoint) -> Any:
        """Run a program for one sample, and end the processes that it leaves."""
        adopt_orphans()
        try:
            result = result_of(self._factories[name].complete(row, model))
            return {
                name: dict(value) if isinstance(value, Mapping) else value for name, value in _fields_of(result).items()
            }
        finally:
            for pid in children():
                os.kill(pid, SIGKILL)
            reap()

    def step(self, *answer: Any) -> Mapping[str, Any]:
        """Pass an answer to the environment and return the fields of its reply."""
        made: Any = self._environment
        return _fields_of(check_step(made, made.step(*answer)))

    def reward(self) -> float | Mapping[str, Any] | None:
        """Return the final reward of a conversation that ends at a limit."""
        made = self._environment
        final = made.reward() if isinstance(made, Environment) else getattr(made, "reward", lambda: None)()
        if isinstance(final, TokenStep):
            return _fields_of(final)
        check_figures(final, {})
        return final

    def close(self) -> bool:
        """End the conversation; return True if no thread or process of it is left."""
        made, self._environment = self._environment, None
        if made is not None:
            made.close()
        reap()
        return threading.active_count() == 1 and not children()


def _fields_of(step: Any) -> Mapping[str, Any]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


class _Remote:
    """Environment of one conversation that runs in a worker, leased from reset to close."""

    def __init__(self, pool: WorkerPool, factory: str, description: Description, budget: Budget) -> None:
        self._pool, self._factory, self._budget = pool, factory, budget
        self._worker: Worker | None = None
        self.environment_name = description.name
        self.schemas, self.begins_itself = description.schemas, description.begins_itself

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Lease a worker and create an environment there."""
        try:
            self._worker = self._pool.pool.lease()
        except CallError as error:
            raise _interrupt_of(error) or error from None
        return self._ask("reset", self._factory, dict(row), seed)

    def reward(self) -> Any:
        """Return the final reward of a conversation that ends at a limit."""
        final = self._ask("reward")
        return TokenStep(**final) if isinstance(final, Mapping) else final

    def close(self) -> None:
        """End the conversation and return the worker, unless a process of the environment is left."""
        if self._worker is not None:
            self._release(keep=self._ask("close"))

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call a method of :class:`Host` in the worker within the remaining time.

        Raises:
            CallError: If it raises, dies or takes longer.
            FailedEnvironmentsError: If it was interrupted because a signal stopped the run.
        """
        worker, budget, seconds = self._worker, self._budget, self._pool.step_seconds
        if worker is None:
            raise RuntimeError(f"expected an environment that was reset before its {call}, got one that is closed")
        late = f"{call} took longer than {seconds:g} s (step_timeout)"
        if budget.left < seconds:
            seconds, whole = max(budget.left, 0.0), self._pool.conversation_seconds
            late = f"the environment took longer than {whole:g} s for a conversation (timeout)"
        begin = time.monotonic()
        try:
            return pickle.loads(worker.ask(_task(call, *arguments), seconds))
        except CallError as error:
            failure = self._failure(worker, call, error, late)
            self._release(keep=False)
            raise failure from None
        except BaseException:
            self._release(keep=False)
            raise
        finally:
            budget.left -= time.monotonic() - begin

    def _failure(self, worker: Worker, call: str, error: CallError, late: str) -> Exception:
        """Return the error of a call; after an exception close the environment."""
        if (interrupt := _interrupt_of(error)) is not None:
            return interrupt
        if error.kind == TIMEOUT:
            return CallError(TIMEOUT, late)
        if error.kind == DEATH:
            return CallError(DEATH, f"the process {error.message} in {call}")
        if call != "close":
            with contextlib.suppress(CallError):
                worker.ask(_task("close"), CLOSE_SECONDS)
        return error

    def _release(self, *, keep: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.pool.release(worker, keep=keep)


class RemoteEnvironment(_Remote, Environment):
    """Environment in messages that runs in a worker."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(**self._ask("step", answer))


class RemoteTokenEnvironment(_Remote):
    """Environment in token ids that runs in a worker."""

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Return the reply to the sampled ids of a turn."""
        return TokenStep(**self._ask("step", tuple(token_ids), finish))


def _interrupt_of(error: CallError) -> FailedEnvironmentsError | None:
    """Return the error of a rollout that a signal interrupted; None for any other failure."""
    if error.kind != INTERRUPT:
        return None
    return FailedEnvironmentsError(
        f"a rollout was left unfinished and starts over on resume: an environment {error.message}"
    )


def _task(call: str, *arguments: Any) -> bytes:
    return cloudpickle.dumps(((call, *arguments), {}, carrier()))
