"""What servers say of their own work: figures by hand, names that stay, and nobody who waits for them."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.scripted_server import KEY, Answer, ScriptedServer, servers
from kit.support import fit, tiny_model, tiny_module, tiny_prompts
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_rl import VLLMServerEngine
from lightning_rl.generation.vllm import endpoint, meters
from lightning_rl.generation.vllm.endpoint import Endpoint
from lightning_rl.generation.vllm.http import LOOP
from lightning_rl.generation.vllm.meters import Meters
from lightning_rl.generation.vllm.places import Server
from lightning_rl.metrics import is_of_the_clock

pytest.importorskip("prometheus_client")
Make = Callable[..., list[Server]]


@pytest.fixture
def one() -> Iterator[ScriptedServer]:
    server = ScriptedServer(architecture="Qwen2ForCausalLM")
    with servers(server):
        yield server


@pytest.fixture
def two() -> Iterator[ScriptedServer]:
    server = ScriptedServer(architecture="Qwen2ForCausalLM")
    with servers(server):
        yield server


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds from one reading of a server to the next."""
    seconds = itertools.count(step=10)
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


LABELS = r'{engine="0",model_name="a \"model\" } of \\ours"}'


def text(**values: float | str) -> bytes:
    """As vLLM puts it, with other metrics before and behind."""
    lines = ["# HELP vllm:num_requests_running Number of requests", "# TYPE vllm:num_requests_running gauge"]
    lines += [f"vllm:{name}{LABELS} {value}" for name, value in values.items()]
    lines += ['vllm:e2e_request_latency_seconds_bucket{le="0.3"} 7.0', "process_open_fds 12.0", ""]
    return "\n".join(lines).encode()


def read(known: Meters, rollout: int) -> dict[str, float]:
    """The figures of a reading, once it has ended."""

    async def reading() -> None:
        known.begin(rollout)
        if known._reading is not None:  # noqa: SLF001  which nobody waits for but a test
            await known._reading  # noqa: SLF001

    LOOP.run(reading())
    return known.take()


@pytest.fixture
def of() -> Iterator[Make]:
    """Makes servers of a pool."""
    known = dict[str, Server]()

    def make(*scripted: ScriptedServer) -> list[Server]:
        for server in scripted:
            known.setdefault(server.url, Server(Endpoint(server.url, KEY, 5), ready=True))
        return [known[server.url] for server in scripted]

    yield make
    for server in known.values():
        server.endpoint.close()


def test_figures_are_those_of_a_hand_table(one: ScriptedServer, of: Make) -> None:
    known = Meters(lambda: of(one))
    one.metrics = text(
        num_requests_running=3.0, num_requests_waiting=2.0, kv_cache_usage_perc=0.25, generation_tokens_total=1000.0,
        num_preemptions_total=1.0, prefix_cache_queries_total=80.0, prefix_cache_hits_total=0.0,
    )  # fmt: skip
    gauges = {"server/0/running": 3.0, "server/0/waiting": 2.0, "server/0/kv_cache": 0.25}
    assert read(known, 0) == {"server/ready": 1.0, **gauges}
    one.metrics = text(
        num_requests_running=0.0, num_requests_waiting=0.0, kv_cache_usage_perc=1e-1, generation_tokens_total=1.5e3,
        num_preemptions_total=4.0, prefix_cache_queries_total=180.0, prefix_cache_hits_total=75.0,
    )  # fmt: skip
    assert read(known, 1) == {
        "server/ready": 1.0, "server/0/running": 0.0, "server/0/waiting": 0.0, "server/0/kv_cache": 0.1,
        "server/0/tokens_per_second": 50.0, "server/0/preemptions": 3.0, "server/0/prefix_hits": 0.75,
    }  # fmt: skip
    assert read(known, 1) == {}, "once in a rollout"
    one.metrics = text(generation_tokens_total=20.0, num_requests_running=1.0)
    assert read(known, 2) == {"server/ready": 1.0, "server/0/running": 1.0}, "it has started anew"
    assert all(is_of_the_clock(name) for name in gauges)


