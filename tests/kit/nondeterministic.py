"""Operations that CUDA refuses under ``torch.use_deterministic_algorithms``, noticed on a CPU, which runs them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

Arguments = dict[str, Any]


def _floats(given: Arguments) -> bool:
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


# From the documentation of torch.use_deterministic_algorithms, "will throw a RuntimeError", and when they do.
ALWAYS = (
    "put", "put_", "histc", "kthvalue", "nll_loss_forward", "nll_loss2d_forward", "_ctc_loss_backward",
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d",
    "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
)  # fmt: skip
SOMETIMES: dict[str, Callable[[Arguments], bool]] = {
    "cumsum": _floats,
    "cumsum_": _floats,
    "bincount": lambda given: given.get("weights") is not None,
    "median": lambda given: "dim" in given,
    "scatter_reduce": lambda given: given["reduce"] == "prod",
    "scatter_reduce_": lambda given: given["reduce"] == "prod",
    "_embedding_bag": lambda given: given.get("mode") == 2,
}
REFUSED: dict[str, Callable[[Arguments], bool]] = {**dict.fromkeys(ALWAYS, lambda _: True), **SOMETIMES}


class RefusesNondeterministic(TorchDispatchMode):
    """Raises inside for an operation that would raise on a GPU."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuses = REFUSED.get(func.overloadpacket.__name__)
        names = (argument.name for argument in func._schema.arguments)  # noqa: SLF001  the only place that has them
        if refuses is not None and refuses({**dict(zip(names, args, strict=False)), **kwargs}):
            raise RuntimeError(f"{func} does not have a deterministic implementation on CUDA")
        return func(*args, **kwargs)


def check_refusals() -> None:
    """Every name above is that of an operation of this PyTorch."""
    for name in REFUSED:
        assert hasattr(torch.ops.aten, name), name
