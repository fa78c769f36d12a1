"""Loading of a sharded model: built on the meta device, sharded, and filled by each rank with its part."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lightning_rl.policy.text_model import auto_class_of, text_model_of

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHANGES_WEIGHTS = ("adapter_config.json",)  # files beside the weights which show that these are incomplete
PREFIX = "model."  # prefix of the policy's parameters in a PolicyModel


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files and keys of the parameters of a model.

    Attributes:
        folder: Folder of the files.
        files: File and key of each parameter, in the order of the model.
        dtype: Dtype in which they are loaded.
    """

    folder: Path
    files: dict[str, tuple[str, str]]
    dtype: torch.dtype

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full value of each parameter, one at a time."""
        for name, (file, key) in self.files.items():
            with safe_open(self.folder / file, framework="pt") as opened:
                yield name, opened.get_tensor(key).to(self.dtype)

    @torch.no_grad()
    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Load this rank's part of each parameter into a sharded model without storage.

        Args:
            model: PolicyModel whose policy is loaded.
            device: Device of this rank.
        """
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=device)
        for name, buffer in kept.items():
            model.get_buffer(name).copy_(buffer)
        parts, rest = dict[str, Tensor](), list[nn.Parameter]()
        for name, parameter in model.named_parameters():
            if name.removeprefix(PREFIX) in self.files and name.startswith(PREFIX):
                parts[self.files[name.removeprefix(PREFIX)][1]] = parameter.detach()
            else:
                rest.append(parameter)
        for parameter in rest:  # the value head, initialized with 0
            parameter.zero_()
        load(cast(Any, parts), storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


def model_without_numbers(source: object, *, whole: bool = False) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return the text model of a folder on the meta device, with its buffers on the CPU, and its weight files.

    Returns:
        None if ``source`` is no folder, cannot be read, or has parameters that are not plain tensors in the files:
            adapters, quantized or converted weights, weights tied only in the model, or buffers that do not follow
            from the configuration. Such a model is built normally.
    """
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        stored = _tensors_in(folder)
        if not stored or any((folder / name).exists() for name in CHANGES_WEIGHTS):
            return None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        auto, dtype = auto_class_of(config), torch.get_default_dtype()
        with torch.device("meta"):
            saved = cast(PreTrainedModel, auto.from_config(config, dtype=dtype, trust_remote_code=False))
    except (
        SafetensorError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # reported when the model is built normally
        return None
    if getattr(config, "quantization_config", None) is not None:
        return None
    model = saved if whole else text_model_of(saved)
    keys = _keys_of(saved, model, stored)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if keys is None or len(dtypes) != 1 or not _fill_buffers(model):
        return None
    with suppress(OSError):  # as in from_pretrained: a folder may have none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, WeightFiles(folder, {name: (stored[key][0], key) for name, key in keys.items()}, dtypes.pop())


def _keys_of(
    saved: PreTrainedModel, model: PreTrainedModel, stored: Mapping[str, tuple[str, list[int]]]
) -> dict[str, str] | None:
    """Return the key in the files of each parameter; None if one does not match, is missing, or is left over.

    Args:
        saved: Model whose files they are.
        model: ``saved`` or its text model.
        stored: File and shape of each tensor.
    """
    transforms = get_model_conversion_mapping(saved)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    ignored = tuple(getattr(saved, "_keys_to_ignore_on_load_unexpected", None) or ())
    tensors, wanted = saved.state_dict(keep_vars=True), set(map(id, model.state_dict(keep_vars=True).values()))
    keys = dict[int, str]()
    for key in stored:
        name, converted = rename_source_key(key, renamings, converters, saved.base_model_prefix, tensors)
        tensor = tensors.get(name)
        if tensor is None and any(re.search(pattern, name) for pattern in ignored):
            continue
        if tensor is None or converted is not None or id(tensor) in keys:
            return None
        if id(tensor) in wanted:
            keys[id(tensor)] = key
    needed = dict(model.named_parameters())
    if keys.keys() != set(map(id, needed.values())):
        return None
    found = {name: keys[id(parameter)] for name, parameter in needed.items()}
    return found if all(stored[found[name]][1] == list(needed[name].shape) for name in needed) else None


def _tensors_in(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return file and shape of every tensor that transformers would read; empty if there are other files too."""
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {WHOLE}
    if {path.name for path in folder.glob("*.safetensors")} != files:
        return {}
    stored = dict[str, tuple[str, list[int]]]()
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as opened:
            names = list(opened.keys())
            stored |= {name: (file, opened.get_slice(name).get_shape()) for name in names}
    return stored


def _fill_buffers(model: PreTrainedModel) -> bool:
    """Compute buffers that follow from the configuration as transformers does; return False if others exist."""
    for part in model.modules():
        buffers = dict(part.named_buffers(recurse=False))
        if not all(buffer.is_floating_point() for buffer in buffers.values()):
            return False
        for name, buffer in buffers.items():
            setattr(part, name, torch.full_like(buffer, torch.nan, device="cpu"))
        if buffers:
            model._init_weights(part)  # noqa: SLF001  as in from_pretrained
        if any(bool(buffer.isnan().any()) for buffer in part.buffers(recurse=False)):
            return False
    return True
