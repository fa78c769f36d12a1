"""Broadcast of weights to scripted servers, whose workers join real groups, with faults and their repair."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from generation.vllm import served_engines
from generation.vllm.served_engines import push, the_model
from kit.scripted_server import ScriptedServer, servers
from torch import Tensor

from lightning_rl.generation.vllm import broadcast, fleet, group
from lightning_rl.generation.vllm.group import GroupError
from lightning_rl.generation.vllm.worker_extension import HOST, WeightLoader

an_engine = partial(served_engines.an_engine, pushed=False, transfer="broadcast")


def check_weights(server: ScriptedServer, expected: dict[str, Tensor], version: int) -> None:
    assert server.label.endswith(f"/{version}")
    assert server.weights.keys() == expected.keys()
    assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())


def test_every_server_receives_every_tensor_in_one_group_without_files(
    one: ScriptedServer, two: ScriptedServer, tmp_path: Path
) -> None:
    engine = an_engine(one, two, storage=tmp_path)
    for version in range(3):
        expected = push(engine, version)
        check_weights(one, expected, version)
        check_weights(two, expected, version)
    assert len(one.receptions) == 3 and set(one.receptions) == set(two.receptions) == {one.receptions[0]}
    assert not one.loads and not list(tmp_path.glob("*/*")), "no server needed a file"
    assert one.calls.count("/resume") == one.calls.count("/pause?mode=keep&clear_cache=false") == 3
    engine.close()


def test_tensors_are_sent_in_the_dtype_of_the_engine() -> None:
    server = ScriptedServer(dtype="bfloat16")
    with servers(server):
        engine = an_engine(server)
        expected = {name: weight.bfloat16() for name, weight in push(engine, 0).items()}
        check_weights(server, expected, 0)
        engine.close()


def test_a_server_that_cannot_load_the_broadcast_loads_from_a_file(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = an_engine(one, two)
    push(engine, 0)

    def refuse(name: str) -> None:
        if name.endswith("k_proj.weight"):
            raise ValueError("expected another shape")

    two.on_tensor = refuse
    expected = push(engine, 1)
    check_weights(one, expected, 1)
    check_weights(two, expected, 1)
    assert len(two.loads) == 1 and not one.loads
    assert any("did not reach every server" in record.message for record in caplog.records)
    two.on_tensor = lambda _: None
    check_weights(two, push(engine, 2), 2)
    assert len(set(one.receptions)) == 1, "the group still works"
    engine.close()


def test_a_stream_that_fails_ends_the_group_until_the_next_push(one: ScriptedServer, two: ScriptedServer) -> None:
    engine = an_engine(one, two)
    push(engine, 0)

    def failing() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(the_model().named_parameters()):
            if number == 5:
                raise RuntimeError("the gather failed")
            yield pair

    with pytest.raises(RuntimeError, match="the gather failed"):
        engine.load_weights(failing(), 1)
    assert (one.label, two.label) == ("loading", "loading"), "tokens of a mixture are refused"
    expected = push(engine, 2)
    check_weights(one, expected, 2)
    check_weights(two, expected, 2)
    assert len(set(one.receptions)) == 2 and not one.loads
    engine.close()


def test_a_stream_of_other_tensors_is_an_error(one: ScriptedServer) -> None:
    engine = an_engine(one)
    push(engine, 0)
    swapped = list(the_model().named_parameters())
    swapped[2], swapped[3] = swapped[3], swapped[2]
    with pytest.raises(ValueError, match="as in the first sync, got"):
        engine.load_weights(swapped, 1)
    assert one.label == "loading"
    engine.close()


def test_a_slow_server_ends_the_group_and_loads_from_a_file(
    one: ScriptedServer, two: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group, "STALL", 0.5)
    engine, gate = an_engine(one, two), threading.Event()
    push(engine, 0)
    held: list[str] = []

    def hold(name: str) -> None:
        if not held:
            held.append(name)
            gate.wait(1.5)

    two.on_tensor = hold
    expected = push(engine, 1)
    check_weights(one, expected, 1)
    check_weights(two, expected, 1)
    assert two.loads and any("no tensor in 0.5 s" in record.message for record in caplog.records)
    engine.close()


def test_a_server_that_restarts_with_the_old_label_gets_the_weights_in_a_new_group(
    one: ScriptedServer, two: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "POLL", 3600.0)  # the push is the first to contact it
    engine = an_engine(one, two)
    push(engine, 0)
    label, port = two.label, two.port
    two.kill()
    again = ScriptedServer(port=port)
    again.label = label
    with servers(again):
        expected = push(engine, 1)
        check_weights(one, expected, 1)
        check_weights(again, expected, 1)
        assert one.receptions[-1] == again.receptions[-1] != one.receptions[0]
        engine.close()


def a_worker() -> WeightLoader:
    worker = WeightLoader()
    worker.rank, worker.device = 0, torch.device("cpu")  # pyrefly: ignore[read-only]
    return worker


GROUP = ("run/1", "127.0.0.1", 1, 2, "gloo")


def test_a_server_on_loopback_joins_groups_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beyond, tensors = (GROUP[0], "10.0.0.7", *GROUP[2:]), [["w", [2], "float32"]]
    monkeypatch.setattr(group, "connect", lambda host, port: (host, port))
    assert "expected a group on loopback" in a_worker().lightning_rl_join(beyond, 1, tensors)["error"]
    monkeypatch.setenv(HOST, "10.0.0.8")
    worker = a_worker()
    assert worker.lightning_rl_join(beyond, 1, tensors) == {}
    assert worker.lightning_rl_member() == {"group": "run/1", "gpu": ""}


def test_a_group_of_local_servers_listens_on_loopback_only(one: ScriptedServer) -> None:
    def listening() -> set[tuple[str, int]]:
        return {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}

    before = listening()  # sockets of earlier tests in this process
    engine = an_engine(one)
    push(engine, 0)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    engine.close()


class BlockingGroup:
    """NCCL group without its other member, whose first collective blocks while it connects."""

    def __init__(self) -> None:
        self.entered, self.arrived, self.aborted = threading.Event(), threading.Event(), False

    def broadcast(self, *_: Any) -> Any:
        """Block, and fail once released."""
        self.entered.set()
        self.arrived.wait(30)
        raise RuntimeError("the group was abandoned")

    def abort(self) -> None:
        """Store the call."""
        self.aborted = True


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[group.Group, BlockingGroup]]:
    """Return the only member of an NCCL group of two."""
    fake = BlockingGroup()
    monkeypatch.setattr(group, "_nccl", lambda *_: fake)
    store = group.open_store("127.0.0.1")
    invitation = group.Invitation("lonely", "127.0.0.1", store.port, 2, "nccl")
    yield group.Group(invitation, [("a", (4,), "float32")], rank=0, device=torch.device("cpu"), store=store), fake
    fake.arrived.set()


def outcome(call: Callable[[], object]) -> "Future[object]":
    """Run a call that may block in a thread."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  for the test
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_missing_member_breaks_the_group_after_the_timeout(
    lonely: tuple[group.Group, BlockingGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STALL", 0.5)
    member, fake = lonely
    for _ in range(2):
        with pytest.raises(GroupError, match=r"group lonely is broken: no tensor in 0.5 s"):
            outcome(lambda: list(member.receive())).result(5)
    outcome(member.close).result(5)
    assert fake.entered.is_set() and not fake.aborted, "aborting what connects would block as well"


def test_a_waiting_member_can_give_up(lonely: tuple[group.Group, BlockingGroup]) -> None:
    member, fake = lonely
    call = outcome(lambda: member.broadcast(torch.zeros(16, dtype=torch.uint8)))
    assert fake.entered.wait(5)
    member.give_up()
    with pytest.raises(GroupError, match="a member has left it"):
        call.result(5)


@pytest.mark.parametrize("shared", ["the trainer", "servers", "none"])
def test_members_that_share_a_gpu_are_an_error_that_names_both(
    shared: str,
    one: ScriptedServer,
    two: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"of {device}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    numbers = {"the trainer": (1, 0), "servers": (1, 1), "none": (1, 2)}[shared]
    for server, number in zip((one, two), numbers, strict=True):
        server.holds["device"], server.worker.device = "cuda", torch.device("cuda", number)  # pyrefly: ignore[read-only]
    engine = an_engine(one, two, transfer="file")
    sender = broadcast.Broadcast("run", [("a", (4,), "float32")], torch.device("cuda", 0), "cuda")
    monkeypatch.setattr(group, "_nccl", lambda *_: BlockingGroup())
    joined = partial(sender._group_of, engine._running().ready())  # noqa: SLF001
    if shared == "none":
        assert joined() is not None and "takes no part" not in caplog.text
    else:
        owner = re.escape(shared if shared == "the trainer" else one.url)
        with pytest.raises(ValueError, match=rf'got one for {owner} and {re.escape(two.url)}: pass transfer="file"'):
            joined()
    engine.close()
