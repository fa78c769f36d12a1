"""Full parameters of any strategy as a stream that an engine loads in bounded memory.

One tensor at a time is gathered, merged with its adapter, cast and yielded. An engine holds tensors until a fused
module (q, k and v; gate and up; the experts of a layer) is complete, so a stream in the order of the layers has at
most one such module in memory.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from lightning_rl.policy.lora import adapters_of
from lightning_rl.policy.text_model import has_towers

Weights = Iterable[tuple[str, Tensor]]
Shape = tuple[int, ...]


def aliases_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the names that share another parameter's tensor, and that parameter: alias to source."""
    inner = cast(Any, model)
    keys = getattr(inner, "all_tied_weights_keys", None) or {}
    if not keys and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        keys = inner._tied_weights_keys or {}  # noqa: SLF001
    return dict(keys)


def add_aliases(weights: Weights, aliases: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream with each alias right after its source, for engines that load a tied head as a tensor."""
    for name, weight in weights:
        yield name, weight
        for alias, source in aliases.items():
            if source == name:
                yield alias, weight


def copied_names_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the plain name of each tensor in a module that peft trains as a copy; empty for one that nothing reads.

    A frozen weight that a tied head still reads has the name of the head's.
    """
    copied: dict[str, str] = {
        path: cast(Any, module).active_adapters[0]
        for path, module in model.named_modules()
        if "modules_to_save" in module._modules  # noqa: SLF001
    }
    ties = {source: alias for alias, source in aliases_of(model).items() if alias.rpartition(".")[0] not in copied}
    names = dict[str, str]()
    for name, _ in [*model.named_parameters(), *persistent_buffers(model)]:
        for path, active in copied.items():
            if name.startswith(copy := f"{path}.modules_to_save.{active}."):
                names[name] = f"{path}.{name.removeprefix(copy)}"
            elif name.startswith(f"{path}."):
                names[name] = ties.get(name.replace(".original_module.", "."), "")
    return names


def saved_name_in(model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function from the name of a parameter to the name that it has in files of a multimodal checkpoint.

    Engines of text take the names of transformers, which are those of files.
    """
    if not has_towers(model.config):
        return str
    changes: Any = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    renamings: Any = [each.reverse_transform() for each in reversed(changes) if isinstance(each, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [], reverse=True)[0]


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """Return the scaling of each LoRA layer by the layer's name, without the modules that peft trains as copies.

    Raises:
        ValueError: If an adapter is not one plain LoRA product added to a linear layer.
    """
    layers = set(map(id, adapters_of(model)))
    scales: dict[str, float] = {}
    for name, module in model.named_modules():
        if id(module) not in layers or "modules_to_save" in module._modules:  # noqa: SLF001
            continue
        layer = cast(Any, module)
        special = any(len(getattr(layer, kind, ())) for kind in ("lora_magnitude_vector", "lora_embedding_A"))
        base = getattr(layer, "base_layer", None)
        plain = isinstance(base, nn.Linear) and not getattr(layer, "fan_in_fan_out", False)
        if special or not plain or len(layer.active_adapters) != 1:
            raise ValueError(
                f"expected one plain LoRA adapter on a linear layer, got another at {name}: use TransformersEngine()"
            )
        scales[name] = float(layer.scaling[layer.active_adapters[0]])
    return scales


def merge_stream(weights: Weights, scales: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream with every adapter merged into its weight, W + s B A, under the plain name.

    A layer's weight is held until its A and B arrive, which directly follow it in the order of parameters.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        layer, part = part_of(name)
        if layer not in scales:
            yield name, weight
        elif part == "bias":
            yield f"{layer}.bias", weight
        else:
            parts = waiting.setdefault(layer, {})
            parts[part] = weight.clone()
            if len(parts) == len(("weight", "A", "B")):
                del waiting[layer]
                exact = torch.promote_types(parts["weight"].dtype, torch.float32)
                product = parts["B"].to(exact) @ parts["A"].to(exact)
                yield f"{layer}.weight", parts["weight"].to(exact) + scales[layer] * product
    if waiting:
        raise ValueError(
            f"expected weight, A and B of every adapter, got {sorted(waiting[min(waiting)])} of {min(waiting)}"
        )


def part_of(name: str) -> tuple[str, str]:
    """Return the LoRA layer of a parameter and its part: A, B, or the name within the base layer.

    Example:
        >>> part_of("model.q_proj.lora_A.default.weight"), part_of("model.q_proj.base_layer.weight"), part_of("norm")
        (('model.q_proj', 'A'), ('model.q_proj', 'weight'), ('norm', ''))
    """
    for mark, part in ((".lora_A.", "A"), (".lora_B.", "B"), (".base_layer.", "")):
        layer, separator, rest = name.partition(mark)
        if separator:
            return layer, part or rest
    return name, ""


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each buffer in the state dict, such as the bias of a router."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.removeprefix(f"{path}.") not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield name, buffer


def copies(
    weights: Weights, dtype: torch.dtype | None, device: torch.device, exact: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor in the engine's dtype. Strategies reuse the buffer that they gather into.

    Args:
        weights: Names and tensors.
        dtype: Dtype of the engine.
        device: Device of the copies.
        exact: Names of tensors that keep their dtype.
    """
    for name, weight in weights:
        casts = weight.is_floating_point() and name not in exact
        yield name, weight.detach().to(device=device, dtype=dtype if casts else weight.dtype, copy=True)


@dataclass(slots=True)
class WeightPlan:
    """Tensors of the engine, and the tensors that a stream has to contain."""

    shapes: Mapping[str, Shape]  # of each tensor of the engine, by the engine's name
    target_of: Callable[[str], tuple[str, int] | None]  # sent name -> target tensor, number of parts it fills
    buffers: Container[str] = ()  # of the engine, which a stream may contain too
    towers: tuple[str, ...] = ()  # beginnings of names, of whose layers the engine builds only those that it needs
    whole: bool = True  # False under tensor parallelism, where shapes differ
    expected: dict[str, Shape] = field(default_factory=dict)  # of every later stream, set by compare

    def compare(self, sent: Sequence[tuple[str, Shape]]) -> None:
        """Compare names and shapes once, before any weight is loaded; every later stream has to have the same.

        Raises:
            ValueError: If a tensor differs; names the first one.
        """
        parts: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in sent:
            if (target := self.target_of(name)) is None:
                continue
            if target[0] in self.buffers:
                continue
            if target[0] not in self.shapes:
                if target[0].startswith(self.towers):
                    continue
                raise ValueError(f"expected names of the engine's tensors, got {name} {list(shape)}")
            parts.setdefault(target[0], []).extend([(name, shape)] * target[1])
        for target, expected in self.shapes.items():
            if target not in parts:
                raise ValueError(f"expected a tensor for the engine's {target} {list(expected)}, got none")
            first, *others = (shape for _, shape in parts[target])
            stacked = (first[0] + sum(shape[0] for shape in others), *first[1:]) if others else first
            if self.whole and (stacked != expected or any(shape[1:] != first[1:] for shape in others)):
                names = ", ".join(f"{name} {list(shape)}" for name, shape in parts[target])
                raise ValueError(f"expected {list(expected)} for the engine's {target}, got {names}")
        self.expected = dict(sent)


def verify(weights: Weights, expected: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream after comparing each tensor with the first sync's.

    Raises:
        ValueError: If a tensor differs or is missing; names the first one, before it is yielded.
    """
    missing = dict(expected)
    for name, weight in weights:
        if missing.pop(name, None) != tuple(weight.shape):
            before = f"{list(expected[name])} or was sent before" if name in expected else "not among them"
            raise ValueError(
                f"expected the tensors of the first sync, got {name} {list(weight.shape)}, which was {before}"
            )
        yield name, weight
    if missing:
        raise ValueError(f"expected all tensors of the first sync, but {next(iter(missing))} is missing")


class Checksums:
    """Sum of the bits of every tensor of a stream, which shows if a weight changed since the last sync.

    It is no fingerprint: unequal weights can, rarely, have equal sums.

    Args:
        dtype: Dtype to which weights are cast first; a change that rounding hides does not count.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sums: list[Tensor] = []

    def observe(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream unchanged while computing its sums."""
        self._sums = []
        for name, weight in weights:
            rounded = weight.detach().to(self.dtype).contiguous()
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rounded.element_size()]
            self._sums.append(rounded.view(-1).view(bits).sum(dtype=torch.int64))
            yield name, weight

    def values(self) -> tuple[int, ...]:
        """Return one sum for each tensor of the last stream, in order."""
        return tuple(torch.stack(self._sums).tolist()) if self._sums else ()
