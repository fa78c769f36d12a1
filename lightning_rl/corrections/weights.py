"""Weights: who writes to the policy while it is only shown a rollout, by whatever way it is written."""

import zlib
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_rl.edits import WeightEditError, buffer_of

ENDS = 16  # entries on either end of a parameter that are read


class _Look(NamedTuple):
    """What the parameters were at a time, one entry for each."""

    places: list[int]  # of their elements in memory; 0 off the CPU
    versions: list[int]  # counts of writes in place, other than through `.data` or a pointer
    sums: list[int]  # checksums of some entries; 0 off the CPU


class WeightWatch:
    """Compares the parameters of a model before and after somebody who has no business with them.

    Whole tensors that were written to or replaced are noticed by whatever way, on the CPU; single entries in the middle
    of one, and on an accelerator, only what counts as a write in place. Reading all of a model would cost more than a
    correction does.

    Args:
        model: whose parameters are looked at, from the first look on.
        sharded: whether its strategy frees and takes memory of parameters as it goes, so that nobody may hold on to it.
    """

    def __init__(self, model: nn.Module, *, sharded: bool = False) -> None:
        self._model, self._sharded, self._names = model, sharded, list[str]()
        self._parameters = list[nn.Parameter]()
        self._ends: list[tuple[Any, ...]] = []
        self._places = list[int]()

    def look(self) -> _Look:
        """What the parameters are now."""
        if not self._names:
            named = dict(self._model.named_parameters())
            self._names, self._parameters = list(named), list(named.values())
        readable = [not self._sharded and _readable(parameter) for parameter in self._parameters]
        places = [one.data_ptr() if reads else 0 for one, reads in zip(self._parameters, readable, strict=True)]
        if places != self._places:
            self._places, self._ends = (
                places,
                [_ends_of(one) if reads else (b"", b"") for one, reads in zip(self._parameters, readable, strict=True)],
            )
        versions = [parameter._version for parameter in self._parameters]  # noqa: SLF001
        return _Look(places, versions, [zlib.crc32(last, zlib.crc32(first)) for first, last in self._ends])

    def refuse(self, who: str, before: _Look, cure: str) -> None:
        """Raises if the parameters are others than before.

        Raises:
            WeightEditError: naming who, and the first of the parameters.
        """
        after = self.look()
        if after != before:
            states = zip(self._names, zip(*before, strict=True), zip(*after, strict=True), strict=True)
            edited = [name for name, then, now in states if then != now]
            further = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
            raise WeightEditError(f"{who} wrote in place to the policy's weights, {edited[0]}{further}: {cure}")


def _readable(parameter: Tensor) -> bool:
    """Whether a parameter is here whole, one element behind the other."""
    return parameter.is_cpu and type(parameter) is nn.Parameter and parameter.is_contiguous()


def _ends_of(parameter: Tensor) -> tuple[Any, Any]:
    flat = parameter.detach().view(-1)
    return buffer_of(flat[:ENDS]), buffer_of(flat[-ENDS:])
