"""Parameters of a recorded call that note which of them a replay has read."""

from collections.abc import Iterator, Mapping
from typing import Any


class Params(Mapping[str, Any]):
    """Mapping that knows which entries were looked up; names of nested entries are ``outer.inner``.

    Args:
        values: Parameters of a call.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: Params(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Return a parameter and note that it was read."""
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        """Return True if a parameter is given. This does not read it."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._values)

    def __repr__(self) -> str:
        """Return the parameters as a dictionary."""
        return repr(self._values)

    def unread(self) -> dict[str, Any]:
        """Return the parameters that were not looked up, without those that are None."""
        left = {name: value for name, value in self._values.items() if name not in self._read and value is not None}
        for name in self._read:
            if isinstance(value := self._values.get(name), Params):
                left |= {f"{name}.{inner}": given for inner, given in value.unread().items()}
        return left
