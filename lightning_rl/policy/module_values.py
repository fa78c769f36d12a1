"""Inputs and outputs of the modules of a model for each token, recorded on two sides and compared."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_rl.policy.packing import Layout

JUMP = 16.0  # a difference above this multiple of all earlier ones is a fault; rounding alone reached 9


class TokenPosition(NamedTuple):
    """Position of a token in the sequence of a row."""

    row: int
    position: int


class Event(NamedTuple):
    """Values of a call of a module: floating-point inputs or outputs, or integer outputs, such as chosen experts."""

    module: str
    side: Literal["input", "output", "choice"]
    call: int = 0  # number of the call within a forward


@dataclass(frozen=True)
class ModuleValues:
    """Values of modules, tensors [tokens, F] per event and forward, in the order of their first call.

    Attributes:
        positions: Positions of the tokens of each forward.
        shapes: Shape of the input ids of each forward.
        events: Values of each event by number of the forward; modules that pass a tensor on share its copy.
        fused: Names of the modules of the other side that a fused module of this side replaces, such as ``qkv_proj``.
        copies: Copy of each tensor that still exists, with the number of writes to it before.
    """

    positions: list[list[TokenPosition]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    events: dict[Event, dict[int, list[Tensor]]] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copies: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)

    def begin(self, positions: list[TokenPosition], shape: tuple[int, ...]) -> None:
        """Begin a forward."""
        self.positions.append(positions)
        self.shapes.append(shape)

    def add(self, event: Event, values: Any) -> None:
        """Store copies of the tensors of a call."""
        floats = event.side != "choice"
        copies = list(self._copies_of(values, floats=floats)) if self.shapes else []
        if copies:
            number = len(self.shapes) - 1
            while number in self.events.setdefault(event, {}):
                event = event._replace(call=event.call + 1)
            self.events[event][number] = copies

    def _copies_of(self, values: Any, *, floats: bool) -> Iterator[Tensor]:
        """Yield a copy of each tensor with a row for each token; one copy as long as a tensor is not written to."""
        for tensor in _tensors_in(values):
            if tensor.is_floating_point() != floats:
                continue
            written = None if tensor.is_inference() else tensor._version  # noqa: SLF001  no public name
            version, copy = self.copies.get(tensor, (None, None))
            if copy is None or written is None or version != written:
                rows = _by_token(tensor, self.shapes[-1])
                if rows is None:
                    continue
                copy = rows.to("cpu", torch.promote_types(rows.dtype, torch.float32), copy=True)
                self.copies[tensor] = written, copy
            yield copy

    @cached_property
    def index_of(self) -> dict[TokenPosition, int]:
        """Index of each position among the tokens of all forwards; the last one if repeated, as padding is earlier."""
        return {token: index for index, token in enumerate(token for forward in self.positions for token in forward)}

    def at(self, event: Event, positions: Sequence[TokenPosition]) -> Float[Tensor, "N F"] | None:
        """Return the values of an event at some positions; None if a forward lacks it or has another width."""
        forwards = self.events.get(event, {})
        widths = {tuple(part.shape[1] for part in parts) for parts in forwards.values()}
        if len(forwards) != len(self.positions) or len(widths) != 1:
            return None
        index = [self.index_of[token] for token in positions]
        ordered = [forwards[number] for number in range(len(self.positions))]
        return torch.cat([torch.cat(parts)[index] for parts in zip(*ordered, strict=True)], -1)


@contextmanager
def record_modules(
    model: nn.Module,
    backbone: nn.Module,
    positions: Callable[[Mapping[str, Any]], list[TokenPosition]],
    *,
    inputs: Callable[[nn.Module], bool] = lambda _: True,
    outputs: Callable[[nn.Module], bool] = lambda _: True,
    fused: Mapping[str, tuple[str, ...]] | None = None,
) -> Iterator[ModuleValues]:
    """Record inputs and outputs of the modules of ``model`` inside.

    Args:
        model: Model, which names the modules.
        backbone: Module whose call begins a forward.
        positions: Function that returns the positions of a forward's tokens from its arguments by name.
        inputs: Function that returns True for a module whose input the other side can be compared with.
        outputs: The same for its output.
        fused: See :class:`ModuleValues`.
    """
    values = ModuleValues(fused=fused or {})

    def begin(_module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        inputs = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        values.begin(positions({**kwargs, "input_ids": inputs}), tuple(inputs.shape[:2]))

    def after(_module: nn.Module, _args: Any, output: Any, *, name: str) -> None:
        values.add(Event(name, "output"), output)
        values.add(Event(name, "choice"), output)

    handles = [backbone.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)]
    for name, module in model.named_modules():
        if inputs(module):
            before = partial(values.add, Event(name, "input"))
            hook = partial(lambda before, _, *arguments: before(arguments), before)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if outputs(module):
            handles.append(module.register_forward_hook(partial(after, name=name)))
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested values; masks are left out."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for name, value in values.items():
            if not name.endswith("mask"):
                yield from _tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)


def _by_token(tensor: Tensor, shape: tuple[int, ...]) -> Float[Tensor, "N F"] | None:
    """Return a tensor [R, S, ...], [N, F] or [R, H, S, D] with a row for each of N tokens; None for another shape.

    With as many heads as tokens it is unknown which axis is which, so the tensor is left out, too.
    """
    tokens, by_head = math.prod(shape), tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == shape
    flat = tensor.dim() == 2 and tensor.shape[0] == tokens  # a longer one may be a cache of N rows
    by_token = flat or (tensor.shape[: len(shape)] == shape and tensor.dim() > len(shape))
    if by_token and not (by_head and tensor.shape[2] > 1):
        return tensor.detach().reshape(tokens, -1)
    if by_head and not by_token:
        return tensor.detach().transpose(1, 2).reshape(tokens, -1)
    return None


def positions_of(layout: Layout) -> list[TokenPosition]:
    """Return the positions of a layout's inputs; those of shared prompts are not supported."""
    if layout.lengths:
        return [
            TokenPosition(row, position) for row, (_, length) in enumerate(layout.lengths) for position in range(length)
        ]
    rows, width = layout.input_ids.shape
    return [TokenPosition(row, position) for row in range(rows) for position in range(width)]


