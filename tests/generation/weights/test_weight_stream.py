"""Weight streams: aliases, merged adapters, copies, and what is compared before anything is loaded."""

import warnings
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from kit.support import tiny_model, tiny_policy
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_rl.generation.vllm.vllm_weights import VLLMWeights
from lightning_rl.generation.weights.weight_stream import (
    Checksums,
    WeightPlan,
    adapter_scales,
    add_aliases,
    aliases_of,
    copies,
    merge_stream,
    persistent_buffers,
    verify,
)
from lightning_rl.policy.lora import base_model_of, merge_adapters


def adapted(*, tied: bool = False, **options: Any) -> nn.Module:
    known: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    model = get_peft_model(tiny_policy(tie_word_embeddings=tied), LoraConfig(**known))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
def test_merged_adapters_are_the_weights_that_peft_merges(options: dict[str, Any]) -> None:
    model = adapted(**options)
    inner = base_model_of(model)
    found = {name: weight.clone() for name, weight in merge_stream(inner.named_parameters(), adapter_scales(inner))}
    expected = dict(merge_adapters(model).named_parameters())
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight)


@pytest.mark.parametrize("copies", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"], ["norm"]], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_modules_that_train_as_copies_are_sent_under_their_own_names(copies: list[str], *, tied: bool) -> None:
    model = adapted(tied=tied, modules_to_save=copies)
    inner = base_model_of(model)
    outgoing = VLLMWeights(inner, lora="merged", pictures=False)
    assert outgoing.unties is (tied and copies != ["norm"])
    pairs = [(name, weight.clone()) for name, weight in outgoing(inner.named_parameters())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that merged weights are tied no longer
        expected = merge_adapters(model).state_dict()
    assert sorted(name for name, _ in pairs) == sorted(expected)
    for name, weight in pairs:
        torch.testing.assert_close(weight, expected[name])


def test_copies_that_stay_tied_are_sent_as_one_weight() -> None:
    both = ["embed_tokens", "lm_head"]
    inner = base_model_of(adapted(tied=True, modules_to_save=both, ensure_weight_tying=True))
    outgoing = VLLMWeights(inner, lora="merged", pictures=False)
    sent = dict(outgoing(inner.named_parameters()))
    assert not outgoing.unties and sent["lm_head.weight"] is sent["model.embed_tokens.weight"]
    assert sent["lm_head.weight"] is cast(Any, inner).lm_head.weight


def test_a_module_that_trains_as_a_copy_is_no_adapter_to_be_sent_alone() -> None:
    inner = base_model_of(adapted(modules_to_save=["lm_head"]))
    message = r'frozen base, got lm_head\.modules_to_save\.default\.weight that trains as well: use lora="merged"'
    with pytest.raises(ValueError, match=message):
        VLLMWeights(inner, lora="adapter", pictures=False)


def test_a_merged_weight_is_emitted_at_the_place_of_its_layer() -> None:
    inner = base_model_of(adapted())
    taken: list[str] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, weight in inner.named_parameters():
            taken.append(name)
            yield name, weight

    stream = merge_stream(watched(), adapter_scales(inner))
    for name, _ in stream:
        layer = name.rpartition(".")[0]
        assert taken[-1].startswith(layer), "it was held longer than its own layer took"


def test_half_an_adapter_is_refused() -> None:
    inner = base_model_of(adapted())
    half = ((name, weight) for name, weight in inner.named_parameters() if "1.mlp.down_proj.lora_B" not in name)
    with pytest.raises(ValueError, match=r"A and B of every adapter, got \['A', 'weight'\] of model.layers.1.mlp.down"):
        list(merge_stream(half, adapter_scales(inner)))


def test_adapters_of_other_kinds_are_refused() -> None:
    inner = base_model_of(adapted(use_dora=True))
    with pytest.raises(
        ValueError, match=r"one plain LoRA adapter on a linear layer, got another at model.layers.0.*: use Transf"
    ):
        adapter_scales(inner)


@pytest.mark.parametrize(
    ("tied", "family"), [(True, "qwen2"), (False, "qwen2"), (True, "gemma3_text"), (False, "llama")]
)
def test_an_alias_follows_its_source(tied: bool, family: str) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    names = [name for name, _ in add_aliases(model.named_parameters(), aliases_of(model))]
    assert set(names) == set(model.state_dict())
    assert ("lm_head.weight" in names[:2]) is tied


def test_tensors_for_an_engine_are_copies_in_the_dtype_of_the_engine() -> None:
    weight = torch.ones(3)
    ((_, same),) = copies([("w", weight)], torch.float32, torch.device("cpu"))
    ((_, other),) = copies([("w", weight)], torch.bfloat16, torch.device("cpu"))
    weight.zero_()
    assert same.tolist() == [1, 1, 1] and other.dtype == torch.bfloat16


def test_buffers_that_a_checkpoint_holds_follow_and_keep_their_dtype() -> None:
    model: Any = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.register_buffer("scale", torch.full((1,), 1.0009765625))
    model.inner.register_buffer("frequencies", torch.ones(2), persistent=False)
    ((name, buffer),) = persistent_buffers(model)
    assert name == "inner.scale"
    ((_, copy),) = copies([(name, buffer)], torch.bfloat16, torch.device("cpu"), {name})
    assert torch.equal(copy, buffer) and copy.data_ptr() != buffer.data_ptr()


def a_plan(**options: Any) -> WeightPlan:
    held = {"l.qkv.weight": (8, 4), "l.norm.weight": (4,), "l.experts.w": (2, 6, 4)}
    renamed = {"l.q.weight": "l.qkv.weight", "l.k.weight": "l.qkv.weight", "l.experts.gate_up": "l.experts.w"}
    return WeightPlan(held, lambda name: (renamed.get(name, name), 1), **options)


GOOD = [("l.q.weight", (6, 4)), ("l.k.weight", (2, 4)), ("l.norm.weight", (4,)), ("l.experts.gate_up", (2, 6, 4))]


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        pytest.param(1, None, r"\[8, 4\] for the engine's l.qkv.weight, got l.q.weight \[6, 4\]$", id="part"),
        pytest.param(1, ("l.k.weight", (2, 5)), r"got l.q.weight \[6, 4\], l.k.weight \[2, 5\]", id="columns"),
        pytest.param(2, None, r"a tensor for the engine's l.norm.weight \[4\], got none", id="missing"),
        pytest.param(2, ("l.norm.scale", (4,)), r"of the engine's tensors, got l.norm.scale \[4\]", id="unknown"),
        pytest.param(3, ("l.experts.gate_up", (2, 4, 6)), r"\[2, 6, 4\] for the engine's l.experts.w, got", id="shape"),
    ],
)
def test_the_first_tensor_that_differs_is_named(place: int, given: Any, message: str) -> None:
    sent = [*GOOD[:place], *([] if given is None else [given]), *GOOD[place + 1 :]]
    with pytest.raises(ValueError, match=message):
        a_plan().compare(sent)


