"""Server process that loads environments once and forks a worker process on each request.

A fork starts in milliseconds and shares the server's memory. Each has a guard
(:mod:`lightning_rl.rewards.process_worker`) that keeps its output, and kills it with all processes that it
started. Replies are plain values of limited size.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch

from lightning_rl.environments.conversation import close_quietly
from lightning_rl.environments.environment import Environment, TokenEnvironment, TokenStep, check_figures
from lightning_rl.environments.outcome import text_of
from lightning_rl.environments.run_environments import begins_itself
from lightning_rl.environments.tools import schemas_of
from lightning_rl.environments.validation import check_reset, check_step, environment_of, name_of, plain
from lightning_rl.rewards.process_worker import Log, adopt_orphans, children, reap, split

LOG_BYTES = 2**15  # kept at the beginning of an environment's output, and as many at its end
MAX_BYTES = 2**24  # maximum size of a reply


def main(descriptor: int) -> None:
    """Load the factories from standard input, then fork on each request of the trainer."""
    control = Connection(descriptor)
    factories: dict[str, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer
    try:
        for name, payload in cloudpickle.loads(sys.stdin.buffer.read()).items():
            factories[name] = cloudpickle.loads(payload)
    except BaseException:  # noqa: BLE001  the boundary to foreign code
        control.send(f"an environment could not be loaded in a process:\n{traceback.format_exc()}")
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are not waited for
    control.send("")
    while True:
        try:
            tasks, life = (reduction.recv_handle(control) for _ in range(2))
        except (EOFError, OSError):
            os._exit(0)  # an orderly exit takes seconds
        if os.fork() == 0:
            control.close()
            become_worker(tasks, life, factories)
        os.close(tasks)
        os.close(life)


def become_worker(tasks: int, life: int, factories: Mapping[str, Any]) -> None:
    """Split into a guard, which finally sends exit code and output of the worker, and the worker."""
    source, sink = os.pipe()
    log = Log(source, LOG_BYTES)
    code = split(life, [tasks, sink], log)
    if code is not None:
        with socket.socket(fileno=life) as line, contextlib.suppress(OSError):  # the trainer is gone
            line.sendall(json.dumps([code, log.text()]).encode())
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (sink, 1), (sink, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(sink)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    adopt_orphans()  # so that all are found when a conversation has ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # a crash or SIGABRT prints a traceback
    serve(Connection(tasks), Host(factories))


def serve(connection: Connection, host: "Host") -> None:
    """Run tasks until the connection closes."""
    pid = os.getpid()
    try:
        connection.send((os.getppid(), pid))
        while True:
            reply = host.answer(connection.recv_bytes())
            if os.getpid() != pid:
                os._exit(0)  # a child forked by an environment must not reply
            connection.send_bytes(reply)
    except (EOFError, OSError):
        os._exit(0)


class Host:
    """Runs one environment of the factories at a time."""

    def __init__(self, factories: Mapping[str, Any]) -> None:
        self._factories = factories
        self._environment: Environment | TokenEnvironment | None = None

    def answer(self, task: bytes) -> bytes:
        """Return the pickled result of a call: ``("returned", value)`` or ``("raised", kind, message, traceback)``."""
        try:
            call, arguments = cloudpickle.loads(task)
            reply = pickle.dumps(("returned", plain(getattr(self, call)(*arguments))))
            if len(reply) > MAX_BYTES:
                name = type(self._environment).__name__
                raise ValueError(f"expected {name} to return at most {MAX_BYTES} bytes from {call}, got {len(reply)}")
        except BaseException as error:  # noqa: BLE001  the boundary to foreign code, which may call exit() as well
            return pickle.dumps(("raised", type(error).__name__, text_of(error)[:2000], traceback.format_exc()[-8000:]))
        return reply

    def describe(self, name: str) -> Mapping[str, Any]:
        """Return the fields of :class:`.workers.Description` for a factory."""
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
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        self._environment = made = environment_of(self._factories[name]())
        return check_reset(made, made.reset(row, seed))

    def step(self, *answer: Any) -> Mapping[str, Any]:
        """Pass an answer to the environment and return the fields of its reply."""
        made: Any = self._environment
        return _fields_of(check_step(made, made.step(*answer)))

    def reward(self) -> float | Mapping[str, Any] | None:
        """Return the final reward of a conversation that ends at a limit."""
        made = self._environment
        score = made.reward() if isinstance(made, Environment) else getattr(made, "reward", lambda: None)()
        if isinstance(score, TokenStep):
            return _fields_of(score)
        check_figures(score, {})
        return score

    def close(self) -> bool:
        """End the conversation; return True if no thread or process of it is left."""
        made, self._environment = self._environment, None
        if made is not None:
            made.close()
        reap()
        return threading.active_count() == 1 and not children()


def _fields_of(step: Any) -> Mapping[str, Any]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
