"""The folder of a sharded checkpoint holds values and tensors: no pickle in it runs code."""

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.support import fit, parity_reward, tiny_module, tiny_policy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lightning_rl import RLLightningModule
from lightning_rl.checkpointing.checksum import write_sums
from lightning_rl.checkpointing.folder_pickles import check_pickles

STATE: dict[str, Any] = {
    "weight": torch.ones(3, 2),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "optimizer": {"lr": 0.1, "betas": (0.9, 0.99), "name": "policy", "step": 3},
}


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        """Return a call that writes."""
        return Path.write_text, (self.target, "code ran")


class ByAttribute(Attack):
    """Asks for an attribute first, as members of enums do in some versions of Python."""

    def __reduce__(self) -> Any:
        """Return a call of getattr."""
        return getattr, (self.target, "unlink")


def folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint as a sharded strategy writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
    torch.save({"global_step": 3}, path / "meta.pt")
    return path


def rewrite_object(folder: Path, content: bytes) -> None:
    """Replace the stored bytes of an object that is no tensor, and its entry."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "optimizer.name")
    info = metadata.storage_data[index]
    with (folder / info.relative_path).open("ab") as stream:
        info.offset, info.length = stream.tell(), len(content)
        stream.write(content)
    file.write_bytes(pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def poison(folder: Path, where: str, target: Path) -> None:
    """Put an attack into a file of a folder."""
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Attack(target)))
    elif where == "metadata of a rank":
        (folder / "__1.metadata").write_bytes(pickle.dumps(Attack(target)))
    elif where == "attribute":
        (folder / ".metadata").write_bytes(pickle.dumps(ByAttribute(target)))
    elif where == "within the metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = {"a": Attack(target)}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    elif where == "object":
        rewrite_object(folder, saved(Attack(target)))
    elif where == "another file":
        (folder.parent / "other").write_bytes(saved("policy"))
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        next(
            info for index, info in metadata.storage_data.items() if index.fqn == "optimizer.name"
        ).relative_path = "../other"
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        (folder / where).parent.mkdir(exist_ok=True)
        torch.save({"optimizer_state_dict": Attack(target)}, folder / where)


ATTACKS = [
    "metadata",
    "metadata of a rank",
    "attribute",
    "within the metadata",
    "object",
    "another file",
    "meta.pt",
    "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt",
]

WAYS: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: fit(tiny_module(), ckpt_path=folder),
    "load": lambda folder: RLLightningModule.load_from_checkpoint(folder, policy=tiny_policy, rewards=parity_reward),
}


@pytest.mark.parametrize("where", ATTACKS)
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_runs_no_code_also_with_matching_checksums(where: str, way: str, tmp_path: Path) -> None:
    folder, target = folder_of(tmp_path / "run.ckpt"), tmp_path / "target"
    poison(folder, where, target)
    if where == "attribute":
        target.touch()
    write_sums(folder, {"global_step": 3})
    with pytest.raises(ValueError, match=r"got .*, which may run code or is damaged \(.*your own"):
        WAYS[way](folder)
    assert target.exists() == (where == "attribute")


def test_an_honest_folder_is_read_with_the_enums_of_old_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    folder = folder_of(tmp_path / "run.ckpt")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    check_pickles(folder)
    assert len(FileSystemReader(folder).read_metadata().state_dict_metadata) == 6
