"""The default reference of a policy with adapters: the policy as built, which never moves."""

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from kit.support import callback_of, fit, recorder, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import IA3Config, LNTuningConfig, LoraConfig, VeraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import SGD

import lightning_rl.policy.lora as lora_module
from lightning_rl import Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy.lora import ModelWithoutAdapter, base_model_of
from lightning_rl.policy.memory import local_bytes, resident_bytes

kl = partial(ReferenceKL, 0.1, as_loss=True)
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(config: Any, *, shape: Any = (), train: str = "", draw: str = "") -> nn.Module:
    """A policy with adapters; ``train`` names further parameters that train, ``draw`` those that do not begin at 0."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = get_peft_model(cast(Any, tiny_policy(**dict(shape))), config)
        for name, parameter in model.named_parameters():
            if draw and draw in name:
                nn.init.normal_(parameter, std=0.1)
            if train and train in name:
                parameter.requires_grad_()
    return model


def lora(**options: Any) -> LoraConfig:
    known: dict[str, Any] = {"r": 2, "target_modules": TARGETS, **options}
    return LoraConfig(**known)


OFF: dict[str, Any] = {
    "plain": partial(adapted, lora()),
    "dora": partial(adapted, lora(use_dora=True)),
    "embeddings": partial(adapted, lora(target_modules=["embed_tokens"])),
    "head": partial(adapted, lora(modules_to_save=["lm_head"])),
    "norms": partial(adapted, lora(modules_to_save=["norm", "input_layernorm"])),
    "whole embeddings": partial(adapted, lora(modules_to_save=["embed_tokens"])),
    "tokens": partial(adapted, lora(trainable_token_indices={"embed_tokens": [2, 3, 5]})),
    "ia3": partial(adapted, IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"])),
    "vera": partial(adapted, VeraConfig(r=2, target_modules=["q_proj"])),
}
COPIED: dict[str, Any] = {
    "all biases": partial(adapted, lora(bias="all")),
    "biases of the layers": partial(adapted, lora(bias="lora_only")),
    "pissa": partial(adapted, lora(init_lora_weights="pissa")),
    "olora": partial(adapted, lora(init_lora_weights="olora")),
    "random": partial(adapted, lora(init_lora_weights=False)),
    "trained before": partial(adapted, lora(), draw="lora_B"),
    "tokens trained before": partial(
        adapted, lora(trainable_token_indices={"embed_tokens": [2]}), draw="trainable_tok"
    ),
    "head trained before": partial(adapted, lora(modules_to_save=["lm_head"]), draw="modules_to_save"),
    "unfrozen norm": partial(adapted, lora(), train="model.norm"),
    "unfrozen base": partial(adapted, lora(), train="q_proj.base_layer"),
    "norm tuning": partial(adapted, LNTuningConfig(target_modules=["norm"])),
}
ALL = OFF | COPIED


def plain_logprobs(model: Any, rollout: Rollout, row: int) -> Tensor:
    """Log-probabilities of a response by a model's own forward."""
    prompt, response = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
    ids = torch.cat([rollout.prompt_ids[row, :prompt], rollout.response_ids[row, :response]])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("kind", ALL)
