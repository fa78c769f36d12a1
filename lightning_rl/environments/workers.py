"""Workers: processes that each hold one environment at a time, are killed when it hangs, and replaced when they die.

They are forks of one process that has loaded the environments (:mod:`lightning_rl.environments.server`). A conversation
leases a worker from its reset to its close; what it started dies with it.
"""

import contextlib
import io
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

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.environments.environment import Answer, Environment, Message, Step, TokenStep
from lightning_rl.environments.failure import DEATH, TIMEOUT, EnvironmentFailureError, Failure
from lightning_rl.environments.failures import FailedEnvironmentsError
from lightning_rl.rewards.limit import CLOCK, HURRY
from lightning_rl.rollout import Finish

STARTUP_SECONDS = 120.0  # that the server has to load the environments, and a worker to be there
FAREWELL = 5.0  # seconds that an environment has to close after it has failed
LAST_WORDS = 1.0  # seconds that one that took too long has to say where it is
GONE = 10.0  # seconds after which a killed process counts as gone
PATIENCE = 1.0  # seconds after which a wait looks whether the run was told to stop
MAX_BYTES = 2**25  # of a reply; the worker refuses less
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from lightning_rl.environments.server import main; "
QUIET = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}


class Description(NamedTuple):
    """What the environments of a factory are.

    Attributes:
        words: whether they speak in messages; else in token ids.
        schemas: of their tools.
        begins_itself: whether they may begin with messages of their own.
        name: of their class, for errors.
    """

    words: bool
    schemas: Sequence[Mapping[str, Any]]
    begins_itself: bool = True
    name: str = "an environment"


@dataclass(slots=True)
class Budget:
    """Seconds that the environment of one sample has in all, the second try included.

    Attributes:
        left: of them.
    """

    left: float


class WorkerPool:
    """Processes for environments, at most so many at a time.

    Args:
        factories: by name; whatever cloudpickle takes, lambdas and functions of the main script too.
        workers: how many conversations are open at a time, each in a process of its own.
        step_seconds: that an environment has for a reset or a step, from when its process is there.
        conversation_seconds: that it has for all of them in a conversation, the second try included.

    Raises:
        ValueError: if an option is out of range, or a factory cannot be pickled.
    """

    def __init__(
        self,
        factories: Mapping[str, Any],
        *,
        workers: int,
        step_seconds: float = 60.0,
        conversation_seconds: float = 600.0,
    ) -> None:
        check_counts(1, workers=workers)
        check_numbers(above=0, finite=True, step_seconds=step_seconds, conversation_seconds=conversation_seconds)
        self.workers, self.step_seconds, self.conversation_seconds = workers, step_seconds, conversation_seconds
        self._payload = pickle.dumps({name: _pickle(name, factory) for name, factory in factories.items()})
        self._prepare()

    def _prepare(self) -> None:
        """Nothing is running."""
        self._free = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._live: set[Worker] = set()
        self._server: _Server | None = None
        self._descriptions: dict[str, Description] = {}

    @staticmethod
    def of(
        factories: Mapping[str, Any],
        *,
        environment_workers: int,
        environment_timeout: float,
        conversation_timeout: float,
    ) -> "WorkerPool | None":
        """The pool of the options of a run; None for environments in the trainer's own process, or if there are none.

        Raises:
            ValueError: if an option is out of range, or a factory cannot be pickled.
        """
        check_counts(0, environment_workers=environment_workers)
        check_numbers(above=0, finite=True, environment_timeout=environment_timeout)
        check_numbers(at_least=environment_timeout, finite=True, conversation_timeout=conversation_timeout)
        if not environment_workers or not factories:
            return None
        return WorkerPool(
            factories,
            workers=environment_workers,
            step_seconds=environment_timeout,
            conversation_seconds=conversation_timeout,
        )

    def describe(self, name: str) -> Description:
        """What the environments of a factory are, by making one in a worker, once.

        Raises:
            ValueError: naming the environment, and why none can be made.
        """
        if name not in self._descriptions:
            worker = self.lease()
            try:
                said = worker.ask("describe", (name,), STARTUP_SECONDS)
            except EnvironmentFailureError as error:
                self.release(worker, keep=False)
                raise ValueError(
                    f"expected environment {name} to be made in a process of its own, got {error}\n{error.failure.log}"
                ) from error
            self.release(worker, keep=True)
            self._descriptions[name] = Description(**said)
        return self._descriptions[name]

    def open(self, name: str, budget: Budget) -> "RemoteEnvironment | RemoteTokenEnvironment":
        """An environment, in a worker from its reset to its close.

        Args:
            name: of the factory.
            budget: of the sample.
        """
        description, link = self.describe(name), Link(self, name, budget)
        if not description.words:
            return RemoteTokenEnvironment(link, description.name)
        return RemoteEnvironment(link, description)

    def budget(self) -> Budget:
        """What the environment of one sample has."""
        return Budget(self.conversation_seconds)

    def executor(self) -> ThreadPoolExecutor:
        """Threads enough to wait for every worker; an own executor for everyone who plays conversations at a time."""
        return ThreadPoolExecutor(self.workers, thread_name_prefix="environment")

    def lease(self) -> "Worker":
        """A worker that nobody else has; waits until there is one."""
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
        """Gives a worker back, for the next conversation or to be ended with all that it started."""
        if not keep:
            worker.end()
        with self._lock:
            (self._idle.append if keep else self._live.discard)(worker)
        self._free.release()

    def pids(self) -> list[int]:
        """Of all processes: the server, guards and workers."""
        with self._lock:
            server = [] if self._server is None else [self._server.popen.pid]
            return [*server, *(pid for worker in self._live for pid in worker.pids)]

    def close(self) -> None:
        """Ends every process, whatever it is at; who waits for one is told that it died."""
        with self._lock:
            live, server = list(self._live), self._server
            self._idle, self._live, self._server = [], set(), None
        for worker in live:
            worker.kill()
        for worker in live:
            worker.end()
        if server is not None:
            server.close()

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes, which belong to this one."""
        kept = ("workers", "step_seconds", "conversation_seconds", "_payload")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Starts processes of its own when there is something to do."""
        vars(self).update(state)
        self._prepare()


