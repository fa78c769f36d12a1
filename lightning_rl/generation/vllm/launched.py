"""URLs of the servers that the launcher of a run has started."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_rl.processes.ray_connection import connect_to_ray

SERVERS = "SERVERS"
RAY_SERVERS = "LIGHTNING_RL_RAY_SERVERS"  # namespace and number of the actors of `lightning-rl ray`
ANSWER_SECONDS = 2.0  # for an actor to return its URL


def launched_servers() -> Sequence[str]:
    """Return the URLs of the servers that the launcher of this run has started.

    Under ``lightning-rl ray`` they are those of its servers that run now, otherwise the words of the environment
    variable ``SERVERS``. Pass the function itself, ``VLLMServerEngine(launched_servers)``, which calls it every second.

    Raises:
        LookupError: If no launcher has set ``SERVERS``.
    """
    if RAY_SERVERS in os.environ:
        return _servers_of_ray(*os.environ[RAY_SERVERS].split())
    if SERVERS not in os.environ:
        raise LookupError(f"expected URLs of servers in the environment variable {SERVERS}, got none: set it")
    return os.environ[SERVERS].split()


def _servers_of_ray(namespace: str, number: str) -> Sequence[str]:
    connect_to_ray(log_to_driver=False)
    import ray

    calls, urls = list[Any](), list[str]()
    for place in range(int(number)):
        with suppress(ValueError):  # an actor that does not exist yet
            calls.append(ray.get_actor(actor_name(place), namespace).url.remote())
    for call in ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)[0] if calls else ():
        with suppress(ray.exceptions.RayError):  # an actor that is being started again
            urls.append(ray.get(call))
    return [url for url in urls if url]


def actor_name(place: int) -> str:
    """Return the name of the actor of a server."""
    return f"server-{place}"
