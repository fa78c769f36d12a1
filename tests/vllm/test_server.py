"""VLLMServerEngine with a real server: samples, syncs, keys, and a server that is killed."""

import http.client
import logging
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.open_paths import OPEN
from kit.served import SECRET, Served
from kit.served_runs import MODEL, a_run, an_engine, check_run
from kit.support import fit, tiny_prompts, tiny_tokenizer
from kit.talks import TURNS, openings, what_was_said
from kit.vllm_models import Starter, prompts_of, requests_for, synced, worst
from kit.vllm_rank import Watch
from transformers import AutoTokenizer

from lightning_rl import FinishReason, VLLMServerEngine
from lightning_rl.callbacks import RolloutKL
from lightning_rl.environments import converse
from lightning_rl.generation import CanaryError, Completion
from lightning_rl.generation.vllm.server_client import Label, ServerClient
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS
from lightning_rl.utils.event_loop import REQUESTS
from lightning_rl.utils.http import Cancelled, Client


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return the server of all tests of this file, which starts with random weights."""
    served = Served(MODEL(), tmp_path_factory.mktemp("served"))
    yield served
    code, left = served.stop()
    assert (code, left) == (0, []), (served.folder / "log").read_text()[-3000:]


@pytest.fixture
def engine(server: Served) -> Iterator[VLLMServerEngine]:
    engine, model = an_engine(server, canary=False), MODEL()
    launch(engine, model, AutoTokenizer.from_pretrained(server.folder))
    engine.expect(model.named_parameters())
    yield engine
    engine.close()


def what(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish, c.version, [] if c.logprobs is None else c.logprobs.tolist()) for c in completions]


def test_samples_equal_those_of_the_engine_in_process(
    server: Served, engine: VLLMServerEngine, start_engine: Starter
) -> None:
    model = MODEL()
    here = synced(start_engine(model, AutoTokenizer.from_pretrained(server.folder)), model)
    synced(engine, model)
    for options in ({"temperature": 1.0}, {"temperature": 0.0}, {"eos_token_ids": range(1, 40)}, {"stop": ("d",)}):
        requests = requests_for(prompts_of(24, 70), **options)
        found = engine.generate(requests, logprobs=True)
        assert what(found) == what(here.generate(requests, logprobs=True)), options
        assert worst(model, requests, found) < 1e-4
    row = prompts_of(1, 60)[0]
    assert torch.equal(engine.score([row])[0], here.score([row])[0].float())


def test_likeliest_tokens_are_those_of_the_sampled_distribution(engine: VLLMServerEngine) -> None:
    model = MODEL()
    engine.select_extras(frozenset((TOP_IDS, TOP_LOGPROBS)))
    engine.top_logprobs = 4
    requests = requests_for(prompts_of(4, 20), temperature=0.7)
    for request, completion in zip(requests, synced(engine, model).generate(requests, logprobs=True), strict=True):
        ids = torch.tensor([[*request.prefix_ids, *completion.token_ids]])
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / 0.7).log_softmax(-1)
        top, found = completion.token_extras[TOP_IDS].long(), completion.token_extras[TOP_LOGPROBS]
        torch.testing.assert_close(scores.gather(1, top), found, atol=1e-4, rtol=0)
        assert top.shape == (len(completion.token_ids), 4)
        assert (top.sort(-1).values.diff() > 0).all()  # different ones
        assert (found.sort(-1, descending=True).values[:, :3] > scores.topk(4).values[:, :3] - 1e-4).all()


def test_conversations_equal_those_of_the_engine_in_process(
    server: Served, engine: VLLMServerEngine, start_engine: Starter
) -> None:
    model = MODEL()
    here = synced(start_engine(model, AutoTokenizer.from_pretrained(server.folder)), model)
    synced(engine, model)
    expected = what_was_said(converse(openings(), here, logprobs=True))
    assert max(len(scores) for _, _, scores in expected) == TURNS
    for limit in (None, 5):
        assert what_was_said(converse(openings(), engine, logprobs=True, limit=limit)) == expected


def status_of(server: Served, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, b"{}" if method == "POST" else None, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_every_path_needs_the_key(server: Served, engine: VLLMServerEngine) -> None:
    with closing(Client(server.url, SECRET)) as client:
        routes = client.call("GET", "/openapi.json", timeout=60)["paths"]
    assert {"/collective_rpc", "/pause", "/update_weights", "/inference/v1/generate"} <= routes.keys()
    calls = [(method.upper(), path) for path, methods in routes.items() for method in methods]
    calls += [(method, path) for path in OPEN for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT")]
    found = {(method, path, key): status_of(server, method, path, key) for method, path in calls for key in (None, "x")}
    assert len(found) > 200 and {call for call, status in found.items() if status != 401} == set()
    assert status_of(server, "GET", "/health", SECRET) == 200
    synced(engine, MODEL())
    assert len(engine.generate(requests_for(prompts_of(1, 10)))) == 1


def test_the_key_is_in_no_list_of_processes_and_in_no_log(server: Served, engine: VLLMServerEngine) -> None:
    commands = [" ".join(process.cmdline()) for process in server.family()]
    assert len(commands) >= 3 and not [command for command in commands if SECRET in command]
    log = (server.folder / "log").read_text()
    assert "serving" in log and SECRET not in log


def test_a_server_listens_on_loopback_only(server: Served, engine: VLLMServerEngine) -> None:
    connections = [connection for process in server.family() for connection in process.net_connections("all")]
    places = {connection.laddr.ip for connection in connections if connection.status == "LISTEN"}
    assert places <= {"127.0.0.1", "::1"} and server.port in {c.laddr.port for c in connections if c.status == "LISTEN"}
    files = {Path(str(c.laddr)) for c in connections if c.family == socket.AF_UNIX and str(c.laddr).startswith("/")}
    assert len(files) >= 2 and {file.stat().st_mode & 0o077 for file in files} == {0}


def test_a_path_outside_of_the_storage_is_not_loaded(server: Served, engine: VLLMServerEngine) -> None:
    synced(engine, MODEL(), 3)
    with pytest.raises(
        RuntimeError, match=f"it failed: expected a folder of weights on {tempfile.gettempdir()}, got /etc"
    ):
        REQUESTS.run(ServerClient(server.url, SECRET, 60).load(Path("/etc"), Label("mine", 0, 0)))
    assert REQUESTS.run(ServerClient(server.url, SECRET, 60).label()) is None, "and the label is gone"


def test_stop_strings_need_the_same_tokenizer_at_the_server(server: Served) -> None:
    engine, model = an_engine(server, canary=False), MODEL()
    launch(engine, model, tiny_tokenizer())  # vLLM chooses another class for the same files
    engine.expect(model.named_parameters())
    with pytest.raises(ValueError, match="stop strings need one: pass tokenizer= to the module, and the same"):
        synced(engine, model).generate(requests_for([[2, 3]], stop=("d",)))
    engine.close()


def test_each_token_has_the_version_of_its_weights_during_syncs(engine: VLLMServerEngine) -> None:
    models, drawn = [MODEL(), MODEL(seed=1)], list[Completion]()
    synced(engine, models[0], 0)
    requests = requests_for(prompts_of(8, 20), max_new_tokens=200, temperature=1.0)
    drawing = threading.Thread(target=lambda: drawn.extend(engine.generate(requests, logprobs=True)))
    drawing.start()
    version = 0
    while drawing.is_alive() and version < 50:
        version += 1
        synced(engine, models[version % 2], version)
    drawing.join()
    mixed = [completion for completion in drawn if completion.versions is not None]
    assert len(drawn) == 8 and mixed, "no sync came in between"
    for request, completion in zip(requests, drawn, strict=True):
        versions = completion.versions or (completion.version,) * len(completion.token_ids)
        assert list(versions) == sorted(versions) and completion.finish is FinishReason.LENGTH
        whole = torch.tensor(request.prefix_ids + completion.token_ids)
        with torch.no_grad():
            logits = [model(input_ids=whole[None]).logits[0, len(request.prefix_ids) - 1 : -1] for model in models]
        expected = torch.stack(logits)[torch.tensor(versions) % 2, torch.arange(len(versions))].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs is not None and float((completion.logprobs - expected).abs().max()) < 1e-4
    assert synced(engine, models[0], 99).generate(requests[:1])[0].version == 99


def counted(server: Served, metric: str, label: str = "") -> float:
    """Return the sum of a metric of vLLM over labels that contain a text."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    with urllib.request.urlopen(request) as answer:  # on loopback
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric + "{") and label in line)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"


