"""Pool of workers on a Ray cluster: actors with local pools of one process, whose limits and failures it has."""

import itertools
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_rl.processes.errors import DEATH, INTERRUPT, LOADING, CallError, LostWorkerError
from lightning_rl.processes.pool import BLOCKED, KILL_SECONDS, STARTUP_SECONDS, Pool, Worker, open_reply, wait_within
from lightning_rl.processes.ray_connection import connect_to_ray
from lightning_rl.processes.timeouts import CLOCK, LONGEST
from lightning_rl.utils.arguments import check_counts, check_numbers
from lightning_rl.version import __version__

__all__ = ["RayWorkers"]  # which checkpoints may restore

LOG = logging.getLogger(__name__)
KEYS = itertools.count()


@dataclass(frozen=True)
class RayWorkers:
    """Workers on the nodes of a Ray cluster, in place of processes on this machine.

    The cluster is that of the environment variable ``RAY_ADDRESS``, else that of this machine, which is started if
    there is none. Equal options share their workers within a process; each rank has its own.

    Args:
        number: Maximum number of workers, each with one task at a time. A smaller cluster runs as many as it can.
        cpus: Number of CPUs that each worker reserves.

    Raises:
        ValueError: If an option is out of range.
    """

    number: int
    cpus: float = 1.0

    def __post_init__(self) -> None:  # noqa: D105
        check_counts(1, number=self.number)
        check_numbers(at_least=0, finite=True, cpus=self.cpus)


def actor_class() -> type:
    """Return the class of actors, which is nested and thus pickled by value, for nodes without this package."""

    class Actor:
        def load(self) -> tuple[str, str, str]:
            """Return the id and the address of this node, and the version of the package there, or why it has none."""
            import ray

            place = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            try:
                from lightning_rl.processes.ray_host import RayHost
                from lightning_rl.version import __version__
            except ImportError as error:
                return *place, f"none ({error})"
            self.host = RayHost()
            return *place, __version__

        def live(self) -> None:
            """Never return: the trainer gets an error when this actor ends."""
            import threading

            threading.Event().wait()

        def call(self, method: str, *arguments: Any, **options: Any) -> Any:
            """Call a method of :class:`RayHost`."""
            return getattr(self.host, method)(*arguments, **options)

    return Actor


class RayWorker(Worker):
    """Actor as the trainer knows it; ``node`` is empty until it has started, key and options are of the pool."""

    def __init__(self, fleet: "RayFleet") -> None:
        import ray

        options: dict[str, Any] = {"num_cpus": fleet.workers.cpus, "scheduling_strategy": "SPREAD"}
        if fleet.refused:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(fleet.refused)})"}
        actor: Any = ray.remote(concurrency_groups={"watch": 3}, max_restarts=0, **options)(actor_class())
        self.host = actor.remote()
        self.fleet, self.node, self.killed, self.new = fleet, "", False, True
        self.known = set[int]()
        self.key: int
        self.options: Any
        self.host.load.remote().future().add_done_callback(self._arrive)
        live = self.host.live.options(concurrency_group="watch").remote()
        live.future().add_done_callback(lambda _: fleet.lose(self))

    def watch(self, method: str, *arguments: Any) -> Any:
        """Call a method beside the task in progress, and return its reference."""
        return self.host.call.options(concurrency_group="watch").remote(method, *arguments)

    def _arrive(self, loaded: Any) -> None:
        if loaded.exception() is None:
            self.node, address, version = loaded.result()
            if version == __version__:
                self.fleet.give(self)
            else:
                self.fleet.refuse(self, f"{version} at {address}")

    @override
    def ask(self, task: bytes, seconds: float) -> Any:
        return open_reply(self.exchange(task, seconds))

    @override
    def exchange(self, task: bytes, seconds: float) -> bytes:
        import ray
        from ray.exceptions import RayError, RayTaskError

        options = None if self.key in self.known else self.options
        reply = self.host.call.remote("ask", self.key, options, task, seconds, new=self.new)
        self.known.add(self.key)
        self.new = False
        try:
            if not wait_within(lambda left: bool(ray.wait([reply], timeout=left)[0]), LONGEST):
                self.kill()
                raise CallError(INTERRUPT, CLOCK.reason())
            answer = ray.get(reply)
        except RayTaskError:
            raise
        except RayError:
            self.fleet.lose(self)
            raise CallError(DEATH, "was ended by SIGKILL") if self.killed else LostWorkerError from None
        if isinstance(answer, bytes):
            return answer
        raise CallError(*answer)

    @override
    def kill(self) -> None:
        import ray

        self.killed = True
        self.fleet.forget(self)
        ray.kill(self.host)  # the guard ends the process with it


