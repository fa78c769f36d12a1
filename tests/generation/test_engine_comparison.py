"""Comparison of engine and trainer: differences in nats, and the first module that differs."""

import copy

import pytest
import torch
from faults.mismatches import MISMATCHES, Mismatch, model_of
from kit.support import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_rl.generation import TransformersEngine
from lightning_rl.generation.engine_comparison import DISTRIBUTION, Consistency, compare
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.expert_routes import count_experts

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe")
ELSEWHERE = {  # what the embedded engine computes itself, so that the fault has no effect
    True: {
        "head with weights in bfloat16",
        "logits in bfloat16",
        "logits divided by 1.001 behind the head",
        "window narrower by one token",
    },
    False: {"head with weights in bfloat16", "logits in bfloat16"},
}
MASKS = {"one token looks ahead", "window in a layer that has none"}  # which batch-invariant attention does not read


def compared(
    model: PreTrainedModel, fault: Mismatch | None, *, bitwise: bool, cached: bool = True, rows: int | None = None
) -> Consistency:
    policy = PolicyModel(model, None, temperature=1.0, packed=True, batch_invariant=bitwise)
    engine, replica = TransformersEngine(canary=None), copy.deepcopy(model)
    engine.select_extras(DISTRIBUTION)
    engine.start(replica, None, device=replica.device, dtype=replica.dtype)
    engine.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), version=0)
    if fault is not None:
        fault.apply(replica)
    draw = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [torch.randperm(vocabulary, generator=draw)[:length].tolist() for length in (5, 9, 9, 14, 14)]
    return compare(policy, engine, prompts, new_tokens=8, cached=cached, rows=rows)


def check(fault: Mismatch, *, bitwise: bool) -> None:
    found = compared(model_of(fault.family), fault, bitwise=bitwise)
    if fault.name in ELSEWHERE[bitwise]:
        assert found.largest < 1e-5 and (found.module is None or found.rounded)
    else:
        assert (found.module, found.rounded) == (fault.module, False)


@pytest.mark.parametrize("fault", MISMATCHES[::9], ids=lambda fault: f"{fault.family}: {fault.name}")
def test_the_module_of_a_fault_is_found(fault: Mismatch) -> None:
    check(fault, bitwise=fault.name not in MASKS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "bitwise"),
    [
        pytest.param(fault, bitwise, id=f"{fault.family}: {fault.name}, {'bitwise' if bitwise else 'default'}")
        for fault in MISMATCHES
        for bitwise in (True, False)
        if not (bitwise and fault.name in MASKS)
    ],
)
def test_the_modules_of_all_faults_are_found(fault: Mismatch, *, bitwise: bool) -> None:
    check(fault, bitwise=bitwise)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_fault_every_difference_is_rounding(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=torch.float32).to(dtype)  # pyrefly: ignore[bad-argument-type]
    for cached, rows in ((True, None), (False, None), (True, 1)):
        found = compared(model, None, bitwise=False, cached=cached, rows=rows)
        assert found.module is None or found.rounded
        assert found.tokens == (40 if rows == 1 else 80)
        assert found.largest < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_bitwise_consistent_sides_differ_in_no_module(family: str) -> None:
    found = compared(tiny_model(family, dtype=torch.float32), None, bitwise=True)
    assert (found.largest, found.kl, found.largest_kl, found.module) == (0.0, 0.0, 0.0, None)


def test_a_difference_of_unsampled_tokens_shows_in_the_kl() -> None:
    def stale_row(model: PreTrainedModel) -> None:
        head = model.get_parameter("lm_head.weight")
        with torch.no_grad():
            head[-1] = 0.5 * torch.arange(head.shape[1]).sin()

    model = model_of("llama")
    found = compared(model, Mismatch("a stale row of the head", "llama", stale_row, "lm_head"), bitwise=True)
    assert found.module == "lm_head" and not found.rounded
    assert found.kl is not None and found.largest_kl is not None and 0 < found.kl < found.largest_kl


def test_a_cache_of_latents_is_not_read_as_tokens() -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    }
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **latent, **experts, num_key_value_heads=4, vocab_size=50)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    found = compared(model, None, bitwise=False)
    assert found.module is not None and found.rounded


def test_routers_that_return_no_experts_are_not_counted() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "llama4_text", **sizes, num_key_value_heads=4, head_dim=8, vocab_size=50, num_local_experts=4
    )
    model = AutoModelForCausalLM.from_config(config)
    with count_experts(model) as counts:
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert counts == {}


def test_experts_that_no_token_visits_are_counted() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float32, num_experts=64)
    found = compared(model, None, bitwise=False)
    assert found.unvisited.keys() == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert all(0 < number < 64 for number in found.unvisited.values())


@pytest.mark.parametrize("heads", [4, 16])  # as many as tokens of the prompts below
def test_heads_are_never_read_as_tokens(heads: int) -> None:
    model = tiny_model("gemma3_text", dtype=torch.float32, num_attention_heads=heads, hidden_size=64, vocab_size=40)
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    engine = TransformersEngine(canary=None)
    engine.select_extras(DISTRIBUTION)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), version=0)
    prompts = [list(range(2, 2 + length)) for length in (4, 16, 16, 4)]  # with duplicates
    found = compare(policy, engine, prompts, new_tokens=6, rows=1)
    assert found.module is not None and found.rounded


def test_tokens_whose_experts_rounding_changes_are_left_out() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float32, num_experts=64, initializer_range=0.02).to(torch.bfloat16)  # pyrefly: ignore[bad-argument-type]
    found = compared(model, None, bitwise=False)
    assert found.module is not None and found.rounded
