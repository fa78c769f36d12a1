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

from lightning_rl.policy.model import FrozenModel
from lightning_rl.policy.roles import Role

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


def _innermost(module: nn.Module) -> nn.Module:
    """Return the layer inside of all adapters."""
    return _innermost(_layer_below(module)) if hasattr(module, "_disable_adapters") else module


def check_adapters(source: nn.Module, *, trains: bool) -> None:
    """Check that a peft model computes what the model inside of it computes, and trains as configured.

    Args:
        source: Peft model, or any other model.
        trains: True for a model that trains, whose adapters have to be merged in the end.

    Raises:
        ValueError: If it does not; names the parameter or layer.
    """
    model, kind = base_model_of(source), type(source).__name__
    inside = set(model.parameters())
    for name, parameter in source.named_parameters():
        if parameter not in inside:
            raise ValueError(
                f"expected adapters within the layers of {type(model).__name__}, got {name}, which only the forward of "
                f"{kind} reads, and a run calls the model inside of it: use LoraConfig"
            )
    configs: Any = getattr(source, "peft_config", {})
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs.values()):
        raise ValueError(
            f"expected adapters that are on for all tokens, got aLoRA, which only the forward of {kind} switches on, "
            "and a run calls the model inside of it: use LoraConfig without alora_invocation_tokens"
        )
    if trains:
        _check_training(source, model)


def _check_training(source: nn.Module, model: PreTrainedModel) -> None:
    """Check that the adapters of a model train as configured, and can be merged."""
    if hasattr(getattr(source, "base_model", None), "update_and_allocate"):
        raise ValueError(
            "expected adapters of fixed ranks, got AdaLoRA, which needs a call of update_and_allocate after each step, "
            "and its regularizer in the loss, neither of which runs here: use LoraConfig"
        )
    names, adapters = {part: name for name, part in model.named_modules()}, adapters_of(model)
    if adapters:
        _check_tie(model)
    for adapter in adapters:
        if (unread := _unread(adapter)) is not None:
            raise ValueError(
                f"expected the output of {names[adapter]} to depend on {unread}, which trains, but it does not: "
                "unmerge and activate the adapter"
            )
    for adapter in {_kind(adapter): adapter for adapter in adapters}.values():
        try:
            _check_merge(adapter)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected adapters that can be merged into the weights, for engines and exports, but that of "
                f"{names[adapter]} cannot: {error}: change its configuration"
            ) from error


def _kind(adapter: Any) -> tuple[type, type, bool]:
    """Return what decides, within a model, if an adapter can be merged."""
    inner = _innermost(adapter)
    return type(adapter), type(inner), getattr(inner, "bias", None) is None


@torch.no_grad()
def _check_merge(adapter: nn.Module) -> None:
    """Merge a copy of an adapter, unless the weight below is quantized, which peft rounds with a warning."""
    weight: Any = getattr(_innermost(adapter), "weight", None)
    if hasattr(adapter, "merge") and weight is not None and weight.is_floating_point():
        cast(Any, copy.deepcopy(adapter)).merge()


def _check_tie(model: PreTrainedModel) -> None:
    """Check that no adapter is merged into a weight that embeddings and head share, unless both have the same one."""
    parts: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    first, second = (getattr(_innermost(part), "weight", None) for part in parts)
    merging = [part for part in parts if part is not _innermost(part) and "modules_to_save" not in part._modules]  # noqa: SLF001
    tokens = [part for part in parts if "token_adapter" in part._modules]  # noqa: SLF001  peft ties them
    if first is second and merging and tokens != parts:
        name = next(name for name, part in model.named_modules() if part is merging[0])
        raise ValueError(
            f"expected no adapter on {name}, as embeddings and vocabulary head share its weight, and a merge would "
            f'change both: use modules_to_save=["{name.rpartition(".")[-1]}"], or build the model with untied weights'
        )


@torch.enable_grad()
def _unread(adapter: Any) -> str | None:
    """Return the name of a parameter of an adapter that trains without an effect on the layer's output, or None."""
    below = set(_layer_below(adapter).parameters())
    trained = {name: part for name, part in adapter.named_parameters() if part.requires_grad and part not in below}
    probe = next(_probes(_innermost(adapter)), None)
    if not trained or probe is None:
        return None
    try:
        output = adapter(probe[:PROBES])
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected adapters that read hidden states alone, got {type(error).__name__}: {error}: use LoraConfig"
        ) from error
    if not output.requires_grad:
        return next(iter(trained))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))  # a sum may be constant
    total = (output * weights.to(output.device, output.dtype)).sum()
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    moves = not probe.is_floating_point() or any(bool(part.any()) for part in gradients if part is not None)
    return next((name for name, part in zip(trained, gradients, strict=True) if part is None or not moves), None)


@torch.no_grad()
def is_base_model(model: nn.Module) -> bool:
    """Return True if the model without its adapters is the model with them, bit for bit, however they train.

    So no parameter that trains is read while they are off, and no adapter changes an output of its layer. Layers that
    cannot be compared alone count as changed.
    """
    trains = any(parameter.requires_grad for parameter in parameters_without_adapters(model))
    return not trains and all(map(_changes_nothing, adapters_of(model)))


def _changes_nothing(adapter: Any) -> bool:
    below = _innermost(adapter)
    if (copies := adapter._modules.get("modules_to_save")) is not None:  # noqa: SLF001
        return all(_equal(copies[name], below) for name in adapter.active_adapters if name in copies)
    probes = list(_probes(below))
    if not probes:
        factors = adapter._modules.get("lora_B")  # noqa: SLF001  of parameters of the layer, such as experts
        return bool(factors) and not any(bool(factor.any()) for factor in factors.parameters())
    return all(torch.equal(adapter(probe), _without(adapter, probe)) for probe in probes)


def _probes(layer: Any) -> Iterator[Tensor]:
    """Yield inputs that show any difference between two linear layers or embeddings; none for another layer."""
    if isinstance(layer, nn.Embedding):
        yield from torch.arange(layer.num_embeddings, device=layer.weight.device).split(CHUNK)
    elif isinstance(layer, nn.Linear | Conv1D):
        width = layer.in_features if isinstance(layer, nn.Linear) else len(layer.weight)
        dtype = layer.weight.dtype if layer.weight.is_floating_point() else torch.get_default_dtype()  # if quantized
        yield torch.randn(PROBES, width, generator=torch.Generator().manual_seed(0)).to(layer.weight.device, dtype)


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


class ModelWithoutAdapter(FrozenModel):
    """Reference of a policy with adapters that began at 0: the policy without them, so there is no second model.

    Args:
        policy: Policy, sharded or not.
        model: Transformers model in it.
    """

    def __init__(self, policy: nn.Module, model: PreTrainedModel) -> None:
        self.scoring, self.model, self.role = policy, model, cast(Role, "reference")

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
