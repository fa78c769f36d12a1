"""Files of torch.save from elsewhere: a pickle in them is never run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_prompts

from lightning_rl import RLLightningModule
from lightning_rl.checkpointing import latest_checkpoint


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, left: Path) -> None:
        self.left = left

    def __reduce__(self) -> Any:
        """Names the call that unpickling makes."""
        return os.system, (f"touch {self.left}",)


def cut(path: Path) -> None:
    torch.save({"weights": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:900])


FILES: dict[str, Callable[[Path], object]] = {
    "a payload": lambda path: torch.save({"lightning_rl": Payload(path.with_name("left"))}, path),
    "a payload in the old format": lambda path: path.write_bytes(pickle.dumps(Payload(path.with_name("left")), 2)),
    "a cut file": cut,
    "nothing": lambda path: path.touch(),
    "text": lambda path: path.write_text("{}"),
}
REFUSALS = (ValueError, RuntimeError, pickle.UnpicklingError)


@pytest.mark.parametrize("name", [*FILES, "a pipe"])
def test_it_is_never_the_newest_checkpoint(name: str, tmp_path: Path) -> None:
    torch.save({"global_step": 1}, tmp_path / "good.ckpt")
    torch.save({"global_step": []}, tmp_path / "no_number.ckpt")
    os.mkfifo(tmp_path / "a.ckpt") if name == "a pipe" else FILES[name](tmp_path / "a.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "good.ckpt"
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize("name", FILES)
def test_it_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / "a.pt")
    with pytest.raises(REFUSALS):
        RLLightningModule.load_from_checkpoint(tmp_path / "a.pt")
    with pytest.raises(REFUSALS):
        fit(tiny_module(), ckpt_path=tmp_path / "a.pt", data=tiny_prompts(4, 4))
    assert not (tmp_path / "left").exists()


def test_a_checkpoint_that_names_an_unpickler_is_asked_for_the_policy(tmp_path: Path) -> None:
    fit(tiny_module(), limit_train_batches=1).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    task = pickle.dumps(((), Payload(tmp_path / "left")))
    checkpoint["lightning_rl"]["configuration"]["module"]["policy"] = {
        "partial": "lightning_rl.processes.worker.answer",
        "args": [None, task],
        "keywords": {},
    }
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="expected policy= to be passed"):
        RLLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", rewards=parity_reward)
    assert not (tmp_path / "left").exists()
