"""Broadcast of weights to real servers, with faults and their repair."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.served import SECRET, Served
from kit.served_runs import MODEL, a_run, an_engine, check_run
from kit.support import fit, tiny_prompts
from kit.vllm_models import moved, prompts_of, requests_for, synced, worst
from kit.vllm_rank import Watch
from typing_extensions import override

from lightning_rl import Rollout, VLLMServerEngine
from lightning_rl.callbacks import RolloutKL
from lightning_rl.generation.vllm.broadcast import Broadcast
from lightning_rl.generation.vllm.server_client import Label, ServerClient
from lightning_rl.utils.event_loop import REQUESTS


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Return the two servers of all tests of this file."""
    one, two = (Served(MODEL(), tmp_path_factory.mktemp("served")) for _ in range(2))
    for server in (one, two):
        server.wait()
    yield one, two
    assert one.stop() == two.stop() == (0, [])


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the URLs of servers that load a file."""
    loaded, honest = list[str](), ServerClient.load

    def load(client: ServerClient, *arguments: Any) -> Any:
        loaded.append(client.url)
        return honest(client, *arguments)

    monkeypatch.setattr(ServerClient, "load", load)
    return loaded


def test_weights_reach_every_server_without_files_over_loopback(
    both: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, model = loads(monkeypatch), MODEL()
    engine = an_engine(*both, canary=False, transfer="broadcast", storage=tmp_path)
    launch(engine, model)
    engine.expect(model.named_parameters())
    for version in range(4):
        moved(model, 0.02, seed=version)
        synced(engine, model, version)
        row = prompts_of(1, 60, seed=version)[0]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        scores = engine.score_copies(row)
        assert scores.keys() == {server.url for server in both}
        assert all(float((found - expected).abs().max()) < 1e-4 for found in scores.values())
    assert not files and not list(tmp_path.glob("*/*"))
    connections = [c for server in both for process in server.family() for c in process.net_connections("tcp")]
    assert {c.laddr.ip for c in connections if c.status == "LISTEN"} == {"127.0.0.1"}
    assert all(c.family == socket.AF_INET for c in connections if c.status == "LISTEN")
    engine.close()


def test_a_run_sees_every_engine_agree_with_the_trainer_after_each_sync(both: tuple[Served, Served]) -> None:
    watch = Watch()
    module = a_run(*both, engine=an_engine(*both, transfer="broadcast"))
    fit(module, callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(20, 4))
    check_run(watch, 5)
    assert all(abs(row["kl/rollout"]) < 1e-5 for row in watch.rows[::2])


def test_servers_stay_loadable_after_an_unknown_tensor(
    both: tuple[Served, Served], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = an_engine(*both, canary=False, transfer="broadcast"), MODEL()
    launch(engine, model)
    engine.expect(model.named_parameters())
    synced(engine, model, 0)
    fleet = engine._running()  # noqa: SLF001
    weights = [("model.layers.9.norm.weight", torch.ones(4)), *model.state_dict().items()]
    tensors = [(name, tuple(weight.shape), "float32") for name, weight in weights]
    other = Broadcast(fleet.run, tensors, torch.device("cpu"), "cpu")
    other.send(fleet.ready(), weights, Label(fleet.run, 1, 1))
    other.close()
    assert all(f"expected {server.url} to load weights, but it failed: " in caplog.text for server in both)
    assert [REQUESTS.run(server.client.label()) for server in fleet.servers] == [None, None]
    moved(model, 0.02)
    requests = requests_for(prompts_of(8, 20))
    assert worst(model, requests, synced(engine, model, 1).generate(requests, logprobs=True)) < 1e-4
    engine.close()


def test_a_run_with_a_changing_list_of_servers(
    both: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (one, two), honest, asked, listing = both, ServerClient.draw, list[str](), tmp_path / "servers"
    listing.write_text(one.url)
    engine = VLLMServerEngine(listing, api_key=SECRET, patience=300, timeout=120, transfer="broadcast")

    def draw(client: ServerClient, name: str, *arguments: Any) -> Any:
        asked.append(client.url)
        return honest(client, name, *arguments)

    class Change(Watch):
        """List two servers after the second rollout, and only the second one after the fourth."""

        @override
        def observe(self, rollout: Rollout) -> None:
            super().observe(rollout)
            listed = {2: [one.url, two.url], 4: [two.url]}.get(len(self.rollouts))
            if listed is not None:
                listing.write_text("\n".join(listed))
                fleet, end = engine._running(), time.monotonic() + 120  # noqa: SLF001
                while [server.client.url for server in fleet.ready()] != listed:
                    assert time.monotonic() < end, "the list was not followed"
                asked.append("changed")

    monkeypatch.setattr(ServerClient, "draw", draw)
    watch = Change()
    fit(a_run(one, engine=engine), callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(24, 4))
    check_run(watch, 6)
    first, second = (place for place, url in enumerate(asked) if url == "changed")
    assert asked[first - 1] == two.url, "it has said what the canary knows before it draws"
    assert set(asked[first + 1 : second]) == {one.url, two.url} and set(asked[second + 1 :]) == {two.url}


def test_a_killed_server_loads_a_file_and_joins_the_next_sync(
    both: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, honest, asked, left = loads(monkeypatch), ServerClient.draw, list[str](), list[Any]()
    (one, _), killing = both, threading.Lock()

    def deadly(client: ServerClient, name: str, *arguments: Any) -> Any:
        with killing:
            asked.append(name)
            if len(asked) == 40:
                left.append(one.kill())
                one.start()
        return honest(client, name, *arguments)

    monkeypatch.setattr(ServerClient, "draw", deadly)
    watch = Watch()
    module = a_run(one, engine=an_engine(one, transfer="broadcast", patience=600))
    fit(module, callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(16, 4))
    check_run(watch, 4)
    assert (left, files) == ([[]], [one.url])
