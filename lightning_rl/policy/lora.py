"""LoRA and other adapters: the model inside of peft's wrappers, and the reference of a policy with adapters."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from lightning_rl.policy.model import Scorer

PROBES, CHUNK = 8, 2**14  # random inputs of a layer; token ids of an embedding at a time


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a peft model, with its adapters; any other model as it is."""
    inner: Any = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, model if inner is None else inner())


def merge_adapters(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model of a peft model with merged adapters; any other model as it is."""
    merge: Any = getattr(model, "merge_and_unload", None)
    return cast(PreTrainedModel, model if merge is None else merge())


def adapters_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that peft's switch affects: those with an adapter, and trained copies of whole modules."""
    return [part for part in model.modules() if hasattr(part, "_disable_adapters")]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside, without freezing them as peft's switch does."""
    layers = [(layer, layer._disable_adapters) for layer in cast(list[Any], adapters_of(model))]  # noqa: SLF001
    for layer, _ in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer, before in layers:
            layer._disable_adapters = before  # noqa: SLF001


def parameters_without_adapters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module reads while its adapters are off."""
    if hasattr(module, "_disable_adapters"):
        yield from parameters_without_adapters(_layer_below(module))
        return
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)  # noqa: SLF001
    for part in module.children():
        yield from parameters_without_adapters(part)


def _layer_below(adapter: Any) -> nn.Module:
    """Return the layer that an adapter wraps."""
    below = adapter._modules.get("base_layer")  # noqa: SLF001
    return adapter.original_module if below is None else below


@torch.no_grad()
def is_base_model(model: nn.Module) -> bool:
    """Return True if the model without its adapters is the model with them, bit for bit, however they train.

    So no parameter that trains is read while they are off, and no adapter changes an output of its layer. Layers that
    cannot be compared alone count as changed.
    """
    trains = any(parameter.requires_grad for parameter in parameters_without_adapters(model))
    return not trains and all(map(_changes_nothing, adapters_of(model)))


def _changes_nothing(adapter: Any) -> bool:
    below = _layer_below(adapter)
    while hasattr(below, "_disable_adapters"):  # several adapters on one layer
        below = _layer_below(below)
    if (copies := adapter._modules.get("modules_to_save")) is not None:  # noqa: SLF001
        return all(_equal(copies[name], below) for name in adapter.active_adapters if name in copies)
    if isinstance(below, nn.Embedding):
        probes = torch.arange(below.num_embeddings, device=below.weight.device).split(CHUNK)
    elif isinstance(below, nn.Linear | Conv1D):
        weight = below.weight
        width = below.in_features if isinstance(below, nn.Linear) else len(weight)
        dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()  # quantized weights
        random = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0))
        probes = (random.to(weight.device, dtype),)
    else:
        factors = adapter._modules.get("lora_B")  # noqa: SLF001  of parameters of the layer, such as experts
        return bool(factors) and not any(bool(factor.any()) for factor in factors.parameters())
    return all(torch.equal(adapter(probe), _without(adapter, probe)) for probe in probes)


def _without(adapter: nn.Module, inputs: Tensor) -> Tensor:
    with adapters_off(adapter):
        return adapter(inputs)


def _equal(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def frozen_copy(model: PreTrainedModel, *, shares: bool) -> PreTrainedModel:
    """Return a copy of a model; if ``shares``, its frozen parameters are those of the model."""
    kept = (parameter for parameter in model.parameters() if shares and not parameter.requires_grad)
    return copy.deepcopy(model, {id(parameter): parameter for parameter in kept})


class AdapterOffScorer(Scorer):
    """Reference of a policy with adapters that began at 0: the policy without them, so there is no second model.

    Args:
        policy: Policy, sharded or not.
        model: Transformers model in it.
    """

    def __init__(self, policy: nn.Module, model: PreTrainedModel) -> None:
        self.scoring, self.model = policy, model

    @property
    @override
    def fingerprint(self) -> str:
        """Constant, because its weights are in the checkpoint of the policy."""
        return "the policy without its adapters"

    @override
    def to(self, device: torch.device) -> None:
        """Do nothing: it is on the policy's device."""

    @override
    def read_parameters(self) -> Iterator[nn.Parameter]:
        return parameters_without_adapters(self.model)

    @override
    def reading(self) -> AbstractContextManager[object]:
        return adapters_off(self.model)