def test_a_server_keeps_its_number_when_others_come_and_go(one: ScriptedServer, two: ScriptedServer, of: Make) -> None:
    one.metrics, two.metrics = text(num_requests_running=1.0), text(num_requests_running=2.0)
    now = of(one)
    known = Meters(lambda: now)
    seen = []
    for rollout, listed in enumerate(([one], [two, one], [two], [one])):
        now = of(*listed)
        seen.append({name: value for name, value in read(known, rollout).items() if name != "server/ready"})
    first, second = {"server/0/running": 1.0}, {"server/1/running": 2.0}
    assert seen == [first, first | second, second, first]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(404, id="none"),
        pytest.param(500, id="broken"),
        pytest.param(b"vllm:num_requests_running{ 1\n", id="rubbish"),
        pytest.param(b"vllm:num_requests_running many\n", id="no-number"),
        pytest.param(text(num_requests_running="NaN", kv_cache_usage_perc="+Inf"), id="not-finite"),
        pytest.param(b"\xff\x00" * 100, id="bytes"),
        pytest.param(b"x" * 2**21, id="long"),
        pytest.param(b"", id="empty"),
        pytest.param({"status": "ok"}, id="json"),
        pytest.param(text(num_requests_running="9" * 400), id="beyond-numbers"),
    ],
)
def test_a_server_that_says_something_else_has_no_figures_and_is_no_error(
    said: Answer, one: ScriptedServer, two: ScriptedServer, of: Make
) -> None:
    one.metrics, two.metrics = said, text(num_requests_running=2.0)
    assert read(Meters(lambda: of(one, two)), 0) == {"server/ready": 2.0, "server/1/running": 2.0}


def test_only_a_line_end_ends_a_line(one: ScriptedServer, of: Make) -> None:
    one.metrics = 'vllm:num_requests_running{model_name="a\u2028vllm:b\x0c"} 3.0\r\n'.encode()
    assert read(Meters(lambda: of(one)), 0) == {"server/ready": 1.0, "server/0/running": 3.0}


class Keeping(DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = list[dict[str, float]]()

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))


def test_a_run_logs_what_its_servers_say_and_waits_for_none_that_says_nothing(
    one: ScriptedServer, two: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "METERS", 60.0)
    gate, honest, log = threading.Event(), two.answer, Keeping()
    one.metrics = text(num_requests_running=5.0)
    two.answer = lambda path, body: (path == "/metrics" and not gate.wait(30)) or honest(path, body)  # pyright: ignore[reportAttributeAccessIssue]

    def drawing(_: dict[str, Any], answer: Answer) -> Answer:
        one.until(lambda known: "/metrics" in known.calls)  # at the start already, before anything is drawn
        return answer

    one.script = drawing
    engine = VLLMServerEngine([one.url, two.url], api_key=KEY, canary=False, patience=20)
    fit(tiny_module(engine=engine), data=tiny_prompts(12, 4), logger=log)
    gate.set()
    logged = {name: row[name] for row in log.rows for name in row if name.startswith("server/")}
    assert logged["server/0/running"] == 5.0 and not any(name.startswith("server/1/") for name in logged)
    assert logged["server/ready"] == 2.0 and len(log.rows) == 3


def test_servers_are_read_when_a_rollout_has_its_first_answer(one: ScriptedServer) -> None:
    engine, model = VLLMServerEngine(one.url, api_key=KEY, canary=False), tiny_model("qwen2", dtype=torch.float32)
    launch(engine, model)
    engine.expect(model.named_parameters())
    engine.load_weights(model.named_parameters(), 0)
    one.until(lambda known: known.calls.count("/metrics") == 1)
    asked = [request_of((2, 3), n, n, max_new_tokens=2) for n in range(8)]
    for rollout in (0, 0, 1):
        engine.generate([replace(request, rollout=rollout) for request in asked])
        one.until(lambda known, readings=2 + rollout: known.calls.count("/metrics") == readings)
    engine.close()


def test_without_the_package_nothing_is_read_and_the_log_says_what_to_install(
    one: ScriptedServer, of: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    known = Meters(lambda: of(one))
    assert read(known, 0) == {} and "/metrics" not in one.calls
    assert "pip install 'lightning-rl[servers]'" in caplog.text
