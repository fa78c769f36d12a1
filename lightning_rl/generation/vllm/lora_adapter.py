"""LoRA in vLLM: a new adapter file for each version, and a base that is sent once."""

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.generation.weights.weight_stream import Weights, adapter_scales, part_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank that vLLM accepts


class Adapter:
    """Transfer of the policy's LoRA adapter to vLLM.

    vLLM stores an adapter by id, and blocks of the prefix cache by its name and path, so each version has a new id,
    name and path.

    Raises:
        ValueError: If there is no adapter, or other parameters train too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.scales = adapter_scales(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        others = sorted(name for name in trained if part_of(name)[1] not in ("A", "B"))
        if others or not self.scales:
            got = f"{others[0]} that trains as well" if self.scales else f"none in {type(model).__name__}"
            raise ValueError(f'expected adapters and a frozen base, got {got}: use lora="merged"')
        self.lora_rank = max(len(weight) for name, weight in model.named_parameters() if part_of(name)[1] == "A")
        self.max_lora_rank = next(value for value in RANKS if value >= self.lora_rank)
        self.number = 0
        self.request: Any = None
        self._parts: dict[str, Tensor] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``vllm.LLM``."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.max_lora_rank}

    def split(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights under plain names; the adapter's are stored for :meth:`save`."""
        self._parts = {}
        for name, weight in weights:
            layer, part = part_of(name)
            if layer not in self.scales:
                yield name, weight
            elif part in ("A", "B"):
                scaled = weight if part == "A" else weight * self.scales[layer]
                self._parts[f"base_model.model.{layer}.lora_{part}.weight"] = scaled.detach().cpu().contiguous().clone()
            else:
                yield f"{layer}.{part}", weight

    def save(self, path: Path, dtype: torch.dtype | None) -> None:
        """Write the adapter of the last stream to a new folder.

        Raises:
            RuntimeError: If A or B of a layer is missing.
        """
        if len(self._parts) != 2 * len(self.scales):
            raise RuntimeError(f"expected A and B of {len(self.scales)} layers, got {len(self._parts)} tensors")
        path.mkdir()
        save_file(
            {name: part.to(dtype=dtype) for name, part in self._parts.items()}, path / "adapter_model.safetensors"
        )
        targets = sorted({layer.rpartition(".")[-1] for layer in self.scales})
        config = {"peft_type": "LORA", "r": self.lora_rank, "lora_alpha": self.lora_rank, "target_modules": targets}
        (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))  # scaling is in B
        self._parts = {}

    def load(self, llm: Any, folder: Path, dtype: torch.dtype | None) -> None:
        """Load the adapter of the last stream under a new id, and remove the previous version.

        Raises:
            RuntimeError: If A or B of a layer is missing, or vLLM rejects the adapter.
        """
        before, self.number = self.request, self.number + 1
        path = folder / f"adapter-{self.number}"
        self.save(path, dtype)
        kind: Any = import_module("vllm.lora.request").LoRARequest
        self.request = kind(f"policy-{self.number}", self.number, str(path))
        if before is not None:
            llm.llm_engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path)
        if not llm.llm_engine.add_lora(self.request):
            raise RuntimeError(f"expected vLLM to load the adapter {self.request.lora_name}, but it did not")
