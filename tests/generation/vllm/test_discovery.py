"""Servers that are added and removed while a run goes on: samples stay, each counts once, and no list ends the run."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.scripted_server import KEY, VOCABULARY, Answer, ScriptedServer, servers
from kit.support import fit, recorder, tiny_model, tiny_module, tiny_prompts, weights_of
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import EngineError, RLLightningModule, Rollout, VLLMServerEngine
from lightning_rl.generation import Canary, Completion, Request
from lightning_rl.generation.vllm import discovery, server_pool
from lightning_rl.generation.vllm.discovery import Members

MODEL: dict[str, Any] = {"architecture": "Qwen2ForCausalLM"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "POLL", 0.02)
    monkeypatch.setattr(server_pool, "BACKOFF", 0.01)
    monkeypatch.setattr(discovery, "READ", 0.005)


class Listed:
    """A function that lists servers, and knows when the run has taken what it lists."""

    def __init__(self, *listed: ScriptedServer) -> None:
        self.urls: Any = [server.url for server in listed]
        self.readings, self.read = 0, threading.Condition()

    def __call__(self) -> Any:
        """The URLs; raises an error that it was given instead."""
        with self.read:
            self.readings += 1
            self.read.notify_all()
            if isinstance(self.urls, BaseException):
                raise self.urls
            return self.urls() if callable(self.urls) else self.urls

    def change(self, *listed: ScriptedServer) -> None:
        """Returns once the run has these servers."""
        self.say([server.url for server in listed])

    def say(self, urls: Any) -> None:
        """Returns once the run has read this often enough to take it."""
        with self.read:
            self.urls, enough = urls, self.readings + 4
            assert self.read.wait_for(lambda: self.readings >= enough, 20), "the list was not read"


def the_model(seed: int = 0) -> PreTrainedModel:
    return tiny_model("llama", seed, dtype=torch.float32)


def an_engine(listing: Any, **options: Any) -> VLLMServerEngine:
    known: dict[str, Any] = {"api_key": KEY, "canary": False, "patience": 20, "timeout": 20, **options}
    engine = VLLMServerEngine(listing, **known)
    launch(engine, the_model())
    engine.expect(the_model().named_parameters())
    push(engine, 0)
    return engine


def push(engine: VLLMServerEngine, version: int) -> None:
    engine.load_weights(the_model(seed=version).named_parameters(), version)


def requests(number: int) -> list[Request]:
    return [request_of((n // 4 % VOCABULARY, 3), n, n, max_new_tokens=4, temperature=0.7) for n in range(number)]


def check(drawn: Sequence[Completion], versions: Sequence[int] = (0,)) -> None:
    expected = [tuple((n + place) % VOCABULARY for place in range(4)) for n in range(len(drawn))]
    assert [completion.token_ids for completion in drawn] == expected, "one answer to each request, and its own"
    assert {completion.version for completion in drawn} <= set(versions)


def samples_of(server: ScriptedServer) -> list[int]:
    """Sample ids that a server was asked for, the canary's aside."""
    return [int(name.split("-")[1]) for name in names_of(server) if name.split("-")[1].isdigit()]


def names_of(server: ScriptedServer) -> list[str]:
    return [body["request_id"] for body in server.requests]


@contextmanager
def until_the_log_says(caplog: pytest.LogCaptureFixture, text: str) -> Iterator[None]:
    """Returns once the log has said something."""
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                said.set()

    listener = Listener()
    logger = logging.getLogger("lightning_rl")
    logger.addHandler(listener)
    try:
        yield
        assert said.wait(20), f"expected {text!r} in the log, got {caplog.text}"
    finally:
        logger.removeHandler(listener)


def draw_in_a_thread(engine: VLLMServerEngine, number: int) -> Callable[[], list[Completion]]:
    """Begins to draw; what is returned waits for the answers."""
    drawn = list[Completion]()
    thread = threading.Thread(target=lambda: drawn.extend(engine.generate(requests(number))))
    thread.start()

    def wait() -> list[Completion]:
        thread.join()
        return drawn

    return wait


