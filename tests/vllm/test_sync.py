"""Syncs of vLLM: names and shapes, failed syncs, and stale caches."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.vllm_models import Starter, a_model, moved, prompts_of, requests_for, synced, worst
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.generation import EngineState
from lightning_rl.generation.vllm import internals


def weights(model: PreTrainedModel, **changed: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter; those given by the end of their name are replaced, or left out for None."""
    for name, weight in model.named_parameters():
        ends = [end for end in changed if name.endswith(end.replace("__", "."))]
        given = changed[ends[0]] if ends else weight.detach()
        if given is not None:
            yield name, given


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"1__self_attn__k_proj__bias": None},
            r"expected \[256\] for the engine's model.layers.1.self_attn.qkv_proj.bias, got .*q_proj.bias \[128\]",
            id="part-missing",
        ),
        pytest.param({"norm__weight": None}, "a tensor for the engine's model.layers.0.input_layernorm", id="missing"),
        pytest.param(
            {"lm_head__weight": torch.zeros(150, 128)},
            r"expected \[151, 128\] for the engine's lm_head.weight, got lm_head.weight \[150, 128\]",
            id="shape",
        ),
    ],
)
def test_names_and_shapes_are_compared_before_anything_is_loaded(
    changed: dict[str, Any], message: str, start_engine: Starter
) -> None:
    model = a_model()
    engine = synced(start_engine(model), model)
    with pytest.raises(ValueError, match=message):
        engine.expect(weights(model, **changed))
    engine.expect(weights(model))
    assert engine.state is EngineState.SYNCED


def test_a_sync_warns_of_no_weights_that_failed_to_load(start_engine: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload of vLLM warns of rotary embeddings, whose tensors are computed."""
    model, lines, handler = a_model(), list[str](), logging.Handler()
    engine = synced(start_engine(model), model)  # the import of vLLM removes handlers
    logger = logging.getLogger(f"{internals.RELOAD}.layerwise")
    level, handler.emit = logger.level, lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        engine.load_weights(weights(model), 1)
        assert lines == []
        llm: Any = engine._llm  # noqa: SLF001
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights(model)})
        assert lines == ["RotaryEmbedding: Failed to load weights"]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def broken(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for place, (name, weight) in enumerate(model.named_parameters()):
        if place == 9:
            raise OSError("lost")
        yield name, weight.detach()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2"])
@pytest.mark.parametrize("fault", ["raises", "missing", "shape"])
def test_a_failed_sync_leaves_an_engine_that_refuses_until_the_next_one(
    fault: str, family: str, start_engine: Starter
) -> None:
    model = a_model(family)
    engine, requests = synced(start_engine(model), model, 1), requests_for(prompts_of(6))
    moved(model, 0.05)
    faults: dict[str, tuple[Iterator[tuple[str, Tensor]], str]] = {
        "raises": (broken(model), "lost"),
        "missing": (weights(model, o_proj__weight=None), "is missing"),
        "shape": (weights(model, o_proj__weight=torch.zeros(128, 64)), r"got .*o_proj.weight \[128, 64\]"),
    }
    stream, message = faults[fault]
    with pytest.raises((ValueError, OSError), match=message):
        engine.load_weights(stream, 2)
    assert next(stream, None) is None, "the stream was not read to its end, so other ranks would wait"
    assert (engine.state, engine.version) == (EngineState.AWAKE, 1)
    with pytest.raises(RuntimeError, match="expected a synced engine, got one that is awake"):
        engine.generate(requests)
    completions = synced(engine, model, 3).generate(requests, logprobs=True)
    assert worst(model, requests, completions) < 1e-4


def test_a_sync_drops_the_prefix_cache(start_engine: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    engine, prompt = synced(start_engine(model), model), prompts_of(1, 1)[0] * 100
    requests = requests_for([prompt] * 2, temperature=1.0)
    engine.generate(requests)
    moved(model, 0.05)
    assert worst(model, requests, synced(engine, model).generate(requests, logprobs=True)) < 1e-4
    moved(model, 0.05)
    monkeypatch.setattr(internals, "reset_caches", lambda _: None)
    assert worst(model, requests, synced(engine, model).generate(requests, logprobs=True)) > 1e-2, "it should be stale"
    monkeypatch.undo()
    assert worst(model, requests, synced(engine, model).generate(requests, logprobs=True)) < 1e-4


def test_a_sync_that_could_not_drop_the_prefix_cache_is_an_error(start_engine: Starter) -> None:
    model = a_model()
    engine = synced(start_engine(model), model)
    core, parameters = engine._llm.llm_engine, engine._parameters(requests_for([[5]])[0], logprobs=False)  # noqa: SLF001
    core.add_request("running", {"prompt_token_ids": [5, 6, 7]}, parameters)
    core.step()
    with pytest.raises(RuntimeError, match="whose prefix cache can be reset, got running requests"):
        synced(engine, model)
    assert engine.state is EngineState.AWAKE
    core.abort_request(["running"])
    assert synced(engine, model).state is EngineState.SYNCED
