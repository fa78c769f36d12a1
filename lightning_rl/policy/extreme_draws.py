"""Random numbers at the ends of their range, at which a layer that is rarely skipped is skipped or not."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

END = 2.0**-24  # distance from 0 and 1 of the ends of uniform numbers in float32


class ExtremeDraws(TorchFunctionMode):
    """Uniform and Bernoulli numbers inside are the lowest or the highest ones.

    So a decision of any probability between 0 and 1 differs between both. Other random numbers stay random.

    Args:
        highest: True for the highest numbers, and for dropout of all elements.

    Attributes:
        drawn: True if such a number was drawn.
    """

    def __init__(self, *, highest: bool) -> None:
        super().__init__()
        self.highest, self.drawn = highest, False
        self.uniform = 1 - END if highest else END

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        result = func(*args, **options)
        if name in ("rand", "rand_like"):
            result.fill_(self.uniform)
        elif name == "uniform_":
            low = options.get("from", args[1] if len(args) > 1 else 0.0)
            high = options.get("to", args[2] if len(args) > len(("self", "from")) else 1.0)
            result.fill_(low + self.uniform * (high - low))
        elif name in ("bernoulli", "bernoulli_"):
            chance = options.get("p", args[-1] if len(args) > 1 or name == "bernoulli" else 0.5)
            result.copy_(self.uniform < torch.as_tensor(chance))
        elif "dropout" in name and options.get("training") and options.get("p"):
            result = torch.zeros_like(result) if self.highest else result
        else:
            return result
        self.drawn = True
        return result


def other_generators() -> tuple[object, ...]:
    """Return the states of the global generators of Python and NumPy, which modules of torch have no reason to draw."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
