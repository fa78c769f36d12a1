"""LoRA on servers: the base is sent once, then adapters, each under a new name that its requests keep."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from generation.vllm.served_engines import the_model
from kit.engine_requests import launch, request_of
from kit.scripted_server import KEY, Answer, ScriptedServer, servers
from kit.support import tiny_policy
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from lightning_rl import VLLMServerEngine
from lightning_rl.generation import Completion
from lightning_rl.policy.lora import base_model_of

HOLDS: dict[str, Any] = {"max_lora_rank": 8}
TARGETS = ["q_proj", "v_proj"]


def with_adapter() -> PreTrainedModel:
    """Return a model whose adapter, scaled by 3, is larger with each version."""
    config = LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS)
    return base_model_of(get_peft_model(the_model(), config))


def an_engine(*scripted: ScriptedServer, **options: Any) -> VLLMServerEngine:
    """Return a started engine with the base, and an adapter of version 0."""
    known: dict[str, Any] = {"api_key": KEY, "canary": False, "patience": 20, "timeout": 20, **options}
    engine = VLLMServerEngine([server.url for server in scripted], lora="adapter", **known)
    launch(engine, model := with_adapter())
    engine.expect(model.named_parameters())
    push(engine, model, 0)
    return engine


def push(engine: VLLMServerEngine, model: PreTrainedModel, version: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(version + 1)
    engine.load_weights(model.named_parameters(), version)


def draw(engine: VLLMServerEngine) -> Completion:
    return engine.generate([request_of((2, 3), 7, 1, max_new_tokens=4, temperature=0.7)])[0]


def version_of(name: str) -> int:
    return int(name.rpartition("/")[2])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_copy_of_a_tied_head_is_refused_because_servers_have_none() -> None:
    config = LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"])
    model = base_model_of(get_peft_model(tiny_policy(tie_word_embeddings=True), config))
    with pytest.raises(ValueError, match=r"expected embeddings and vocabulary head with one weight, .* tie_word_emb"):
        launch(VLLMServerEngine("http://127.0.0.1:1"), model)


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_the_base_is_sent_once_and_then_only_adapters(transfer: str, tmp_path: Path) -> None:
    one, two = (ScriptedServer(dtype="bfloat16", **HOLDS) for _ in range(2))
    with servers(one, two):
        engine, model = an_engine(one, two, storage=tmp_path, transfer=transfer), with_adapter()
        for version in range(1, 4):
            push(engine, model, version)
            completion = draw(engine)
            assert (completion.version, completion.versions) == (version, None)
        for server in (one, two):
            assert len(server.loads) + len(server.receptions) == 1
            assert server.weights.keys() == the_model().state_dict().keys()
            assert server.calls.count("/pause?mode=keep&clear_cache=false") == 1
            assert [version_of(name) for name in server.adapters] == [0, 1, 2, 3]
            for version, parts in enumerate(server.adapters.values()):
                values = {name.split("lora_")[1]: part.unique().tolist() for name, part in parts.items()}
                assert values == {"A.weight": [version + 1], "B.weight": [3 * (version + 1)]}
                assert len(parts) == 2 * len(TARGETS) * model.config.num_hidden_layers
                assert {part.dtype for part in parts.values()} == {torch.bfloat16}
        assert {version_of(body["model"]) for body in one.requests + two.requests} == {1, 2, 3}
        folders = {path.name for path in tmp_path.glob("*/*")}
        assert folders == ({"0", "4"} if transfer == "file" else {"4"}), "the base and the current adapter"
        engine.close()


def test_a_request_in_flight_keeps_its_adapter_and_the_file_that_vllm_may_read_again(tmp_path: Path) -> None:
    go, drawn = threading.Event(), list[Completion]()

    def wait(_: dict[str, Any], answer: Answer) -> Answer:
        assert go.wait(20)
        return answer

    server, model = ScriptedServer(wait, **HOLDS), with_adapter()
    with servers(server):
        engine = an_engine(server, storage=tmp_path)
        thread = threading.Thread(target=lambda: drawn.append(draw(engine)))
        thread.start()
        server.until(lambda server: bool(server.requests))
        for version in range(1, 4):
            push(engine, model, version)
        assert {path.name for path in tmp_path.glob("*/*")} == {"0", "1", "2", "3", "4"}
        go.set()
        thread.join()
        assert (drawn[0].version, drawn[0].versions, server.label[-3:]) == (0, None, "4/3")
        push(engine, model, 4)
        assert {path.name for path in tmp_path.glob("*/*")} == {"0", "5"}
        assert draw(engine).version == 4
        engine.close()


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_a_server_that_restarts_gets_the_base_and_the_current_adapter(transfer: str) -> None:
    one, model = ScriptedServer(**HOLDS), with_adapter()
    with servers(one):
        engine = an_engine(one, transfer=transfer)
        push(engine, model, 1)
        port = one.port
        one.kill()
        restarted = ScriptedServer(port=port, **HOLDS)
        with servers(restarted):
            assert draw(engine).version == 1
            (name,) = restarted.adapters
            assert version_of(name) == 1 and restarted.weights.keys() == the_model().state_dict().keys()
            engine.close()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": "/a/model"}, id="base"),
        pytest.param({"model": "other/2/0"}, id="another-adapter"),
        pytest.param({"label": "other/1/0"}, id="another-run"),
    ],
)
def test_tokens_of_other_weights_lose_the_server(change: dict[str, str]) -> None:
    def lie(_: dict[str, Any], answer: Any) -> Answer:
        if len(two.requests) > 1:
            return answer
        label = change.get("label", answer["choices"][0]["weight_versions"][0]["version"])
        choice = {**answer["choices"][0], "weight_versions": [{"version": label, "start": 0, "end": 4}]}
        return {**answer, "choices": [choice], "model": change.get("model", answer["model"])}

    two = ScriptedServer(lie, **HOLDS)
    with servers(two):
        engine = an_engine(two)
        assert draw(engine).version == 0 and len(two.requests) == 2
        assert "expected an answer from" in str(engine._running().servers[0].error)  # noqa: SLF001
        engine.close()


def test_a_server_without_adapters_and_a_policy_that_trains_more_are_refused(one: ScriptedServer) -> None:
    engine = VLLMServerEngine(one.url, api_key=KEY, lora="adapter")
    with pytest.raises(ValueError, match=r"adapters of rank 8, got at most 0: .* -- --enable-lora --max-lora-rank 8"):
        launch(engine, with_adapter())
    engine.close()
    with pytest.raises(ValueError, match=r'none in LlamaForCausalLM: use lora="merged"'):
        launch(engine, the_model())
    with pytest.raises(ValueError, match='expected lora="merged" or "adapter", got \'both\''):
        VLLMServerEngine(one.url, lora="both")  # pyrefly: ignore[bad-argument-type]
