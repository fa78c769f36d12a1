"""Count the synchronizations of the host with an accelerator, on PyTorch's meta device.

What lies there cannot be read, so every attempt to is noticed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_rl import Rollout
from lightning_rl.algorithm import Algorithm
from lightning_rl.policy import Microbatch, Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.update import accumulate_gradient

CUT = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
aten = torch.ops.aten


def there(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_meta]


class HostReads(TorchDispatchMode):
    """Notes what makes the host wait for the device, and answers False, 0 or zeros in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device, given = kwargs.get("device"), there((args, kwargs))
        to_host = func is aten._to_copy.default and device is not None and torch.device(device).type == "cpu"  # noqa: SLF001
        masks = func is aten.index.Tensor and any(mask is not None and mask.dtype == torch.bool for mask in args[1])
        if given and (masks or func is aten._local_scalar_dense.default or to_host):  # noqa: SLF001
            self.names.append(str(func))
            answer = torch.zeros(given[0].shape, dtype=given[0].dtype)
            return given[0].new_empty(1) if masks else answer if to_host else answer.item()
        results = func(*args, **kwargs)
        on_host = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and not value.is_meta]
        if there(results) and any(value.dim() for value in on_host):
            self.names.append(f"{func} from the host")
        return results


class HostLists(TorchFunctionMode):
    """Notes lists of numbers that are copied to the device, for which the host waits as well."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor) and there(result) and not there(args)
        listed = func in (Tensor.__getitem__, Tensor.__setitem__) and there(args[0])
        keys = args[1] if listed and isinstance(args[1], tuple) else args[1:2] if listed else ()
        if made or any(isinstance(key, list) for key in keys):
            self.names.append(f"{func.__name__} of a list")
        return result


@contextmanager
def count_reads() -> Iterator[list[str]]:
    """The names of what is read inside; the device without numbers knows no autocast, which is off here anyway."""
    reads = HostReads()
    with patch.object(torch, "autocast", lambda *_, **__: nullcontext()), reads, HostLists(reads.names):
        yield reads.names


def reads_within(
    rollout: Rollout, forward: Callable[[Microbatch], Outputs], algorithm: Algorithm, *, packed: bool = True
) -> tuple[list[str], list[str], list[str]]:
    """Return the reads before the first backward, between it and the last one, and after the last one."""
    microbatches = plan_of_rows(rollout, [CUT], packed=packed).to("meta").step(0)
    rollout, ends = rollout.to("meta"), list[int]()
    with count_reads() as names:

        def backward(loss: Tensor) -> None:
            loss.backward()
            ends.append(len(names))

        accumulate_gradient(rollout, microbatches, forward, algorithm, backward=backward)
    assert len(ends) == len(CUT)
    return names[: ends[0]], names[ends[0] : ends[-1]], names[ends[-1] :]