class Worker:
    """A process with its guard.

    Args:
        connection: that tasks and replies go by.
        life: the line to the guard.
    """

    def __init__(self, connection: Connection, life: socket.socket) -> None:
        self._connection, self._life = connection, life
        life.settimeout(GONE)
        self._lock = threading.Lock()
        self._report: tuple[int | None, str] | None = None
        self.pids: tuple[int, ...] = ()

    def start(self) -> None:
        """Waits until it is there; if it never is, the first task says so."""
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(STARTUP_SECONDS):
                self.pids = tuple(self._connection.recv())

    @property
    def alive(self) -> bool:
        """Whether it waits for something to do; one that died since closed its connection."""
        try:
            return not self._connection.poll(0)
        except OSError:
            return False

    def forget(self) -> None:
        """Has the guard clear the log, and waits for that: it would clear what the next task prints as well."""
        with contextlib.suppress(OSError):
            self._life.send(b"\0")
            if self._life.recv(1, socket.MSG_PEEK) == b"\0":  # else the report of a process that died meanwhile
                self._life.recv(1)

    def ask(self, call: str, arguments: Sequence[Any], seconds: float, late: str = "") -> Any:
        """Has the worker do something, and waits.

        Args:
            call: a method of :class:`~lightning_rl.environments.server.Host`.
            arguments: of the call.
            seconds: that it may take.
            late: what to say if it takes longer.

        Raises:
            EnvironmentFailureError: if it raises, dies or takes longer.
            FailedEnvironmentsError: if it was cut short because the run was told to stop.
        """
        try:
            self._connection.send_bytes(cloudpickle.dumps((call, tuple(arguments))))
            if not self._wait(seconds):
                raise EnvironmentFailureError(self._late(late or f"{call} took longer than {seconds:g} s"))
            kind, *reply = _load(self._connection.recv_bytes(MAX_BYTES))
        except (EOFError, OSError, pickle.UnpicklingError):
            raise EnvironmentFailureError(self._death(call)) from None
        if kind == "raised":
            raise EnvironmentFailureError(self._error(call, *reply))
        return reply[0]

    def _wait(self, seconds: float) -> bool:
        """Whether there is a reply in time."""
        end, stopped_by = time.monotonic() + seconds, 0
        while not self._connection.poll(max(0.0, min(PATIENCE, end - time.monotonic()))):
            if CLOCK.stopped_by and not stopped_by and time.monotonic() < end - HURRY:
                stopped_by, end = CLOCK.stopped_by, time.monotonic() + HURRY
            if time.monotonic() < end:
                continue
            if stopped_by:
                self.end()
                raise FailedEnvironmentsError(
                    "a rollout was left unfinished and begins anew on resume: an environment was busy when "
                    f"{Signals(stopped_by).name} told the run to stop"
                )
            return False
        return True

    def _late(self, message: str) -> Failure:
        """The worker is told to say where it is, in its log, and is ended."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.pids[-1], SIGABRT)
        return Failure(kind=TIMEOUT, message=message, log=self.end(LAST_WORDS)[1])

    def _death(self, call: str) -> Failure:
        code, log = self.end(FAREWELL)
        how = "is gone" if code is None else f"exited with status {code}"
        if code is not None and code > 128:
            how = f"was ended by {Signals(code - 128).name}"
        return Failure(kind=DEATH, message=f"the process {how} in {call}", log=log)

    def _error(self, call: str, kind: str, message: str, trace: str) -> Failure:
        """What was raised; the environment may still say good-bye to whom it talks to."""
        if call != "close":
            with contextlib.suppress(EnvironmentFailureError):
                self.ask("close", (), FAREWELL)
        return Failure(kind=kind, message=message, log=f"{trace}{self.end()[1]}")

    def kill(self) -> None:
        """Has the guard end the process with all that it started; any thread may say so."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def end(self, patience: float = 0.0) -> tuple[int | None, str]:
        """Ends the process with all that it started, and waits for that; how it ended, and its log.

        Args:
            patience: seconds that it has to end by itself.
        """
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
    """The process that workers are forks of.

    Args:
        payload: pickled factories.

    Raises:
        ValueError: if it cannot load them; the message says why.
    """

    def __init__(self, payload: bytes) -> None:
        self._control, theirs = Pipe()
        command = [sys.executable, "-P", "-c", f"{BOOT}main({theirs.fileno()})", "environments", json.dumps(sys.path)]
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
        """Whether it is there."""
        return self.popen.poll() is None

    def fork(self) -> Worker:
        """Another worker."""
        here, there = Pipe()
        life, line = socket.socketpair()
        with there, line:
            for descriptor in (there.fileno(), line.fileno()):
                reduction.send_handle(self._control, descriptor, self.popen.pid)
        return Worker(here, life)

    def close(self) -> None:
        """Ends it."""
        self._control.close()
        try:
            self.popen.wait(GONE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Link:
    """What a conversation holds of an environment elsewhere: a worker from its reset to its close.

    Args:
        pool: of the workers.
        name: of the factory.
        budget: of the sample.
    """

    def __init__(self, pool: WorkerPool, name: str, budget: Budget) -> None:
        self._pool, self._name, self._budget = pool, name, budget
        self._worker: Worker | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Leases a worker and makes an environment there."""
        self._worker = self._pool.lease()
        self._worker.forget()
        return self.ask("reset", (self._name, dict(row), seed))

    def ask(self, call: str, arguments: Sequence[Any]) -> Any:
        """Has the worker do something within what is left of its time."""
        worker, budget, seconds = self._worker, self._budget, self._pool.step_seconds
        if worker is None:
            raise RuntimeError(f"expected an environment that was reset before its {call}, got one that is closed")
        late = f"{call} took longer than {seconds:g} s (environment_timeout)"
        if budget.left < seconds:
            seconds, whole = max(budget.left, 0.0), self._pool.conversation_seconds
            late = f"the environment took longer than {whole:g} s for a conversation (conversation_timeout)"
        begin = time.monotonic()
        try:
            return worker.ask(call, arguments, seconds, late)
        except BaseException:
            self._let_go(keep=False)
            raise
        finally:
            budget.left -= time.monotonic() - begin

    def close(self) -> None:
        """Ends the conversation and gives the worker back, unless something is left of what it started."""
        if self._worker is not None:
            self._let_go(keep=self.ask("close", ()))

    def _let_go(self, *, keep: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.release(worker, keep=keep)


class RemoteEnvironment(Environment):
    """An environment in messages that runs in a worker.

    Args:
        link: to the worker.
        description: of it.
    """

    def __init__(self, link: Link, description: Description) -> None:
        self._link, self.environment_name = link, description.name
        self.schemas, self.begins_itself = description.schemas, description.begins_itself

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return self._link.reset(row, seed)

    @override
    def step(self, answer: Answer) -> Step:
        return Step(**self._link.ask("step", (answer,)))

    @override
    def reward(self) -> float | None:
        return self._link.ask("reward", ())

    @override
    def close(self) -> None:
        self._link.close()


class RemoteTokenEnvironment:
    """An environment in token ids that runs in a worker.

    Args:
        link: to the worker.
        name: of its class, for errors.
    """

    def __init__(self, link: Link, name: str) -> None:
        self._link, self.environment_name = link, name

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins a conversation."""
        return self._link.reset(row, seed)

    def step(self, token_ids: Sequence[int], finish: Finish) -> TokenStep:
        """Takes what was drawn in a turn."""
        return TokenStep(**self._link.ask("step", (tuple(token_ids), finish)))

    def reward(self) -> float | TokenStep | None:
        """What a conversation is worth that a limit ends."""
        said = self._link.ask("reward", ())
        return TokenStep(**said) if isinstance(said, Mapping) else said

    def close(self) -> None:
        """Ends the conversation."""
        self._link.close()


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values alone."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"expected plain values from an environment, got {module_name}.{global_name}")


def _load(data: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(data)).load()


def _pickle(name: str, factory: Any) -> bytes:
    try:
        return cloudpickle.dumps(factory)
    except Exception as error:
        raise ValueError(
            f"expected a factory that can be sent to another process for environment {name}, got {factory!r:.200} "
            f"({type(error).__name__}: {error}): make what it holds inside of it, or run with environment_workers=0"
        ) from error
