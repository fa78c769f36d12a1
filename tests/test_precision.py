"""Precision, activation checkpointing and flags of the Trainer: same gradient, or an error that names our option."""

from functools import partial
from typing import Any

import pytest
import torch
from kit.rows import Rows
from kit.support import a_trainer, fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner.tuning import Tuner
from torch.optim import SGD

from lightning_rl.callbacks import ReferenceKL


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


@pytest.mark.parametrize("critic", [None, "shared"])
def test_activation_checkpointing_changes_no_bit(critic: str | None) -> None:
    found = []
    for saving in (False, True):
        options: dict[str, Any] = {"advantages": "gae", "critic": critic} if critic else {}
        module = tiny_module(minibatches_per_rollout=2, activation_checkpointing=saving, **options)
        fit(module, callbacks=[] if critic else [ReferenceKL(0.1, as_loss=True)])
        assert module.policy is not None
        assert any(getattr(part, "gradient_checkpointing", False) for part in module.policy.model.modules()) == saving
        found.append(weights_of(module))
    assert all(torch.equal(found[1][name], weight) for name, weight in found[0].items())


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
