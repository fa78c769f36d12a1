"""Weights on storage shared by trainer and servers, written in parts of bounded size and renamed when complete."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_rl.generation.weights.weight_stream import Weights
from lightning_rl.utils.atomic_write import write_atomically

PART_BYTES = 2**30  # bytes of tensors that the writer and each reader hold at once


def write_weights(weights: Weights, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
    """Write a stream of tensors into a new folder, which gets its name once it is complete.

    Args:
        weights: Names and tensors on the CPU, none of which shares memory with another.
        folder: Folder that does not exist yet; its parent is created.
        part_bytes: Size at which a part is closed; with the largest tensor it bounds memory.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder, lambda path: _write_parts(weights, path, part_bytes))


def _write_parts(weights: Weights, folder: Path, part_bytes: int) -> None:
    folder.mkdir()
    part: dict[str, Tensor] = {}
    for name, weight in weights:
        part[name] = weight.contiguous()
        del weight
        if sum(tensor.nbytes for tensor in part.values()) >= part_bytes:
            _save(part, folder)
            part.clear()
    if part:
        _save(part, folder)


def _save(part: dict[str, Tensor], folder: Path) -> None:
    names = json.dumps(list(part))  # a file of safetensors has an order of names other than the stream's
    save_file(part, folder / f"{len(list(folder.iterdir())):05d}.safetensors", metadata={"names": names})


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a folder one at a time, in the order in which they were written.

    Every part is opened before the first tensor is read, so a damaged file is found before any weight is loaded.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If a part is damaged; names it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected weights in {folder}, which does not exist here: pass storage= on all machines"
        )
    parts: dict[Path, list[str]] = {}
    for part in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(part, framework="pt") as file:
                parts[part] = json.loads(file.metadata()["names"])
        except (OSError, SafetensorError) as error:
            raise ValueError(f"expected weights in {part}, got a damaged file: {error}") from error
    return _tensors(parts)


def _tensors(parts: dict[Path, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for part, names in parts.items():
        with safe_open(part, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
