"""Updates of a few entries of parameters by known optimizer rules, in float64."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.audit.parameter_tracer import ParameterTrace
from lightning_rl.testing.properties.comparisons import rounding


class Move(NamedTuple):
    """Expected change of entries, and its tolerance for rounding, [N] float64 each."""

    by: Tensor
    slack: Tensor


def moves_by_rule(optimizer: str, parameters: Mapping[str, ParameterTrace]) -> dict[str, Move]:
    """Return the update of each parameter with a known rule, computed at once for parameters with equal options."""
    groups, moves = dict[tuple[object, ...], dict[str, ParameterTrace]](), dict[str, Move]()
    for name, one in parameters.items():
        tensors = (one.before, one.after, one.gradient, *one.state.values())
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        key = one.lr, one.dtype, *dtypes, *one.options.items(), *one.state, float(one.state.get("step", 0.0))
        groups.setdefault(key, {})[name] = one
    for group in groups.values():
        if (move := move_by_rule(optimizer, _join(list(group.values())))) is not None:
            sizes = [len(one.summed) for one in group.values()]
            moves |= zip(group, map(Move, move.by.split(sizes), move.slack.split(sizes)), strict=True)
    return {name: moves[name] for name in parameters if name in moves}


def _join(alike: Sequence[ParameterTrace]) -> ParameterTrace:
    first = alike[0]
    entries: dict[str, Any] = {
        name: None if getattr(first, name) is None else torch.cat([getattr(one, name) for one in alike])
        for name in ("before", "after", "gradient")
    }
    return replace(first, **entries, state={key: torch.cat([one.state[key] for one in alike]) for key in first.state})


def move_by_rule(optimizer: str, parameter: ParameterTrace) -> Move | None:
    """Return the update of a parameter from its gradient and state; None for an unknown rule.

    Source: Kingma and Ba 2015, algorithm 1 (Adam); Loshchilov and Hutter 2019, algorithm 2 (AdamW); SGD with momentum
    as PyTorch defines it.
    """
    rules = {"AdamW": _adam, "Adam": _adam, "SGD": _sgd}
    before, after, gradient, options = parameter.before, parameter.after, parameter.gradient, parameter.options
    if optimizer not in rules or before is None or after is None or options.get("amsgrad"):
        return None
    if gradient is None:
        return Move(torch.zeros_like(before, dtype=torch.float64), torch.zeros_like(before, dtype=torch.float64))
    exact, gradient = before.double(), -gradient if options.get("maximize") else gradient
    decay = options.get("weight_decay", 0.0)
    decoupled = bool(options.get("decoupled_weight_decay", optimizer == "AdamW")) and optimizer != "SGD"
    if not decoupled:
        gradient = gradient + decay * exact
    move = rules[optimizer](parameter, gradient)
    if move is None:
        return None
    by = move.by - parameter.lr * decay * exact if decoupled else move.by
    written = 2.0 * torch.finfo(before.dtype).eps * (exact.abs() + after.double().abs())  # rounding of the weights
    return Move(by, move.slack + written)


def _adam(parameter: ParameterTrace, gradient: Tensor) -> Move | None:
    options, state = parameter.options, parameter.state
    if not {"beta1", "beta2", "eps"} <= options.keys() or (state and not {"exp_avg", "exp_avg_sq"} <= state.keys()):
        return None
    beta1, beta2, nothing = options["beta1"], options["beta2"], torch.zeros_like(gradient)
    step = (float(state["step"].flatten()[0]) if state else 0.0) + 1
    mean, square = (state[name].double() if state else nothing for name in ("exp_avg", "exp_avg_sq"))
    size = beta1 * mean.abs() + (1 - beta1) * gradient.abs()
    mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient.square()
    scale = parameter.lr / (1 - beta1**step)
    below = square.sqrt() / math.sqrt(1 - beta2**step) + options["eps"]
    dtype = state["exp_avg"].dtype if state else parameter.dtype or torch.float32
    return Move(-scale * mean / below, rounding(dtype, scale * size / below, 32))


def _sgd(parameter: ParameterTrace, gradient: Tensor) -> Move | None:
    momentum, buffer = parameter.options.get("momentum", 0.0), parameter.state.get("momentum_buffer")
    size = gradient.abs()
    if momentum and buffer is not None:
        kept = momentum * buffer.double()
        size = size + kept.abs()
        held = kept + (1 - parameter.options.get("dampening", 0.0)) * gradient
        gradient = gradient + momentum * held if parameter.options.get("nesterov") else held
    elif momentum and parameter.options.get("nesterov"):
        gradient = gradient * (1 + momentum)
    return Move(-parameter.lr * gradient, rounding(parameter.dtype or torch.float32, parameter.lr * size, 32))
