"""Copies of losses, estimators and corrections that share no state, so that repeated calls do not affect the run.

Values, tensors, generators and modules of torch are copied at any depth, and so are closures, defaults and referenced
globals of user functions, and the attributes of an object's user classes. Language models and modules with hooks,
engines, trainers, tokenizers and Python modules are shared, and locks are replaced by new ones. Code that holds
anything else that cannot be copied, such as an open file, is never called again.
"""

import copy
import copyreg
import dataclasses
import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, ReplayCorrections, RLCallback
from lightning_rl.distributed import Collectives
from lightning_rl.generation import Engine
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.expert_routes import ExpertReplay
from lightning_rl.utils.naming import name_of

Thing = TypeVar("Thing")

OF_THE_RUN = (LightningModule, Trainer, LightningDataModule)
LIVE = (PreTrainedModel, PolicyModel, *OF_THE_RUN, Engine, ExpertReplay)
SHARED = (type, ModuleType, BuiltinFunctionType, Collectives, PreTrainedTokenizerBase, *LIVE)
LOCKS: Mapping[type, Callable[[], Any]] = {type(lock()): lock for lock in (threading.Lock, threading.RLock)}
STATELESS = {"lightning_rl", "torch", "lightning", "transformers", "numpy", *sys.stdlib_module_names}
"""Packages whose functions and classes are stateless."""


class CopyError(Exception):
    """Code of the run cannot be called again, because its state cannot be copied; the message names both."""


def copy_state(thing: Thing, *, allows: tuple[type, ...] = (object,)) -> Thing:
    """Return a copy that shares no state.

    Raises:
        CopyError: If the object holds something that cannot be copied, or a model or lock not of the allowed types.
    """
    try:
        return cast(Thing, _Copier(allows).copy_object(thing))
    except Exception as error:  # pickling runs code of the object
        raise CopyError(f"{name_of(thing)} holds state that cannot be copied ({error})") from error


def copy_apart(thing: Any) -> Any:
    """Return a copy that shares no state, or None if the object holds a model or cannot be copied."""
    try:
        return copy_state(thing, allows=())
    except CopyError:
        return None


def repeatable(algorithm: Algorithm, callbacks: Iterable[RLCallback], *, models: bool = True) -> Algorithm:
    """Return an algorithm with copied state, without observing corrections and without collectives.

    A part whose state cannot be copied, or that holds a model without ``models``, raises :class:`CopyError` if called.
    """
    allows = (object,) if models else OF_THE_RUN  # methods that Lightning attaches to callbacks hold the module
    followers = [callback for callback in callbacks if _follows_rows(callback)]
    repeated = [copy_or_refuse(callback, callback.contributes, allows) for callback in followers]
    prepare = ["prepare"] if algorithm.loss.prepares else []
    return algorithm.replace(
        loss=copy_or_refuse(algorithm.loss, ["__call__", "metrics", *prepare], allows),
        advantages=copy_or_refuse(algorithm.advantages, ["__call__"], allows),
        corrections=ReplayCorrections(repeated).alone(),
    )


def _follows_rows(callback: RLCallback) -> bool:
    """Return True if a correction contributes values that depend only on its rows."""
    watches = any(CONTRIBUTIONS[method].when == "watch" for method in callback.contributes)
    return (
        callback.affects
        or "metrics" in callback.contributes
        or ("rollout_metrics" in callback.contributes and not watches)
    )


def copy_or_refuse(thing: Thing, methods: Iterable[str], allows: tuple[type, ...]) -> Thing:
    """Return a copy that shares no state; if there is none, a stand-in whose ``methods`` raise :class:`CopyError`."""
    try:
        return copy_state(thing, allows=allows)
    except CopyError as error:
        message = str(error)

    def refuse(*_: object) -> None:
        raise CopyError(message)

    stand_in = copy.copy(thing)
    kind = type(type(thing).__name__, (type(thing),), {"__slots__": (), **dict.fromkeys(methods, refuse)})
    object.__setattr__(stand_in, "__class__", kind)
    return stand_in


def numbers_of(thing: Any, prefix: str = "") -> dict[str, float]:
    """Return the numeric attributes of an object and of its parts, by path."""
    numbers = dict[str, float]()
    for name, value in getattr(thing, "__dict__", {}).items():
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[prefix + name] = float(value)
        elif not prefix and not isinstance(value, (*SHARED, Tensor)):
            numbers |= numbers_of(value, f"{name}.")
    return numbers


def with_numbers_of_others(callback: RLCallback, numbers: Sequence[Mapping[str, float]]) -> Iterator[RLCallback]:
    """Yield a copy of a correction for each rank whose numeric attributes differ, with the attributes of that rank.

    Args:
        callback: The correction on this rank.
        numbers: Result of :func:`numbers_of` on each rank.
    """
    own = numbers_of(callback)
    for theirs in numbers:
        others = {name: value for name, value in theirs.items() if name in own and not _equal(own[name], value)}
        if others:
            twin = copy_state(callback)
            for name, value in others.items():
                _write(twin, name, value)
            yield twin


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def _write(thing: Any, name: str, value: float) -> None:
    """Replace a number by another one of the same type."""
    *path, last = name.split(".")
    for step in path:
        thing = getattr(thing, step)
    held = getattr(thing, last)
    new = torch.full_like(held, value) if isinstance(held, Tensor) else type(held)(value)
    object.__setattr__(thing, last, new)