class DecodedPositions:
    """Positions of the tokens of decodes with a cache, from the ``position_ids`` of each forward.

    Position 0 begins a batch. The rows of a batch keep their order, so prompts have to be different.
    """

    def __init__(self) -> None:
        self.first = self.rows = 0

    def __call__(self, kwargs: Mapping[str, Any]) -> list[TokenPosition]:
        """Return the positions of the tokens of a forward."""
        tokens, given = kwargs["input_ids"], kwargs.get("position_ids")
        inputs = torch.arange(tokens.shape[1]).expand_as(tokens) if given is None else given
        numbers = inputs.tolist()
        if any(0 in line for line in numbers):
            self.first, self.rows = self.first + self.rows, len(numbers)
        return [TokenPosition(self.first + row, position) for row, line in enumerate(numbers) for position in line]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference:
    """First difference of two sides.

    Attributes:
        module: Module whose output differs, though its inputs are equal.
        relative: Largest absolute difference over the largest absolute value of the trainer.
        rounded: True if rounding explains it.
    """

    module: str
    relative: float
    rounded: bool


Compared = tuple[Event, list[TokenPosition], Tensor, Tensor]  # an event, positions, values of trainer and of engine


def first_difference(
    trainer: ModuleValues,
    engine: ModuleValues,
    lengths: Sequence[int],
    *,
    head: Compared,
    rounding: float,
) -> ModuleDifference | None:
    """Return the first module whose outputs differ by more than rounding, in the order of the trainer's forward.

    A difference is more than rounding if it is :data:`JUMP` times as large as ``rounding`` and all before it, relative
    to the largest value. Without one, the first difference of all is returned. Rounding may change the experts of a
    few tokens, so their rows are left out from there on.

    Args:
        trainer: Values of the trainer.
        engine: Values of the engine, with the same tokens.
        lengths: Number of inputs of each row.
        head: Outputs of the head, which are compared last.
        rounding: Relative rounding of a module, from :func:`rounding_of`; 0 if equal bits are expected.
    """
    known = [{token for forward in side.positions for token in forward} for side in (trainer, engine)]
    positions = sorted(token for token in known[0] & known[1] if token.position < lengths[token.row])
    first: ModuleDifference | None = None
    largest = rounding
    ends: dict[int, float] = defaultdict(lambda: math.inf)  # first token of a row that other experts computed
    for event, at, one, other in itertools.chain(_pairs(trainer, engine, positions), [head]):
        if event.side == "choice" and rounding:
            differs = (one != other).any(-1)
            if 2 * int(differs.sum()) > len(differs):
                return ModuleDifference(module=event.module, relative=math.inf, rounded=False)
            for token in [at[number] for number in differs.nonzero()[:, 0].tolist()]:
                ends[token.row] = min(token.position, ends[token.row])
            continue
        kept = torch.tensor([token.position < ends[token.row] for token in at])
        relative = _relative_difference(one[kept], other[kept], whole=event.side != "input" and not engine.fused)
        if relative == 0:
            continue
        found = ModuleDifference(module=_owner(event, trainer), relative=relative, rounded=relative <= JUMP * largest)
        if not found.rounded:
            return found
        first, largest = first or found, max(largest, relative)
    return first


