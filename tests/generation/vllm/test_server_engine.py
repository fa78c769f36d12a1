"""VLLMServerEngine with scripted servers: requests, checks at the start, syncs, and repeated requests."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generation.vllm.served_engines import an_engine, the_model
from kit.engine_requests import launch, request_of
from kit.scripted_server import VOCABULARY, Answer, ScriptedServer, servers
from kit.vision import PROCESSORS

from lightning_rl import EngineError, FinishReason, VLLMServerEngine
from lightning_rl.generation import EngineState, Request
from lightning_rl.generation.vllm.server_client import Label
from lightning_rl.policy.processor import attach
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS


def requests(number: int, **options: Any) -> list[Request]:
    known: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.7, **options}
    return [request_of((2, 3), 100 + n, n, **known) for n in range(number)]


def samples_in(*scripted: ScriptedServer) -> list[int]:
    """Return the sample ids that the servers were asked for."""
    return sorted(int(body["request_id"].split("-")[1]) for server in scripted for body in server.requests)


def test_requests_carry_the_key_and_all_parameters_and_completions_are_in_order(one: ScriptedServer) -> None:
    engine = an_engine(one)
    asked = requests(20, eos_token_ids=[15, 14])
    drawn = engine.generate(asked, logprobs=True)
    for request, completion in zip(asked, drawn, strict=True):
        expected = [(request.seed + place) % VOCABULARY for place in range(4)]
        ends = [place for place, token in enumerate(expected) if token in (14, 15)]
        expected = expected[: ends[0] + 1] if ends else expected
        finish = FinishReason.STOP if ends else FinishReason.LENGTH
        assert list(completion.token_ids) == expected and completion.logprobs is not None
        assert torch.equal(completion.logprobs, torch.tensor([-1 - token / 100 for token in expected]))
        assert (completion.finish, completion.version, completion.versions) == (finish, 0, None)
    assert samples_in(one) == [request.sample_id for request in asked]
    assert len({body["request_id"] for body in one.requests}) == 20
    assert one.requests[0]["sampling_params"] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": 4,
        "ignore_eos": True,
        "seed": one.requests[0]["sampling_params"]["seed"],
        "stop_token_ids": [14, 15],
        "stop": None,
        "detokenize": False,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    assert engine.generate([]) == [] and engine.generate(asked[:1])[0].logprobs is None
    assert one.requests[-1]["sampling_params"]["logprobs"] is None
    engine.close()


@pytest.mark.parametrize(("k", "number"), [(3, 3), (None, VOCABULARY)])
def test_likeliest_tokens_come_with_each_token(one: ScriptedServer, k: int | None, number: int) -> None:
    engine = an_engine(one)
    engine.select_extras(frozenset((TOP_IDS, TOP_LOGPROBS)))
    engine.top_logprobs = k
    (completion,) = engine.generate(requests(1), logprobs=True)
    assert one.requests[0]["sampling_params"]["logprobs"] == number and len(completion.token_ids) == 4
    assert completion.token_extras[TOP_IDS].tolist() == [list(range(number))] * 4
    assert torch.equal(completion.token_extras[TOP_LOGPROBS], -0.5 - completion.token_extras[TOP_IDS])
    engine.close()


def test_a_wrong_key_is_an_error_without_a_retry(one: ScriptedServer) -> None:
    engine = an_engine(one, api_key="wrong", started=False)
    with pytest.raises(ValueError, match="got status 401: refused: pass the key of lightning-rl serve as api_key="):
        launch(engine, the_model())
    assert len(one.calls) == 1
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"release": "0.31.1"}, r"http://.*: expected vllm >= 0.32 and < 0.34, got 0.31.1", id="release"),
        pytest.param({"architecture": "Qwen2ForCausalLM"}, "expected architecture LlamaForCausalLM at", id="model"),
        pytest.param({"vocabulary": 17}, r"expected vocabulary 16 at .*, got 17", id="vocabulary"),
        pytest.param({"logprobs_mode": "raw_logprobs"}, "expected logprobs_mode processed_logprobs", id="logprobs"),
        pytest.param({"generation_config": "auto"}, "expected generation_config vllm", id="defaults"),
        pytest.param({"dtype": "bfloat16"}, r"expected dtype \w+ at .*, as the other servers have", id="dtype"),
    ],
)
def test_an_unsuitable_server_is_refused_at_the_start(
    options: dict[str, Any], message: str, one: ScriptedServer
) -> None:
    other = ScriptedServer(**options)
    with servers(other):
        engine = an_engine(one, other, started=False)
        with pytest.raises(ValueError, match=message):
            launch(engine, the_model())
        engine.close()


@pytest.mark.parametrize(
    ("max_pictures", "message"),
    [
        pytest.param(0, r"expected http://.* to take pictures, got a limit of 0: remove the option", id="none"),
        pytest.param(None, r"expected http://.* to attend in both directions within a picture, as the", id="causal"),
    ],
)
def test_a_server_that_does_not_read_pictures_as_the_policy_does_is_refused(
    max_pictures: int | None, message: str
) -> None:
    server = ScriptedServer(max_pictures=max_pictures)
    with servers(server):
        engine = an_engine(server, started=False)
        with pytest.raises(ValueError, match=message):
            launch(engine, the_model(), attach(PROCESSORS["qwen2_5_vl"]()))
        engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"servers": []}, "expected URLs of one or more servers", id="none"),
        pytest.param({"servers": "http://10.0.0.7:8000"}, "expected storage=", id="no-storage"),
        pytest.param({"servers": "http://localhost:1", "timeout": 0}, "expected timeout > 0, got 0", id="timeout"),
        pytest.param({"servers": "http://localhost:1", "patience": -1}, "expected patience > 0, got -1", id="patience"),
    ],
)
def test_arguments_are_checked_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMServerEngine(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"prefix_ids": (5,) * 62}, r"within 64 tokens, got 62 \+ 4 for sample 100", id="too-long"),
        pytest.param({"prefix_ids": (5, VOCABULARY)}, r"ids in \[0, 16\), got 5..16", id="unknown-id"),
        pytest.param({"temperature": 0.005}, r"temperature 0 or within \[0.01, 2\]", id="raised-silently"),
        pytest.param({"seed": -1}, "a seed of 31 bits", id="unseeded-silently"),
        pytest.param({"stop": ("x",)}, "expected a tokenizer", id="stop-without-tokenizer"),
    ],
)
def test_a_request_that_vllm_would_change_is_refused(change: dict[str, Any], message: str, one: ScriptedServer) -> None:
    engine = an_engine(one)
    with pytest.raises(ValueError, match=message):
        engine.generate(
            [*requests(3), request_of(**dict[str, Any](prefix_ids=(2, 3), sample_id=100, max_new_tokens=4) | change)]
        )
    assert not one.requests
    engine.close()


def test_a_sync_sends_every_tensor_and_deletes_earlier_weights(tmp_path: Path) -> None:
    server, model = ScriptedServer(dtype="bfloat16"), the_model(tie_word_embeddings=True)
    with servers(server):
        engine = an_engine(server, started=False, storage=tmp_path)
        launch(engine, model)
        engine.expect(model.named_parameters())
        assert engine.dtype == torch.bfloat16 and engine.max_length == 64
        for version in range(3):
            engine.load_weights(model.named_parameters(), version)
            assert server.label.endswith(f"/{version}/{version}")
            assert len(list(tmp_path.glob("*/*"))) == 1, "those before are gone"
        assert server.weights.keys() == model.state_dict().keys() and "lm_head.weight" in server.weights
        for name, weight in model.state_dict().items():
            assert torch.equal(server.weights[name], weight.bfloat16())
        order = [call for call in server.calls if call.startswith(("/pause", "/resume", "/reset", "/update"))]
        assert order[-6:] == [
            "/pause?mode=keep&clear_cache=false",
            "/update_weight_version",
            "/reset_prefix_cache?reset_running_requests=true",
            "/reset_encoder_cache",
            "/update_weight_version",
            "/resume",
        ]
        engine.close()
        assert not list(tmp_path.iterdir())


def test_an_engine_refuses_to_generate_after_a_failed_load_until_the_next_one(one: ScriptedServer) -> None:
    engine, model = an_engine(one), the_model()
    one.error = "ValueError: expected weights in /x, got a damaged file"
    stream = iter(list(model.named_parameters()))
    with pytest.raises(RuntimeError, match=r"expected http://.* to load weights, but it failed: .*damaged file"):
        engine.load_weights(stream, 1)
    assert next(stream, None) is None, "ranks that gather it together would wait otherwise"
    assert one.label == "loading" and engine.state is EngineState.AWAKE
    one.until(lambda known: known.calls.count("/resume") == known.calls.count("/pause?mode=keep&clear_cache=false"))
    with pytest.raises(RuntimeError, match="expected a synced engine"):
        engine.generate(requests(1))
    one.error = ""
    engine.load_weights(model.named_parameters(), 2)
    assert engine.generate(requests(1))[0].version == 2
    engine.close()


def test_a_stream_that_fails_is_read_to_its_end_and_writes_nothing(one: ScriptedServer, tmp_path: Path) -> None:
    engine, model, read = an_engine(one, storage=tmp_path), the_model(), []

    def stream() -> Iterator[Any]:
        for number, (name, weight) in enumerate(model.named_parameters()):
            read.append(name)
            yield ("other" if number == 2 else name), weight

    with pytest.raises(ValueError, match="expected the tensors of the first sync, got other"):
        engine.load_weights(stream(), 1)
    assert len(read) == len(list(model.named_parameters()))
    assert len(one.loads) == 1 and [folder.name for folder in tmp_path.glob("*/*")] == ["0"]
    engine.close()


def healthy(body: dict[str, Any], answer: Answer) -> Answer:
    return answer


def changed(answer: Answer, **changes: Any) -> Answer:
    assert isinstance(answer, dict)
    return {**answer, "choices": [{**answer["choices"][0], **changes}]}


FAULTS: dict[str, Any] = {
    "500": lambda _: 500,
    "no-logprobs": lambda answer: changed(answer, logprobs=None),
    "other-tokens": lambda answer: changed(answer, token_ids=[1, 1, 1, 1]),
    "not-finite": lambda answer: changed(
        answer, logprobs={"content": [{"token_id": t, "logprob": -9999.0} for t in answer["choices"][0]["token_ids"]]}
    ),
    "dummy-weights": lambda answer: changed(answer, weight_versions=[{"version": "default", "start": 0, "end": 4}]),
    "other-run": lambda answer: changed(answer, weight_versions=[{"version": "abc/7/0", "start": 0, "end": 4}]),
    "aborted": lambda answer: changed(answer, finish_reason="abort"),
    "forbidden": lambda _: 401,
    "finish-unknown": lambda answer: changed(answer, finish_reason="repetition"),
    "label-of-half": lambda answer: changed(
        answer, weight_versions=[{**answer["choices"][0]["weight_versions"][0], "end": 2}]
    ),
    "never-pushed": lambda answer: relabel(answer, number=7),
    "other-version": lambda answer: relabel(answer, version=7),
}


def relabel(answer: Answer, **fields: Any) -> Answer:
    assert isinstance(answer, dict)
    (span,) = answer["choices"][0]["weight_versions"]
    label = Label.read(span["version"])
    assert label is not None
    return changed(answer, weight_versions=[{**span, "version": str(label._replace(**fields))}])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_with_an_unusable_answer_is_repeated(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    lock, broken = threading.Lock(), {103, 105}

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        with lock:
            sample = int(body["request_id"].split("-")[1])
            if sample not in broken:
                return answer
            broken.discard(sample)
        return FAULTS[fault](answer)

    one, two = ScriptedServer(script), ScriptedServer(script)
    with servers(one, two):
        engine = an_engine(one, two)
        drawn = engine.generate(requests(10), logprobs=True)
        assert [completion.token_ids[0] for completion in drawn] == list(range(10))
        assert samples_in(one, two) == sorted([*range(100, 110), 103, 105])
        engine.close()
    assert any(record.message.startswith("lost http://") for record in caplog.records)


def test_a_failure_cancels_the_other_requests() -> None:
    gate = threading.Event()

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        if body["request_id"].split("-")[1] == "102":
            server.until(lambda known: len(known.requests) >= 3)
            return 400
        assert gate.wait(20)
        return answer

    server = ScriptedServer(script)
    with servers(server):
        engine = an_engine(server)
        with pytest.raises(EngineError, match=r"request 102-0, but it rejected it: .* status 400"):
            engine.generate(requests(3))
        gate.set()
        server.until(lambda known: known.cut == 2)
        server.script = healthy
        assert len(engine.generate(requests(3))) == 3, "the engine still works"
        engine.close()


def test_a_sync_does_not_wait_for_requests_and_each_token_has_its_version(one: ScriptedServer) -> None:
    model, loaded = the_model(), threading.Event()

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        begun = one.label
        assert loaded.wait(20)
        spans = [{"version": begun, "start": 0, "end": 1}, {"version": one.label, "start": 1, "end": 4}]
        return changed(answer, weight_versions=spans)

    engine, drawn = an_engine(one), []
    one.script = script
    drawing = threading.Thread(target=lambda: drawn.extend(engine.generate(requests(5))))
    drawing.start()
    one.until(lambda known: len(known.requests) == 5)
    engine.load_weights(model.named_parameters(), 3)
    loaded.set()
    drawing.join()
    assert [(completion.version, completion.versions) for completion in drawn] == [(0, (0, 3, 3, 3))] * 5
    engine.close()


def test_a_request_answered_from_older_weights_is_repeated(one: ScriptedServer) -> None:
    engine, model = an_engine(one), the_model()
    older, answers = one.label, []
    engine.load_weights(model.named_parameters(), 1)

    def script(body: dict[str, Any], answer: Answer) -> Answer:
        answers.append(body)
        return (
            changed(answer, weight_versions=[{"version": older, "start": 0, "end": 4}]) if len(answers) < 3 else answer
        )

    one.script = script
    assert [completion.version for completion in engine.generate(requests(1))] == [1] and len(answers) == 3
    engine.close()
