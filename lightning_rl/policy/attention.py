"""Packed attention: each sequence of a packed row attends only to itself, through the fastest available kernel.

Every kernel is causal and supports grouped heads, a scale and a sliding window. They differ in their requirements
(:data:`KERNELS`) and in rounding.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

AUTO = "auto"
HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256  # of all FlashAttention kernels
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
BLOCK = 256  # queries at once under a mask, so that few of their keys come later
PACKAGES = ("flash_attn", "flash_attn_interface")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware and packages available to a kernel.

    Attributes:
        device: Type of the device, such as ``"cuda"``.
        capability: Compute capability of an NVIDIA GPU; None elsewhere.
        packages: Installed packages out of :data:`PACKAGES`.
    """

    device: str
    capability: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset()


@lru_cache
def hardware_of(device: torch.device) -> Hardware:
    """Return the hardware of a device of this machine."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return Hardware(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if nvidia and torch.cuda.is_available() else None,
        packages=frozenset(name for name in PACKAGES if importlib.util.find_spec(name) is not None),
    )


class Shared(NamedTuple):
    """Index maps between packed inputs, where common prompts occur once, and what attention reads.

    Inputs [p, q, a, b] of the sequences p, q, a and p, q, b: keys [0, 1, 2, 0, 1, 3], queries and outputs [0, 1, 2, 3].

    Attributes:
        keys: Index of the input at each key: every sequence has all of its tokens.
        queries: Index of the input at each query: every sequence has the tokens that no sequence before it has.
        outputs: Index of the query of each input.
    """

    keys: Int[Tensor, " F"]
    queries: Int[Tensor, " N"]
    outputs: Int[Tensor, " N"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Sequences of a packed row and the kernel for their attention: lengths ((9, 9), (4, 9)) if 5 tokens are shared.

    The queries of a sequence are those of its last tokens; of all, if it shares no prompt.

    Attributes:
        lengths: Number of queries and of keys of each sequence, in order.
        cu_queries: Cumulative numbers of queries, int32, starting with 0.
        cu_keys: Cumulative numbers of keys, int32, starting with 0.
        attention: Name in :data:`KERNELS`, or ``"auto"``.
        shared: Index maps of common prompts; None if sequences follow each other.
    """

    lengths: tuple[tuple[int, int], ...]
    cu_queries: Int[Tensor, " b1"]
    cu_keys: Int[Tensor, " b1"]
    attention: str = AUTO
    shared: Shared | None = None

    @property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        """Cumulative numbers of queries and of keys, and the largest number of each."""
        queries, keys = map(max, zip(*self.lengths, strict=True))
        return self.cu_queries, self.cu_keys, queries, keys


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    sequences: PackedSequences,
    *,
    scaling: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "1 N H D"]:
    """Compute causal attention within each sequence, N tokens in all.

    Args:
        query: Queries of every token of the row.
        key: Keys of every token; as many heads as the queries, or a divisor.
        value: Values of every token.
        sequences: Boundaries of the sequences.
        scaling: Scale of the scores; by default one over the root of D.
        window: Number of tokens that a token attends to, including itself; None for all before it.

    Raises:
        ValueError: If the kernel does not support these tensors.
    """
    sizes = frozenset((query.shape[-1], value.shape[-1]))
    name = choose_attention(sequences.attention, hardware_of(query.device), query.dtype, sizes)
    shared = sequences.shared
    if shared is None:
        return KERNELS[name].attend(query, key, value, sequences, scaling, window)
    query, key, value = (
        query.index_select(2, shared.queries),
        *(part.index_select(2, shared.keys) for part in (key, value)),
    )
    return KERNELS[name].attend(query, key, value, sequences, scaling, window).index_select(1, shared.outputs)


