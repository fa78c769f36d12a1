"""Two scripted servers, and engines that start without a garbage collection and check servers often."""

import gc
from collections.abc import Iterator

import pytest
from kit.scripted_server import ScriptedServer, servers

from lightning_rl.generation.vllm import discovery, fleet


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a second of each start
    monkeypatch.setattr(fleet, "POLL", 0.02)
    monkeypatch.setattr(fleet, "BACKOFF", 0.01)
    monkeypatch.setattr(discovery, "READ", 0.005)


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
