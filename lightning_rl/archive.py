"""Archive: a file of ``torch.save`` from anywhere, read as plain values and tensors, and refused if it is more."""

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_archive(path: str | Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, under ``weights_only=True``, and never more memory than the file is large.

    ``torch.save`` compresses nothing, so an archive that does is somebody else's: it could unfold to any size. Neither
    may a tensor claim more than the file holds, as one does that repeats a number a trillion times.

    Args:
        path: of a file; nothing of it is run, imported or built but plain values.
        map_location: where tensors are loaded to.
        mmap: whether the bytes of tensors stay in the file until somebody reads them.

    Raises:
        ValueError: naming the file and why it is none of ours.
        FileNotFoundError: if it is not there.
    """
    path = Path(path)
    size = _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Detected pickle protocol")  # torch.save writes one, and torch reads on
            loaded = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as refused:  # torch builds tensors by functions that assert, look up and convert
        what = str(refused).partition("\n")[0] or "on reading it"
        raise ValueError(_wrong(path, f"{type(refused).__name__}: {what}")) from refused
    for tensor in _tensors(loaded):
        claimed = tensor.numel() * tensor.element_size()
        if tensor.layout != torch.strided or tensor.is_meta or claimed > size:
            raise ValueError(_wrong(path, f"a tensor of shape {list(tensor.shape)} in {size} bytes"))
    return loaded


def _check_archive(path: Path) -> int:
    """The size of the file, whose entries lie in it as they are."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as missing:  # also links in a circle, and names that are too long
        got = "no such file" if isinstance(missing, FileNotFoundError) else getattr(missing, "strerror", None)
        raise FileNotFoundError(f"expected {path} to be a file of torch.save, got {got or missing}") from None
    if not target.is_file():
        raise ValueError(_wrong(path, "no regular file"))
    size = target.stat().st_size
    try:
        with zipfile.ZipFile(target) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, RecursionError, NotImplementedError) as broken:
        raise ValueError(_wrong(path, str(broken))) from broken
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(_wrong(path, "compressed entries"))
    if len({entry.filename for entry in entries}) < len(entries) or sum(entry.file_size for entry in entries) > size:
        raise ValueError(_wrong(path, "entries over each other"))
    return size


def _wrong(path: Path, what: str) -> str:
    return f"expected a whole file as torch.save writes it, of plain values and tensors alone, got {path}: {what}"


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in lists and mappings, however deep they are."""
    found, level = list[Tensor](), [value]
    while level:
        found += [item for item in level if isinstance(item, Tensor)]
        nested = [item for item in level if isinstance(item, Mapping | list | tuple | set)]
        level = [item for each in nested for item in (each.values() if isinstance(each, Mapping) else each)]
    return found