def _relative_difference(one: Tensor, other: Tensor, *, whole: bool) -> float:
    """Return the largest difference over the largest value; infinity for other widths if ``whole``."""
    if not len(one):
        return 0.0
    if whole and one.shape != other.shape:
        return math.inf
    width = min(one.shape[1], other.shape[1])  # vLLM adds values behind those of transformers
    one, other = one[:, :width], other[:, :width]
    return float((one - other).abs().max() / one.abs().max().clamp(min=torch.finfo(one.dtype).tiny))


def rounding_of(dtypes: Sequence[torch.dtype]) -> float:
    """Return the relative rounding of a module in the least exact of these dtypes; sums are at most float32."""
    return max(*(torch.finfo(dtype).eps for dtype in dtypes), 4 * torch.finfo(torch.float32).eps)


def _pairs(trainer: ModuleValues, engine: ModuleValues, positions: list[TokenPosition]) -> Iterator[Compared]:
    """Yield the events of both sides with positions and values, in the order of the trainer's forward."""
    fused = {parts[-1]: (whole, parts) for whole, parts in engine.fused.items()}
    for event in trainer.events:
        parent, dot, name = event.module.rpartition(".")
        whole, parts = fused.get(name, (name, (name,)))
        found = event._replace(module=f"{parent}{dot}{whole}")
        names = parts[:1] if event.side == "input" else parts
        ones = [trainer.at(event._replace(module=f"{parent}{dot}{part}"), positions) for part in names]
        other = engine.at(found, positions)
        if event.side == "choice" and other is None:
            ones, other = _choices(trainer, engine, event, positions)
        if other is not None and all(one is not None for one in ones):
            yield found, positions, torch.cat(cast(list[Tensor], ones), -1), other


def _choices(
    trainer: ModuleValues, engine: ModuleValues, event: Event, positions: list[TokenPosition]
) -> tuple[list[Tensor | None], Tensor | None]:
    """Return the experts with the largest logits on both sides, for an engine whose routers return only logits."""
    chosen, one, other = (
        trainer.at(event, positions),
        *(side.at(event._replace(side="output"), positions) for side in (trainer, engine)),
    )
    if chosen is None or one is None or other is None:
        return [None], None
    experts = [logits[:, : other.shape[1]].topk(chosen.shape[1]).indices.sort().values for logits in (one, other)]
    return [experts[0]], experts[1]


def _owner(event: Event, values: ModuleValues) -> str:
    """Return the module that computed a value: for an input, the closest called module around it."""
    name = event.module
    while event.side == "input" and name:
        name = name.rpartition(".")[0]
        if Event(name, "output") in values.events:
            break
    return name
