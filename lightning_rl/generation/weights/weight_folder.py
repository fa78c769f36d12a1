"""Weights on storage shared by trainer and servers, written in parts of bounded size and renamed when complete."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_rl.generation.weights.weight_stream import Stream
from lightning_rl.utils.atomic_write import write_atomically

PART_BYTES = 2**30  # bytes of tensors that the writer and each reader hold at once
INDEX = "index.json"


def write_weights(stream: Stream, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
    """Write a stream of tensors into a new folder, which gets its name once it is complete.

    Args:
        stream: Names and tensors on the CPU, none of which shares memory with another.
        folder: Folder that does not exist yet; its parent is created.
        part_bytes: Size at which a part is closed; with the largest tensor it bounds memory.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(folder, lambda path: _write_parts(stream, path, part_bytes))


def _write_parts(stream: Stream, folder: Path, part_bytes: int) -> None:
    folder.mkdir()
    parts: dict[str, list[str]] = {}
    open_part: dict[str, Tensor] = {}

    def close() -> None:
        name = f"{len(parts):05d}.safetensors"
        save_file(open_part, folder / name)
        parts[name] = list(open_part)
        open_part.clear()

    for name, weight in stream:
        open_part[name] = weight.contiguous()
        del weight
        if sum(tensor.nbytes for tensor in open_part.values()) >= part_bytes:
            close()
    if open_part:
        close()
    (folder / INDEX).write_text(json.dumps(parts))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a folder one at a time, in the order of its parts.

    Every part is compared with the index before the first tensor is read, so a damaged file is found before any weight
    is loaded.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If a part is damaged; names it.
    """
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"expected weights in {folder}, which does not exist here: pass storage= on all machines"
        )
    parts = _read_index(folder)
    for part, names in parts.items():
        try:
            with safe_open(folder / part, framework="pt") as file:
                keys = sorted(file.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"expected weights in {folder / part}, got a damaged file: {error}") from error
        if keys != sorted(names):
            raise ValueError(f"expected {len(names)} tensors in {folder / part}, got {len(keys)}")
    return _tensors(folder, parts)


def _read_index(folder: Path) -> dict[str, list[str]]:
    path = folder / INDEX
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected an index of weights in {path}, got a damaged file: {error}") from error


def _tensors(folder: Path, parts: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for part, names in parts.items():
        with safe_open(folder / part, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