@lru_cache(maxsize=256)
def choose_attention(
    name: str, hardware: Hardware, dtype: torch.dtype | None, head_sizes: frozenset[int] = frozenset()
) -> str:
    """Return the name of the kernel to use: the given one, or for ``"auto"`` the fastest that can run.

    Args:
        name: Name in :data:`KERNELS`, or ``"auto"``.
        hardware: Hardware of the device.
        dtype: Dtype of the queries; None if unknown.
        head_sizes: Head sizes of queries and values, as far as known.

    Raises:
        ValueError: If the named kernel cannot run; says why and what to use.
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
    """Attention kernel and its requirements.

    Attributes:
        attend: Function like :func:`attend`, for tensors that it supports.
        name: Name in messages.
        flash: True for FlashAttention: half precision, heads of at most 256, an NVIDIA GPU from Ampere on.
        package: Required package.
        made_for: Compute capability for which ``"auto"`` prefers it; None for any.
        head_multiple: Required divisor of the head size.
    """

    attend: Callable[[Tensor, Tensor, Tensor, PackedSequences, float | None, int | None], Tensor]
    name: str
    flash: bool = True
    package: str | None = None
    made_for: tuple[int, int] | None = None
    head_multiple: int = 1

    def suits(self, hardware: Hardware) -> bool:
        """Return True if ``"auto"`` may choose it here."""
        return self.made_for in (None, hardware.capability)

    def obstacle(self, hardware: Hardware, dtype: torch.dtype | None, head_sizes: frozenset[int]) -> str | None:
        """Return the first unmet requirement, or None."""
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


def _flash(
    package: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Call ``flash_attn_varlen_func`` of a package."""
    function = import_module(package).flash_attn_varlen_func
    reach = (-1, -1) if window is None else (window - 1, 0)  # inclusive, without the token itself
    tokens = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options = {"softmax_scale": scaling, "causal": True, "window_size": reach}
    deterministic = torch.are_deterministic_algorithms_enabled()  # PyTorch's own kernels read this setting
    mixed = function(*tokens, *sequences.boundaries, **options, deterministic=deterministic)
    return (mixed[0] if isinstance(mixed, tuple) else mixed)[None]  # some releases of 3 return a tuple


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    reach = (-1 if window is None else window - 1, 0)
    grouped = q.shape[1] != k.shape[1]
    mixed = varlen_attn(q, k, v, *sequences.boundaries, scale=scaling, window_size=reach, enable_gqa=grouped)
    return (mixed[0] if isinstance(mixed, tuple) else mixed)[None]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention with torch, for neighboring sequences of equal lengths together."""
    runs = _runs(sequences.lengths)
    queries, keys, values = (
        [
            part[0].unflatten(1, (number, -1)).transpose(0, 1)
            for part, number in zip(tensor.split(sizes, 2), runs.numbers, strict=True)
        ]
        for tensor, sizes in ((query, runs.queries), (key, runs.keys), (value, runs.keys))
    )
    mixed = [causal_attention(q, k, v, scaling, window) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in mixed])[None]


class _Runs(NamedTuple):
    """Numbers of sequences, queries and keys of each run of neighboring sequences of equal lengths."""

    numbers: list[int]
    queries: list[int]
    keys: list[int]


@lru_cache(maxsize=1024)
def _runs(lengths: tuple[tuple[int, int], ...]) -> _Runs:
    runs = [(len(list(run)), *sizes) for sizes, run in groupby(lengths)]
    return _Runs(
        *map(list, zip(*((number, number * queries, number * keys) for number, queries, keys in runs), strict=True))
    )


def causal_attention(
    query: Float[Tensor, "n H Q D"],
    key: Float[Tensor, "n K L D"],
    value: Float[Tensor, "n K L D"],
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "n H Q D"]:
    """Compute attention of the last Q tokens of n sequences of one length L with torch."""
    asked, length = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if asked == length and (window is None or length <= window):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    mixed, position = [], torch.arange(length, device=query.device)
    for start, part in zip(range(length - asked, length, BLOCK), query.split(BLOCK, 2), strict=True):
        end, first = start + part.shape[2], 0 if window is None else max(0, start - window + 1)
        distance = position[start:end, None] - position[first:end]
        mask = (distance >= 0) & (distance < (length if window is None else window))
        inputs = part, key[:, :, first:end], value[:, :, first:end]
        mixed.append(functional.scaled_dot_product_attention(*inputs, attn_mask=mask, **options))
    return torch.cat(mixed, 2)


KERNELS = {  # fastest first
    "flash_attention_3": Kernel(
        name="FlashAttention 3",
        attend=partial(_flash, "flash_attn_interface"),
        package="flash_attn_interface",
        made_for=HOPPER,
    ),
    "flash_attention_2": Kernel(name="FlashAttention 2", attend=partial(_flash, "flash_attn"), package="flash_attn"),
    "varlen_attn": Kernel(name="varlen_attn", attend=_varlen, head_multiple=8),
    "sdpa": Kernel(name="SDPA", attend=_sdpa, flash=False),
}
ATTENTIONS = (AUTO, *KERNELS)
