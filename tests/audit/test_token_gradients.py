"""Every token contributes to the gradient of the update's forward, for each kind of forward."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_rl.audit import SignalAudit


def audit_of(folder: Path, precision: Any = "32-true", **options: Any) -> SignalAudit:
    audit = SignalAudit(1, checks=["token_gradients"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, data = tiny_module(**options), tiny_prompts(8, 4)
        fit(module, callbacks=[audit], data=data, default_root_dir=folder, precision=precision)
    return audit


def with_adapters() -> Any:
    return get_peft_model(tiny_policy(0), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        *({"packing": False}, {"top_k": 6}, {"precision": "bf16-mixed"}, {"policy": with_adapters}),
        {"advantages": "gae", "critic": partial(tiny_policy, 3), "activation_checkpointing": True},
    ],
    ids=["padded", "filtered", "bfloat16", "adapters", "critic"],
)
def test_a_gradient_from_every_token_gives_no_alarm(options: dict[str, Any], tmp_path: Path) -> None:
    audit = audit_of(tmp_path, **options)
    assert audit.findings == [] and audit.skipped == {}


@pytest.mark.parametrize("scores", [1.0, 100.0])
def test_what_rounding_leaves_of_a_sure_token_is_no_finding(scores: float) -> None:
    """The error of a gradient of 1e-4 is 2e-4 beside scores of size 1, and 2e-2 beside scores of 100."""
    plain, size = torch.tensor([1e-4, 0.0]), torch.tensor([scores, 0.0])
    near, far = (plain + torch.tensor([0.0, scores * part]) for part in (1.9e-4, 2.1e-4))
    fine = replace(evidence_of(), token_gradients=(near, plain, size))
    assert culprits("token_gradients", fine) == []
    assert culprits("token_gradients", replace(fine, token_gradients=(far, plain, size))) != []


def test_hooks_of_the_parameters_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called once per microbatch, as without the audit, since a hook may have state."""
    numbers = list[int]()
    for callbacks in ([], [SignalAudit(1, checks=["token_gradients"])]):
        calls = list[int]()
        module = tiny_module(policy=lambda calls=calls: _policy_with_hooks(calls))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, callbacks=callbacks, data=tiny_prompts(8, 4), default_root_dir=tmp_path)
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] > 0


def _policy_with_hooks(calls: list[int]) -> nn.Module:
    model = tiny_policy(0)
    for weight in model.parameters():
        weight.register_hook(lambda _gradient: calls.append(1))
    return model


def test_rows_that_are_too_long_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.audit.forwards.GRADIENT_TOKENS", 3)
    assert "the checked rows are long" in audit_of(tmp_path).skipped["token_gradients"]
