"""Servers that are added and removed during a run: samples stay the same, and an unusable list changes nothing."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation.vllm.served_engines import an_engine, push
from kit.engine_requests import request_of
from kit.scripted_server import KEY, VOCABULARY, Answer, ScriptedServer, servers
from kit.support import fit, recorder, tiny_module, tiny_prompts, weights_of
from torch import Tensor

from lightning_rl import EngineError, RLLightningModule, Rollout, VLLMServerEngine
from lightning_rl.generation import Canary, Completion, Request
from lightning_rl.generation.vllm.discovery import ServerList

MODEL: dict[str, Any] = {"architecture": "Qwen2ForCausalLM"}


class Listed:
    """Function that lists servers; its changes return once the run has read them."""

    def __init__(self, *listed: ScriptedServer) -> None:
        self.urls: Any = [server.url for server in listed]
        self.readings, self.read = 0, threading.Condition()

    def __call__(self) -> Any:
        """Return the URLs, or raise the error that it was given."""
        with self.read:
            self.readings += 1
            self.read.notify_all()
            if isinstance(self.urls, BaseException):
                raise self.urls
            return self.urls() if callable(self.urls) else self.urls

    def change(self, *listed: ScriptedServer) -> None:
        """List these servers, and return once the run has them."""
        self.say([server.url for server in listed])

    def say(self, urls: Any) -> None:
        """List these URLs, and return once the run has read them often enough to use them."""
        with self.read:
            self.urls, enough = urls, self.readings + 4
            assert self.read.wait_for(lambda: self.readings >= enough, 20), "the list was not read"


def requests(number: int) -> list[Request]:
    return [request_of((n // 4 % VOCABULARY, 3), n, n, max_new_tokens=4, temperature=0.7) for n in range(number)]


def check(drawn: Sequence[Completion], versions: Sequence[int] = (0,)) -> None:
    expected = [tuple((n + place) % VOCABULARY for place in range(4)) for n in range(len(drawn))]
    assert [completion.token_ids for completion in drawn] == expected, "one answer to each request, and its own"
    assert {completion.version for completion in drawn} <= set(versions)


def samples_of(server: ScriptedServer) -> list[int]:
    """Return the sample ids that a server was asked for, without the canary's."""
    return [int(name.split("-")[1]) for name in names_of(server) if name.split("-")[1].isdigit()]


def names_of(server: ScriptedServer) -> list[str]:
    return [body["request_id"] for body in server.requests]


def draw_in_a_thread(engine: VLLMServerEngine, number: int) -> Callable[[], list[Completion]]:
    """Start to generate, and return a function that waits for the completions."""
    drawn = list[Completion]()
    thread = threading.Thread(target=lambda: drawn.extend(engine.generate(requests(number))))
    thread.start()

    def wait() -> list[Completion]:
        thread.join()
        return drawn

    return wait


# Lists.


def test_a_list_may_repeat_a_server_in_several_spellings(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# of node 2\nhttp://a:1/\n\n  https://b:2  # the slow one\nhttp://a:1\n")
    assert ServerList(file, lambda _: None).read() == ("http://a:1", "https://b:2")
    assert ServerList(lambda: "http://a:1", lambda _: None).read() == ("http://a:1",)
    spelled = ["http://a", "HTTP://A:80/", "http://a:080", " http://a\n", "https://[::1]:443", "https://[::1]"]
    assert ServerList(lambda: spelled, lambda _: None).read() == ("http://a", "https://[::1]")
    with pytest.raises(ValueError, match="each of them once"):
        VLLMServerEngine(["http://127.0.0.1:8000", "http://127.0.0.1:08000/"])


@pytest.mark.parametrize(
    "line",
    ["http://a:1, http://b:2", "http://a:80000", "http://a:0", "http://a:eight", "http://[::1", "http://a/x?y=1", "a"],
)
def test_an_invalid_url_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text(f"# of node 2\nhttp://a:1\n{line}\n")
    with pytest.raises(ValueError, match=r"^expected a URL such as http://127.0.0.1:8000, got ") as caught:
        ServerList(file, lambda _: None).read()
    assert line in str(caught.value)


def test_a_password_in_a_url_is_refused_and_not_quoted() -> None:
    with pytest.raises(ValueError, match="expected a URL without a user and a password") as caught:
        VLLMServerEngine("http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param([], "expected URLs of one or more servers, got none", id="empty"),
        pytest.param(["http://10.0.0.7:8000"], "expected storage=, a folder shared with the machine", id="no-storage"),
        pytest.param(OSError("the registry is down"), "OSError: the registry is down", id="raises"),
    ],
)
def test_an_unusable_list_changes_nothing_and_is_logged_once(
    said: Any, why: str, one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine = an_engine(listed)
    listed.say(said)
    check(engine.generate(requests(8)))
    engine.close()
    told = [record.message for record in caplog.records if "servers stay as they are" in record.message]
    assert len(told) == 1 and why in told[0] and told[0].isprintable()


def test_a_list_that_is_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "servers")
    with pytest.raises(ValueError, match=r"expected a file of URLs, got .*servers, which is a pipe or a device"):
        ServerList(tmp_path / "servers", lambda _: None).read()


