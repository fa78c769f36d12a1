"""Two scripted servers, and engines that start without a garbage collection of the test process."""

import gc
from collections.abc import Iterator

import pytest
from kit.scripted_server import ScriptedServer, servers


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a second of each start


@pytest.fixture
def one() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with servers(server):
        yield server


@pytest.fixture
def two() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with servers(server):
        yield server
