"""Objects as plain values and back: their import path and the arguments of their constructor.

=====================  ======================================================================
an instance            ``{"class_path": "package.Class", "init_args": {...}}``
a function, a class    ``{"name": "package.function"}``, with ``closure`` if it has one
``functools.partial``  ``{"partial": "package.function", "args": [...], "keywords": {...}}``
a model                its class and size, without its values
a tensor, an array     its numbers, if they are at most 64; else its class and size
a secret               omitted by :mod:`.utils.keys`, as ``api_key`` and ``password``, or a field with ``repr=False``
=====================  ======================================================================

Checkpoints, hyperparameters and recordings contain descriptions. No code runs from a file: only parts of this library
and of ``torch.optim`` are restored.
"""

import dataclasses
import hashlib
import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from types import CellType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightning_rl.utils.keys import HIDDEN, hide_secrets, is_secret

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

FORMER_PATHS = {
    "lightning_rl.generation.sampling_params.SamplingParams": "lightning_rl.samples.sampling_params.SamplingParams"
}
"""Import paths of today by those in older checkpoints and recordings."""

CLASS, ARGUMENTS, NAME, PARTIAL = "class_path", "init_args", "name", "partial"
ABSENT = "nothing"
MAX_ITEMS = 64  # longer lists are described by length and hash
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
MODULES = ("advantages", "callbacks", "evaluation", "generation", "losses", "optimizers", "rewards")
MODULES += ("environments.conversation_options", "policy.model_options")
MODULES += ("signal.kl", "signal.masked", "signal.reductions", "processes.ray_pool")
NEVER = {"CodeTests", "SubprocessReward", "Judge", "RewardModel", "Sandbox", "SandboxService"}
NEVER |= {"VLLMEngine", "VLLMServerEngine"}  # start processes, open connections or load models

# jsonargparse prints a mapping or list of functions by the first type of a union, that of one function, with this
# warning. As an error it makes jsonargparse try the next type.
warnings.filterwarnings("error", r"\s*Unable to serialize\s+instance\s+[\[{]")