def test_a_list_is_used_once_two_reads_agree(one: ScriptedServer, two: ScriptedServer) -> None:
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


def test_a_run_waits_for_its_first_list_and_logs_the_reason(
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
    with pytest.raises(EngineError, match=r"expected servers to be listed by .*none within 0.2 s: FileNotFoundError"):
        an_engine(file, patience=0.2)
    assert f"waiting up to 0.2 s for servers to be listed by {file}: FileNotFoundError" in caplog.text


# Added servers.


def test_a_new_server_generates_only_after_its_log_probabilities_agree(
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


def test_a_new_server_waits_for_the_canary_at_ready_servers(one: ScriptedServer, two: ScriptedServer) -> None:
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


def test_a_server_of_another_model_is_left_out_even_under_the_right_label(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    other, listed = ScriptedServer(architecture="OtherForCausalLM"), Listed(one)
    with servers(other):
        engine = an_engine(listed)
        other.label = one.label
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


# Removed servers.


def remove_a_busy_server(one: ScriptedServer, two: ScriptedServer) -> tuple[threading.Event, Listed, Any, Any]:
    """Take a server with two requests from the list.

    Returns an event that lets it answer, the list, the engine, and a function that waits for the samples.
    """
    gate, listed = threading.Event(), Listed(one, two)
    one.script = lambda _, answer: answer if gate.wait(20) else 500
    engine = an_engine(listed, at_once=2)
    wait = draw_in_a_thread(engine, 40)
    one.until(lambda known: len(known.requests) == 2)
    listed.change(two)
    return gate, listed, engine, wait


def test_a_removed_server_is_closed_after_its_requests_have_ended(
    one: ScriptedServer, two: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    gate, _, engine, wait = remove_a_busy_server(one, two)
    begun = list(samples_of(one))
    assert one.open, "its connections stay"
    two.until(lambda known: len(known.requests) >= 38)
    gate.set()
    check(wait())
    one.until(lambda known: not known.open)
    assert samples_of(one) == begun and sorted(begun + samples_of(two)) == list(range(40))
    assert one.cut == 0 and f"{one.url} is closed" in caplog.text
    push(engine, 1)
    assert (one.label[-2:], two.label[-2:]) == ("/0", "/1")
    engine.close()


def test_a_server_that_is_listed_again_gets_the_weights_that_it_missed(
    one: ScriptedServer, two: ScriptedServer
) -> None:
    gate, listed, engine, wait = remove_a_busy_server(one, two)
    push(engine, 1)
    listed.change(two, one)
    one.until(lambda known: known.label.endswith("/1"))
    gate.set()
    check(wait(), [0, 1])
    engine.close()


def test_an_empty_list_keeps_the_servers_and_an_error_names_the_list(
    one: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed = Listed(one)
    engine = an_engine(listed, patience=0.5)
    listed.change()
    check(engine.generate(requests(4)))
    one.kill()
    with pytest.raises(EngineError, match=r"expected one of 1 servers that .*Listed.* lists to be ready within 0.5 s"):
        engine.generate(requests(4))
    assert "waiting up to 0.5 s for one of 1 servers that" in caplog.text
    engine.close()


# During a sync.


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_a_server_removed_during_a_sync_does_not_delay_it(
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
def test_a_server_added_during_a_sync_gets_its_weights_and_joins_the_next(
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
    """Call a function while a server loads weights."""
    honest = server.answer

    def answer(path: str, body: Any) -> Answer:
        if path == "/collective_rpc" and body["method"] == "lightning_rl_load":
            act(path)
        return honest(path, body)

    server.on_tensor = act
    server.answer = answer if transfer == "file" else honest


# A whole run.


def run(listing: Any, seen: list[Rollout]) -> RLLightningModule:
    """Train on three rollouts of sixteen samples each."""
    engine = VLLMServerEngine(listing, api_key=KEY, canary=False, patience=20, at_once=2)
    module = tiny_module(engine=engine)
    fit(module, callbacks=[recorder(seen)("seen")], data=tiny_prompts(12, 4))
    return module


def test_a_run_with_a_changing_list_equals_that_with_a_fixed_list_bit_for_bit(tmp_path: Path) -> None:
    first, second, third = (ScriptedServer(**MODEL) for _ in range(3))
    fixed, seen, expected = ScriptedServer(**MODEL), list[Rollout](), list[Rollout]()
    file = tmp_path / "servers"
    file.write_text(f"{first.url}\n")

    def at(server: ScriptedServer, number: int, lists: Sequence[ScriptedServer]) -> None:
        """Change the list at the ``number``-th request of a server, which answers once the third server was asked."""

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
