"""LoRA: policies whose adapters alone train, and whose base model is the reference."""

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
    """Return the transformers model inside a peft model, with its adapters; any other model as it is."""
    inner: Any = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, model if inner is None else inner())


def merge_adapters(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model of a peft model with merged adapters; any other model as it is."""
    merge: Any = getattr(model, "merge_and_unload", None)
    return cast(PreTrainedModel, model if merge is None else merge())


def adapters_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers with an adapter."""
    return [part for part in model.modules() if hasattr(part, "active_adapters") and hasattr(part, "base_layer")]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside, without freezing them as peft's switch does."""
    layers = cast(list[Any], adapters_of(model))
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


class AdapterOffScorer(Scorer):
    """Reference of a policy with adapters: the policy without them, so there is no second model.

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
    @torch.no_grad()
    def logprobs(self, layout: Layout) -> Float[Tensor, "b T"]:
        with adapters_off(self.model):
            return self.scoring(layout).logprobs
