"""Policy, critic, reference and teacher pass the same checks, whose messages name the model."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from kit.support import FAMILIES, fit, tiny_model, tiny_module, tiny_policy
from peft import (
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn
from transformers import PreTrainedModel

from lightning_rl import GAE, PromptDataModule
from lightning_rl.callbacks import ReferenceKL, TeacherKL

FEW: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
TARGETS = ["q_proj", "v_proj"]
ROLES = ("policy", "critic", "reference", "teacher")
every_role = pytest.mark.parametrize("role", ROLES)


def run_with(role: str, source: Callable[[], Any], **options: Any) -> None:
    """Fit one step with a source as one of the models of the run."""
    data = options.pop("data", None)
    options |= {"critic": {"advantages": GAE(), "group_size": 1}}.get(role, {})
    options |= {} if role == "teacher" else {role: source}
    callbacks = {"reference": [ReferenceKL(as_loss=True)], "teacher": [TeacherKL(source, as_loss=True)]}.get(role, [])
    fit(tiny_module(**options), callbacks=callbacks, data=data, max_steps=1)


def adapted(config: Any, *, frozen: bool = False) -> nn.Module:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        return get_peft_model(cast(Any, tiny_policy(4)), config).requires_grad_(not frozen)


def lora(**options: Any) -> LoraConfig:
    known: dict[str, Any] = {"r": 2, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
    return LoraConfig(**known)


def merged() -> nn.Module:
    model: Any = adapted(lora(init_lora_weights=False))
    model.merge_adapter()
    return model


def with_head_of_two() -> PreTrainedModel:
    model = tiny_policy()
    model.lm_head = cast(Any, nn.Sequential(model.lm_head))
    model.lm_head.register_parameter("weight", model.lm_head[0].weight)
    return model


WITHIN = r"expected adapters within the layers of Qwen2ForCausalLM, got prompt_encoder"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt tuning": (lambda: adapted(PromptTuningConfig(**FEW)), WITHIN),
    "prefix tuning": (lambda: adapted(PrefixTuningConfig(**FEW)), WITHIN),
    "p-tuning": (lambda: adapted(PromptEncoderConfig(**FEW, encoder_hidden_size=16)), WITHIN),
    "frozen prompt tuning": (lambda: adapted(PromptTuningConfig(**FEW), frozen=True), WITHIN),
    "frozen prefix tuning": (lambda: adapted(PrefixTuningConfig(**FEW), frozen=True), WITHIN),
    "alora": (lambda: adapted(lora(alora_invocation_tokens=[3], init_lora_weights=False)), "aLoRA"),
    "frozen alora": (
        lambda: adapted(lora(alora_invocation_tokens=[3], init_lora_weights=False), frozen=True),
        "aLoRA",
    ),
    "poly": (
        lambda: adapted(PolyConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM")),
        r"got ValueError: task_ids should not be None\..*: use LoraConfig|needs more than text",
    ),
    "dropout": (partial(tiny_policy, attention_dropout=0.1), "without dropout, got config.attention_dropout=0.1"),
    "lora dropout": (lambda: adapted(lora(lora_dropout=0.1)), "set lora_dropout=0"),
    "a head of two layers": (with_head_of_two, "vocabulary head lm_head to be a linear layer"),
    "another vocabulary": (partial(tiny_policy, vocab_size=20), "the policy's vocabulary of 16 tokens, got 20"),
}


@every_role
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_would_be_read_otherwise_is_refused_in_every_role(case: str, role: str) -> None:
    if case == "another vocabulary" and role == "policy":
        pytest.skip("the policy's vocabulary is that of the run")
    source, message = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^{role}: (?s:.*)({message})"):
        run_with(role, source)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_merged_adapters_are_refused_where_they_would_train(role: str) -> None:
    with pytest.raises(ValueError, match=rf"^{role}: .* to depend on lora_A.default.weight, which trains"):
        run_with(role, merged)


@pytest.mark.parametrize("role", ["reference", "teacher"])
@pytest.mark.parametrize("source", [merged, lambda: adapted(lora(init_lora_weights=False), frozen=True)])
def test_merged_and_frozen_adapters_score_where_nothing_trains(source: Callable[[], Any], role: str) -> None:
    run_with(role, source)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_model_that_is_the_policy_itself_is_refused(role: str) -> None:
    model = tiny_policy()
    with pytest.raises(
        ValueError,
        match=rf"^{role}: expected a model apart from the policy, got one that shares model.embed_tokens.weight",
    ):
        run_with(role, lambda: model, policy=lambda: model)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_frozen_weights_may_be_shared_with_the_policy(role: str) -> None:
    model = tiny_policy()
    model.lm_head.requires_grad_(requires_grad=False)
    other = tiny_policy(1)
    other.lm_head.weight = model.lm_head.weight
    run_with(role, lambda: other, policy=lambda: model)


WINDOW = 16
ROPE = {"rope_theta": 1e4, "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **ROPE}
OFF = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop", "dropout", "attention_dropout", "layerdrop"), 0.0)
SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"max_position_embeddings": WINDOW}),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": WINDOW, "pad_token_id": 0}),
    "longrope": ("llama", {"rope_parameters": {**LONG, "original_max_position_embeddings": WINDOW}}),
    "dynamic": ("llama", {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": WINDOW}),
}


@pytest.mark.parametrize("role", ["critic", "reference", "teacher"])
@pytest.mark.parametrize("kind", SHORT)
def test_a_window_shorter_than_the_longest_row_is_refused_before_the_first_rollout(
    kind: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options = SHORT[kind]
    monkeypatch.setitem(FAMILIES, family, {})
    source = partial(tiny_model, family, dtype=torch.float32, **OFF, **options)
    data = PromptDataModule([[2] * 12] * 4, 4)
    run_with(role, source, data=data, max_new_tokens=4)
    rewards: list[int] = []

    def reward(prompts: list[Any], **_: Any) -> list[float]:
        rewards.append(len(prompts))
        return [float(place % 2) for place in range(len(prompts))]

    with pytest.raises(ValueError, match=rf"^{role}: .* window of {WINDOW} tokens.*, got 17.*: lower max_new_tokens"):
        run_with(role, source, data=data, max_new_tokens=5, rewards=reward)
    assert not rewards
