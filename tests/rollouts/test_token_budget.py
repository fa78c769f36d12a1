"""Default of ``max_tokens_per_microbatch``: what fits into the device, kept by a resumed run."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.first_step import SavesAt
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch import Callback, Trainer
from transformers import PretrainedConfig
from typing_extensions import override

from lightning_rl import RLLightningModule
from lightning_rl.policy.memory import GIB
from lightning_rl.run.memory_estimate import token_budget
from lightning_rl.run.run import Run

SMALL = 2 * 2**20  # bytes of a machine, half of which the run may use


class Examines(Callback):
    """Keeps the result of a function of the module after the last step."""

    def __init__(self, examine: Callable[[Any], Any]) -> None:
        self.examine, self.result = examine, None

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.result = self.examine(pl_module)


def memory(patch: pytest.MonkeyPatch, size: int) -> None:
    """Set the memory of the machine, in bytes."""
    sysconf = os.sysconf
    patch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}.get(str(name)) or sysconf(name)
    )


def run(
    examine: Callable[[Any], Any] = lambda module: module.run.progress.max_tokens_per_microbatch, **options: Any
) -> tuple[RLLightningModule, Any]:
    """Train on rollouts of 64 rows; return the module, and the token budget or another result."""
    module, callback = tiny_module(**options.pop("module", {})), Examines(examine)
    options = {"max_steps": 3, **options, "callbacks": [callback, *options.pop("callbacks", ())]}
    fit(module, data=tiny_prompts(48, 16), **options)
    return module, callback.result


def default_on(device: str, *, config: PretrainedConfig | None = None) -> tuple[int, str]:
    """Compute the default of a run on a kind of device, of a model with another configuration."""

    def examine(module: Any) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "device", torch.device(device))
            if config is not None:
                patch.setattr(module.policy.model, "config", config)
            return token_budget(module.run)

    return run(examine, max_steps=1)[1]


def test_a_small_machine_has_a_smaller_default_and_shows_its_derivation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory(monkeypatch, SMALL)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert run(max_steps=1)[1] == 256
    (line,) = [record.message for record in caplog.records if "max_tokens_per_microbatch" in record.message]
    assert line.startswith("max_tokens_per_microbatch=256 (") and "MB per token" in line


def test_the_default_is_bounded_by_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    assert (default_on("cpu")[0], default_on("cuda")[0]) == (4096, 16_384)


def test_an_option_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, SMALL)
    assert run(max_steps=1, module={"max_tokens_per_microbatch": 5000})[1] == 5000


def test_a_model_of_unknown_sizes_has_the_default_of_a_cpu() -> None:
    tokens, derivation = default_on("cpu", config=PretrainedConfig())
    assert tokens == 4096 and "has no hidden_size" in derivation


def test_a_resumed_run_keeps_the_default_of_a_machine_with_less_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        memory(patch, SMALL)
        whole, _ = run(callbacks=[SavesAt(1, tmp_path / "a.ckpt")])
    resumed, tokens = run(ckpt_path=tmp_path / "a.ckpt")
    assert tokens == 256
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(resumed)[name], weight), name


@pytest.mark.parametrize("recorded", [4096, 96])
def test_a_checkpoint_of_a_version_without_this_default_resumes_with_its_number(recorded: int, tmp_path: Path) -> None:
    run(callbacks=[SavesAt(1, tmp_path / "a.ckpt")], module={"max_tokens_per_microbatch": recorded})
    assert run(ckpt_path=tmp_path / "a.ckpt")[1] == recorded