# Which lists are taken.


def test_a_file_has_one_url_on_each_line_and_one_that_is_listed_twice_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# of node 2\nhttp://a:1/\n\n  https://b:2  # the slow one\nhttp://a:1\n")
    assert Members(file, lambda _: None).read() == ("http://a:1", "https://b:2")
    assert Members(lambda: "http://a:1", lambda _: None).read() == ("http://a:1",)


def test_one_server_in_several_spellings_counts_once() -> None:
    spelled = ["http://a", "HTTP://A:80/", "http://a:080", " http://a\n", "https://[::1]:443", "https://[::1]"]
    assert Members(lambda: spelled, lambda _: None).read() == ("http://a", "https://[::1]")
    with pytest.raises(ValueError, match="each of them once"):
        VLLMServerEngine(["http://127.0.0.1:8000", "http://127.0.0.1:08000/"])


def test_a_file_may_be_written_on_any_system(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_bytes(b"\xef\xbb\xbfhttp://a:1\r\n\r\nhttp://b:2 # na\xc3\xafve\xe2\x80\xa8http://c:3\r\n")
    assert Members(file, lambda _: None).read() == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("http://a:1, http://b:2", id="two-with-a-comma"),
        pytest.param("http://a:1 http://b:2", id="two-with-a-space"),
        pytest.param("http://a:80000", id="no-such-port"),
        pytest.param("http://a:0", id="no-port-to-call"),
        pytest.param("http://a:eight", id="no-number"),
        pytest.param("http://[::1", id="half-an-address"),
        pytest.param("http://a/x?y=1", id="query"),
        pytest.param("http://a/x y", id="space"),
        pytest.param('"http://a"', id="quotes"),
        pytest.param("http://", id="nobody"),
    ],
)
def test_a_line_that_leads_to_no_server_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text(f"# of node 2\nhttp://a:1\n{line}\n")
    with pytest.raises(ValueError, match=r"^line 3: expected a URL such as http://127.0.0.1:8000, got ") as caught:
        Members(file, lambda _: None).read()
    assert line in str(caught.value)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="the key of servers is api_key=") as caught:
        VLLMServerEngine("http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(caught.value)


def test_a_list_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at most 4096 servers, got more"):
        Members(lambda: itertools.repeat("http://a:1"), lambda _: None).read()
    with pytest.raises(ValueError, match="expected at most 1048576 bytes, got more"):
        Members(Path("/dev/zero"), lambda _: None).read()


def test_a_list_that_does_not_come_ends_the_start_and_not_the_run(
    one: ScriptedServer, two: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "SLOW", 0.05)
    monkeypatch.setattr(discovery, "LEAVING", 0.05)
    gate, first = threading.Event(), threading.Event()

    def slow() -> list[str]:
        if first.is_set():
            gate.wait(20)
            return [one.url, two.url]
        return [one.url]

    engine = an_engine(slow)
    first.set()
    with until_the_log_says(caplog, "slow is unusable: no list within 0.05 s so far"):
        check(engine.generate(requests(4)))
    gate.set()
    two.until(lambda known: bool(known.loads))
    engine.close()
    gate.clear()
    with pytest.raises(EngineError, match=r"expected servers to be listed by .*slow within 0.2 s: no list within"):
        an_engine(slow, patience=0.2)
    gate.set()


class Unprintable(BaseException):
    """Whose message is an error."""

    @override
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "raised", [SystemExit(3), KeyboardInterrupt(), Unprintable()], ids=lambda raised: type(raised).__name__
)
def test_whatever_a_function_raises_the_run_goes_on_and_asks_it_again(
    raised: BaseException, one: ScriptedServer, two: ScriptedServer
) -> None:
    listed = Listed(one)
    engine = an_engine(listed)
    listed.say(raised)
    check(engine.generate(requests(4)))
    listed.change(one, two)
    two.until(lambda known: bool(known.loads))
    engine.close()


