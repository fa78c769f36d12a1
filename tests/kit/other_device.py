"""A device that is not the CPU, where there is no other: tensors that say they are on a GPU, and compute on the CPU.

What lies there has numbers, so whole runs go through it, and give those of the CPU. As on a GPU, operations refuse
tensors of both devices, NumPy gets nothing, and generators of the CPU draw nothing there; copies between the devices
are noted. On a machine with a GPU that is the device, and what follows here stands aside.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

OTHER = torch.device("cuda", 0)
META = torch.device("meta")  # what PyTorch itself takes it for: it builds without CUDA, but not without this one
aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
JOINED = {aten.cat.default, aten.stack.default}  # also refuse numbers of another device


class Copy(NamedTuple):
    """A copy between the devices.

    Attributes:
        to_host: or from it.
        shape: of the tensor.
        pinned: whether the tensor on the CPU was pinned.
        non_blocking: whether the copy was asynchronous.
    """

    to_host: bool
    shape: tuple[int, ...]
    pinned: bool
    non_blocking: bool


class OtherTensor(Tensor):
    """A tensor on the other device."""

    numbers: Tensor
    device = property(lambda _: OTHER)
    is_cuda = property(lambda _: True)  # pyrefly: ignore[bad-override]
    is_meta = property(lambda _: False)  # pyrefly: ignore[bad-override]
    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001  # pyrefly: ignore[bad-override]

    @staticmethod
    def __new__(cls: type["OtherTensor"], numbers: Tensor) -> "OtherTensor":  # noqa: D102
        made = Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=META,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105  # pyrefly: ignore[bad-override]
        return OtherDevice().run(func, args, kwargs or {})  # of a thread or a moment that knows no mode


class OtherDevice(TorchDispatchMode):
    """Runs operations, and refuses those of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = list[Copy]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation, on its device."""
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        there, here = (
            [tensor for tensor in given if isinstance(tensor, OtherTensor) is side] for side in (True, False)
        )
        assert not any(tensor.is_meta for tensor in here), f"expected numbers, got none for {func}"
        device = kwargs.get("device")
        to_there = bool(there) if device is None else torch.device(device) == META
        if func is aten.is_pinned.default:
            return hasattr(given[0], "pinned")
        if func is aten._pin_memory.default:  # noqa: SLF001
            assert not there, "expected a tensor on the CPU to pin"
            pinned: Any = torch.empty_strided(given[0].shape, given[0].stride(), dtype=given[0].dtype)
            pinned.copy_(given[0]).pinned = True
            return pinned
        if func is aten._to_copy.default and to_there != bool(there):  # noqa: SLF001
            self._note(given[0], to_host=not to_there, non_blocking=kwargs.pop("non_blocking", False))
        elif func is aten.copy_.default and there and here:
            self._note(args[1], to_host=args[1] is there[0], non_blocking=(*args, *kwargs.values(), False)[2])
        elif func is aten._fused_sdp_choice.default:  # noqa: SLF001
            return 0  # the one that needs no kernel of a device
        else:
            _refuse_two_devices(func, args, there, here)
        if to_there and kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if to_there or there:
            kwargs = {**kwargs, **({} if device is None else {"device": "cpu"})}
            kwargs.pop("pin_memory", None)
        held_args, held_kwargs = tree_map_only(OtherTensor, lambda tensor: tensor.numbers, (args, kwargs))
        result = _run(func, held_args, held_kwargs)
        if not to_there:
            return result
        result = tree_map_only(Tensor, OtherTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, result) if there else result

    def _note(self, source: Tensor, *, to_host: bool, non_blocking: bool) -> None:
        if source.dim():
            self.copies.append(Copy(to_host, tuple(source.shape), hasattr(source, "pinned"), non_blocking))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """On the CPU; a GPU also multiplies to another dtype than that of the operands."""
    if func in (aten.mm.dtype, aten.mm.dtype_out):
        left, right, dtype = args
        product = torch.mm(left.to(dtype), right.to(dtype))
        return kwargs["out"].copy_(product) if "out" in kwargs else product
    return func(*args, **kwargs)


def _refuse_two_devices(func: Any, args: Any, there: list[Tensor], here: list[Tensor]) -> None:
    if func in INDEXED and isinstance(args[0], OtherTensor):  # indices may come from the CPU
        here = [value for value in args[2:3] if not isinstance(value, OtherTensor)]
    if there and any(tensor.dim() or func in JOINED for tensor in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but got cuda:0 and cpu for {func}")


class _Names(TorchFunctionMode):
    """Sends what names the other device there, and answers what PyTorch asks of no subclass."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], OtherTensor):
            return args[0].cpu().tolist()
        if func is Tensor.numpy and isinstance(args[0], OtherTensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in (torch.device, torch._C._nn._parse_to):  # noqa: SLF001  which say where
            return func(*args, **(kwargs or {}))
        args, kwargs = tuple(map(_renamed, args)), kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OtherTensor):
            places = tuple(map(_sent, args[1])) if isinstance(args[1], tuple) else _sent(args[1])
            args = (args[0], places, *args[2:])
        if func is Tensor.new_tensor and isinstance(args[0], OtherTensor):
            return torch.tensor(args[1], **dict[str, Any](dtype=args[0].dtype) | kwargs).to(META)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _renamed(torch.device(kwargs["device"]))}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META:
            return func(*args, **{**kwargs, "device": "cpu"}).to(META)
        return func(*args, **kwargs)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """The backward, in which a mode that has called it knows nothing of what is called."""
    with _Names():
        return _engine_run_backward(*args, **kwargs)


def _sent(place: Any) -> Any:
    """A list as index is copied to the device."""
    return torch.tensor(place, dtype=None if place else torch.int64).to(META) if isinstance(place, list) else place


def _renamed(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


@contextmanager
def other_device() -> Iterator[list[Copy]]:
    """Within, ``OTHER`` is a device; yields the copies of more than a number between it and the CPU, as they come.

    Autocast is off: what it would do there, PyTorch without CUDA leaves undone.
    """
    if torch.cuda.is_available():
        yield []
        return
    device, properties = OtherDevice(), SimpleNamespace(total_memory=2**30)
    with ExitStack() as stack:
        for holder, name, stand_in in (
            (torch, "autocast", lambda *_, **__: nullcontext()),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda *_: None),
            (torch.autograd, "_engine_run_backward", _run_backward),
        ):
            stack.enter_context(patch.object(holder, name, stand_in))
        stack.enter_context(device)
        stack.enter_context(_Names())
        yield device.copies


class _OtherAccelerator(CPUAccelerator):
    """Accelerator of the other device for a Trainer."""

    @override
    def setup_device(self, device: torch.device) -> None: ...

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> Any:
        return [OTHER]


def trainer_options() -> dict[str, Any]:
    """Return the options that put a fit of :func:`.support.fit` on the other device."""
    if torch.cuda.is_available():
        return {"accelerator": "gpu"}
    accelerator = _OtherAccelerator()
    return {"accelerator": "auto", "strategy": SingleDeviceStrategy(device=OTHER, accelerator=accelerator)}
