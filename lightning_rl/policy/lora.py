"""LoRA: policies whose adapters train alone. Switched off, they are their own reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl.policy.model import Scorer
from lightning_rl.policy.packing import Layout


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of a peft model, adapters injected; any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, model if inner is None else inner())


def merge_adapters(model: nn.Module) -> PreTrainedModel:
    """A peft model's transformers model with the adapters added to the weights; any other model as it is."""
    merge = getattr(model, "merge_and_unload", None)
    return cast(PreTrainedModel, model if merge is None else merge())


def adapters_of(model: nn.Module) -> list[nn.Module]:
    """The layers that carry an adapter."""
    return [part for part in model.modules() if hasattr(part, "active_adapters") and hasattr(part, "base_layer")]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters. Nothing else of them changes, unlike peft's switch, which freezes them too."""
    layers = cast(list[Any], adapters_of(model))
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


class AdapterOffScorer(Scorer):
    """The reference of a policy with adapters: the policy without them, so no second model is held.

    Args:
        policy: its forward, however it is sharded.
        model: the transformers model in it.
    """

    def __init__(self, policy: nn.Module, model: PreTrainedModel) -> None:
        self.scoring, self.model = policy, model

    @property
    @override
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same for every such reference: its weights are in the checkpoint of the policy."""
        return "the policy without its adapters"

    @override
    def to(self, device: torch.device) -> None:
        """It lies where the policy lies."""

    @override
    @torch.no_grad()
    def logprobs(self, layout: Layout) -> Float[Tensor, "b T"]:
        with adapters_off(self.model):
            return self.scoring(layout).logprobs
