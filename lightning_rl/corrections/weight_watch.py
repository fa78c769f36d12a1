"""WeightWatch: detects writes of callbacks to the policy's weights."""

import zlib
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_rl.utils.mutation_guard import WeightEditError, buffer_of

ENDS = 16  # entries at each end of a parameter in the checksum


class _Look(NamedTuple):
    """Snapshot of the parameters, one entry per parameter."""

    places: list[int]  # data pointers; 0 if not on the CPU
    versions: list[int]  # counts of in-place writes, except through `.data` or a pointer
    sums: list[int]  # checksums of some entries; 0 if not on the CPU


class WeightWatch:
    """Comparison of a model's parameters before and after a call that must not change them.

    On the CPU, writes to a whole tensor and replaced tensors are always detected. Writes to single entries, and writes
    on an accelerator, are detected if they are in-place operations. A complete comparison would cost more than a
    correction.

    Args:
        model: Model with the parameters.
        sharded: True if the strategy frees and allocates parameters during the run.
    """

    def __init__(self, model: nn.Module, *, sharded: bool = False) -> None:
        self._model, self._sharded, self._names = model, sharded, list[str]()
        self._parameters = list[nn.Parameter]()
        self._ends: list[tuple[Any, ...]] = []
        self._places = list[int]()

    def look(self) -> _Look:
        """Return a snapshot of the parameters."""
        if not self._names:
            named = dict(self._model.named_parameters())
            self._names, self._parameters = list(named), list(named.values())
        readable = [not self._sharded and _readable(parameter) for parameter in self._parameters]
        places = [p.data_ptr() if reads else 0 for p, reads in zip(self._parameters, readable, strict=True)]
        if places != self._places:
            self._places, self._ends = (
                places,
                [_ends_of(p) if reads else (b"", b"") for p, reads in zip(self._parameters, readable, strict=True)],
            )
        versions = [parameter._version for parameter in self._parameters]  # noqa: SLF001
        return _Look(places, versions, [zlib.crc32(last, zlib.crc32(first)) for first, last in self._ends])

    def refuse(self, who: str, before: _Look, cure: str) -> None:
        """Raise an error if the parameters have changed since a snapshot.

        Raises:
            WeightEditError: With the name of the caller and of the first changed parameter.
        """
        after = self.look()
        if after != before:
            states = zip(self._names, zip(*before, strict=True), zip(*after, strict=True), strict=True)
            edited = [name for name, then, now in states if then != now]
            further = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
            raise WeightEditError(f"{who} wrote in place to the policy's weights, {edited[0]}{further}: {cure}")


def _readable(parameter: Tensor) -> bool:
    """Return True if a parameter is contiguous in CPU memory."""
    return parameter.is_cpu and type(parameter) is nn.Parameter and parameter.is_contiguous()


def _ends_of(parameter: Tensor) -> tuple[Any, Any]:
    flat = parameter.detach().view(-1)
    return buffer_of(flat[:ENDS]), buffer_of(flat[-ENDS:])
