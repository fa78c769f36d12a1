"""Sharing: whether a function keeps something in memory that a copy of the process would share with the run.

Tensors in shared memory, ``mmap``, ``SharedMemory``, ``multiprocessing.Value`` and their like are the same memory in a
fork. Ranks and data loaders have such memory mapped as well, so it is looked for where the function itself can reach
it: in what it is, holds, closes over and names, and in the modules of the user's own that it names.
"""

import ctypes
import mmap
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_THINGS = 20_000  # that are looked at; a function that reaches more keeps its state somewhere in the first of them
ATOMS = (str, bytes, int, float, complex, bool, type(None), CodeType, torch.dtype, torch.device)
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
HELD = (list, tuple, set, frozenset)


def shared_memory_of(function: Any) -> str:
    """What a function can reach of memory that is shared with other processes, in words; empty if nothing."""
    seen, level, kept = set[int](), deque[Any]([function]), list[Any]()
    while level and len(seen) < MAX_THINGS:
        thing = level.popleft()
        if isinstance(thing, ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)  # or another one could get its identity
        if what := _shared_memory(thing):
            return what
        level += _within(thing)
    return ""


def _shared_memory(thing: Any) -> str:
    """What shared memory something is, in words."""
    if isinstance(thing, Tensor):
        return "a tensor in shared memory" if thing.device.type == "cpu" and _lies_with_others(thing) else ""
    if isinstance(thing, mmap.mmap | SharedMemory | np.memmap):
        return f"a {type(thing).__name__}"
    if isinstance(thing, SemLock):
        return f"a {type(thing).__name__} of multiprocessing"
    module = str(type(thing).__module__)
    if module.startswith(("multiprocessing.sharedctypes", "multiprocessing.heap")):
        return f"a {type(thing).__name__} of multiprocessing"
    return "a ctypes object" if isinstance(thing, ctypes.Array | ctypes.Structure | ctypes._SimpleCData) else ""  # noqa: SLF001


def _lies_with_others(tensor: Tensor) -> bool:
    try:
        return tensor.is_shared()
    except (RuntimeError, NotImplementedError):  # without a storage
        return False


def _within(thing: Any) -> Iterable[Any]:
    """What something holds, as far as calling it could write there."""
    if isinstance(thing, FunctionType):
        return _within_function(thing)
    if isinstance(thing, ModuleType):
        return list(vars(thing).values()) if _is_own(getattr(thing, "__file__", None)) else ()
    if isinstance(thing, type):
        return list(vars(thing).values()) if _is_own(_file_of(thing)) else ()
    if isinstance(thing, Mapping):
        return _entries(thing)
    return [*_parts(thing), *getattr(thing, "__dict__", {}).values(), type(thing)]


def _within_function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    own = _is_own(function.__code__.co_filename)
    return [*cells, *(named if own else ()), *defaults, *vars(function).values()]


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, HELD):
        return list(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, np.ndarray):
        return [thing.base]
    if isinstance(thing, memoryview):
        return [thing.obj]
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, staticmethod | classmethod):
        return [thing.__func__]
    return [getattr(thing, name, None) for kind in type(thing).__mro__ for name in _slots(kind)]


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    yield from [slots] if isinstance(slots, str) else slots


def _entries(mapping: Mapping[Any, Any]) -> list[Any]:
    return list(mapping.values()) if isinstance(mapping, dict) else []


def _names(code: CodeType) -> set[str]:
    """Every name of a function's code, and of those that are defined within."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _is_own(file: str | None) -> bool:
    """Whether code is a user's, and not the library's of Python or an installed one."""
    ours = str(__file__).rpartition("audit")[0]
    return file is not None and not file.startswith((*LIBRARIES, ours, "<frozen"))
