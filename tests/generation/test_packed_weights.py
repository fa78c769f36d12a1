"""Packed weights of the embedded engine: which layers have them, what is drawn with them, and when they are chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.support import EOS, fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lightning_rl import TransformersEngine
from lightning_rl.generation import Completion
from lightning_rl.generation.packed_weights import packable_layers, packed_weights, packing_pays
from lightning_rl.policy.batch_invariance import make_batch_invariant

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 16384}
PROMPTS = [(2,), (3, 4, 5, 6, 7), (8, 9), (3, 4, 5, 6, 7)]

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch cannot pack weights",
)


def large(seed: int = 0, **options: Any) -> PreTrainedModel:
    return tiny_model("qwen2", seed, dtype=torch.float32, **SIZES, initializer_range=0.05, **options)


def adapted() -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(large(), config).base_model.model


def engine_of(model: PreTrainedModel, *, packs: bool) -> TransformersEngine:
    engine = TransformersEngine()
    launch(engine, model)
    engine.load_state_dict({"packs": packs})
    engine.load_weights([], 0)
    return engine


def draw(engine: TransformersEngine) -> list[Completion]:
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_ids": [EOS]}
    return engine.generate([request_of(ids, n, n, **options) for n, ids in enumerate(PROMPTS)], logprobs=True)


def logprobs_of(completions: list[Completion]) -> torch.Tensor:
    return torch.cat([one.logprobs for one in completions if one.logprobs is not None])


@pytest.mark.parametrize(
    "build", [large, lambda: large(tie_word_embeddings=True), adapted], ids=["biases", "tied", "adapter"]
)
def test_packed_weights_draw_with_the_log_probabilities_of_the_plain_forward(build: Callable[[], Any]) -> None:
    model = build()
    engine = engine_of(model, packs=True)
    with torch.profiler.profile() as profile:
        completions = draw(engine)
    assert "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}
    for ids, one in zip(PROMPTS, completions, strict=True):
        assert one.logprobs is not None
        (expected,) = engine.score([[*ids, *one.token_ids]])
        torch.testing.assert_close(one.logprobs, expected[len(ids) - 1 :], rtol=0, atol=1e-4)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_are_packed_again_after_a_sync() -> None:
    model, other = large(), large(seed=1)
    engine = engine_of(model, packs=True)
    before = draw(engine)
    engine.load_weights(list(other.named_parameters()), 1)
    after, expected = draw(engine), draw(engine_of(other, packs=True))
    assert [one.token_ids for one in before] != [one.token_ids for one in expected]
    assert torch.equal(logprobs_of(after), logprobs_of(expected))


class _Quantized(nn.Linear):
    """Layer whose forward is not a plain product."""


def with_quantized_layers() -> PreTrainedModel:
    model = large()
    for part in [part for part in model.modules() if type(part) is nn.Linear]:
        part.__class__ = _Quantized
    return model


def batch_invariant() -> PreTrainedModel:
    model = large()
    make_batch_invariant(model)
    return model


@pytest.mark.parametrize(
    "build",
    [tiny_policy, lambda: large().bfloat16(), lambda: large().double(), with_quantized_layers, batch_invariant],
    ids=["small", "bfloat16", "float64", "quantized", "bitwise"],
)
def test_other_models_have_no_packable_layers(build: Callable[[], PreTrainedModel]) -> None:
    assert packable_layers(build()) == []


def test_matrices_of_adapters_and_layers_under_autocast_are_not_packed() -> None:
    model = adapted()
    names = {part: name for name, part in model.named_modules()}
    assert not any("lora_" in names[layer] for layer in packable_layers(model))
    assert any("base_layer" in names[layer] for layer in packable_layers(model))
    with torch.autocast("cpu", torch.bfloat16):
        assert packable_layers(model) == []


def test_a_layer_that_torch_cannot_pack_stays_plain() -> None:
    assert packing_pays([nn.Linear(64, 64, dtype=torch.float64)], rows=8, tokens=10**6) is False


def test_the_first_draw_makes_the_choice() -> None:
    model = large()
    engine = engine_of(model, packs=False)
    engine.load_state_dict({"packs": None})
    draw(engine)
    chosen = engine.state_dict()
    assert chosen["packs"] in (True, False)


def test_a_layer_keeps_a_forward_of_its_own() -> None:
    layer = nn.Linear(8, 8)
    layer.forward = torch.relu  # type: ignore[method-assign]
    with packed_weights([layer]):
        assert not torch.equal(layer(-torch.ones(1, 8)), torch.zeros(1, 8))
    assert layer.forward is torch.relu


def test_a_layer_with_another_forward_is_not_packed() -> None:
    model = large()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert layer in packable_layers(model)
    layer.forward = torch.relu
    assert layer not in packable_layers(model)


@pytest.mark.parametrize("packs", [True, False])
def test_a_resumed_run_keeps_the_choice_of_its_checkpoint(packs: bool, tmp_path: Path) -> None:
    module, resumed, path = tiny_module(), tiny_module(), tmp_path / "step.ckpt"
    module.options.engine.load_state_dict({"packs": packs})
    fit(module, data=tiny_prompts(8, 4), max_steps=1).save_checkpoint(path)
    fit(resumed, data=tiny_prompts(8, 4), max_epochs=2, ckpt_path=path)
    assert resumed.options.engine.state_dict() == {"packs": packs}


def test_a_checkpoint_without_a_choice_resumes_with_plain_weights() -> None:
    engine = TransformersEngine()
    engine.load_state_dict({})
    assert engine.state_dict() == {"packs": False}