def describe(value: Any, around: tuple[int, ...] = ()) -> Plain:
    """Return a value as plain values; equal configurations have equal descriptions.

    Args:
        value: Any object.
        around: Ids of the objects that contain the value, to end reference cycles.

    Example:
        >>> describe({"epochs": 2, "where": Path("runs"), "rate": partial(round, ndigits=2)})
        {'epochs': 2, 'where': 'runs', 'rate': {'partial': 'builtins.round', 'args': [], 'keywords': {'ndigits': 2}}}
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        value = value.value if isinstance(value, Enum) else value
        return hide_secrets(value) if isinstance(value, str) else value
    if id(value) in around:
        return {CLASS: path_of(type(value))}
    around = (*around, id(value))
    for kinds, function in _KINDS:
        if isinstance(value, kinds):
            return function(value, around)
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        return _describe_function(value, around)
    return _describe_object(value, around)


def restore(description: Any, unknown: Callable[[str], Any] | None = None) -> Any:
    """Return the described value, if it is plain or made of :func:`restorable` parts.

    Files are untrusted, so no other name is looked up, imported or called.

    Args:
        description: Value of :func:`describe`.
        unknown: Function that returns a placeholder for a name that is not restorable; None to raise an error.

    Raises:
        ValueError: If the description names anything else; the message lists the names.
    """
    if unknown is None and (lost := sorted(set(_losses(description)))):
        raise ValueError(", ".join(lost))
    try:
        return _rebuild(description, unknown)
    except (KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(f"a description in an unknown format ({type(wrong).__name__}: {wrong})") from wrong


@cache
def restorable() -> Mapping[str, Any]:
    """Return the functions and classes that a checkpoint may name, by import path.

    They are parts of this library and of ``torch.optim`` that start no processes, open no connections and load no
    models.
    """
    parts = [part for module in MODULES for part in _public(importlib.import_module(f"lightning_rl.{module}"))]
    for module, base in ((torch.optim, torch.optim.Optimizer), (lr_scheduler, lr_scheduler.LRScheduler)):
        parts += [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    known = {path_of(part): part for part in parts if inspect.isroutine(part) or inspect.isclass(part)}
    return MappingProxyType(known | {old: known[new] for old, new in FORMER_PATHS.items()})


def changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of each difference between two descriptions; NaN equals NaN."""
    if isinstance(old, Mapping) and (kind := old.get(CLASS)) in FORMER_PATHS:
        old = {**old, CLASS: FORMER_PATHS[kind]}
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get(CLASS) == new.get(CLASS):
        for key in dict.fromkeys([*old, *new]):
            below = path if key == ARGUMENTS else f"{path}.{key}".removeprefix(".")
            yield from changes(old.get(key, ABSENT), new.get(key, ABSENT), below)
    elif _are_parts(old, new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from changes(*pair, f"{path}.{place}")
    elif old != new and not (isinstance(old, float) and isinstance(new, float) and old != old and new != new):
        yield path, old, new


def _are_parts(old: Any, new: Any) -> bool:
    """Return True for lists of equal length that contain lists or mappings, whose differences have their own paths."""
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return False
    return any(isinstance(item, list | Mapping) for item in (*old, *new))


def is_import_path(value: Any) -> bool:
    """Return True if a value is a string that looks like a dotted import path, and no file has that name.

    Example:
        >>> [is_import_path(name) for name in ("my_package.policy", "Qwen/Qwen2.5-0.5B", "gpt2", len)]
        [True, False, False, False]
    """
    return isinstance(value, str) and IMPORT_PATH.fullmatch(value) is not None and not Path(value).exists()


def import_by_name(**given: Any) -> Any:
    """Import a dotted name such as ``"my_package.policy"``; return other values unchanged.

    Configuration files contain functions by name, which jsonargparse passes as strings.

    Args:
        given: One argument, by name.

    Raises:
        ValueError: If the module cannot be imported, or lacks the attribute.
    """
    ((option, name),) = given.items()
    if not is_import_path(name):
        return name
    module, _, attribute = name.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except Exception as error:  # the module is code of the user, which may raise anything
        where = "" if isinstance(error, ModuleNotFoundError) else f", which raised {type(error).__name__}"
        raise ValueError(
            f"expected {option}={name!r} to be found: there is no folder of that name, and importing {module!r} "
            f"failed{where}: {error}"
        ) from error
    if not hasattr(holder, attribute):
        near = get_close_matches(attribute, dir(holder), n=1, cutoff=0.5)
        public = [known for known in vars(holder) if not known.startswith("_")]
        cure = f"did you mean {module}.{near[0]}?" if near else f"it has {', '.join(public[:20])}"
        raise ValueError(f"expected {option}={name!r} to be found, but module {module!r} has no {attribute!r}: {cure}")
    return getattr(holder, attribute)


def path_of(value: Any) -> str:
    """Return the import path of a class or function, such as ``lightning_rl.losses.cispo.CISPO``."""
    return f"{value.__module__}.{value.__qualname__}"


def _losses(description: Any) -> Iterator[str]:
    """Yield the names in a description that are not restorable."""
    if (name := _unknown_name(description)) is not None:
        yield name
    elif isinstance(description, list | Mapping):
        for item in description.values() if isinstance(description, Mapping) else description:
            yield from _losses(item)


def _unknown_name(description: Any) -> str | None:
    """Return the name of a described value that is not restorable itself, else None."""
    if not isinstance(description, Mapping):
        return None
    for key in (CLASS, PARTIAL, NAME):
        path = description.get(key)
        partly = set(description) & {"closure", "size", "unknown"} or (key == CLASS and ARGUMENTS not in description)
        if isinstance(path, str) and (path not in restorable() or partly):
            return path
    return f"a list of {description['length']}" if set(description) == {"length", "hash"} else None


def _rebuild(description: Any, unknown: Callable[[str], Any] | None) -> Any:
    if isinstance(description, list):
        return [_rebuild(item, unknown) for item in description]
    if not isinstance(description, Mapping):
        return description
    if unknown is not None and (name := _unknown_name(description)) is not None:
        return unknown(name)
    if CLASS in description:
        return _make(restorable()[description[CLASS]], description[ARGUMENTS], unknown)
    if PARTIAL in description:
        keywords = {key: _rebuild(item, unknown) for key, item in description["keywords"].items()}
        return partial(restorable()[description[PARTIAL]], *_rebuild(description["args"], unknown), **keywords)
    if NAME in description and len(description) == 1:
        return restorable()[description[NAME]]
    return {key: _rebuild(item, unknown) for key, item in description.items()}


def _public(module: ModuleType) -> list[Any]:
    """Return the exports of a module, or its public functions and classes if it has no ``__all__``."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return [getattr(module, name) for name in names if name not in NEVER]


def _make(kind: Any, arguments: Any, unknown: Callable[[str], Any] | None) -> Any:
    if not isinstance(kind, type) or not isinstance(arguments, Mapping):
        raise ValueError(path_of(kind))
    try:
        return kind(**{key: _rebuild(item, unknown) for key, item in arguments.items()})
    except (TypeError, ArithmeticError) as refused:
        raise ValueError(f"{path_of(kind)} with unknown options ({refused})") from refused


def _describe_mapping(value: Mapping[Any, Any], around: tuple[int, ...]) -> Plain:
    return {str(key): describe(item, around) for key, item in value.items() if not is_secret(str(key), item)}


def _describe_items(value: Any, around: tuple[int, ...]) -> Plain:
    if fields := getattr(value, "_fields", ()):  # of a named tuple
        value = _without_secrets(fields, value)
    elif not isinstance(value, Set):
        value = _without_secrets([option if _is_option(option) else "" for option in ["", *value[:-1]]], value)
    items = [describe(item, around) for item in (sorted(value, key=repr) if isinstance(value, Set) else value)]
    if len(items) <= MAX_ITEMS:
        return items
    return {"length": len(items), "hash": hashlib.sha256(repr(items).encode()).hexdigest()[:16]}


def _is_option(value: Any) -> bool:
    """Return True for an option of a command line, such as ``--password``, whose value is the next item."""
    return isinstance(value, str) and value.startswith("-")


def _describe_partial(value: "partial[Any]", around: tuple[int, ...]) -> Plain:
    if (value.func.__module__ or "").startswith("jsonargparse."):  # jsonargparse wraps a class_path in its own function
        value = partial(*value.args[1:], **value.keywords)
    function = describe(value.func, around)
    name = function[NAME] if isinstance(function, dict) and set(function) == {NAME} else function
    arguments = _without_secrets([parameter.name for parameter in _parameters(value.func)], value.args)
    bound = {"args": describe(arguments, around), "keywords": describe(value.keywords, around)}
    return {PARTIAL: name, **bound}


def _without_secrets(names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Return values by position, with a placeholder for secrets."""
    return [
        HIDDEN if name and is_secret(name, value) else value
        for name, value in zip_longest(names[: len(values)], values)
    ]


def _describe_function(value: Any, around: tuple[int, ...]) -> Plain:
    names = inspect.unwrap(value).__code__.co_freevars if inspect.isfunction(inspect.unwrap(value)) else ()
    closed = {}
    for name, cell in zip(names, inspect.unwrap(value).__closure__ or () if names else (), strict=True):
        inner = cell.cell_contents if cell != CellType() else ABSENT
        if not is_secret(name, inner):
            closed[name] = describe(inner, around)
    owner = getattr(value, "__self__", None)
    if inspect.ismethod(value):
        closed["self"] = describe(owner, around)
    # of a built-in method, bound or not
    module = getattr(value, "__module__", None) or getattr(value, "__objclass__", type(owner)).__module__
    return {NAME: f"{module}.{value.__qualname__}", **({"closure": closed} if closed else {})}


def _describe_object(value: Any, around: tuple[int, ...]) -> Plain:
    """Describe an object by its constructor arguments that it stores under the same names."""
    if type(value).__module__.startswith("datasets."):  # their constructors take tables
        return {CLASS: path_of(type(value)), "size": len(value) if isinstance(value, Sized) else None}
    options, unknown = {}, []
    for parameter in _parameters(type(value)):
        kept = getattr(value, parameter.name) if _keeps(value, parameter.name) else ABSENT
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and isinstance(kept, Mapping):
            options |= kept
        elif kept is not ABSENT:
            options[parameter.name] = kept
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            unknown.append(parameter.name)
    described: dict[str, Any] = {CLASS: path_of(type(value)), ARGUMENTS: _describe_mapping(options, around)}
    if isinstance(fingerprint := getattr(value, "fingerprint", None), str):  # identifies the rows of data
        described["fingerprint"] = fingerprint
    return {**described, **({"unknown": unknown} if unknown else {})}


def _describe_config(value: PreTrainedConfig, around: tuple[int, ...]) -> Plain:
    """Describe a model's configuration without the entries that building or saving a model writes into it."""
    described: Any = _describe_object(value, around)
    for written in ("architectures", "dtype", "transformers_version"):
        described[ARGUMENTS].pop(written, None)
    return described


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hidden = {spec.name for spec in dataclasses.fields(kind) if not spec.repr} if dataclasses.is_dataclass(kind) else ()
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # some built-in classes have none
        return []
    return [parameter for parameter in signature.parameters.values() if parameter.name not in hidden]


def _keeps(value: Any, name: str) -> bool:
    return name in getattr(value, "__dict__", ()) or (
        name in getattr(type(value), "__slots__", ()) and hasattr(value, name)
    )


def _describe_array(value: Any, around: tuple[int, ...]) -> Plain:
    """Return the numbers of a small array or tensor, and class, size and dtype of a larger one, as of weights."""
    if math.prod(value.shape) > MAX_ITEMS or str(getattr(value, "device", "cpu")) == "meta":
        return {CLASS: path_of(type(value)), "size": list(value.shape), "dtype": str(value.dtype)}
    return describe(value.tolist(), around)


_KINDS: tuple[tuple[Any, Any], ...] = (
    (Mapping, _describe_mapping),
    ((list, tuple, set, frozenset), _describe_items),
    (partial, _describe_partial),
    (
        PreTrainedTokenizerBase,  # its files hold its options
        lambda value, _: {CLASS: path_of(type(value)), "size": len(value), "path": str(value.name_or_path)},
    ),
    (PreTrainedConfig, _describe_config),
    (nn.Module, lambda value, _: {CLASS: path_of(type(value)), "size": sum(map(Tensor.numel, value.parameters()))}),
    ((Tensor, np.ndarray, np.generic), _describe_array),
    ((Path, torch.dtype, torch.device, Enum, bytes), lambda value, _: hide_secrets(str(value))),
    (type, lambda value, _: {NAME: path_of(value)}),
)
