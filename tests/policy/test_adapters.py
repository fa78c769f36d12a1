"""Wrappers of peft around the vocabulary head, the embeddings and whole models: trained as configured, or refused."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from peft import (
    AdaLoraConfig,
    FourierFTConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    WaveFTConfig,
    get_peft_model,
)
from torch import Tensor, nn
from torch.optim import SGD
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from lightning_rl import TransformersEngine
from lightning_rl.policy.build import build_policy
from lightning_rl.policy.lora import base_model_of

TARGETS = ["q_proj", "v_proj"]
FEW: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


def adapted(config: Any, *, tied: bool = False) -> nn.Module:
    """A policy with an adapter, without peft's warnings about tied weights."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        return get_peft_model(cast(Any, tiny_policy(tie_word_embeddings=tied)), config)


def lora(*more: str, tied: bool = False, **options: Any) -> nn.Module:
    known: dict[str, Any] = {"r": 2, "target_modules": [*TARGETS, *more], **options}
    return adapted(LoraConfig(**known), tied=tied)


class Scaled(nn.Module):
    """A head with a weight and a factor that begins at 1."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.scale = head.weight, nn.Parameter(torch.ones(()))

    @override
    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight.t() * self.scale


class Shifted(nn.Linear):
    """A head with an addend that begins at 0."""

    def __init__(self, head: Any) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight, self.shift = head.weight, nn.Parameter(torch.zeros(head.out_features))

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.shift


def with_head(kind: Callable[[Any], nn.Module]) -> PreTrainedModel:
    model = tiny_policy()
    model.lm_head = cast(Any, kind(model.lm_head))
    return model


def hooked() -> PreTrainedModel:
    model = tiny_policy()
    model.lm_head.register_parameter("scale", nn.Parameter(torch.ones(())))
    model.lm_head.register_forward_hook(lambda head, _, output: output * head.scale)
    return model


def hooked_backward() -> PreTrainedModel:
    model = tiny_policy()
    model.lm_head.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
    return model


def normalized() -> PreTrainedModel:
    model: Any = tiny_policy()
    for part in (model.lm_head, model.model.layers[0].self_attn.q_proj):
        nn.utils.parametrizations.weight_norm(part)
    return model


def merged() -> nn.Module:
    model: Any = lora()
    model.merge_adapter()
    return model


LINEAR = r"vocabulary head lm_head to be a linear layer, since its weight alone is read, got "
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lora on the head": (
        partial(lora, "lm_head"),
        LINEAR + r"peft.tuners.lora.layer.Linear: leave it out of the adapter",
    ),
    "ia3 on the head": (
        lambda: adapted(IA3Config(target_modules=[*TARGETS, "lm_head"], feedforward_modules=[])),
        LINEAR + r"peft.tuners.ia3",
    ),
    "tokens of the head alone": (
        lambda: adapted(TrainableTokensConfig(target_modules=["lm_head"], token_indices=[2])),
        LINEAR + r"peft.tuners.trainable_tokens",
    ),
    "lora on a tied head": (partial(lora, "lm_head", tied=True), r"no adapter on lm_head, as .* share its weight"),
    "lora on tied embeddings": (
        partial(lora, "embed_tokens", tied=True),
        r'no adapter on model.embed_tokens, as .*: use modules_to_save=\["embed_tokens"\]',
    ),
    "an own head": (partial(with_head, Scaled), LINEAR + r".*\.Scaled: build the model with a torch.nn.Linear"),
    "a subclass of a linear head": (partial(with_head, Shifted), LINEAR + r".*\.Shifted"),
    "a hook on the head": (hooked, LINEAR + "torch.nn.modules.linear.Linear with hooks"),
    "a hook on the head's gradient": (hooked_backward, LINEAR + "torch.nn.modules.linear.Linear with hooks"),
    "adalora": (
        lambda: adapted(AdaLoraConfig(target_modules=TARGETS, total_step=100, task_type="CAUSAL_LM")),
        "got AdaLoRA, which needs a call of update_and_allocate",
    ),
    "prefix tuning": (lambda: adapted(PrefixTuningConfig(**FEW)), r"prompt_encoder.* which only the forward of Peft"),
    "prompt tuning": (lambda: adapted(PromptTuningConfig(**FEW)), r"prompt_encoder.* which only the forward of Peft"),
    "p-tuning": (lambda: adapted(PromptEncoderConfig(**FEW)), r"prompt_encoder.* which only the forward of Peft"),
    "a bias on a layer without one": (
        lambda: lora("o_proj", lora_bias=True),
        r"adapters that can be merged .* that of model.layers.\d.self_attn.o_proj cannot: ",
    ),
    "merged adapters": (merged, r"output of model.layers.0.self_attn.q_proj to depend on lora_A.* unmerge"),
    "alora": (
        partial(lora, alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
        "got aLoRA, which only the forward of PeftModelForCausalLM switches on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_train_is_refused_with_the_reason(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build_policy(build, None, temperature=1.0, packed=True)


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "a head": partial(lora, modules_to_save=["lm_head"]),
    "a tied head": partial(lora, tied=True, modules_to_save=["lm_head"]),
    "tied embeddings": partial(lora, tied=True, modules_to_save=["embed_tokens"]),
    "both": partial(lora, tied=True, modules_to_save=["embed_tokens", "lm_head"]),
    "tokens": partial(lora, trainable_token_indices={"embed_tokens": [2, 3, 5]}),
    "tied tokens": partial(lora, tied=True, trainable_token_indices=[2, 3, 5]),
    "tokens of a head": partial(lora, trainable_token_indices={"lm_head": [2, 3, 5]}),
    "lora on embeddings": partial(lora, "embed_tokens"),
    "biases of layers that have one": partial(lora, lora_bias=True),
    "few frequencies": lambda: adapted(FourierFTConfig(n_frequency=6, target_modules=TARGETS, scaling=300.0)),
    "few wavelets": lambda: adapted(WaveFTConfig(n_frequency=6, target_modules=TARGETS)),
    "dora": partial(lora, use_dora=True),
    "parametrized weights": normalized,
}


@pytest.mark.parametrize("case", TRAINED)
def test_trained_heads_and_embeddings_move_agree_with_the_engine_and_are_exported(case: str, tmp_path: Path) -> None:
    module = tiny_module(policy=TRAINED[case], optimizer=partial(SGD, lr=1.0), engine=TransformersEngine())
    fit(module, data=tiny_prompts(8, 2))
    policy, initial = module.required_policy.model, dict(base_model_of(TRAINED[case]()).named_parameters())
    still = [
        name
        for name, weight in policy.named_parameters()
        if weight.requires_grad and torch.equal(weight, initial[name])
    ]
    assert still == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that merged weights are tied no longer
        module.save_pretrained(tmp_path)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected = policy(input_ids=ids).logits
        exported = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", ["lora_A", "norm.weight"])
def test_weights_that_are_not_finite_are_not_exported(part: str, tmp_path: Path) -> None:
    module = tiny_module(policy=lora)
    module.policy = module.models.build_policy()
    name, weight = next(pair for pair in module.policy.named_parameters() if part in pair[0])
    with torch.no_grad():
        weight.view(-1)[-1] = torch.nan
    with pytest.raises(ValueError, match=rf"got NaN or infinity in {name}: export an earlier checkpoint"):
        module.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
