"""Packed attention: each sequence of a packed row attends to itself alone, through the fastest kernel that can.

Every kernel is causal and takes what transformers gives to attention: grouped heads, a scale, a sliding window. They
differ in what they ask for (:data:`KERNELS`), and in rounding.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

AUTO = "auto"
HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256  # of every FlashAttention kernel
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
PACKAGES = ("flash_attn", "flash_attn_interface")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a kernel finds on a machine.

    Attributes:
        device: its type, such as ``"cuda"``.
        capability: compute capability of an NVIDIA GPU; None elsewhere.
        packages: of :data:`PACKAGES`, those that are installed.
    """

    device: str
    capability: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset()


@lru_cache
def hardware_of(device: torch.device) -> Hardware:
    """The hardware of a device of this machine."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return Hardware(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if nvidia and torch.cuda.is_available() else None,
        packages=frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is not None),
    )


class Shared(NamedTuple):
    """How attention reads packed inputs of which several sequences begin with the same ones.

    Attributes:
        inputs: which input stands at each of attention's positions.
        positions: where attention has its result for each input.
    """

    inputs: Int[Tensor, " F"]
    positions: Int[Tensor, " N"]

    def spread(self, tensor: Shaped[Tensor, "1 heads N D"]) -> Shaped[Tensor, "1 heads F D"]:
        """Queries, keys or values as attention reads them."""
        return tensor.index_select(2, self.inputs)

    def gather(self, mixed: Shaped[Tensor, "1 F heads D"]) -> Shaped[Tensor, "1 N heads D"]:
        """Attention's result for each input."""
        return mixed.index_select(1, self.positions)


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """The sequences of a packed row, and the kernel in which they attend.

    Attributes:
        lengths: of the sequences, in their order.
        cu_seqlens: cumulated lengths, int32, beginning with 0.
        attention: a name of :data:`KERNELS`, or ``"auto"``.
        shared: where they stand in the row; None if one after the other.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Int[Tensor, " b1"]
    attention: str = AUTO
    shared: Shared | None = None


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    sequences: PackedSequences,
    *,
    scaling: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "1 N H D"]:
    """Causal attention within each sequence, N tokens in all.

    Args:
        query: of every token of the row.
        key: the same for its keys, with as many heads or a divisor of them.
        value: the same for its values.
        sequences: where they begin and end.
        scaling: of the scores; one over the root of D by default.
        window: how many tokens a token sees, itself among them; None for all before it.

    Raises:
        ValueError: if the kernel cannot take these tensors.
    """
    sizes = frozenset((query.shape[-1], value.shape[-1]))
    name = choose_attention(sequences.attention, hardware_of(query.device), query.dtype, sizes)
    if sequences.shared is None:
        return KERNELS[name].attend(query, key, value, sequences, scaling, window)
    query, key, value = map(sequences.shared.spread, (query, key, value))
    return sequences.shared.gather(KERNELS[name].attend(query, key, value, sequences, scaling, window))


@lru_cache(maxsize=256)
def choose_attention(
    name: str, hardware: Hardware, dtype: torch.dtype | None, head_sizes: frozenset[int] = frozenset()
) -> str:
    """The kernel of a name: itself, or for ``"auto"`` the fastest that runs there.

    Args:
        name: of :data:`KERNELS`, or ``"auto"``.
        hardware: where it runs.
        dtype: of the queries; None if it is not known yet.
        head_sizes: of queries and values, as far as they are known.

    Raises:
        ValueError: saying why the named kernel cannot run, and what to use.
    """
    if name == AUTO:
        return next(
            other
            for other, kernel in KERNELS.items()
            if kernel.suits(hardware) and kernel.obstacle(hardware, dtype, head_sizes) is None
        )
    obstacle = KERNELS[name].obstacle(hardware, dtype, head_sizes)
    if obstacle is not None:
        raise ValueError(f'expected {obstacle}: use attention="auto" or "sdpa"')
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel and what it asks for.

    Attributes:
        attend: as :func:`attend` for tensors that it can take.
        flash: whether it is FlashAttention: half precision, heads of at most 256, an NVIDIA GPU from Ampere on.
        package: that it needs.
        made_for: the compute capability that it is the best for; None for any.
        head_multiple: that the size of a head has to be a multiple of.
    """

    attend: Callable[[Tensor, Tensor, Tensor, PackedSequences, float | None, int | None], Tensor]
    name: str
    flash: bool = True
    package: str | None = None
    made_for: tuple[int, int] | None = None
    head_multiple: int = 1

    def suits(self, hardware: Hardware) -> bool:
        """Whether ``"auto"`` takes it where it can run."""
        return self.made_for in (None, hardware.capability)

    def obstacle(self, hardware: Hardware, dtype: torch.dtype | None, head_sizes: frozenset[int]) -> str | None:
        """What it needs and does not find, or None."""
        if not self.flash:
            return None
        sizes, capability = sorted(head_sizes), hardware.capability
        gpu = f"{hardware.device}{'' if capability is None else ' of {}.{}'.format(*capability)}"
        fits = len(sizes) < 2 and all(size <= MAX_HEAD_SIZE and size % self.head_multiple == 0 for size in sizes)
        multiple = f" and divisible by {self.head_multiple}" if self.head_multiple > 1 else ""
        needs = f"which {self.name} needs, got"
        demands = (
            (capability is not None and capability >= AMPERE, f"an NVIDIA GPU of capability 8.0, {needs} {gpu}"),
            (self.package in (None, *hardware.packages), f"the package {self.package}, {needs} none"),
            (dtype in (None, *HALF), f'float16 or bfloat16 (Trainer(precision="bf16-mixed")), {needs} {dtype}'),
            (fits, f"heads of one size up to {MAX_HEAD_SIZE}{multiple}, {needs} {sizes}"),
        )
        return next((demand for met, demand in demands if not met), None)


