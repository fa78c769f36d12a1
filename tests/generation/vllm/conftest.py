"""Scripted servers: two that differ in nothing but their port."""

from collections.abc import Iterator

import pytest
from kit.scripted_server import ScriptedServer, servers


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
