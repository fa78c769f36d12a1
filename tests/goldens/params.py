"""Params: the parameters of a case, which note who has been read."""

from collections.abc import Iterator, Mapping
from typing import Any


class Params(Mapping[str, Any]):
    """A mapping that knows which of its entries were looked up, nested ones by ``outer.inner``.

    Args:
        values: the parameters.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        plain = values.plain() if isinstance(values, Params) else values
        self._values = {name: Params(value) if isinstance(value, Mapping) else value for name, value in plain.items()}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """A parameter, which is read from now on."""
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        """Whether a parameter is given, which reads it."""
        self._read.add(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def plain(self) -> dict[str, Any]:
        """The parameters as they were given, without reading them."""
        return {name: value.plain() if isinstance(value, Params) else value for name, value in self._values.items()}

    def unread(self) -> dict[str, Any]:
        """What nobody has looked up."""
        left: dict[str, Any] = {}
        for name, value in self._values.items():
            if name not in self._read:
                left[name] = value.plain() if isinstance(value, Params) else value
            elif isinstance(value, Params):
                left |= {f"{name}.{inner}": given for inner, given in value.unread().items()}
        return left
