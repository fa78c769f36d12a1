"""Servers that die and restart continuously: every request is answered once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from kit.engine_requests import launch, request_of
from kit.scripted_server import KEY, VOCABULARY, ScriptedServer
from kit.support import tiny_model

from lightning_rl import VLLMServerEngine

GROUP = 8


class Mortal:
    """Scripted servers that are killed and restarted one at a time."""

    def __init__(self, number: int) -> None:
        self.servers = [ScriptedServer() for _ in range(number)]
        self.urls = [server.url for server in self.servers]
        self.dead = list[ScriptedServer]()

    def arrived(self) -> int:
        """Return the number of requests at all servers, the dead ones included."""
        return sum(len(server.requests) for server in (*self.servers, *self.dead))

    @contextmanager
    def dying(self, every: int) -> Iterator[None]:
        """Kill one server after the other, each when ``every`` more requests have arrived."""
        ended = threading.Event()

        def kill() -> None:
            while not ended.wait(0.005):
                if self.arrived() < every * (len(self.dead) + 1):
                    continue
                place = len(self.dead) % len(self.servers)
                self.dead.append(self.servers[place])
                self.dead[-1].kill()
                self.servers[place] = ScriptedServer(port=self.dead[-1].port)

        killing = threading.Thread(target=kill)
        killing.start()
        try:
            yield
        finally:
            ended.set()
            killing.join()
            for server in self.servers:
                server.kill()


def check(number: int, every: int) -> None:
    fleet, model = Mortal(4), tiny_model("llama", dtype=torch.float32)
    engine = VLLMServerEngine(fleet.urls, api_key=KEY, canary=False, patience=60, timeout=60, at_once=16)
    with fleet.dying(every):
        launch(engine, model)
        engine.expect(model.named_parameters())
        engine.load_weights(model.named_parameters(), 0)
        requests = [request_of((2, 3), n, n, max_new_tokens=4) for n in range(number)]
        requests = [replace(each, prefix_ids=(n // GROUP % VOCABULARY, 3)) for n, each in enumerate(requests)]
        drawn = engine.generate(requests)
        engine.close()
    expected = [tuple((n + place) % VOCABULARY for place in range(4)) for n in range(number)]
    assert [completion.token_ids for completion in drawn] == expected, "one answer to each request, and its own"
    assert {completion.version for completion in drawn} == {0} and len(fleet.dead) >= 2
    names = [body["request_id"] for server in (*fleet.servers, *fleet.dead) for body in server.requests]
    assert {int(name.split("-")[1]) for name in names} == set(range(number))


def test_every_request_is_answered_once_while_servers_die() -> None:
    check(600, every=150)
