"""Pickles in the folder of a sharded checkpoint: they may hold plain values and nothing that runs code.

``torch.distributed.checkpoint`` and DeepSpeed unpickle the files of a folder without ``weights_only=True``, so they are
read here first, by readers that know the classes that belong there.
"""

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata
from typing_extensions import override

METADATA = "*.metadata"
TORCH_FILES = ("*.pt", "*.bin", "*.ckpt")
KNOWN = {
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
}
DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}


class _MetadataReader(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _memory_format  # Python 3.11.0 to 3.11.3 pickle members of an enum so
        if global_name not in KNOWN.get(module_name, ()):
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def _memory_format(owner: Any, name: str) -> Any:
    if owner is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for an attribute of {owner}")
    return _MEM_FORMAT_ENCODING[name]


def check_pickles(folder: Path) -> None:
    """Check that reading the folder of a sharded checkpoint runs no code.

    Raises:
        ValueError: If a file asks for something other than plain values and tensors; names the file.
    """
    for path in sorted(folder.rglob(METADATA)):
        metadata = _read(path, lambda path=path: _MetadataReader(io.BytesIO(path.read_bytes())).load())
        if not isinstance(metadata, Metadata):
            raise ValueError(_message(path, f"it holds {type(metadata).__name__}"))
        for name, content in _stored_objects(path, metadata):
            _read(path.parent / name, lambda content=content: torch.load(io.BytesIO(content), weights_only=True))
    files = (path for pattern in TORCH_FILES for path in sorted(folder.rglob(pattern)) if path.is_file())
    for path in files:
        _read(path, lambda path=path: _load_without_data(path))


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # of damaged files, too
        raise ValueError(_message(path, str(error).strip().split("\n")[-1][:200] or type(error).__name__)) from error


def _message(path: Path, reason: str) -> str:
    return (
        f"expected a checkpoint of plain values and tensors, got {path}, which may run code or is damaged ({reason}): "
        "resume from a checkpoint of your own"
    )


def _stored_objects(path: Path, metadata: Metadata) -> Iterator[tuple[str, bytes]]:
    """Yield the file and the bytes of each stored object that is no tensor."""
    objects = {name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)}
    for index, info in (metadata.storage_data or {}).items():
        if index.fqn not in objects:
            continue
        file = path.parent / info.relative_path
        if file.resolve().parent != path.parent.resolve():
            raise ValueError(_message(path, f"it names the file {info.relative_path}"))
        with file.open("rb") as opened:
            opened.seek(info.offset)
            yield info.relative_path, opened.read(info.length)


def _load_without_data(path: Path) -> None:
    loaded = [(sys.modules[module], names) for module, names in DEEPSPEED.items() if module in sys.modules]
    classes: list[Any] = [getattr(module, name) for module, names in loaded for name in names if hasattr(module, name)]
    with torch.serialization.safe_globals(classes):
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
