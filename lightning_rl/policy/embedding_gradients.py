"""Gradients at the embeddings of tokens, which show the tokens that an output depends on, however little."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def embedding_leaves(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Enable gradients and yield a list that gets the embeddings of each forward, [R, N, H], as leaves.

    The gradient at a token that an output does not depend on is exactly 0 for all weights and dtypes.
    Values are no proof: those of a flat model differ by less than rounding, and experts round by their batch.
    """
    leaves, embeddings = list[Tensor](), cast(nn.Module, model.get_input_embeddings())

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models write to it

    handle = embeddings.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            yield leaves
    finally:
        handle.remove()


def token_gradients(output: Tensor, leaves: list[Tensor]) -> Float[Tensor, "R N"]:
    """Return the largest absolute gradient of a sum at each token; 0 if it does not depend on the token."""
    gradients = torch.autograd.grad(output.sum(), leaves, retain_graph=True, materialize_grads=True)
    return torch.stack([gradient.abs().amax(-1) for gradient in gradients]).amax(0)
