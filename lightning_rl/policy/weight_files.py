"""Weight files: a model is built without numbers, split over the ranks, and each rank reads its own part of them.

What a rank holds at any time is its part and no other: neither the model in float32 nor a copy of it for a reference.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHANGES_WEIGHTS = ("adapter_config.json",)  # beside the weights, says that they are not all
PREFIX = "model."  # of the policy's parameters in a PolicyModel


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where the parameters of a model lie.

    Attributes:
        folder: of the files.
        files: the file of each parameter, in the order of the model.
        dtype: that they are read in.
    """

    folder: Path
    files: dict[str, str]
    dtype: torch.dtype

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter, one at a time, as the whole model would have them."""
        for name, file in self.files.items():
            with safe_open(self.folder / file, framework="pt") as opened:
                yield name, opened.get_tensor(name).to(self.dtype)

    @torch.no_grad()
    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Reads this rank's part of each parameter into a model that was split before it had numbers.

        Args:
            model: a PolicyModel, whose policy is meant.
            device: where its part comes to lie.
        """
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device=device)
        for name, buffer in kept.items():
            model.get_buffer(name).copy_(buffer)
        parts, rest = dict[str, Tensor](), list[nn.Parameter]()
        for name, parameter in model.named_parameters():
            if name.removeprefix(PREFIX) in self.files and name.startswith(PREFIX):
                parts[name.removeprefix(PREFIX)] = parameter.detach()
            else:
                rest.append(parameter)
        for parameter in rest:  # the value head, which begins at 0
            parameter.zero_()
        load(cast(Any, parts), storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


def model_without_numbers(source: object) -> tuple[PreTrainedModel, WeightFiles] | None:
    """The model of a folder on the meta device, its buffers on the CPU, and where its parameters lie.

    Returns:
        None if ``source`` is no folder, its files cannot be read, or transformers would make something else of them
        than to read each parameter under its own name: adapters, quantized or renamed weights, weights that are tied
        in the model and not in the files, buffers that are no rotary frequencies. Such a model is built whole.
    """
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        stored = _tensors_in(folder)
    except (
        SafetensorError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # whoever builds it whole says
        return None
    if not stored or any((folder / name).exists() for name in CHANGES_WEIGHTS):
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False)
    needed = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if needed != {name: shape for name, (_, shape) in stored.items()} or len(dtypes) != 1 or not _fill_buffers(model):
        return None
    with suppress(OSError):  # as from_pretrained: a folder may have none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, WeightFiles(folder, {name: stored[name][0] for name in needed}, dtypes.pop())


def _tensors_in(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """File and shape of every tensor that transformers would read; empty if there are other files besides."""
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
    """Computes what follows from the configuration alone, as transformers does after it has read weights."""
    for part in model.modules():
        buffers = list(part.buffers(recurse=False))
        if not buffers:
            continue
        part.to_empty(device="cpu", recurse=False)
        buffers = list(part.buffers(recurse=False))
        if any(True for _ in part.parameters(recurse=False)) or not all(b.is_floating_point() for b in buffers):
            return False
        for buffer in buffers:
            buffer.fill_(torch.nan)
        model._init_weights(part)  # noqa: SLF001  what transformers itself calls then
        if any(bool(buffer.isnan().any()) for buffer in buffers):
            return False
    return True
