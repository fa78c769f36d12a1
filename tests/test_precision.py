"""Precision, activation checkpointing and flags of the Trainer: same gradient, or an error that names our option."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.rows import Rows
from kit.strategy_cases import lora_policy
from kit.support import a_trainer, differing, fit, tiny_module, tiny_policy, tiny_prompts, weights_of
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner.tuning import Tuner
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

from lightning_rl import warmup_then_linear
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy.build import build_model


def norms_of(rows: Rows) -> list[float]:
    return [row["optim/grad_norm"] for row in rows.rows]


def test_a_gradient_scaler_changes_neither_norm_nor_step() -> None:
    """float16 on a CPU has no kernels for all of this, so the scaler stands beside float32."""
    found = []
    for scale in (1.0, 1024.0):
        plugin = MixedPrecision("bf16-mixed", "cpu")
        plugin.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        rows, module = Rows(), tiny_module(max_grad_norm=0.1, optimizer=partial(SGD, lr=0.5))
        fit(module, callbacks=[rows], plugins=[plugin])
        found.append((norms_of(rows), weights_of(module)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3) and max(found[0][0]) > 0.1
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("case", ["reference", "critic", "adapters", "padded"])
def test_activation_checkpointing_changes_no_bit(case: str, precision: str) -> None:
    found = []
    for saving in (False, "full", "selective", True):
        options: dict[str, Any] = {
            "critic": {"advantages": "gae", "critic": "shared"},
            "adapters": {"policy": partial(lora_policy, torch.float32)},
            "padded": {"packing": False},
        }.get(case, {})
        module = tiny_module(minibatches_per_rollout=2, activation_checkpointing=saving, **options)
        callbacks = [ReferenceKL(0.1, as_loss=True)] if case == "reference" else []
        fit(module, callbacks=callbacks, precision=precision)
        assert module.policy is not None
        saves = any(getattr(part, "gradient_checkpointing", False) for part in module.policy.model.modules())
        assert saves == bool(saving)
        found.append(weights_of(module))
    assert all(torch.equal(other[name], weight) for name, weight in found[0].items() for other in found[1:])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"gradient_clip_val": 0.5}, "without gradient_clip_val, got 0.5: pass max_grad_norm="),
        ({"accumulate_grad_batches": 2}, "without accumulate_grad_batches, got 2: max_tokens_per_microbatch="),
        (
            {"precision": "16-true"},
            r'expected a precision for training, got Trainer\(precision="16-true"\).*use "bf16-mixed"',
        ),
        ({"callbacks": [LearningRateFinder()]}, "expected a fit, got lr_find .*choose lr= of the optimizer"),
        (
            {"callbacks": [BatchSizeFinder()]},
            "expected a fit, got scale_batch_size .*max_tokens_per_microbatch= of ModelOptions",
        ),
    ],
)
def test_flags_that_manual_optimization_refuses_name_our_option(flag: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(), **flag)


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused(method: str) -> None:
    trainer = a_trainer()
    with pytest.raises(ValueError, match=f"expected a fit, got {method}"):
        getattr(Tuner(trainer), method)(tiny_module(), datamodule=tiny_prompts())


def bfloat16_policy() -> Any:
    return tiny_policy(dtype=torch.bfloat16)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_function_that_returns_a_bfloat16_model_trains_as_its_folder_does(precision: str, tmp_path: Path) -> None:
    bfloat16_policy().save_pretrained(tmp_path)
    modules = []
    for policy in (partial(AutoModelForCausalLM.from_pretrained, tmp_path), tmp_path):
        modules.append(tiny_module(policy=policy, minibatches_per_rollout=2))
        fit(modules[-1], callbacks=[ReferenceKL(0.1, as_loss=True)], precision=precision)
    weights = weights_of(modules[0])
    assert {weight.dtype for weight in weights.values()} == {
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    }
    assert not differing(*modules)


def test_half_precision_that_is_not_trained_and_other_dtypes_stay() -> None:
    frozen = bfloat16_policy().requires_grad_(requires_grad=False)
    assert build_model(lambda: frozen).dtype == torch.bfloat16
    assert build_model(partial(tiny_policy, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("precision", "rate", "lost"),
    [("bf16-true", 1e-6, True), ("bf16-true", 1e-2, False), ("32-true", 1e-6, False), ("bf16-mixed", 1e-6, False)],
)
def test_steps_that_are_lost_in_the_rounding_of_the_weights_give_one_warning(
    precision: str, rate: float, lost: bool
) -> None:
    module = tiny_module(optimizer=partial(AdamW, lr=rate), lr_scheduler=warmup_then_linear(2, 9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, data=tiny_prompts(16, 2), precision=precision)
    texts = [str(one.message) for one in caught if "did not move" in str(one.message)]
    assert len(texts) == lost
    assert all(f"rate of {rate:g}: the step is lost in" in text and "bf16-mixed" in text for text in texts)
