"""Two network namespaces as two machines: each with its loopback, and one wire between them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth0"


def can_make() -> bool:
    """Return True if this user may create namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Return the prefixes of commands for the first and the second of :data:`ADDRESSES`."""
    names = [f"machine-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"end{os.getpid() % 10**8}-{number}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            for words in (
                ("link", "set", end, "name", INTERFACE), ("addr", "add", f"{address}/24", "dev", INTERFACE),
                ("link", "set", "lo", "up"), ("link", "set", INTERFACE, "up"),
            ):  # fmt: skip
                _ip("-n", name, *words)
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
