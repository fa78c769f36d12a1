"""Worker processes that each run one environment at a time, are killed at a timeout, and replaced when they die.

They are forks of a server that has loaded the environments (:mod:`lightning_rl.environments.fork_server`). A
conversation leases a worker from reset to close; processes that it started are killed with it.
"""

import contextlib
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from signal import SIGABRT, Signals
from typing import Any, NamedTuple

import cloudpickle
from typing_extensions import override

from lightning_rl.environments.environment import Action, Environment, StepResult, TokenStep
from lightning_rl.environments.outcome import DEATH, TIMEOUT, EnvironmentFailureError, FailedEnvironmentsError
from lightning_rl.rewards.timeouts import CLOCK, HURRY
from lightning_rl.rollout import FinishReason

STARTUP_SECONDS = 120.0  # for the server to load the environments, and for a worker to start
CLOSE_SECONDS = 5.0  # for an environment to close after a failure
TRACEBACK_SECONDS = 1.0  # for a late environment to print its traceback
KILL_SECONDS = 10.0  # after which a killed process counts as gone
POLL_SECONDS = 1.0  # between checks for the end of the run
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from lightning_rl.environments.fork_server import main"
QUIET = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}


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
    """Pool of worker processes for environments.

    Args:
        factories: Factories by name, pickled with cloudpickle, so lambdas and functions of the main script are
            supported.
        workers: Number of workers and thus of open conversations.
        step_seconds: Timeout of a reset or a step.
        conversation_seconds: Timeout of all resets and steps of a conversation, for both tries together.

    Raises:
        ValueError: If a factory cannot be pickled.
    """

    def __init__(
        self,
        factories: Mapping[str, Any],
        *,
        workers: int,
        step_seconds: float = 60.0,
        conversation_seconds: float = 600.0,
    ) -> None:
        self.workers, self.step_seconds, self.conversation_seconds = workers, step_seconds, conversation_seconds
        self._payload = pickle.dumps({name: _pickle(name, factory) for name, factory in factories.items()})
        self._prepare()

    def _prepare(self) -> None:
        """Initialize the state without any process."""
        self._free = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._live: set[Worker] = set()
        self._server: _Server | None = None
        self._descriptions: dict[str, Description] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without processes."""
        kept = ("workers", "step_seconds", "conversation_seconds", "_payload")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; processes start on demand."""
        vars(self).update(state)
        self._prepare()

    def describe(self, name: str) -> Description:
        """Return the description of a factory's environments, from one created in a worker.

        Raises:
            ValueError: If none can be created; names the environment and the error.
        """
        if name not in self._descriptions:
            worker = self.lease()
            try:
                self._descriptions[name] = Description(**worker.ask("describe", (name,), STARTUP_SECONDS))
            except EnvironmentFailureError as error:
                self.release(worker, keep=False)
                raise ValueError(
                    f"expected environment {name} to be created in a worker process, got {error}\n{error.log}"
                ) from error
            self.release(worker, keep=True)
        return self._descriptions[name]

    def open(self, name: str, budget: Budget) -> "RemoteEnvironment | RemoteTokenEnvironment":
        """Return an environment of a factory that runs in a worker from its reset to its close."""
        description = self.describe(name)
        kind = RemoteEnvironment if description.uses_messages else RemoteTokenEnvironment
        return kind(self, name, description, budget)

    def budget(self) -> Budget:
        """Return the time of the environment of one sample."""
        return Budget(self.conversation_seconds)

    def executor(self) -> ThreadPoolExecutor:
        """Return an executor with a thread for every worker."""
        return ThreadPoolExecutor(self.workers, thread_name_prefix="environment")

    def lease(self) -> "Worker":
        """Return a free worker; wait until there is one."""
        self._free.acquire()
        try:
            with self._lock:
                while self._idle:
                    worker = self._idle.pop()
                    if worker.alive:
                        return worker
                    worker.end()
                    self._live.discard(worker)
                if self._server is None or not self._server.alive:
                    self._server = _Server(self._payload)
                worker = self._server.fork()
                self._live.add(worker)
            worker.start()
            return worker
        except BaseException:
            self._free.release()
            raise

    def release(self, worker: "Worker", *, keep: bool) -> None:
        """Return a worker to the pool, or end it."""
        if not keep:
            worker.end()
        with self._lock:
            (self._idle.append if keep else self._live.discard)(worker)
        self._free.release()

    def pids(self) -> list[int]:
        """Return the ids of all processes: the server, guards and workers."""
        with self._lock:
            server = [] if self._server is None else [self._server.popen.pid]
            return [*server, *(pid for worker in self._live for pid in worker.pids)]

    def close(self) -> None:
        """End every process; calls in progress fail with :data:`DEATH`."""
        with self._lock:
            live, server = list(self._live), self._server
            self._idle, self._live, self._server = [], set(), None
        for worker in live:
            worker.kill()
        for worker in live:
            worker.end()
        if server is not None:
            server.close()


