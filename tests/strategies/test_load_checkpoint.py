"""Checkpoints of sharded strategies become a module on one device, and a loaded module trains under them."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, TIMEOUT, run_ranks
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts

from lightning_rl import FSDP2Strategy, RLLightningModule

AGAIN: dict[str, Any] = {"policy": tiny_policy, "rewards": parity_reward}
CONSOLIDATE = "lightning.fabric.utilities.consolidate_checkpoint"


def load(path: Path) -> dict[str, torch.Tensor]:
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN)
    return {name: weight.detach() for name, weight in loaded.required_policy.named_parameters()}


def run(folder: Path) -> None:
    """On two ranks: one file and a folder after two steps; then one step more of a module that was loaded."""
    torch.set_num_threads(1)
    for name, strategy in {
        "whole": STRATEGIES["fsdp2"](),
        "fsdp2": FSDP2Strategy(process_group_backend="gloo", timeout=TIMEOUT),
        "fsdp1": STRATEGIES["fsdp1"](),
    }.items():
        module = tiny_module()
        trainer = fit(module, data=tiny_prompts(8, 4), strategy=strategy, devices=2)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        weights = {key: w.cpu().clone() for key, w in module.parallel.full_parameters(module.required_policy)}
        if trainer.is_global_zero:
            torch.save(weights, folder / f"{name}.weights")
    loaded = RLLightningModule.load_from_checkpoint(folder / "whole.ckpt", **AGAIN)
    fit(loaded, data=tiny_prompts(8, 4), strategy=STRATEGIES["fsdp2"](), devices=2, limit_train_batches=1)
    assert loaded.parallel.sharded and loaded.models.replica is not None


@pytest.mark.nightly
def test_checkpoints_of_two_ranks_load_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(__file__, 2, tmp_path)
    paths = {"whole": tmp_path / "whole.ckpt"}
    for name in ("fsdp2", "fsdp1"):
        folder = tmp_path / f"{name}.ckpt"
        with pytest.raises(ValueError, match="consolidate_checkpoint"):
            load(folder)
        monkeypatch.setattr(sys, "argv", [CONSOLIDATE, str(folder)])
        runpy.run_module(CONSOLIDATE, run_name="__main__")
        paths[name] = folder.with_name(f"{folder.name}.consolidated")
    for name, path in paths.items():
        trained, loaded = torch.load(tmp_path / f"{name}.weights"), load(path)
        assert trained.keys() == loaded.keys()
        assert all(torch.equal(trained[key], weight) for key, weight in loaded.items())


if __name__ == "__main__":
    run(Path(sys.argv[1]))