def test_cancelled_requests_end_at_the_server(server: Served, engine: VLLMServerEngine) -> None:
    synced(engine, MODEL())
    ended, requests = list[Exception](), requests_for(prompts_of(200, 20), max_new_tokens=200)
    before = counted(server, "vllm:request_success_total", '"length"')

    def draw() -> None:
        try:
            engine.generate(requests)
        except RuntimeError as error:
            ended.append(error)

    drawing = threading.Thread(target=draw)
    drawing.start()
    wait_until(lambda: counted(server, "vllm:num_requests_running") > 0)
    engine.close()
    drawing.join()
    assert [type(error) for error in ended] == [Cancelled]
    wait_until(lambda: counted(server, "vllm:num_requests_running") == 0)
    whole = counted(server, "vllm:request_success_total", '"length"') - before
    assert whole < len(requests), "the others went on to their end"


def test_a_run_sees_engine_and_trainer_agree(server: Served) -> None:
    watch = Watch()
    data = tiny_prompts(20, 4, validation=[[2, 3], [5]])
    fit(a_run(server), callbacks=[watch, RolloutKL(0.1)], data=data)
    check_run(watch, 5)
    assert len(watch.rows) == 10 and all(abs(row["kl/rollout"]) < 1e-5 for row in watch.rows[::2])


def test_the_canary_finds_a_server_that_was_not_synced(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, watch = ServerClient._post, Watch()  # noqa: SLF001

    async def forgetful(client: ServerClient, asked: str, body: Any = None) -> Any:
        skipped = asked == "/collective_rpc" and body["method"] == "lightning_rl_load"
        return {"results": [{}]} if skipped and len(watch.rollouts) == 2 else await honest(client, asked, body)

    monkeypatch.setattr(ServerClient, "_post", forgetful)
    with pytest.raises(CanaryError, match="bit for bit those of version 1, while the trainer's moved"):
        fit(a_run(server), callbacks=[watch], data=tiny_prompts(16, 4))
    assert len(watch.rollouts) == 2


def test_a_run_survives_a_killed_server(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest, asked, left = ServerClient.draw, list[str](), list[Any]()
    killing = threading.Lock()

    def deadly(client: ServerClient, name: str, *arguments: Any) -> Any:
        with killing:
            asked.append(name)
            if len(asked) == 40:
                left.append(server.kill())
                server.start()
        return honest(client, name, *arguments)

    monkeypatch.setattr(ServerClient, "draw", deadly)
    watch = Watch()
    with caplog.at_level(logging.WARNING):
        fit(a_run(server), callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(16, 4))
    check_run(watch, 4)
    assert left == [[]], "processes of the server that was killed"
    said = [record.message for record in caplog.records if record.name == "lightning_rl.generation.vllm.fleet"]
    assert said[0].startswith(f"lost {server.url}: ") and said[-1] == f"{server.url} is back, with the current weights"
