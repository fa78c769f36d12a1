"""Hooks of Lightning that the library needs: they run whether or not an override in a subclass calls ``super()``.

Lightning's own hooks are empty, so its users override them without ``super()``.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar

from lightning_rl.utils.naming import check_hooks

Rule = Literal["before", "after", "joined", "required"]
ClassT = TypeVar("ClassT", bound=type)
RUNNING = "_running_hooks"  # attribute of an object: result of each library hook inside of an override in progress


@dataclass(frozen=True)
class LibraryHooks:
    """Decorator for a class of the library whose hooks have to run in its subclasses, once per call.

    Args:
        rules: What happens to each hook if a subclass overrides it without ``super()``. It runs ``before`` or ``after``
            the override; ``joined``: before, and its list or mapping is joined with that of the override;
            ``required``: the override is refused. With ``super()``, it runs where the override calls it.
        refused: Methods that a subclass may not override, since the library never calls them, and what to use instead.
        constructor: Wrapper for the constructors of subclasses.
    """

    rules: Mapping[str, Rule]
    refused: Mapping[str, str]
    constructor: Callable[[Any], Any] = lambda constructor: constructor
    own: dict[str, Any] = field(default_factory=dict)

    def __call__(self, cls: ClassT) -> ClassT:
        """Wrap the hooks of the class, and those of every subclass that is defined later."""
        for name in self.rules:
            setattr(cls, name, _once(getattr(cls, name)))
        self.own.update({name: getattr(cls, name) for name in (*self.rules, *self.refused)})
        vars_of = {"__init_subclass__": classmethod(lambda subclass: self._keep(cls, subclass)), "library_hooks": self}
        for name, value in vars_of.items():
            setattr(cls, name, value)
        return cls

    def _keep(self, cls: type, subclass: type) -> None:
        check_hooks(subclass, cls, (*self.rules, *self.refused))
        constructor = vars(subclass).get("__init__")
        if inspect.isfunction(constructor) and not {*_names(constructor)} & {"super", "__init__"}:
            raise ValueError(
                f"expected {subclass.__name__}.__init__ to call super().__init__(...), got one without it: call it "
                f"first, with the arguments of {cls.__name__}"
            )
        if inspect.isfunction(constructor):
            subclass.__init__ = self.constructor(constructor)
        for name, rule in self.rules.items():
            override = getattr(subclass, name)
            if override is not self.own[name] and not hasattr(override, "keeps"):
                setattr(subclass, name, _keep_hook(override, self.own[name], rule))

    def problems(self, cls: type) -> Iterator[str]:
        """Yield a problem for each override of a class that has no effect, or that loses the work of the library."""
        for name, instead in self.refused.items():
            if getattr(cls, name) is not self.own[name]:
                yield f"expected {cls.__name__} without {name}, which the library does not call, got one: {instead}"
        for name, rule in self.rules.items():
            override = getattr(cls, name)
            names = {*_names(inspect.unwrap(override))}
            calls = names & ({*self.rules} - {name}) or _calls_parent(override)
            if rule == "required" and override is not self.own[name] and not calls:
                yield _without_super(cls, name)


def check_overrides(part: Any) -> None:
    """Raise ValueError if the class of a part overrides hooks of the library in a way that cannot work."""
    hooks: LibraryHooks = type(part).library_hooks
    for problem in hooks.problems(type(part)):
        raise ValueError(problem)


def _once(hook: Any) -> Any:
    """Return a hook that runs once while an override of it is in progress."""
    key = inspect.unwrap(hook)

    @wraps(hook)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        results = vars(self).get(RUNNING, {}).get(key)
        if results is None:
            return hook(self, *arguments, **keywords)
        if not results:
            results.append(hook(self, *arguments, **keywords))
        return results[0]

    return run


def _keep_hook(override: Any, own: Any, rule: Rule) -> Any:
    """Return an override during which the library's own hook runs once."""
    key, first = inspect.unwrap(own), rule in ("before", "joined") and not _calls_parent(override)

    @wraps(override)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        running = vars(self).setdefault(RUNNING, {})
        outermost = key not in running
        results = running.setdefault(key, [])
        try:
            if first:
                own(self, *arguments, **keywords)
            result = override(self, *arguments, **keywords)
            if outermost and not results:
                if rule == "required":
                    raise RuntimeError(_without_super(type(self), override.__name__))
                own(self, *arguments, **keywords)
            return _join(results[0], result) if outermost and rule == "joined" else result
        finally:
            if outermost:
                del running[key]

    vars(run)["keeps"] = own
    return run


def _join(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, Mapping):
        return {**ours, **(theirs or {})}
    theirs = list(theirs) if isinstance(theirs, list | tuple) else [] if theirs is None else [theirs]
    return [*(one for one in ours if one not in theirs), *theirs]


def _calls_parent(override: Any) -> bool:
    """Return True if the code of an override has ``super()``, or a class with this hook: ``Parent.setup(self)``."""
    function = inspect.unwrap(override)
    classes = [getattr(function, "__globals__", {}).get(name) for name in _names(function)]
    return "super" in _names(function) or any(
        isinstance(one, type) and hasattr(one, override.__name__) for one in classes
    )


def _names(function: Any) -> tuple[str, ...]:
    """Return global names and attributes in the code of a function; empty without code."""
    return function.__code__.co_names if inspect.isfunction(function) else ()


def _without_super(cls: type, name: str) -> str:
    return (
        f"expected {cls.__name__}.{name} to call super().{name}(...), which does the work of the library, got an "
        "override without it: call it and return its result, or use a callback"
    )