def test_the_reference_is_the_policy_as_built_after_any_number_of_steps(kind: str) -> None:
    seen: list[Rollout] = []
    module = tiny_module(policy=ALL[kind], optimizer=partial(SGD, lr=4.0))
    fit(module, callbacks=[kl(), recorder(seen)("watch")], data=tiny_prompts(8, 2))
    initial, policy, moved = base_model_of(ALL[kind]()), module.required_policy.model, 0.0
    assert (type(module.models.reference) is ModelWithoutAdapter) == (kind in OFF)
    for rollout in seen:
        for row in range(len(rollout)):
            expected = plain_logprobs(initial, rollout, row)
            got = cast(Tensor, rollout.ref_logprobs)[row, : len(expected)].double()
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
            moved = max(moved, float((plain_logprobs(policy, rollout, row) - expected).abs().max()))
    assert moved > 0.01


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization", "ignore:Be aware that when using")
@pytest.mark.parametrize("kind", ["plain", "head", "pissa", "all biases"])
def test_a_resumed_run_and_a_later_fit_keep_the_reference(kind: str, tmp_path: Path) -> None:
    whole, resumed, later = [], [], []

    def run(module: Any, seen: list[Rollout], *callbacks: Callback, **options: Any) -> None:
        callbacks = (kl(), recorder(seen)("watch"), *callbacks)
        fit(module, callbacks=callbacks, data=tiny_prompts(8, 2), **options)

    options: dict[str, Any] = {"policy": ALL[kind], "optimizer": partial(SGD, lr=4.0)}
    run(tiny_module(**options), whole)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run(tiny_module(**options), [], saves, enable_checkpointing=True)
    run(tiny_module(**options), resumed, ckpt_path=tmp_path / "step=2.ckpt")
    for one, other in zip(whole[2:], resumed, strict=True):
        assert torch.equal(cast(Tensor, one.ref_logprobs), cast(Tensor, other.ref_logprobs))
    module = tiny_module(**options)
    fit(module, data=tiny_prompts(8, 2))  # needs no reference
    run(module, later)
    expected = plain_logprobs(base_model_of(ALL[kind]()), later[0], 0)
    got = cast(Tensor, later[0].ref_logprobs)[0, : len(expected)].double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "all biases"])
def test_weights_that_begin_to_train_later_are_named(kind: str) -> None:
    module = tiny_module(policy=ALL[kind])

    def unfreeze(_: Rollout) -> None:
        cast(Any, module.required_policy.model.get_input_embeddings()).weight.requires_grad_()

    with pytest.raises(RuntimeError, match=r"stay frozen, got model.embed_tokens.weight, which trains by now: pass"):
        fit(module, callbacks=[kl(), callback_of("unfreeze", observe=unfreeze)], data=tiny_prompts(8, 2))


def test_a_copy_holds_the_trained_weights_alone() -> None:
    module = tiny_module(policy=COPIED["all biases"])
    fit(module, callbacks=[kl()], data=tiny_prompts(2, 2))
    policy, reference = module.required_policy, cast(Any, module.models.reference)
    shared = {id(weight) for weight in policy.parameters() if not weight.requires_grad}
    alone = [weight for weight in reference.model.parameters() if id(weight) not in shared]
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    assert local_bytes(alone) == local_bytes(trained) > 0
    assert resident_bytes(policy, reference, None, copies_gradients=False) == local_bytes(
        [*policy.parameters(), *alone]
    )


def test_a_reference_with_adapters_of_its_own_is_scored_with_them() -> None:
    seen: list[Rollout] = []
    module = tiny_module(policy=ALL["plain"], reference=ALL["trained before"])
    fit(module, callbacks=[kl(), recorder(seen)("watch")], data=tiny_prompts(2, 2))
    expected = plain_logprobs(base_model_of(ALL["trained before"]()), seen[0], 0)
    got = cast(Tensor, seen[0].ref_logprobs)[0, : len(expected)].double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["head", "tokens trained before"])
def test_the_audit_scores_fixed_tokens_at_the_start_and_now(kind: str) -> None:
    """No finding for a right reference; one for a switch that leaves on what is no layer with an adapter."""
    options: dict[str, Any] = {"policy": ALL[kind], "optimizer": partial(SGD, lr=4.0)}
    clean = SignalAudit(1, checks=["reference_stays"])
    fit(tiny_module(**options), callbacks=[kl(), clean], data=tiny_prompts(8, 2))
    assert (clean.findings, clean.skipped) == ([], {})
    faulty = SignalAudit(1, checks=["reference_stays"])
    with patch.object(lora_module, "adapters_off", lambda _: nullcontext()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off: Any = patch("lightning_rl.policy.run_models.is_base_model", return_value=True)
        with off:
            fit(tiny_module(**options), callbacks=[kl(), faulty], data=tiny_prompts(8, 2))
    assert {finding.check for finding in faulty.findings} == {"reference_stays"}
