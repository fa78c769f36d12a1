"""Activation checkpointing of layers: ``"full"``, or ``"selective"``, which recomputes only cheap operations.

Selective checkpointing keeps the results of matrix products and of attention. The backward computes norms, rotary
embeddings, activations of gates, sums and casts again from them. Source: Korthikanti et al. 2022, arXiv:2205.05198,
section 5; torchtitan's ``activation_checkpoint.mode``.
"""

import warnings
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from typing_extensions import override

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
        keep = {"context_fn": _contexts} if mode == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **keep})


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward and of its recomputation."""
    recording, recomputation = create_selective_checkpoint_contexts(_keep)
    recording.__class__ = _CopyOnWrite
    return recording, recomputation


class _CopyOnWrite(_CachingTorchDispatchMode):
    """Copies a kept result before an operation changes it in place, because the recomputation repeats the change.

    PyTorch refuses some of these changes. It misses those of a linear layer's result with a batch dimension, which has
    another version counter than the product that is kept.
    """

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func):
            parameters = func._schema.arguments  # noqa: SLF001
            values = {each.name: value for each, value in zip(parameters, args, strict=False)} | (kwargs or {})
            writes = (each.name for each in parameters if each.alias_info is not None and each.alias_info.is_write)
            written = tree_leaves([values.get(name) for name in writes])
            self._copy({_address(value) for value in written if isinstance(value, Tensor)})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, written: set[int]) -> None:
        for result in (result for results in self.storage.values() for result in results.values()):
            for kept in tree_leaves(result):
                if isinstance(value := getattr(kept, "val", None), Tensor) and _address(value) in written:
                    kept.__init__(value.clone())


def _writes(operation: Any) -> bool:
    """Return True if an operation writes to an argument; higher-order ones, such as flex attention, have no schema."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and schema.is_mutable


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _keep(_context: Any, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep the result of attention, and of a matrix product that costs more than reading and writing its result.

    An operation that writes to its arguments is recomputed, since a kept result does not repeat the write.
    """
    if _writes(operation):
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = operation.name().partition("::")[2].partition(".")[0]
    kept = "attention" in name or "attn" in operation.name()
    if name.endswith("mm") and not name.endswith("bmm"):  # bmm: scores of attention without a kernel
        left, right = args[name == "addmm" :][:2]
        kept = left.shape[-1] >= MIN_INNER * right.shape[-1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
