"""Canary of vLLM: no error for clean syncs, and one message for each kind of fault."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kit.vllm_models import HYBRIDS, Starter, a_model, moved, weights_of
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl import VLLMEngine
from lightning_rl.generation import Canary, CanaryError, EngineState
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import Weights
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.model import carries_state

pictures = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM imports it for Qwen3.5")
FLOAT32, MEAN = 1e-4, 5.0


class Watched:
    """Policy, its engine and a new canary."""

    def __init__(self, engine: VLLMEngine, model: PreTrainedModel, temperature: float = 1.0) -> None:
        self.engine, self.model = engine, model
        self.policy = PolicyModel(model, None, temperature=temperature, packed=not carries_state(model))
        self.canary = engine.canary = Canary()
        self.version = 0

    def sync(self, change: Callable[[Weights], Weights] = lambda stream: stream) -> tuple[float, float]:
        """Sync once, with a stream modified by ``change``, and return the differences."""
        self.version += 1
        load = self.engine.load_weights
        self.engine.load_weights = lambda weights, version: load(change(weights), version)
        try:
            found = synchronize(
                self.engine,
                weights_of(self.model),
                self.version,
                self.policy,
                dtype=self.model.dtype,
                packed=self.policy.packed,
                context=nullcontext,
            )
        finally:
            del self.engine.load_weights
        assert found is not None
        return found

    def step(self, scale: float = 1e-3) -> None:
        """Move every weight of the trainer."""
        moved(self.model, scale, seed=self.version)


@pytest.fixture
def watch_engine(start_engine: Starter) -> Iterator[Callable[..., Watched]]:
    engines: list[VLLMEngine] = []

    def watch(family: str = "qwen2", temperature: float = 1.0, *, dtype: torch.dtype = torch.float32) -> Watched:
        model = a_model(family, dtype=dtype)
        engines.append(start_engine(model))
        return Watched(engines[-1], model, temperature)

    yield watch
    for engine in engines:
        engine.canary = None


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2-tied", "gemma3_text"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_syncs_are_clean(family: str, temperature: float, watch_engine: Callable[..., Watched]) -> None:
    run = watch_engine(family, temperature)
    worst = 0.0
    for _ in range(20):
        worst = max(worst, run.sync()[0])
        run.step()
    assert worst < FLOAT32 / 2


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3_moe", *(pytest.param(family, marks=pictures) for family in HYBRIDS)],
)
def test_bf16_syncs_are_clean(family: str, watch_engine: Callable[..., Watched]) -> None:
    run = watch_engine(family, dtype=torch.bfloat16)
    for _ in range(20):
        assert run.sync()[1] > 1e-3, "rounding should show"
        run.step(1e-4)


def zeroed(stream: Weights) -> Weights:
    for name, weight in stream:
        yield name, torch.zeros_like(weight) if name.endswith("1.self_attn.q_proj.weight") else weight


def swapped(stream: Weights) -> Weights:
    weights = list(stream)
    known = dict(weights)
    for name, weight in weights:
        here = name.startswith("model.layers.1.self_attn")
        yield name, known[name.replace("k_proj", "v_proj")] if here and "k_proj" in name else weight


def dropped(stream: Weights) -> Weights:
    """Send another layer's feed-forward instead of a layer's own."""
    weights = list(stream)
    known = dict(weights)
    for name, weight in weights:
        yield name, known[name.replace("layers.1", "layers.0")] if "layers.1.mlp" in name else weight


@pytest.mark.parametrize("fault", [zeroed, swapped, dropped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_weights_are_found(
    fault: Callable[[Weights], Weights], dtype: torch.dtype, watch_engine: Callable[..., Watched]
) -> None:
    run = watch_engine(dtype=dtype)
    run.sync()
    run.step()
    said = "version 2, but its log-probabilities are not the trainer's: "
    with pytest.raises(CanaryError, match=said):
        run.sync(fault)
    assert run.engine.state is EngineState.AWAKE
    with pytest.raises(RuntimeError, match="expected a synced engine"):
        run.engine.generate([])
    run.sync()
    assert run.engine.state is EngineState.SYNCED


def from_before(weights: dict[str, Tensor]) -> Callable[[Weights], Weights]:
    def change(stream: Weights) -> Weights:
        for name, _ in stream:
            yield name, weights[name]

    return change


def kept(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("scale", [1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_did_not_move_is_found(
    scale: float, dtype: torch.dtype, watch_engine: Callable[..., Watched]
) -> None:
    run = watch_engine(dtype=dtype)
    run.sync()
    old = kept(run.model)
    run.step(scale)
    with pytest.raises(CanaryError, match=r"move with the weights of version 2, but .* bit for bit those of version 1"):
        run.sync(from_before(old))
    run.sync()


def test_a_wrong_temperature_is_told_from_wrong_weights(
    watch_engine: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watch_engine(temperature=0.6)
    run.sync()
    honest = run.engine._parameters  # noqa: SLF001

    def at_one(request: Any, **options: Any) -> Any:
        parameters = honest(request, **options)
        parameters.temperature = 1.0
        return parameters

    monkeypatch.setattr(run.engine, "_parameters", at_one)
    with pytest.raises(CanaryError, match=r"its weights agree, but .* its temperature or filter differs"):
        run.sync()


def test_raw_log_probabilities_are_told_from_wrong_weights(
    start_engine: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model()
    with monkeypatch.context() as patched:
        patched.setitem(
            __import__("lightning_rl.generation.vllm.vllm_engine", fromlist=["FIXED"]).FIXED,
            "logprobs_mode",
            "raw_logprobs",
        )
        run = Watched(start_engine(model, seed=2), model, 0.6)
    with pytest.raises(CanaryError, match="its temperature or filter differs"):
        run.sync()


def test_a_tied_head_that_is_not_sent_is_found_at_setup(
    watch_engine: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watch_engine("qwen2-tied")
    monkeypatch.setattr(run.engine._stream, "_aliases", {})  # noqa: SLF001
    with pytest.raises(ValueError, match=r"a tensor for the engine's lm_head.weight \[151, 128\], got none"):
        run.engine.expect(run.model.named_parameters())
