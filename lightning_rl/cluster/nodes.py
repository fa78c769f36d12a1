"""Checks of a Ray cluster before anything starts on it."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_rl.version import __version__

GUARDED = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}  # Ray would kill the guards of processes first


class ClusterError(Exception):
    """The cluster cannot run the recipe; the message says why, and what to do."""


def has_gpus() -> bool:
    """Return True if the cluster has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def check_resources(bundles: Sequence[Mapping[str, float]]) -> None:
    """Check that the nodes have the resources of all bundles, each on one node.

    Raises:
        ClusterError: With the resources of the nodes.
    """
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda each: sum(each.values()), reverse=True):
        fits = [node for node in free if all(node.get(kind, 0) >= amount for kind, amount in bundle.items())]
        if not fits:
            wanted = ", ".join(_text(each) for each in bundles)
            there = "; ".join(filter(None, map(_text, nodes)))
            raise ClusterError(
                f"expected nodes with {wanted} (each on one node), got nodes with {there}: add nodes, or lower "
                "--nodes, --devices or --servers"
            )
        for kind, amount in bundle.items():
            fits[0][kind] -= amount


def _text(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if kind in resources)


def check_nodes(paths: Sequence[Path]) -> None:
    """Check that every node has this version of the package, and the paths.

    Raises:
        ClusterError: With the nodes where something is missing.
    """

    def look(paths: Sequence[Path]) -> str:  # nested, and thus pickled by value
        try:
            from lightning_rl.version import __version__
        except ImportError as error:
            return f"has no lightning-rl ({error}): install it there"
        missing = [path for path in paths if not path.exists()]
        return f"has no {missing[0]}: mount the folder there" if missing else __version__

    task, nodes = ray.remote(num_cpus=0)(look), [node for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    try:
        answers = ray.get([task.options(scheduling_strategy=place).remote(list(paths)) for place in places])
    except RayError as error:
        raise ClusterError(
            f"expected every node of the Ray cluster to answer, got {error}: was one lost? Try again"
        ) from error
    wrong = [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) "
        + (answer if answer.startswith("has") else f"has version {answer}")
        for node, answer in zip(nodes, answers, strict=True)
        if answer != __version__
    ]
    if wrong:
        raise ClusterError(f"expected lightning-rl {__version__} on every node, but {'; '.join(wrong)}")


def free_port(host: str) -> int:
    """Return a port of this node that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return found.getsockname()[1]
