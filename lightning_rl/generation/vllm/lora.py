"""LoRA in vLLM: the policy's adapter as a file of its own for every version, beside a base that is sent once."""

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.generation.weights.stream import Stream, adapter_scales, part_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for the largest


class Adapter:
    """The policy's LoRA adapter on its way into vLLM.

    vLLM keeps an adapter under its id, and blocks of the prefix cache under its name and path, so each version has a
    new id, name and path in a folder of this process alone, and the one before is removed.

    Raises:
        ValueError: if something else than adapters trains, or there is none.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.scales, self.folder = adapter_scales(model), folder
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        others = sorted(name for name in trained if part_of(name)[1] not in ("A", "B"))
        if others or not self.scales:
            got = f"{others[0]} that trains as well" if self.scales else f"none in {type(model).__name__}"
            raise ValueError(f'expected adapters and a frozen base, got {got}: use lora="merged"')
        self.rank = max(len(weight) for name, weight in model.named_parameters() if part_of(name)[1] == "A")
        self.number = 0
        self.request: Any = None
        self._parts: dict[str, Tensor] = {}

    @property
    def options(self) -> dict[str, Any]:
        """For ``vllm.LLM``."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(rank for rank in RANKS if rank >= self.rank)}

    def split(self, stream: Stream) -> Iterator[tuple[str, Tensor]]:
        """The stream of the base under plain names; what belongs to the adapter is kept for :meth:`load`."""
        self._parts = {}
        for name, weight in stream:
            layer, part = part_of(name)
            if layer not in self.scales:
                yield name, weight
            elif part in ("A", "B"):
                scaled = weight if part == "A" else weight * self.scales[layer]
                self._parts[f"base_model.model.{layer}.lora_{part}.weight"] = scaled.detach().cpu().contiguous().clone()
            else:
                yield f"{layer}.{part}", weight

    def load(self, llm: Any) -> None:
        """Gives vLLM what the last stream brought, under a new id, and takes the version before away.

        Raises:
            RuntimeError: if the stream did not bring A and B of every layer, or vLLM refuses them.
        """
        if len(self._parts) != 2 * len(self.scales):
            raise RuntimeError(f"expected A and B of {len(self.scales)} layers, got {len(self._parts)} tensors")
        before, self.number = self.request, self.number + 1
        path = self.folder / f"adapter-{self.number}"
        path.mkdir()
        save_file(self._parts, path / "adapter_model.safetensors")
        targets = sorted({layer.rpartition(".")[-1] for layer in self.scales})
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "target_modules": targets}
        (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))  # the scale is within B
        kind: Any = import_module("vllm.lora.request").LoRARequest
        self.request, self._parts = kind(f"policy-{self.number}", self.number, str(path)), {}
        if before is not None:
            llm.llm_engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path)
        if not llm.llm_engine.add_lora(self.request):
            raise RuntimeError(f"expected vLLM to load the adapter {self.request.lora_name}, but it did not")