def test_a_reason_that_differs_each_time_is_logged_once_and_again_after_the_list_was_there(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed, places = Listed(one), itertools.count()

    def differently() -> list[str]:
        raise OSError(f"no answer to call {next(places)}")

    engine = an_engine(listed)
    for _ in range(2):
        listed.say(differently)
        listed.say(differently)
        listed.change(one)
    engine.close()
    assert len([record for record in caplog.records if "servers stay as they are" in record.message]) == 2


def test_the_order_of_a_list_changes_nothing(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed, orders = Listed(one), itertools.cycle([[one.url, two.url], [two.url, one.url]])
    engine = an_engine(listed)
    listed.say(lambda: next(orders))
    two.until(lambda known: bool(known.loads))
    listed.say(lambda: next(orders))
    engine.close()
    assert len([record for record in caplog.records if record.message.startswith("servers by")]) == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param([], "expected URLs of one or more servers, got none", id="empty"),
        pytest.param(["http://127.0.0.1:1", "\x00rubbish\x1b"], "expected a URL such as", id="rubbish"),
        pytest.param(["http://10.0.0.7:8000"], "expected storage=, a folder shared with the machine", id="no-storage"),
        pytest.param([3], "expected a URL such as", id="numbers"),
        pytest.param(None, "TypeError: 'NoneType' object is not iterable", id="nothing"),
        pytest.param(OSError("the registry is down"), "OSError: the registry is down", id="raises"),
    ],
)
def test_a_list_that_cannot_be_used_leaves_the_servers_as_they_are_and_the_log_says_why_once(
    said: Any, why: str, one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine = an_engine(listed)
    listed.say(said)
    check(engine.generate(requests(8)))
    engine.close()
    told = [record.message for record in caplog.records if "servers stay as they are" in record.message]
    assert len(told) == 1 and why in told[0] and told[0].isprintable()


def test_a_file_that_is_gone_or_empty_or_torn_for_a_moment_changes_nothing(
    one: ScriptedServer, two: ScriptedServer, tmp_path: Path
) -> None:
    file = tmp_path / "servers"
    file.write_text(one.url)
    engine = an_engine(file)
    for moment in ("", "http://127", "\udcff"):
        file.write_text(moment, errors="surrogateescape")
        check(engine.generate(requests(4)))
    file.unlink()
    check(engine.generate(requests(4)))
    file.write_text(f"{one.url}\n{two.url}")
    two.until(lambda known: bool(known.loads))
    engine.close()


def test_a_list_is_taken_once_two_readings_agree(one: ScriptedServer, two: ScriptedServer) -> None:
    readings = iter([[one.url], [one.url, two.url], [one.url], [two.url], [one.url, two.url]])
    over = threading.Event()

    def torn() -> list[str]:
        try:
            return next(readings)
        except StopIteration:
            over.set()
            return [one.url]

    engine = an_engine(torn)
    assert over.wait(20)
    engine.close()
    assert two.calls == []


def test_a_run_waits_for_its_first_list_and_says_what_it_waits_for(
    one: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed()
    writer = threading.Thread(target=lambda: listed.change(one))
    writer.start()
    engine = an_engine(listed)
    check(engine.generate(requests(4)))
    writer.join()
    engine.close()
    file = tmp_path / "none"
    with pytest.raises(EngineError, match=r"expected servers to be listed by .*none within 2 s: FileNotFoundError"):
        an_engine(file, patience=2.0)
    assert f"waiting up to 2 s for servers to be listed by {file}: FileNotFoundError" in caplog.text


# Servers that come.


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_one_server_under_two_names_is_refused_at_the_start(
    one: ScriptedServer, transfer: Literal["file", "broadcast"]
) -> None:
    names = [one.url, f"http://localhost:{one.port}"]
    engine = VLLMServerEngine(names, api_key=KEY, transfer=transfer)
    with (
        closing(engine),
        pytest.raises(ValueError, match=r"each server once, but .* and .* are the same server: list one"),
    ):
        launch(engine, the_model())


def test_one_server_under_two_names_draws_under_one_of_them(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine, other = an_engine(listed), f"http://localhost:{one.port}"
    with until_the_log_says(caplog, f"but {other} and {one.url} are the same server: list one of them"):
        listed.say([one.url, other])
    with until_the_log_says(caplog, f"{other} is back, with the current weights"):
        listed.say([other])
    push(engine, 1)
    check(engine.generate(requests(8)), versions=[1])
    engine.close()
    assert len(one.loads) == 2, "weights came once with each sync"


def test_a_server_says_what_it_holds_before_it_draws_whatever_its_weights_are_called(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine = an_engine(listed)
    two.holds, two.label = {**two.holds, "architecture": "OtherForCausalLM"}, one.label
    with until_the_log_says(caplog, f"expected architecture LlamaForCausalLM at {two.url}, as the policy has"):
        listed.change(one, two)
    check(engine.generate(requests(8)))
    engine.close()
    assert not two.requests


def test_a_server_that_is_added_in_the_middle_of_a_rollout_gets_work_at_the_right_version(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    listed = Listed(one)
    engine = an_engine(listed, at_once=2)
    push(engine, 1)

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        if len(one.requests) == 5:
            listed.change(one, two)
        if len(one.requests) >= 5:
            two.until(lambda known: bool(known.requests))
        return answer

    one.script = script
    drawn = engine.generate(requests(40))
    engine.close()
    check(drawn, [1])
    assert sorted(samples_of(one) + samples_of(two)) == list(range(40)) and samples_of(two)
    assert len(two.loads) == 1 and two.label.endswith("/1")
    paths = [path.partition("?")[0] for path in two.calls]
    assert paths.index("/update_weight_version") < paths.index("/inference/v1/generate")


def test_a_new_server_proves_its_weights_before_it_draws_and_one_that_cannot_draws_nothing(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    def lies(body: dict[str, Any], answer: Answer) -> Answer:
        assert isinstance(answer, dict)
        return {
            **answer,
            "prompt_logprobs": [None, *({str(token): {"logprob": -1.5}} for token in body["token_ids"][1:])],
        }

    listed, liar = Listed(one), ScriptedServer(lies)
    engine = an_engine(listed, canary=Canary())
    with servers(liar):
        assert engine.score_copies([2, 3, 4]).keys() == {one.url}
        listed.change(one, two, liar)
        two.until(lambda known: bool(known.requests))
        liar.until(lambda known: len(known.requests) > 1)
        check(engine.generate(requests(64)))
        engine.close()
    assert "-proof-" in f"-{names_of(two)[0]}", "before anything else"
    assert samples_of(two) and not samples_of(liar)
    assert f"{liar.url} to agree with another server on version 0, but its" in caplog.text


def test_a_new_server_waits_for_the_canary_where_others_are_ready(one: ScriptedServer, two: ScriptedServer) -> None:
    listed = Listed(one)
    engine = an_engine(listed, canary=Canary())
    listed.change(one, two)
    two.until(lambda known: known.calls.count("/health") > 2)
    check(engine.generate(requests(16)))
    assert not two.requests and not two.loads
    engine.score_copies([2, 3, 4])
    two.until(lambda known: bool(known.requests))
    assert names_of(two)[0].startswith("proof-")
    engine.close()


def test_a_server_of_another_model_is_left_out_and_the_log_says_so(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    other, listed = ScriptedServer(architecture="OtherForCausalLM"), Listed(one)
    with servers(other):
        engine = an_engine(listed)
        listed.change(one, other)
        other.until(lambda known: known.calls.count("/health") > 2)
        check(engine.generate(requests(8)))
        engine.close()
        assert f"expected architecture LlamaForCausalLM at {other.url}, as the policy has, got Other" in caplog.text
        assert not other.requests and not other.loads
        engine = an_engine(Listed(other, one))
        check(engine.generate(requests(8)))
        engine.close()
        with pytest.raises(ValueError, match="expected architecture LlamaForCausalLM"):
            an_engine(Listed(other))


def test_a_server_that_is_listed_and_not_there_costs_nothing_until_it_is(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    absent, listed = ScriptedServer(), Listed(one)
    absent.kill()
    engine = an_engine(listed)
    listed.change(one, absent)
    check(engine.generate(requests(8)))
    with servers(late := ScriptedServer(port=absent.port)):
        late.until(lambda known: bool(known.loads))
        engine.close()
    assert f"lost {absent.url}: no answer" in caplog.text


# Servers that go.


def test_what_is_in_flight_at_a_server_that_is_removed_ends_there_and_then_it_is_let_go(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    gate, listed = threading.Event(), Listed(one, two)
    one.script = lambda _, answer: answer if gate.wait(20) else 500
    engine = an_engine(listed, at_once=2)
    wait = draw_in_a_thread(engine, 40)
    one.until(lambda known: len(known.requests) == 2)
    listed.change(two)
    begun = list(samples_of(one))
    assert one.open, "nobody has hung up"
    two.until(lambda known: len(known.requests) >= 38)
    gate.set()
    check(wait())
    one.until(lambda known: not known.open)
    assert samples_of(one) == begun and sorted(begun + samples_of(two)) == list(range(40))
    assert one.cut == 0 and f"{one.url} is closed" in caplog.text
    push(engine, 1)
    assert (one.label[-2:], two.label[-2:]) == ("/0", "/1")
    engine.close()


def test_what_is_in_flight_at_a_server_that_is_removed_and_dies_goes_to_another(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    gate, listed = threading.Event(), Listed(one, two)
    one.script = lambda _, answer: answer if gate.wait(20) else 500
    engine = an_engine(listed, at_once=2)
    wait = draw_in_a_thread(engine, 40)
    one.until(lambda known: len(known.requests) == 2)
    listed.change(two)
    one.kill()
    check(wait())
    gate.set()
    assert set(samples_of(two)) == set(range(40))
    engine.close()


def test_a_server_that_comes_back_into_the_list_while_it_drains_has_the_weights_that_it_missed(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    gate, listed = threading.Event(), Listed(one, two)
    one.script = lambda _, answer: answer if gate.wait(20) else 500
    engine = an_engine(listed, at_once=2)
    wait = draw_in_a_thread(engine, 40)
    one.until(lambda known: len(known.requests) == 2)
    listed.change(two)
    push(engine, 1)
    listed.change(two, one)
    one.until(lambda known: known.label.endswith("/1"))
    gate.set()
    check(wait(), [0, 1])
    engine.close()


def test_a_run_keeps_its_last_servers_and_names_the_list_when_they_are_gone(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine = an_engine(listed, patience=2.0)
    listed.change()
    check(engine.generate(requests(4)))
    one.kill()
    with pytest.raises(EngineError, match=r"expected one of 1 servers that .*Listed.* lists to be ready within 2 s"):
        engine.generate(requests(4))
    assert "waiting up to 2 s for one of 1 servers that" in caplog.text
    engine.close()


# In the middle of a sync.


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_a_server_that_is_removed_in_the_middle_of_a_sync_holds_nobody_up(
    transfer: str, one: ScriptedServer, two: ScriptedServer
) -> None:
    listed = Listed(one, two)
    engine = an_engine(listed, transfer=transfer)
    push(engine, 1)
    removed: list[str] = []

    def remove(_: str) -> None:
        if not removed:
            removed.append(one.url)
            listed.change(two)

    during_a_load(one, transfer, remove)
    push(engine, 2)
    check(engine.generate(requests(16)), [2])
    one.until(lambda known: not known.open)
    assert removed and two.label.endswith("/2") and not samples_of(one)
    push(engine, 3)
    check(engine.generate(requests(16)), [3])
    assert not one.label.endswith("/3")
    assert len(set(two.receptions)) == (2 if transfer == "broadcast" else 0), "a group without the one that left"
    engine.close()


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_a_server_that_is_added_in_the_middle_of_a_sync_has_its_weights_and_takes_part_in_the_next(
    transfer: str, one: ScriptedServer, two: ScriptedServer
) -> None:
    listed = Listed(one)
    engine = an_engine(listed, transfer=transfer)
    during_a_load(one, transfer, lambda _: None if two.calls else listed.change(one, two))
    push(engine, 1)
    two.until(lambda known: known.label.endswith("/1"))
    check(engine.generate(requests(32)), [1])
    loads = len(two.loads)
    push(engine, 2)
    check(engine.generate(requests(32)), [2])
    assert samples_of(two) and len(two.loads) == loads + (transfer == "file")
    assert two.receptions == one.receptions[-1:] if transfer == "broadcast" else not two.receptions
    engine.close()


def during_a_load(server: ScriptedServer, transfer: str, act: Callable[[str], None]) -> None:
    """Has something happen while a server loads weights."""
    honest = server.answer

    def answer(path: str, body: Any) -> Answer:
        if path == "/collective_rpc" and body["method"] == "lightning_rl_load":
            act(path)
        return honest(path, body)

    server.on_tensor = act
    server.answer = answer if transfer == "file" else honest  # pyright: ignore[reportAttributeAccessIssue]


# A whole run.


def run(listing: Any, seen: list[Rollout]) -> RLLightningModule:
    """Three rollouts of sixteen samples each."""
    engine = VLLMServerEngine(listing, api_key=KEY, canary=False, patience=20, at_once=2)
    module = tiny_module(engine=engine)
    fit(module, callbacks=[recorder(seen)("seen")], data=tiny_prompts(12, 4))
    return module


def test_a_run_whose_servers_come_and_go_is_that_of_a_fixed_list_bit_for_bit(tmp_path: Path) -> None:
    first, second, third = (ScriptedServer(**MODEL) for _ in range(3))
    fixed, seen, expected = ScriptedServer(**MODEL), list[Rollout](), list[Rollout]()
    file = tmp_path / "servers"
    file.write_text(f"{first.url}\n")

    def at(server: ScriptedServer, number: int, lists: Sequence[ScriptedServer]) -> None:
        """With so many requests of a server another list begins to hold, and it answers once the third was asked."""

        def script(_: dict[str, Any], answer: Answer) -> Answer:
            if len(server.requests) == number:
                file.write_text("".join(f"{known.url}\n" for known in lists))
            if len(server.requests) >= number:
                third.until(lambda known: bool(known.requests))
            return answer

        server.script = script

    at(first, 5, [first, second])
    at(second, 3, [third])
    with servers(first, second, third, fixed):
        weights = weights_of(run(file, seen))
        undisturbed: dict[str, Tensor] = weights_of(run(fixed.url, expected))
    for rollout, other in zip(seen, expected, strict=True):
        assert torch.equal(rollout.sample_ids, other.sample_ids) and torch.equal(rollout.rewards, other.rewards)
        assert torch.equal(rollout.response_ids, other.response_ids)
        assert torch.equal(rollout.policy_version, other.policy_version)
    assert all(torch.equal(weight, undisturbed[name]) for name, weight in weights.items())
    drawn = sorted(sample for server in (first, second, third) for sample in samples_of(server))
    assert drawn == list(range(48)), "each sample once"
    assert all(samples_of(server) for server in (first, second, third))