def _is_stateless(module: str | None) -> bool:
    return (module or "").partition(".")[0] in STATELESS


class _Copier:
    """Copies objects with pickle; objects that pickle cannot copy are handled separately."""

    def __init__(self, allows: tuple[type, ...]) -> None:
        self.around = list[Any]()
        self._allows = allows
        self._functions = dict[int, FunctionType]()
        self._classes = dict[int, type]()

    def copy_object(self, thing: Any) -> Any:
        """Return a copy of an object whose user classes are copies too."""
        kind = type(thing)
        own = [] if isinstance(thing, SHARED) else [each for each in kind.__mro__ if not _is_stateless(each.__module__)]
        if not own or isinstance(thing, FunctionType):
            return self.copy(thing)
        copied = type(kind)(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__})
        self._classes = {id(each): copied for each in own}
        for each in reversed(own):
            for name, value in vars(each).items():
                if isinstance(value, FunctionType):
                    setattr(copied, name, self._function(value))
                elif not name.startswith(("__", "_abc_")) and not hasattr(value, "__get__"):
                    setattr(copied, name, self._value(value))
        twin = self.copy(thing)
        object.__setattr__(twin, "__class__", copied)
        return twin

    def copy(self, thing: Any) -> Any:
        """Return a copy of an object."""
        file = io.BytesIO()
        _Pickler(file, self).dump(thing)
        file.seek(0)
        return _Unpickler(file, self).load()

    def put_around(self, thing: Any) -> int | None:
        """Return a number for an object that bypasses pickle; None for other objects."""
        self._refuse(thing)
        if not isinstance(thing, (*SHARED, *LOCKS, Tensor, torch.Generator, FunctionType)):
            return None
        self.around.append(thing)
        return len(self.around) - 1

    def arrive(self, number: int) -> Any:
        """Return an object that bypassed pickle, shared or copied."""
        thing = self.around[number]
        if isinstance(thing, SHARED):
            return thing
        if type(thing) in LOCKS:
            return LOCKS[type(thing)]()
        if isinstance(thing, Tensor):
            return thing.detach().clone().requires_grad_(thing.requires_grad)
        if isinstance(thing, torch.Generator):
            return torch.Generator(thing.device).set_state(thing.get_state())
        return self._function(thing)

    def _function(self, function: FunctionType) -> FunctionType:
        """Return a function with a copied closure and copies of the globals that it names."""
        if _is_stateless(function.__module__):
            return function
        if id(function) not in self._functions:
            code, scope = function.__code__, dict(function.__globals__)
            cells = tuple(CellType() for _ in function.__closure__ or ())
            twin = FunctionType(code, scope, function.__name__, None, cells)
            twin.__dict__ = dict(function.__dict__)
            twin.__annotations__ = function.__annotations__
            self._functions[id(function)] = twin
            twin.__defaults__ = tuple(map(self._value, function.__defaults__ or ()))
            twin.__kwdefaults__ = {name: self._value(value) for name, value in (function.__kwdefaults__ or {}).items()}
            scope |= {name: self._value(scope[name]) for name in code.co_names if name in scope}
            for name, cell, original in zip(code.co_freevars, cells, function.__closure__ or (), strict=True):
                value = original.cell_contents  # of __class__ it is the class from which super() goes on
                cell.cell_contents = value if name == "__class__" else self._value(value)
        return self._functions[id(function)]

    def _value(self, value: Any) -> Any:
        if id(value) in self._classes:
            return self._classes[id(value)]
        if isinstance(value, SHARED):
            self._refuse(value)
            return value
        return self.copy(value)

    def _refuse(self, thing: Any) -> None:
        if isinstance(thing, (nn.Module, *LIVE, *LOCKS)) and not isinstance(thing, self._allows):
            raise CopyError(f"it holds a {name_of(type(thing))}")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, copier: _Copier) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._copier = copier

    @override
    def reducer_override(self, obj: Any) -> Any:
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type) and getattr(obj, "__dict__", None):
            # pickle copies only the fields of a dataclass with slots, not attributes of subclasses
            return copyreg.__newobj__, (type(obj),), object.__getstate__(obj), None, None, _set_state  # pyrefly: ignore[missing-attribute]
        if isinstance(obj, MethodType):  # pickle copies it by its name, which a lambda lacks
            return MethodType, (obj.__func__, obj.__self__)
        return NotImplemented

    @override
    def persistent_id(self, obj: Any) -> Any:
        return self._copier.put_around(obj)


def _set_state(thing: Any, state: Any) -> None:
    """Set attributes from a dictionary or from slots."""
    for part in state if isinstance(state, tuple) else (state,):
        for name, value in (part or {}).items():
            object.__setattr__(thing, name, value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, copier: _Copier) -> None:
        super().__init__(file)
        self._copier = copier

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._copier.arrive(pid)