class Worker:
    """Worker process, with a connection for tasks and replies, and the socket of its guard."""

    def __init__(self, connection: Connection, life: socket.socket) -> None:
        self._connection, self._life = connection, life
        life.settimeout(KILL_SECONDS)
        self._lock = threading.Lock()
        self._report: tuple[int | None, str] | None = None
        self.pids: tuple[int, ...] = ()

    def start(self) -> None:
        """Wait until it has started; a failed start is reported by the first task."""
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(STARTUP_SECONDS):
                self.pids = tuple(self._connection.recv())

    @property
    def alive(self) -> bool:
        """True if it is ready for a task; a dead worker's connection is closed."""
        try:
            return not self._connection.poll(0)
        except OSError:
            return False

    def clear_log(self) -> None:
        """Clear the guard's log before the next task."""
        with contextlib.suppress(OSError):
            self._life.send(b"\0")
            if self._life.recv(1, socket.MSG_PEEK) == b"\0":  # else the report of a process that died meanwhile
                self._life.recv(1)

    def ask(self, call: str, arguments: Sequence[Any], seconds: float, late: str = "") -> Any:
        """Call a method of :class:`~lightning_rl.environments.fork_server.Host` in the worker and return its result.

        Args:
            call: Name of the method.
            arguments: Arguments of the call.
            seconds: Timeout.
            late: Message at a timeout.

        Raises:
            EnvironmentFailureError: If it raises, dies or takes longer.
            FailedEnvironmentsError: If it was interrupted because the run has to stop.
        """
        try:
            self._connection.send_bytes(cloudpickle.dumps((call, tuple(arguments))))
            if not self._wait(seconds):
                message = late or f"{call} took longer than {seconds:g} s"
                raise EnvironmentFailureError(TIMEOUT, message, self._end_with_traceback())
            kind, *reply = self._connection.recv()
        except (EOFError, OSError):
            raise self._death(call) from None
        if kind == "raised":
            raise self._error(call, *reply)
        return reply[0]

    def _wait(self, seconds: float) -> bool:
        """Return True if there is a reply in time."""
        end, stopped_by = time.monotonic() + seconds, 0
        while not self._connection.poll(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
            if CLOCK.stopped_by and not stopped_by and time.monotonic() < end - HURRY:
                stopped_by, end = CLOCK.stopped_by, time.monotonic() + HURRY
            if time.monotonic() < end:
                continue
            if stopped_by:
                self.end()
                raise FailedEnvironmentsError(
                    "a rollout was left unfinished and starts over on resume: an environment was busy when "
                    f"{Signals(stopped_by).name} told the run to stop"
                )
            return False
        return True

    def _end_with_traceback(self) -> str:
        """Make the worker print its traceback, end it, and return its log."""
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.pids[-1], SIGABRT)
        return self.end(TRACEBACK_SECONDS)[1]

    def _death(self, call: str) -> EnvironmentFailureError:
        code, log = self.end(CLOSE_SECONDS)
        how = "is gone" if code is None else f"exited with status {code}"
        if code is not None and code > 128:
            how = f"was ended by {Signals(code - 128).name}"
        return EnvironmentFailureError(DEATH, f"the process {how} in {call}", log)

    def _error(self, call: str, kind: str, message: str, trace: str) -> EnvironmentFailureError:
        """Return the failure of an exception, after closing the environment."""
        if call != "close":
            with contextlib.suppress(EnvironmentFailureError):
                self.ask("close", (), CLOSE_SECONDS)
        return EnvironmentFailureError(kind, message, f"{trace}{self.end()[1]}")

    def kill(self) -> None:
        """Make the guard kill the process and all that it started; thread-safe."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def end(self, patience: float = 0.0) -> tuple[int | None, str]:
        """Kill the process, after ``patience`` seconds to exit, and all that it started; return exit code and log."""
        with self._lock:
            if self._report is None:
                if patience:
                    select.select([self._life], [], [], patience)
                self.kill()
                with self._life:
                    self._report = self._read_report()
            return self._report

    def _read_report(self) -> tuple[int | None, str]:
        text = b""
        try:
            while part := self._life.recv(2**16):
                text += part
        except OSError:
            return None, ""
        code, log = json.loads(text) if text else (None, "")
        return code, log


class _Server:
    """Server process from which workers are forked.

    Raises:
        ValueError: If it cannot load the pickled factories; says why.
    """

    def __init__(self, payload: bytes) -> None:
        self._control, theirs = Pipe()
        command = [sys.executable, "-P", "-c", f"{BOOT}; main({theirs.fileno()})", "environments", json.dumps(sys.path)]
        with tempfile.TemporaryFile() as file:
            file.write(payload)
            file.seek(0)
            self.popen = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **QUIET},
                stdin=file,
                start_new_session=True,
            )
        theirs.close()
        try:
            late = not self._control.poll(STARTUP_SECONDS)
            message = f"nothing within {STARTUP_SECONDS:g} s" if late else self._control.recv()
        except (EOFError, OSError):
            message = f"a process that exited with status {self.popen.wait()}"
        if message:
            self.close()
            raise ValueError(f"expected a process with the environments, got: {message}")

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.popen.poll() is None

    def fork(self) -> Worker:
        """Fork a worker."""
        connection, tasks = Pipe()
        life, guard = socket.socketpair()
        with tasks, guard:
            for descriptor in (tasks.fileno(), guard.fileno()):
                reduction.send_handle(self._control, descriptor, self.popen.pid)
        return Worker(connection, life)

    def close(self) -> None:
        """End the process."""
        self._control.close()
        try:
            self.popen.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class _Remote:
    """Environment of one conversation that runs in a worker, leased from reset to close."""

    def __init__(self, pool: WorkerPool, factory: str, description: Description, budget: Budget) -> None:
        self._pool, self._factory, self._budget = pool, factory, budget
        self._worker: Worker | None = None
        self.environment_name = description.name
        self.schemas, self.begins_itself = description.schemas, description.begins_itself

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Lease a worker and create an environment there."""
        self._worker = self._pool.lease()
        self._worker.clear_log()
        return self._ask("reset", self._factory, dict(row), seed)

    def reward(self) -> Any:
        """Return the final reward of a conversation that ends at a limit."""
        score = self._ask("reward")
        return TokenStep(**score) if isinstance(score, Mapping) else score

    def close(self) -> None:
        """End the conversation and return the worker, unless a process of the environment is left."""
        if self._worker is not None:
            self._release(keep=self._ask("close"))

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Run a task in the worker within the remaining time."""
        worker, budget, seconds = self._worker, self._budget, self._pool.step_seconds
        if worker is None:
            raise RuntimeError(f"expected an environment that was reset before its {call}, got one that is closed")
        late = f"{call} took longer than {seconds:g} s (step_timeout)"
        if budget.left < seconds:
            seconds, whole = max(budget.left, 0.0), self._pool.conversation_seconds
            late = f"the environment took longer than {whole:g} s for a conversation (timeout)"
        begin = time.monotonic()
        try:
            return worker.ask(call, arguments, seconds, late)
        except BaseException:
            self._release(keep=False)
            raise
        finally:
            budget.left -= time.monotonic() - begin

    def _release(self, *, keep: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.release(worker, keep=keep)


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


def _pickle(name: str, factory: Any) -> bytes:
    try:
        return cloudpickle.dumps(factory)
    except Exception as error:
        raise ValueError(
            f"expected a factory that can be sent to another process for environment {name}, got {factory!r:.200} "
            f"({type(error).__name__}: {error}): create its state inside of it, or run with Conversations(workers=0)"
        ) from error
