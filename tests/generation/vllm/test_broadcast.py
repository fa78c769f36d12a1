"""Weights by broadcast to scripted servers, whose workers join real groups: what a fault costs and what repairs it."""

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
from kit.engine_requests import launch, request_of
from kit.scripted_server import KEY, ScriptedServer, servers
from kit.support import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl import VLLMServerEngine
from lightning_rl.generation.vllm import broadcast, group, server_pool
from lightning_rl.generation.vllm.group import GroupError
from lightning_rl.generation.vllm.worker_extension import HOST, WeightLoader


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "POLL", 0.02)
    monkeypatch.setattr(server_pool, "BACKOFF", 0.01)
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 4096)


def the_model(seed: int = 0) -> PreTrainedModel:
    return tiny_model("llama", seed, dtype=torch.float32)


def an_engine(*scripted: ScriptedServer, **options: Any) -> VLLMServerEngine:
    known: dict[str, Any] = {"api_key": KEY, "canary": False, "patience": 10, "timeout": 10, "transfer": "broadcast"}
    engine = VLLMServerEngine([server.url for server in scripted], **{**known, **options})
    launch(engine, the_model())
    engine.expect(the_model().named_parameters())
    return engine


def push(engine: VLLMServerEngine, version: int) -> dict[str, Tensor]:
    model = the_model(seed=version)
    engine.load_weights(model.named_parameters(), version)
    return dict(model.named_parameters())


def check_weights(server: ScriptedServer, expected: dict[str, Tensor], version: int) -> None:
    assert server.label.endswith(f"/{version}")
    assert server.weights.keys() == expected.keys()
    assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())


def test_every_server_gets_every_tensor_in_one_group_and_no_file_is_written(
    one: ScriptedServer, two: ScriptedServer, tmp_path: Path
) -> None:
    engine = an_engine(one, two, storage=tmp_path)
    for version in range(3):
        expected = push(engine, version)
        check_weights(one, expected, version)
        check_weights(two, expected, version)
    assert len(one.receptions) == 3 and set(one.receptions) == set(two.receptions) == {one.receptions[0]}
    assert not one.loads and not list(tmp_path.glob("*/*")), "nobody needed a file"
    assert one.calls.count("/resume") == one.calls.count("/pause?mode=keep&clear_cache=false") == 3
    engine.close()


def test_a_large_tensor_has_a_bucket_to_itself_and_the_dtype_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 64)
    server = ScriptedServer(dtype="bfloat16")
    with servers(server):
        engine = an_engine(server)
        expected = {name: weight.bfloat16() for name, weight in push(engine, 0).items()}
        check_weights(server, expected, 0)
        engine.close()


