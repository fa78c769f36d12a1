"""Load of the experts of a mixture, and the loss that balances it, for each token.

Source: Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, equations 4-6.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_rl.policy.expert_routes import routers_of
from lightning_rl.policy.packing import Layout
from lightning_rl.policy.plan import Plan
from lightning_rl.signal.masked import GlobalSum

TRANSFORMERS_LOSS = "load_balancing_loss_func"  # in the modeling file of each model for which it is defined


class RouterOutputs:
    """Outputs of a policy's routers in one forward.

    Args:
        outputs: Logits [N, E], weights and experts [N, k] of each router, in the order of the flattened input.
    """

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    def probabilities(self, layout: Layout) -> Iterator[tuple[Float[Tensor, "A E"], int]]:
        """Yield each router's softmax where a valid token is predicted, and k.

        Raises:
            ValueError: If a router returns something else.
        """
        for output in self._outputs:
            if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
                raise ValueError(
                    "expected routers that return logits, weights and experts, got others: leave RouterAuxLoss out"
                )
            logits = output[0].flatten(0, -2)[layout.source]
            exact = torch.promote_types(logits.dtype, torch.float32)
            yield logits.softmax(-1, dtype=exact), output[2].shape[-1]

    @torch.no_grad()
    def loads(self, layout: Layout) -> Float[Tensor, "b E"]:
        """Return the number of tokens of a row for which an expert is among the k likeliest, a mean over routers."""
        routers = list(self.probabilities(layout))
        chosen = [functional.one_hot(p.topk(k).indices, p.shape[-1]).sum(1) for p, k in routers]
        of_tokens = torch.stack(chosen).sum(0)
        of_rows = of_tokens.new_zeros(layout.shape[0], of_tokens.shape[-1]).index_add_(0, layout.rows, of_tokens)
        return of_rows.double() / len(chosen)

    def loss(self, layout: Layout) -> Float[Tensor, "b T"]:
        """Return the loss of each token, given the load of the experts in the layout, with gradient."""
        load = cast(Tensor, layout.expert_load)[layout.rows]
        losses = [(load.to(p.dtype) * p).sum(-1) for p, _ in self.probabilities(layout)]
        return layout.scatter(load.shape[-1] * torch.stack(losses).mean(0))


@contextmanager
def record_routers(model: PreTrainedModel) -> Iterator[RouterOutputs]:
    """Yield the outputs of the routers in the forward inside.

    The hooks only keep tensors: activation checkpointing runs the layers again, without them.

    Raises:
        ValueError: If the model is dense.
    """
    outputs = list[Any]()
    routers = routers_of(model, "RouterAuxLoss").values()
    handles = [router.register_forward_hook(lambda _m, _i, output: outputs.append(output)) for router in routers]
    try:
        yield RouterOutputs(outputs)
    finally:
        for handle in handles:
            handle.remove()


def load_of_steps(loads: Float[Tensor, "B E"], plan: Plan, global_sum: GlobalSum) -> Float[Tensor, "B E"]:
    """Return the share of tokens of each expert in the optimizer step of each row, over all ranks; they sum to k.

    Args:
        loads: Number of tokens of each expert in each row.
        plan: Rows of each optimizer step.
        global_sum: Sum over the ranks.
    """
    steps = [plan.rows_of_step(number) for number in range(len(plan.minibatches))]
    tokens = loads.new_tensor([plan.tokens(number) for number in range(len(steps))])
    sums = torch.stack([loads[rows].sum(0) for rows in steps])
    sums = global_sum(torch.cat([sums, tokens[:, None]], 1))
    result = torch.zeros_like(loads)
    for rows, shares in zip(steps, sums[:, :-1] / sums[:, -1:].clamp(min=1), strict=True):
        result[rows] = shares
    return result


def check_load_balancing(model: PreTrainedModel) -> None:
    """Check that transformers defines the loss for a model.

    Raises:
        ValueError: If it does not, or if the model is dense.
    """
    routers_of(model, "RouterAuxLoss")
    if not hasattr(sys.modules[type(model).__module__], TRANSFORMERS_LOSS):
        raise ValueError(
            f"expected a model whose load-balancing loss transformers defines, got {type(model).__name__}, which "
            "balances its experts in another way: leave RouterAuxLoss out"
        )
