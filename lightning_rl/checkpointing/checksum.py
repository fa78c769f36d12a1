"""Checksums: find damaged checkpoints, and read the run and step of a checkpoint.

A file of ``torch.save`` is a zip archive with a CRC-32 of every entry. A folder of a sharded strategy gets a JSON file
with the run, the step, the options of the run and the CRC-32 of every other file.
"""

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

SUMS = "lightning_rl.json"
OPTIONS = ("configuration", "optimizer")  # of the run, in the state of a checkpoint
PARTS = (".metadata", "checkpoint", "meta.pt", "latest")  # files in folders of sharded strategies
BLOCK = 2**22
LIGHTNING = "pytorch-lightning_version"  # a key of every checkpoint of Lightning
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)
DAMAGED = (
    zipfile.BadZipFile,
    NotImplementedError,
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
)


class Origin(NamedTuple):
    """Origin of a checkpoint.

    Attributes:
        run: Name of the run; a resumed run keeps it.
        step: Number of optimizer steps; -1 if unknown.
        resumable: False for a checkpoint of ``save_weights_only=True``.
    """

    run: str
    step: int
    resumable: bool = True

    @staticmethod
    def of(checkpoint: Any) -> "Origin":
        """Return the origin of a loaded checkpoint."""
        if not isinstance(checkpoint, dict):
            return Origin("", -1)
        resumable = LIGHTNING not in checkpoint or "optimizer_states" in checkpoint
        run = checkpoint.get("lightning_rl", {}).get("run", "")
        return Origin(str(run), int(checkpoint.get("global_step", -1)), resumable)


def read_origin(path: Path) -> Origin | None:
    """Return the origin of a checkpoint, or None if it cannot be read; pipes are not opened."""
    try:
        if path.is_dir():
            return _read_sums(path)[0] if (path / SUMS).is_file() else Origin("", -1) if any(path.iterdir()) else None
        return Origin.of(torch.load(path, "cpu", weights_only=True, mmap=True)) if path.is_file() else None
    except UNREADABLE:
        return None


def read_options(path: Path) -> Mapping[str, Any]:
    """Return ``configuration`` and ``optimizer`` of a checkpoint without loading it; empty if it cannot be read."""
    try:
        if path.is_dir():
            return dict(json.loads((path / SUMS).read_text(encoding="utf-8"))["options"])
        return _options_of(torch.load(path, "cpu", weights_only=True, mmap=True))
    except UNREADABLE:
        return {}


def write_sums(folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write run, step, options and checksums into the folder of a checkpoint."""
    origin = Origin.of(checkpoint)
    content = {"run": origin.run, "step": origin.step, "options": _options_of(checkpoint), "crc32": _sums_of(folder)}
    (folder / SUMS).write_text(json.dumps(content, indent=1), encoding="utf-8")


def contents_of(path: Path) -> str:
    """Return a checksum of the stored checksums of a checkpoint, which identifies its contents without reading them."""
    if path.is_dir():
        sums = (path / SUMS).read_bytes() if (path / SUMS).is_file() else b""
    else:
        with zipfile.ZipFile(path) as archive:
            sums = repr([entry.CRC for entry in archive.infolist()]).encode()
    return f"{zlib.crc32(sums):08x}"


def check_whole(path: Path) -> None:
    """Compare a checkpoint with its checksums; a folder without them is not compared.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is empty, truncated, damaged or another kind of file.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a checkpoint, got {path}, which does not exist")
    if fault := _fault_of_folder(path) if path.is_dir() else _fault_of_file(path):
        raise ValueError(f"expected a checkpoint, got {fault}: {_cure(path)}")


def unreadable(path: Path, failure: BaseException) -> str:
    """Return the error message for a file that ``torch.load`` cannot read."""
    reason = str(failure).strip().split("\n")[0][:200] or type(failure).__name__
    return f"expected a checkpoint of an RLLightningModule, got {path}, which cannot be read ({reason}): {_cure(path)}"


def _fault_of_file(path: Path) -> str | None:
    if not path.is_file():
        return f"{path}, which is a pipe or a device"
    if not path.stat().st_size:
        return f"the empty file {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.testzip()
    except DAMAGED as failure:
        return f"{path}, which is truncated, damaged or not a checkpoint ({failure})"
    return None if entry is None else f"the damaged file {path} (CRC-32 of {entry} differs)"


def _fault_of_folder(folder: Path) -> str | None:
    if not (folder / SUMS).exists():
        return None if any((folder / name).exists() for name in PARTS) else f"the folder {folder}"
    try:
        _, sums = _read_sums(folder)
    except UNREADABLE as failure:
        return f"the damaged file {folder / SUMS} ({type(failure).__name__})"
    found = _sums_of(folder)
    if missing := sorted(sums.keys() - found.keys()):
        return f"{folder} without {missing[0]}"
    damaged = next((name for name, crc in sums.items() if found[name] != crc), None)
    return None if damaged is None else f"the damaged file {folder / damaged} (CRC-32 differs)"


def _options_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state = checkpoint.get("lightning_rl", {})
    return {name: state[name] for name in OPTIONS if name in state}


def _cure(path: Path) -> str:
    if path.is_dir() and (within := sorted(other.name for other in path.glob("*.ckpt"))):
        return f"pass one of {', '.join(within[-3:])} in it"
    others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path)
    if not others:
        return "resume from another checkpoint, or start a new run"
    return f"resume from another checkpoint, such as one of {', '.join(others[-3:])} beside it"


def _read_sums(folder: Path) -> tuple[Origin, dict[str, int]]:
    content = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    return Origin(str(content["run"]), int(content["step"])), dict(content["crc32"])


def _sums_of(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {str(path.relative_to(folder)): _crc_of(path) for path in files}


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
