"""One thread, so that tests are bitwise reproducible and two workers share two cores; no deadline, on slow machines."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from kit import skips
from kit.clusters import start_cluster, workers_of

if not os.access("/dev/shm", os.W_OK):  # else datasets shares the epoch of a stream (docs/data.md)
    os.environ["USE_TORCH"] = "0"
settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    """Refuses a test that is named by an address: each worker of pytest-xdist would know it by another name.

    Raises:
        pytest.UsageError: if there is one.
    """
    addressed = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if addressed:
        raise pytest.UsageError(f"expected names that every worker gives, got {addressed[0]}: pass ids=")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the commands that run the skipped tests."""
    if skipped := terminalreporter.getreports("skipped"):
        terminalreporter.section("skipped tests, and the command that runs them")
        for line in skips.lines(report.longrepr[2] for report in skipped):
            terminalreporter.line(line)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the output that of a notebook, where Lightning's bar is shown."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray cluster of three nodes, in the environment of the tests that follow."""
    with start_cluster() as started:
        yield started


@pytest.fixture(scope="module", params=["here", "ray"])
def place(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """Returns a function from a number of workers to that number, or to as many workers of a Ray cluster."""
    if request.param == "here":
        return int
    request.getfixturevalue("cluster")
    return workers_of