def _flash_2(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return _flash(flash_attn_varlen_func, query, key, value, sequences, scaling, window)


def _flash_3(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return _flash(flash_attn_varlen_func, query, key, value, sequences, scaling, window)


def _flash(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """The function that both packages have under one name."""
    ends, longest = sequences.cu_seqlens, max(sequences.lengths)
    reach = (-1, -1) if window is None else (window - 1, 0)  # inclusive, the token itself not counted
    tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options = {"softmax_scale": scaling, "causal": True, "window_size": reach}
    deterministic = torch.are_deterministic_algorithms_enabled()  # which PyTorch's own kernels look at themselves
    mixed = function(*tokens, ends, ends, longest, longest, **options, deterministic=deterministic)
    return (mixed[0] if isinstance(mixed, tuple) else mixed)[None]  # some releases of 3 return two


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = sequences.cu_seqlens, max(sequences.lengths)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    reach = (-1 if window is None else window - 1, 0)
    grouped = q.shape[1] != k.shape[1]
    mixed = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=reach, enable_gqa=grouped)
    return (mixed[0] if isinstance(mixed, tuple) else mixed)[None]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of torch on one sequence after the other, those of one length together."""
    runs, sizes = _runs(sequences.lengths)
    queries, keys, values = (
        [
            part[0].unflatten(1, (number, length)).transpose(0, 1)
            for part, (length, number) in zip(parts, runs, strict=True)
        ]
        for parts in (tensor.split(sizes, 2) for tensor in (query, key, value))
    )
    mixed = [_causal(q, k, v, scaling, window) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(mixed)[None]


@lru_cache(maxsize=1024)
def _runs(lengths: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """Neighbouring sequences of equal length: (length, number) and tokens of each run."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return runs, [length * number for length, number in runs]


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attention within each of n sequences of one length, from [n, heads, length, D] to [n * length, heads, D]."""
    mask = None
    if window is not None and query.shape[2] > window:
        position = torch.arange(query.shape[2], device=query.device)
        distance = position[:, None] - position[None]
        mask = (distance >= 0) & (distance < window)
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).flatten(0, 1)


KERNELS = {  # the first one that can run is the fastest
    "flash_attention_3": Kernel(
        name="FlashAttention 3", attend=_flash_3, package="flash_attn_interface", made_for=HOPPER
    ),
    "flash_attention_2": Kernel(name="FlashAttention 2", attend=_flash_2, package="flash_attn"),
    "varlen_attn": Kernel(name="varlen_attn", attend=_varlen, head_multiple=8),
    "sdpa": Kernel(name="SDPA", attend=_sdpa, flash=False),
}
ATTENTIONS = (AUTO, *KERNELS)
