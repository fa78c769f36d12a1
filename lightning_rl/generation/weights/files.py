"""Weights on storage that trainer and servers share: written in parts of bounded size, whole or not there at all."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_rl.generation.weights.stream import Stream

PART_BYTES = 2**30  # of tensors that are held at once, by the writer and by each reader
INDEX = "index.json"
UNFINISHED = ".part"


def write_weights(stream: Stream, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
    """Writes a stream of tensors that nobody else changes into a new folder, which appears under its name when done.

    Args:
        stream: names and tensors on the CPU, each with memory of its own.
        folder: has to be new; its parent is made if need be.
        part_bytes: a part is closed once it holds so many bytes, which together with the largest tensor bounds memory.
    """
    unfinished = folder.with_name(folder.name + UNFINISHED)
    unfinished.mkdir(parents=True)
    parts: dict[str, list[str]] = {}
    held: dict[str, Tensor] = {}
    size = 0

    def close() -> None:
        name = f"{len(parts):05d}.safetensors"
        save_file(held, unfinished / name)
        parts[name] = list(held)
        held.clear()

    try:
        for name, weight in stream:
            held[name] = weight.contiguous()
            size += weight.nbytes
            del weight
            if size >= part_bytes:
                close()
                size = 0
        if held:
            close()
        (unfinished / INDEX).write_text(json.dumps(parts))
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, one at a time, in the order of its parts.

    Every part is opened and compared with the index before the first tensor is read, so that what is damaged is found
    before anything is loaded.

    Raises:
        FileNotFoundError: if there is no such folder here.
        ValueError: naming the part that is damaged.
    """
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"expected weights in {folder}, which does not exist here: pass storage= on all machines"
        )
    parts: dict[str, list[str]] = json.loads((folder / INDEX).read_text())
    for part, names in parts.items():
        try:
            with safe_open(folder / part, framework="pt") as opened:
                found = sorted(opened.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"expected weights in {folder / part}, got a damaged file: {error}") from error
        if found != sorted(names):
            raise ValueError(f"expected {len(names)} tensors in {folder / part}, got {len(found)}")
    return _tensors(folder, parts)


def _tensors(folder: Path, parts: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for part, names in parts.items():
        with safe_open(folder / part, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)
