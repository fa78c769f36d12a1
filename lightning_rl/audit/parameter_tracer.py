"""ParameterTracer: gradients and values of sampled entries of every parameter through one optimizer step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ENTRIES = 64  # per parameter


@dataclass(kw_only=True)
class ParameterTrace:
    """Sampled entries of one parameter through a step, [N] each, on a single device.

    Attributes:
        summed: Sum of the gradients of all backward passes, float64.
        magnitude: Sum of their absolute values, for rounding bounds; None for that of ``summed``.
        passes: Number of backward passes.
        unclipped: Gradient before the hooks before the optimizer step, and before clipping, float64.
        gradient: Gradient that the optimizer used, after these, float64.
        dtype: Dtype of the gradient; None without one.
        before: Values before the step.
        after: Values after the step.
        held: True if the optimizer contains the parameter.
        lr: Learning rate.
        options: Numeric options of its parameter group, such as ``weight_decay``, ``beta1``, ``beta2``.
        state: Optimizer state before the step by name: entries, and scalars.
    """

    summed: Tensor
    magnitude: Tensor | None = None
    passes: int = 0
    unclipped: Tensor | None = None
    gradient: Tensor | None = None
    dtype: torch.dtype | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    held: bool = True
    lr: float = 0.0
    options: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)


class ParameterTracer:
    """Tracer of sampled entries of every trained parameter through one optimizer step.

    Args:
        model: Unsharded model.
        optimizer: Optimizer of the step; its state is copied now, before the step.

    Attributes:
        parameters: Trace of each trained parameter by name.
        norm: Norm of the gradient that the optimizer used; None before the step.
        unclipped_norm: Norm of the gradient before the hooks before the step; None before them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.parameters = optimizer, dict[str, ParameterTrace]()
        self.norm: float | None = None
        self.unclipped_norm: float | None = None
        self._modules = list(model.named_modules())
        self._handles: list[RemovableHandle] = []
        self._parts: dict[str, list[Tensor]] = {}
        trained = {name: parameter for name, parameter in self._by_name().items() if parameter.requires_grad}
        earlier, states = sample_entries(trained), _states(optimizer, trained)
        for name, parameter in trained.items():
            self.parameters[name] = ParameterTrace(
                summed=torch.zeros_like(earlier[name], dtype=torch.float64), before=earlier[name], state=states[name]
            )
            self._follow(name, parameter)

    def _by_name(self) -> dict[str, nn.Parameter]:
        """Return the current parameters of the initial modules, each under its first name."""
        names = dict[nn.Parameter, str]()
        for prefix, module in self._modules:
            for name, parameter in module._parameters.items():  # noqa: SLF001  named_parameters is slow
                if parameter is not None:
                    names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
        return {name: parameter for parameter, name in names.items()}

    def _follow(self, name: str, parameter: nn.Parameter) -> None:
        parts, few = self._parts.setdefault(name, []), _few_of(parameter.numel(), ENTRIES)

        def add(gradient: Tensor) -> None:
            parts.append(gradient.detach().flatten()[few].clone())

        handle = parameter.register_hook(add)
        hooks: Any = parameter._backward_hooks  # noqa: SLF001  run in this order; ours has to be the first
        others = [key for key in hooks if key != handle.id]
        for key in others:
            hooks[key] = hooks.pop(key)
        self._handles.append(handle)

    def before_optimizer(self) -> None:
        """Record the gradient before the hooks before an optimizer step."""
        self.before_step()
        self.unclipped_norm = self.norm
        for trace in self.parameters.values():
            trace.unclipped = trace.gradient

    def before_step(self) -> None:
        """Record gradients and options inside of the optimizer, after the hooks before its step."""
        numbers = {
            id(parameter): numbers
            for group in self.optimizer.param_groups
            for numbers in [_numbers(group)]
            for parameter in group["params"]
        }
        parameters = self._by_name()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        copies = sample_entries({name: gradient for name, gradient in gradients.items() if name in self.parameters})
        for name, trace in self.parameters.items():
            held = numbers.get(id(parameters[name]))
            trace.options, trace.held, trace.lr = held or {}, held is not None, (held or {}).get("lr", 0.0)
            trace.gradient = copies[name].double() if name in copies else None
            trace.dtype = copies[name].dtype if name in copies else None
        exact = [part if part.dtype == torch.float64 else part.float() for part in gradients.values()]
        self.norm = float(nn.utils.get_total_norm(exact))

    def _add_up(self) -> None:
        """Sum the gradients of all backward passes so far."""
        for name, parts in self._parts.items():
            trace = self.parameters[name]
            if len(parts) == 1:
                trace.summed, trace.passes = parts[0].double(), 1
            elif parts:
                stacked = torch.stack(parts).double()
                trace.summed, trace.magnitude, trace.passes = stacked.sum(0), stacked.abs().sum(0), len(parts)

    def after_step(self) -> None:
        """Record the parameters after the optimizer step."""
        self._add_up()
        for name, after in sample_entries(
            {name: one for name, one in self._by_name().items() if name in self.parameters}
        ).items():
            self.parameters[name].after = after
        self.release()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _few_of(size: int, number: int) -> slice:
    """Return the places of entries sampled evenly from a tensor of some size."""
    stride = max(size // number, 1)
    return slice(0, stride * number, stride)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric options of a parameter group."""
    numbers = {name: float(value) for name, value in group.items() if isinstance(value, bool | int | float)}
    numbers["lr"] = float(group.get("lr", 0.0))  # may be a tensor
    betas = group.get("betas")
    return numbers | ({} if betas is None else {"beta1": float(betas[0]), "beta2": float(betas[1])})


def by_kind(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return tensors by name in groups of one dtype and device."""
    groups = dict[tuple[torch.dtype, torch.device], dict[str, Tensor]]()
    for name, tensor in tensors.items():  # optimizers may keep step counts on the CPU
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return list(groups.values())


def sample_entries(tensors: Mapping[str, Tensor], number: int = ENTRIES) -> dict[str, Tensor]:
    """Copy entries sampled from each tensor with few operations, which is fast for many small tensors."""
    copies = dict[str, Tensor]()
    for group in by_kind(tensors):
        entries = [tensor.detach().flatten()[_few_of(tensor.numel(), number)] for tensor in group.values()]
        copies |= zip(group, torch.cat(entries).split([len(part) for part in entries]), strict=True)
    return copies


def _states(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return copies of the optimizer state of each parameter: entries of tensors of its shape, and scalars."""
    tensors = {
        f"{key} {name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and (value.shape == parameter.shape or value.numel() == 1)
    }
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for label, entries in sample_entries(tensors).items():
        key, _, name = label.partition(" ")
        states[name][key] = entries
    return states