def test_a_stream_is_bound_to_what_was_compared() -> None:
    plan = a_plan()
    plan.compare(GOOD)
    weights = [(name, torch.zeros(shape)) for name, shape in GOOD]
    assert [name for name, _ in verify(weights, plan.expected)] == [name for name, _ in GOOD]
    for wrong, message in [
        (
            [*weights[:2], ("l.norm.weight", torch.zeros(5))],
            r"got l.norm.weight \[5\], which was \[4\] or was sent before",
        ),
        ([("other", torch.zeros(1))], r"got other \[1\], which was not among them"),
        ([weights[0], weights[0]], r"got l.q.weight \[6, 4\], which was \[6, 4\] or was sent before"),
        (weights[:3], "expected all tensors of the first sync, but l.experts.gate_up is missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(verify(wrong, plan.expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_checksums_see_every_change_that_survives_rounding(dtype: torch.dtype) -> None:
    model = tiny_policy(dtype=torch.float64)
    sums = Checksums(dtype)

    def values() -> tuple[int, ...]:
        for _ in sums.observe(model.named_parameters()):
            pass
        return sums.values()

    before = values()
    assert values() == before and len(before) == len(list(model.parameters()))
    weight = next(model.parameters())
    with torch.no_grad():
        weight[0, 0] *= 1 + 1e-12
    assert (values() == before) is (dtype != torch.float64)
    with torch.no_grad():
        weight[0, 0] *= 1.01
    assert values() != before
