"""vLLM servers on a Ray cluster: actors that run ``lightning-rl serve``, and start again elsewhere if they are lost."""

import os
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_rl.cluster.nodes import GUARDED, ClusterError, free_port
from lightning_rl.generation.vllm.launched import RAY_SERVERS, actor_name
from lightning_rl.processes.command import PRIVATE, start_with_guard
from lightning_rl.utils.http import Client, Refused, Unanswered

KEY = "VLLM_API_KEY"
POLL_SECONDS = 1.0  # between checks of a server that starts
PAUSE_SECONDS = 10.0  # before a server that ended while it was starting is started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers of a run: number 2, arguments ("Qwen/Qwen2.5-7B", "--", "--tensor-parallel-size", "2").

    Args:
        number: Number of servers.
        arguments: Arguments of ``lightning-rl serve``, without host and port.
        gpus: True if they run on GPUs.
        namespace: Namespace of the actors.
        variables: Environment variables, added to those of the node.
    """

    number: int
    arguments: Sequence[str]
    gpus: bool
    namespace: str
    variables: Mapping[str, str]

    @property
    def resources(self) -> dict[str, float]:
        """Resources of one server: a GPU for each rank of its tensor and pipeline parallelism."""
        parser = ArgumentParser(add_help=False)
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
        parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
        sizes, _ = parser.parse_known_args([word.replace("_", "-") for word in self.arguments])
        return {"CPU": 1} | ({"GPU": sizes.tensor_parallel_size * sizes.pipeline_parallel_size} if self.gpus else {})

    @contextmanager
    def running(self) -> Iterator[dict[str, str]]:
        """Start the servers, yield the variables by which ranks find them once all answer, and end them.

        Raises:
            ClusterError: If one ends before it answers.
        """
        if not self.number:
            yield {}
            return
        group, actors = placement_group([self.resources] * self.number), []
        for place in range(self.number):
            options: dict[str, Any] = {
                "runtime_env": GUARDED,
                "num_cpus": 1,
                "num_gpus": self.resources.get("GPU", 0),
                "max_restarts": -1,
            }
            options |= {"name": actor_name(place), "namespace": self.namespace}
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, place)
            actors.append(ray.remote(**options)(ServerActor).remote(list(self.arguments), dict(self.variables)))
        states: Sequence[tuple[str, int | None]] = ()
        while not (states and all(url for url, _ in states)):
            time.sleep(POLL_SECONDS)
            with suppress(RayError):  # a node was lost, and its server starts elsewhere
                states = ray.get([actor.state.remote() for actor in actors])
            if failed := [code for _, code in states if code is not None]:
                wanted = f"servers that answer, got one that ended with status {failed[0]}"
                raise ClusterError(f"expected {wanted}: see its log above")
        yield {RAY_SERVERS: f"{self.namespace} {self.number}"}
        for actor in actors:  # which Ray keeps as long as there is a handle
            ray.kill(actor)


class ServerActor:
    """Actor that runs one server.

    If the server ends after it has answered, the actor ends too, and Ray starts it again, on another node if its own is
    lost. A server that ends before it answers is not started again, unless it has replaced another one.

    Args:
        arguments: Arguments of ``lightning-rl serve``, without host and port.
        variables: Environment variables, added to those of the node.
    """

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        host = ray.util.get_node_ip_address()
        port = free_port(host)
        self._url = (
            f"http{'s' if '--ssl-certfile' in arguments else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        )
        self._command = [sys.executable, "-m", "lightning_rl", "serve", "--host", host, "--port", str(port), *arguments]
        self._environment = {**os.environ, **variables}
        self._ready, self._replaces = False, ray.get_runtime_context().was_current_actor_reconstructed
        self._code: int | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self) -> str:
        """Return the URL of a server that answers, else an empty string."""
        return self._url if self._ready else ""

    def state(self) -> tuple[str, int | None]:
        """Return the URL, and the exit status of a server that ended before it answered, else None."""
        return self.url(), self._code

    def _serve(self) -> None:
        with start_with_guard(self._command, self._environment, umask=PRIVATE) as process:
            with closing(Client(self._url, self._environment[KEY])) as client:
                while process.poll() is None and not self._ready:
                    with suppress(Unanswered, Refused):
                        client.call("GET", "/health", timeout=POLL_SECONDS)
                        self._ready = True
                    time.sleep(POLL_SECONDS)
            process.wait()
        if self._ready or self._replaces:
            time.sleep(0.0 if self._ready else PAUSE_SECONDS)
            os._exit(1)
        self._code = process.returncode