def test_a_bad_receiver_reads_to_its_end_and_loads_from_a_file_while_the_others_notice_nothing(
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
    assert len(set(one.receptions)) == 1, "the group is as good as before"
    engine.close()


def test_a_bad_sender_ends_the_group_and_the_next_push_repairs_everything(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    engine = an_engine(one, two)
    push(engine, 0)

    def failing() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(the_model().named_parameters()):
            if number == 5:
                raise RuntimeError("the gather failed")
            yield pair

    with pytest.raises(RuntimeError, match="the gather failed"):
        engine.load_weights(failing(), 1)
    assert (one.label, two.label) == ("loading", "loading"), "nobody takes tokens of a mixture"
    expected = push(engine, 2)
    check_weights(one, expected, 2)
    check_weights(two, expected, 2)
    assert len(set(one.receptions)) == 2 and not one.loads
    engine.close()


def test_a_stream_of_other_tensors_is_an_error_and_no_server_takes_it_for_whole(one: ScriptedServer) -> None:
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
    monkeypatch.setattr(group, "STALL", 1.0)
    engine, gate = an_engine(one, two), threading.Event()
    push(engine, 0)
    held: list[str] = []

    def hold(name: str) -> None:
        if not held:
            held.append(name)
            gate.wait(3.0)

    two.on_tensor = hold
    expected = push(engine, 1)
    check_weights(one, expected, 1)
    check_weights(two, expected, 1)
    assert two.loads and any("no bucket in 1 s" in record.message for record in caplog.records)
    engine.close()


def test_a_server_that_restarts_with_the_old_label_gets_the_weights_in_a_new_group(
    one: ScriptedServer, two: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "POLL", 3600.0)  # nobody sees that it is away before the push asks
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


def test_a_server_that_comes_back_loads_from_a_file_and_joins_with_the_next_push(
    one: ScriptedServer, tmp_path: Path
) -> None:
    engine = an_engine(one, storage=tmp_path)
    expected = push(engine, 0)
    one.kill()
    again = ScriptedServer(port=one.port)
    with servers(again):
        request = request_of((2, 3), 1, 1, max_new_tokens=4, temperature=0.7)
        assert engine.generate([request])[0].version == 0
        check_weights(again, expected, 0)
        assert len(again.loads) == 1 and not again.receptions
        check_weights(again, push(engine, 1), 1)
        assert len(again.loads) == 1 and len(again.receptions) == 1
        assert not list(tmp_path.glob("*/*")), "the file went with its version"
        engine.close()


def test_a_server_of_another_model_is_lost_and_the_others_go_on(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = an_engine(one, two)
    push(engine, 0)
    two.kill()
    other = ScriptedServer(port=two.port, architecture="OtherForCausalLM")

    def refuse(name: str) -> None:
        raise ValueError(f"expected no {name}")

    other.on_tensor = refuse
    with servers(other):
        check_weights(one, push(engine, 1), 1)
        assert "expected architecture LlamaForCausalLM" in caplog.text
        assert not other.label.endswith("/1")
        check_weights(one, push(engine, 2), 2)
        engine.close()


def test_servers_that_cannot_join_load_from_a_file(
    one: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broadcast, "_host_for", lambda _: "127.0.0.2")
    engine = an_engine(one)
    check_weights(one, push(engine, 0), 0)
    assert one.loads and "expected a group on loopback, where this server listens, got one at 127.0.0.2" in caplog.text
    engine.close()


def a_worker() -> WeightLoader:
    worker = WeightLoader()
    worker.rank = 0
    return worker


GROUP = ("run/1", "127.0.0.1", 1, 2, "gloo", 64)


def test_a_server_on_loopback_joins_no_group_beyond_it_and_one_that_listens_elsewhere_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beyond, tensors = (GROUP[0], "10.0.0.7", *GROUP[2:]), [["w", [2], "float32"]]
    monkeypatch.setattr(group, "connect", lambda host, port: (host, port))
    assert "expected a group on loopback" in a_worker().lightning_rl_join(beyond, 1, tensors)["error"]
    monkeypatch.setenv(HOST, "10.0.0.8")
    worker = a_worker()
    assert worker.lightning_rl_join(beyond, 1, tensors) == {}
    assert worker.lightning_rl_membership() == {"name": "run/1"}


@pytest.mark.parametrize(
    ("invitation", "tensors"),
    [
        pytest.param((), [], id="empty"),
        pytest.param(GROUP, [["w", [2], "load"]], id="dtype"),
        pytest.param(GROUP, [["w", [-2], "float32"]], id="size"),
        pytest.param(GROUP, [["w"]], id="no-shape"),
        pytest.param(GROUP, 3, id="no-list"),
    ],
)
def test_an_invitation_that_makes_no_sense_is_an_answer_and_no_exception(invitation: Any, tensors: Any) -> None:
    assert "error" in a_worker().lightning_rl_join(invitation, 1, tensors)


def test_a_worker_that_is_in_no_group_says_that_it_has_left() -> None:
    assert a_worker().lightning_rl_receive("run/1")["left"] == "expected a member of group run/1, got one of None"


def test_sockets_of_a_group_are_on_loopback_alone_when_its_servers_are(one: ScriptedServer) -> None:
    def listening() -> set[tuple[str, int]]:
        return {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}

    before = listening()  # sockets of earlier tests in this process
    engine = an_engine(one)
    push(engine, 0)
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    engine.close()


def test_the_way_of_transfer_is_checked_at_construction() -> None:
    with pytest.raises(ValueError, match="expected transfer out of file, broadcast, got 'telepathy'"):
        VLLMServerEngine("http://localhost:1", transfer="telepathy")  # pyright: ignore[reportArgumentType]


class BlockingGroup:
    """NCCL's group of which a member never comes: its first collective blocks while it connects."""

    def __init__(self) -> None:
        self.entered, self.arrived, self.aborted = threading.Event(), threading.Event(), False

    def broadcast(self, *_: Any) -> Any:
        """Blocks."""
        self.entered.set()
        self.arrived.wait(30)
        raise RuntimeError("the group was abandoned")

    def abort(self) -> None:
        """Notes that it was called."""
        self.aborted = True


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[group.Group, BlockingGroup]]:
    """A member of a group of two on NCCL, alone."""
    fake = BlockingGroup()
    monkeypatch.setattr(group, "_nccl", lambda *_: fake)
    store = group.open_store("127.0.0.1")
    invitation = group.Invitation("lonely", "127.0.0.1", store.port, 2, "nccl", 64)
    yield group.Group(invitation, [("a", (4,), "float32")], rank=0, device=torch.device("cpu"), store=store), fake
    fake.arrived.set()


def outcome(call: Callable[[], object]) -> "Future[object]":
    """A call in a thread that may block."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  for the test
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_member_that_never_comes_breaks_the_group_within_the_time_of_a_bucket(
    what: str, lonely: tuple[group.Group, BlockingGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STALL", 0.5)
    member, fake = lonely
    flat = torch.zeros(16, dtype=torch.uint8)
    call = outcome(lambda: member.send(flat) if what == "send" else list(member.receive()))
    with pytest.raises(GroupError, match=r"group lonely is broken: no bucket in 0.5 s"):
        call.result(5)
    with pytest.raises(GroupError, match=r"no bucket in 0.5 s"):
        outcome(member.send_failure).result(5)
    outcome(member.close).result(5)
    assert fake.entered.is_set() and not fake.aborted, "aborting what connects would block as well"


def test_a_member_that_waits_for_the_others_is_told_to_give_up(lonely: tuple[group.Group, BlockingGroup]) -> None:
    member, fake = lonely
    call = outcome(lambda: member.send(torch.zeros(16, dtype=torch.uint8)))
    assert fake.entered.wait(5)
    member.give_up()
    with pytest.raises(GroupError, match="a member has left it"):
        call.result(5)


def test_members_that_could_not_connect_do_not_try_it_again(
    lonely: tuple[group.Group, BlockingGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    member, fake = lonely

    def refuse(*_: Any) -> Any:
        monkeypatch.setattr(fake, "broadcast", partial(BlockingGroup.broadcast, fake))
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(fake, "broadcast", refuse)
    with pytest.raises(GroupError, match="NCCL error"):
        member.send(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(GroupError, match="NCCL error"):
        outcome(member.send_failure).result(5)
    assert not fake.entered.is_set()


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
        server.holds["device"], server.worker.device = "cuda", torch.device("cuda", number)
    engine = an_engine(one, two, transfer="file")
    server_pool = engine._running()  # noqa: SLF001
    sender = broadcast.Broadcast(server_pool, [("a", (4,), "float32")], torch.device("cuda", 0))
    monkeypatch.setattr(group, "_nccl", lambda *_: BlockingGroup())
    joined = partial(sender._group_of, server_pool.ready())  # noqa: SLF001
    if shared == "none":
        assert joined() is not None and "takes no part" not in caplog.text
    else:
        owner = re.escape(shared if shared == "the trainer" else one.url)
        with pytest.raises(ValueError, match=rf'got one for {owner} and {re.escape(two.url)}: pass transfer="file"'):
            joined()
    engine.close()
