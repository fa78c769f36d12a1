"""Activation checkpointing of layers: ``"full"``, or ``"selective"``, which recomputes only cheap operations.

Selective checkpointing keeps the results of matrix products and of attention. The backward computes norms, rotary
embeddings, activations of gates, sums and casts again from them. Source: Korthikanti et al. 2022, arXiv:2205.05198,
section 5; torchtitan's ``activation_checkpoint.mode``.
"""

import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Checkpointing = Literal["full", "selective"]
MODES: tuple[Checkpointing, ...] = ("full", "selective")
MIN_INNER = 1 / 16  # a product with a smaller inner size, relative to its width, is cheaper than its memory: LoRA's B


def checkpoint_layers(model: PreTrainedModel, mode: Checkpointing | None) -> None:
    """Choose what the layers of a model keep for their backward; gradients have the same bits in every mode.

    A graph of selectively checkpointed layers allows a single backward.

    Args:
        model: Model of transformers.
        mode: ``"full"`` to keep the inputs of layers, ``"selective"`` to keep also the results of matrix products and
            attention, None to keep everything.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the new names are not in the oldest transformers we support
        if mode is None:
            model.gradient_checkpointing_disable()
            return
        keep = {"context_fn": partial(create_selective_checkpoint_contexts, _keep)} if mode == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **keep})


def _keep(_context: Any, operation: torch._ops.OpOverload, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the result of attention, and of a matrix product that costs more than reading and writing its result."""
    name = operation.name().partition("::")[2].partition(".")[0]
    kept = "attention" in name or "attn" in operation.name()
    if name.endswith("mm") and not name.endswith("bmm"):  # bmm: scores of attention without a kernel
        left, right = args[name == "addmm" :][:2]
        kept = left.shape[-1] >= MIN_INNER * right.shape[-1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
