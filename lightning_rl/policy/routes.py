"""Expert routes: which experts each token of a mixture of experts takes, written down while a model runs.

Routes are int16 of shape [N, R, k] for N input tokens, R routers in the order of the layers and k experts a token:
the expert's number + 1, and 0 where nothing was recorded, which is also what padding is filled with. Experts alone are
carried: their weights belong to whoever runs them, see :mod:`lightning_rl.policy.expert_replay`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int, Int16
from torch import Tensor, nn
from transformers import PreTrainedModel


def modules_behind(model: PreTrainedModel, output: str) -> dict[str, nn.Module]:
    """The modules that a model says give one of its optional outputs, such as ``attentions``, in their order."""
    known: Any = model.base_model
    spec = (known._can_record_outputs or {}).get(output, ())  # noqa: SLF001  transformers' own list
    kinds = tuple(getattr(one, "target_class", one) for one in (spec if isinstance(spec, list | tuple) else [spec]))
    return {name: part for name, part in model.named_modules() if isinstance(part, kinds)}


def routers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The routers of a mixture of experts by name, in the order of the layers.

    Raises:
        ValueError: for a dense model.
    """
    routers = modules_behind(model, "router_logits")
    if not routers:
        raise ValueError(
            f"expected a mixture of experts, got {type(model).__name__}, which has no routers: leave RouterReplay out"
        )
    return routers


def routes_of(experts: list[Int[Tensor, "N k"]]) -> Int16[Tensor, "N R k"]:
    """Routes from the numbers of the experts that each router chose.

    Example:
        >>> routes_of([torch.tensor([[0, 3]]), torch.tensor([[2, 1]])]).tolist()
        [[[1, 4], [3, 2]]]
    """
    return (torch.stack(experts, 1) + 1).to(torch.int16)


@contextmanager
def recording_routes(model: PreTrainedModel) -> Iterator[Callable[[], Int16[Tensor, "N R k"]]]:
    """Yields a function that returns the routes of the last forward, in the order of its flattened input.

    Raises:
        ValueError: for a dense model.
    """
    found: list[Tensor] = []
    routers = routers_of(model).values()
    handles = [
        router.register_forward_hook(lambda _module, _given, output: found.append(output[2])) for router in routers
    ]

    def taken() -> Tensor:
        routes = routes_of(found)
        found.clear()
        return routes

    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