class RayFleet:
    """Workers of equal options, shared by the pools of this process; a task waits for any of them.

    Attributes:
        live: Workers that have started or are starting.
        pools: Keys of the pools that use them.
        refused: Versions of this package, by the ids of nodes that have another one or none.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self.workers, self.changed = workers, threading.Condition()
        self.live, self._idle, self.pools = set[RayWorker](), list[RayWorker](), set[int]()
        self.refused, self._waiting = dict[str, str](), 0

    def take(self, task: Any = None) -> RayWorker:
        """Return an idle worker; wait until there is one.

        Raises:
            CallError: If none can start, if the task was cancelled, or if a signal stops the run.
        """
        end = time.monotonic() + STARTUP_SECONDS

        def arrives(seconds: float) -> bool:
            if task is not None and task.abandoned:
                raise CallError(DEATH, "was cancelled")
            if not self._idle:
                self._start(late=time.monotonic() > end)
                self.changed.wait(seconds)
            return bool(self._idle)

        with self.changed:
            blocked, waits = BLOCKED.get() if task is None else task.blocked, int(not self._idle)
            self._waiting += 1
            blocked(waits)
            try:
                if not wait_within(arrives, LONGEST):
                    raise CallError(INTERRUPT, CLOCK.reason())
                return self._idle.pop()
            finally:
                self._waiting -= 1
                blocked(-waits)

    def _start(self, *, late: bool) -> None:
        """Start as many workers as tasks wait for; raise CallError if no node can run one, or it is too late."""
        pending, cpus = sum(not worker.node for worker in self.live), self.workers.cpus
        if pending == len(self.live) and (late or self.refused):
            import ray

            nodes = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]}
            if late or not {node for node, has in nodes.items() if has >= cpus}.difference(self.refused):
                sizes, free = ", ".join(f"{has:g}" for has in nodes.values()), ray.available_resources().get("CPU", 0)
                wanted = f"a Ray cluster with {cpus:g} free CPUs on a node within {STARTUP_SECONDS:g} s"
                got = f"nodes of {sizes} CPUs, {free:g} of them free"
                cure = "pass fewer cpus= to RayWorkers, or add nodes"
                if self.refused:
                    got = f"{got}, and versions of lightning-rl: {', '.join(self.refused.values())}"
                    cure = f"install {__version__} there, {cure}"
                raise CallError(LOADING, f"expected {wanted}, got {got}: {cure}")
        for _ in range(min(self._waiting - pending, self.workers.number - len(self.live))):
            self.live.add(RayWorker(self))

    def give(self, worker: RayWorker) -> None:
        """Add an idle worker."""
        with self.changed:
            if worker in self.live:
                self._idle.append(worker)
                self.changed.notify()

    def refuse(self, worker: RayWorker, found: str) -> None:
        """End a worker with another version of this package, and start no more on its node."""
        with self.changed:
            if worker.node not in self.refused:
                wanted = f"expected lightning-rl {__version__} on every node of the Ray cluster"
                LOG.warning("%s, got %s: no worker runs there", wanted, found)
            self.refused[worker.node] = found
        threading.Thread(target=worker.kill).start()  # which would wait for the thread of ray that calls this

    def lose(self, worker: RayWorker) -> None:
        """Remove the workers of a node where one has ended, and report the number of tasks, if any, that start over."""
        with self.changed:
            if worker not in self.live:
                return
            lost = {worker, *(one for one in self.live if one.node == worker.node != "")}
            if worker.node and (tasks := len(lost.difference(self._idle))):
                LOG.warning("lost workers on node %s of the Ray cluster: %d tasks start over", worker.node, tasks)
            self.forget(*lost)

    def forget(self, *workers: RayWorker) -> None:
        """Remove workers that have ended or will end."""
        with self.changed:
            self.live.difference_update(workers)
            self._idle = [worker for worker in self._idle if worker in self.live]
            self.changed.notify_all()


FLEETS: dict[tuple[int, RayWorkers], RayFleet] = {}  # by process and options


def fleet_of(workers: RayWorkers) -> RayFleet:
    """Return the fleet of some options, after a connection to the cluster.

    Raises:
        ValueError: If there is no cluster at the address, or this process is a fork of one that is connected.
    """
    connect_to_ray()
    if any(process != os.getpid() for process, _ in FLEETS):
        raise ValueError("expected RayWorkers in the process that uses the Ray cluster, got a fork of it: spawn it")
    return FLEETS.setdefault((os.getpid(), workers), RayFleet(workers))


class RayPool(Pool):
    """Pool whose workers are actors of a Ray cluster."""

    def __init__(self, function: bytes, *, workers: RayWorkers, memory: int | None, environment: Any) -> None:
        self.workers = workers
        fleet_of(workers)  # in the main thread as a rule, which alone can restore the handler of SIGTERM
        super().__init__(function, processes=workers.number, memory=memory, environment=environment)

    @override
    def _prepare(self) -> None:
        super()._prepare()
        self._key, self._leased = next(KEYS), set[RayWorker]()

    @property
    @override
    def address(self) -> str:
        fleet_of(self.workers)
        import ray

        return ray.util.get_node_ip_address()

    @override
    def lease(self, task: Any = None) -> RayWorker:
        fleet = fleet_of(self.workers)
        worker = fleet.take(task)
        worker.options = self.function, self.memory, self.environment, sys.path, dict(os.environ)
        worker.key, worker.new = self._key, True
        fleet.pools.add(self._key)
        with self._lock:
            self._leased.add(worker)
            if task is not None:
                task.worker = worker
        try:
            if self._key not in worker.known:
                worker.exchange(b"", 0.0)  # loads the function, which takes no time of the task
        except BaseException as error:
            self.release(worker, keep=True, task=task)
            if isinstance(error, LostWorkerError):
                return self.lease(task)
            raise
        return worker

    @override
    def release(self, worker: Any, *, keep: bool, task: Any = None) -> None:
        with self._lock:
            self._leased.discard(worker)
            if task is not None:
                task.worker = None
        if not (keep or worker.killed):
            worker.host.call.remote("release", keep=False)
        worker.fleet.give(worker)

    def _fleet(self) -> RayFleet:
        return FLEETS.get((os.getpid(), self.workers)) or RayFleet(self.workers)

    @override
    def pids(self) -> list[int]:
        import ray

        known = [worker.watch("pids", self._key) for worker in self._fleet().live if self._key in worker.known]
        return [pid for pids in ray.get(known) for pid in pids]

    @override
    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for worker in list(self._leased):
            worker.kill()
        fleet = self._fleet()
        fleet.pools.discard(self._key)
        if ended := [worker.watch("close", self._key) for worker in fleet.live if self._key in worker.known]:
            import ray

            ray.wait(ended, num_returns=len(ended), timeout=KILL_SECONDS)
        for worker in () if fleet.pools else list(fleet.live):
            worker.kill()


def pool_of(function: bytes, workers: int | RayWorkers, *, memory: int | None = None, environment: Any = None) -> Pool:
    """Return a pool on this machine for a number of processes, or on a Ray cluster; see :class:`.Pool`."""
    if isinstance(workers, RayWorkers):
        return RayPool(function, workers=workers, memory=memory, environment=environment)
    return Pool(function, processes=workers, memory=memory, environment=environment)
