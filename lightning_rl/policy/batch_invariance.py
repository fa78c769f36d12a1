r"""Batch invariance: operations whose result for a row does not depend on the rest of the batch, bit for bit.

A matrix product, a softmax or a sum adds the same numbers in another order if its shape changes, so a token gets other
bits when it is decoded in a batch of one than when it is scored in a packed batch. Here every reduction has one order:

* **Linear layers** multiply blocks of :data:`ROWS` rows, the last one padded with zeros, so that every product of a
  layer has the same shape.
* **Attention** multiplies blocks of :data:`QUERIES` queries and :data:`KEYS` keys, which are counted from the first
  token of the sequence, and adds the blocks in order. A masked key adds an exact 0, so blocks of later keys
  are left out.
* **SiLU, GELU and the sigmoid** are composed of functions that torch computes alike for every element; torch's own use
  another formula for the last elements of a vector.
* **Sums over one long row** are computed over two rows, since torch splits a single one over threads.

The backward is torch's: gradients are not invariant, and do not have to be.

Torch guarantees equal bits for equal inputs, shapes and numbers of threads. That a row's bits depend neither on its
place within a block nor on the number of blocks in a batched product is measured, not guaranteed: every first step of a
rollout checks it (:func:`check_bitwise`).

Source: He et al. 2025, *Defeating Nondeterminism in LLM Inference*.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from typing_extensions import override

from lightning_rl.policy.attention import PackedSequences, causal_attention
from lightning_rl.policy.text_model import modules_behind
from lightning_rl.rollout import Rollout

INVARIANT_ATTENTION = "lightning_rl_batch_invariant"
ROWS = 64  # of a product of a linear layer
QUERIES, KEYS = 8, 32  # of a product of attention; KEYS is a multiple of the width of a vector
ACTIVATIONS = (nn.SiLU.__module__, "transformers.activations")
MASKED = -1e30  # added to the score of a masked key: finite, so that a row without any key is finite


def make_batch_invariant(model: PreTrainedModel) -> None:
    """Make the forward of a model batch invariant, except for the head, which :class:`PolicyModel` computes."""
    model.set_attn_implementation(INVARIANT_ATTENTION)
    model.set_experts_implementation("eager")  # one by one; does nothing to a model without experts
    head = model.get_output_embeddings()
    routers = modules_behind(model, "router_logits")
    mixtures = {model.get_submodule(name.rpartition(".")[0]) for name in routers}  # which may gate a shared expert
    for part in model.modules():
        if part is not head and not isinstance(part, _Invariant) and (_computes(part) or part in mixtures):
            part.__class__ = _invariant_class(type(part))


def is_batch_invariant(model: nn.Module) -> bool:
    """Return True after :func:`make_batch_invariant`, also for a copy."""
    config = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) == INVARIANT_ATTENTION  # no public name


def _computes(part: nn.Module) -> bool:
    """Return True for a module that multiplies by a matrix, or applies a function to each element."""
    matrices = any(parameter.dim() > 1 for parameter in part.parameters(recurse=False))
    return (matrices and not isinstance(part, nn.Embedding)) or type(part).__module__ in ACTIVATIONS


class _Invariant:
    """Module whose forward runs with the functions of :class:`BatchInvariance`.

    The class of a module is replaced, rather than its forward, so that copies and recomputed activations keep it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with BatchInvariance():
            return cast(Any, super()).forward(*args, **kwargs)


@lru_cache(maxsize=256)
def _invariant_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Invariant, kind), {})


@torch.no_grad()
def check_bitwise(logprobs: Float[Tensor, "b T"], rows: Rollout) -> None:
    """Check that the log-probabilities of an update are those of the rollout, bit for bit.

    Raises:
        RuntimeError: If one differs; names sample and position of the first one.
    """
    sampled = rows.rollout_logprobs
    if sampled is None or not len(rows) or not bool((differs := (logprobs != sampled) & rows.valid_tokens).any()):
        return
    row, position = differs.nonzero()[0].tolist()
    raise RuntimeError(
        'expected engine and trainer to agree bit for bit, as consistency="bitwise" demands, got log-probability '
        f"{float(sampled[row, position])!r} from the engine and {float(logprobs[row, position])!r} from the trainer at "
        f"row {row} (sample {int(rows.sample_ids[row])}), response position {position}: the model has an operation "
        "that depends on the batch (lightning-rl consistency MODEL names it), so remove consistency="
    )


class BatchInvariance(TorchFunctionMode):
    """Context that replaces the functions of torch in :data:`REPLACED`."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function: Any = REPLACED.get(func, func)
        return function(*args, **(kwargs or {}))


# Linear layers.


def linear(
    rows: Float[Tensor, "... K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "... N"]:
    """Return a linear layer's output, computed in blocks of rows."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat: Any = rows.reshape(-1, rows.shape[-1])
    flat = _Linear.apply(flat, weight) if torch.is_grad_enabled() else matrix_product(flat, weight.t())
    return (flat if bias is None else flat + bias).view(*rows.shape[:-1], weight.shape[0])


def matrix_product(
    left: Float[Tensor, "M K"],
    right: Float[Tensor, "K N"],
    *,
    out: Float[Tensor, "M N"] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "M N"]:
    """Return a matrix product, computed in blocks of rows of ``left``; without gradient."""
    options: dict[str, Any] = {} if out_dtype is None else {"out_dtype": out_dtype}
    rows = left.shape[0]
    out = left.new_empty(rows, right.shape[1], dtype=out_dtype) if out is None else out
    whole = rows - rows % ROWS
    if whole:
        for block, product in zip(left[:whole].split(ROWS), out[:whole].split(ROWS), strict=True):
            torch.mm(block, right, **options, out=product)
    if whole < rows:
        padded = functional.pad(left[whole:], (0, 0, 0, whole + ROWS - rows))
        out[whole:] = torch.mm(padded, right, **options)[: rows - whole]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return matrix_product(rows, weight.t())

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyrefly: ignore[bad-override]
        (grad,), (rows, weight) = grads, ctx.saved_tensors
        by_rows, by_weight = ctx.needs_input_grad
        return grad @ weight if by_rows else None, grad.t() @ rows if by_weight else None


# Functions of each element, and sums.


class _Elementwise(torch.autograd.Function):
    """Function whose forward is a composition, and whose backward is that of torch's function."""

    @staticmethod
    @override
    def forward(
        ctx: Any, values: Tensor, forward: Callable[[Tensor], Tensor], native: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(values)
        ctx.native = native
        return forward(values.to(torch.promote_types(values.dtype, torch.float32))).to(values.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            values = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.native(values), values, grads)[0], None, None


def sigmoid(values: Tensor) -> Tensor:
    """Return the logistic function of each element."""
    return _Elementwise.apply(values, _sigmoid, torch.sigmoid)


def silu(values: Tensor, **_: bool) -> Tensor:
    """Return each element times its logistic function."""
    return _Elementwise.apply(values, _silu, functional.silu)


def gelu(values: Tensor, approximate: str = "none") -> Tensor:
    """Return the Gaussian error linear unit of each element."""
    forward = _gelu_tanh if approximate == "tanh" else _gelu
    return _Elementwise.apply(values, forward, lambda x: functional.gelu(x, approximate=approximate))


def _sigmoid(values: Tensor) -> Tensor:
    return 1 / (1 + (-values).exp())


def _silu(values: Tensor) -> Tensor:
    return values / (-values).exp_().add_(1)


def _gelu(values: Tensor) -> Tensor:
    return values * (1 + (values * math.sqrt(1 / 2)).erf()) * 0.5


def _gelu_tanh(values: Tensor) -> Tensor:
    return values * (1 + ((values + values * values * values * 0.044715) * math.sqrt(2 / math.pi)).tanh()) * 0.5


def _over_two_rows(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a reduction that computes a single row beside a copy of it."""

    def reduce_two(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        last = (args[0] if args else kwargs.get("dim")) in (-1, (-1,), [-1])
        if not last or values.dim() < 2 or values.shape[:-1].numel() != 1:
            return reduce(values, *args, **kwargs)
        return reduce(torch.cat([values, values]), *args, **kwargs)[:1]

    return reduce_two


REPLACED: dict[Any, Callable[..., Any]] = {
    functional.linear: linear,
    torch.mm: matrix_product,
    functional.silu: silu,
    functional.gelu: gelu,
    functional.sigmoid: sigmoid,
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    torch.Tensor.sum: _over_two_rows(torch.sum),
    torch.Tensor.mean: _over_two_rows(torch.mean),
}


# Attention.


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S D"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    query_positions: Int[Tensor, "B Q"] | None = None,
    **arguments: Any,
) -> tuple[Float[Tensor, "B Q H D"], None]:
    """Compute causal attention for a layer of transformers.

    Args:
        module: Layer.
        query: Queries of the last Q tokens of each row.
        key: Keys of the S tokens of each row.
        value: Values of the S tokens of each row.
        attention_mask: Width of the sliding window, from :func:`_mask`.
        scaling: Scale of the scores; by default one over the root of D.
        sliding_window: Number of tokens that a token attends to, including itself; None for all before it.
        packed_sequences: Boundaries of the sequences of a packed row.
        query_positions: Position of each query in its sequence, with a cache whose S is a multiple of :data:`KEYS`.
        arguments: Other arguments of transformers.

    Raises:
        ValueError: For an attention with a soft cap or a sink.
    """
    unsupported = [name for name in ("softcap", "s_aux") if arguments.get(name) is not None]
    if unsupported:
        raise ValueError(
            f'expected attention without {unsupported[0]}, got {type(module).__name__}: remove consistency="bitwise"'
        )
    window = sliding_window if attention_mask is None else int(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings return float32 under autocast
    if packed_sequences is not None:
        return _attend_packed_rows(query, key, value, packed_sequences, scale, window), None
    if query_positions is not None:
        return blocked_attention(query, key, value, query_positions, scale, window).transpose(1, 2), None
    return _attend_rows(query, key, value, scale, window).transpose(1, 2), None


def _attend_packed_rows(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Compute attention of packed sequences, for sequences of similar length together."""
    shared, (groups, places) = sequences.shared, _groups(sequences.lengths)
    mixed = []
    for index in groups:
        inputs = index.to(query.device) if shared is None else shared.keys[index.to(query.device)]
        q, k, v = (
            part[0].index_select(1, inputs.flatten()).unflatten(1, inputs.shape).transpose(0, 1)
            for part in (query, key, value)
        )
        mixed.append(_attend_rows(q, k, v, scale, window).transpose(1, 2).flatten(0, 1))
    places = places.to(query.device) if shared is None else places.to(query.device)[shared.outputs]
    return torch.cat(mixed).index_select(0, places)[None]


@lru_cache(maxsize=256)
def _groups(sizes: tuple[tuple[int, int], ...]) -> tuple[list[Tensor], Tensor]:
    """Return, for sequences of similar length, the index of each token; and the place of each query in all indices.

    The last token of a sequence is repeated up to the length of the longest one of its group. Keys of shared prompts
    are queries again, so that every block begins where it begins without sharing.
    """
    lengths = [keys for _, keys in sizes]
    starts, groups = [0, *torch.tensor(lengths).cumsum(0).tolist()], list[Tensor]()
    places, filled = torch.empty(starts[-1], dtype=torch.int64), 0
    widths = [-(-length // KEYS) * KEYS for length in lengths]
    for width in sorted(set(widths)):
        chosen = [number for number, other in enumerate(widths) if other == width]
        size = torch.tensor([lengths[number] for number in chosen])[:, None]
        column = torch.arange(int(size.max()))
        index = torch.tensor([starts[number] for number in chosen])[:, None] + torch.minimum(column, size - 1)
        real = column < size
        places[index[real]] = filled + real.flatten().nonzero()[:, 0]
        groups.append(index)
        filled += index.numel()
    asked = [torch.arange(end - queries, end) for (queries, _), end in zip(sizes, starts[1:], strict=True)]
    return groups, places[torch.cat(asked)]


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute attention of rows that begin with the first token of a sequence."""
    return _Attention.apply(query, key, value, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.window = scale, window
        missing = -key.shape[2] % KEYS
        key, value = (functional.pad(part, (0, 0, 0, missing)) for part in (key, value))
        position = torch.arange(query.shape[2], device=query.device)[None]
        return blocked_attention(query, key, value, position, scale, window)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            query, key, value = inputs = [part.detach().requires_grad_() for part in ctx.saved_tensors]
            mixed = causal_attention(query, key, value, ctx.scale, ctx.window)
            return *torch.autograd.grad(mixed, inputs, grads), None, None


def blocked_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S E"],
    position: Int[Tensor, "b Q"],
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H Q E"]:
    """Compute causal attention block by block, without gradient.

    Args:
        query: Queries.
        key: Keys from the first token of each sequence on; S is a multiple of :data:`KEYS`.
        value: Values.
        position: Position of each query in its sequence; b is B or 1.
        scale: Scale of the scores.
        window: Number of tokens that a token attends to; None for all before it.
    """
    exact, (rows, heads, queries, size) = torch.promote_types(query.dtype, torch.float32), query.shape
    kinds, keys = key.shape[1:3]
    group = heads // kinds
    key, value = (part.to(exact).flatten(0, 1) for part in (key, value))
    lines = (query.to(exact) * scale).view(rows, kinds, group, queries, size).transpose(2, 3)
    lines = lines.reshape(rows * kinds, queries * group, size)  # the queries of a position follow each other
    asked, column = position.repeat_interleave(group, 1)[:, None, :, None], torch.arange(keys, device=key.device)
    mixed = []
    for start in range(0, queries * group, QUERIES):
        block, at = lines[:, start : start + QUERIES], asked[:, :, start : start + QUERIES]
        last = min(start + QUERIES - 1, queries * group - 1) // group + keys - queries  # latest possible position
        parts = [slice(first, first + KEYS) for first in range(0, last + 1, KEYS)]
        scores = torch.cat([_block_product(block, key[:, part].transpose(1, 2)) for part in parts], -1)
        seen = column[: scores.shape[2]]
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        weights = (scores.unflatten(0, (rows, kinds)) + hidden * MASKED).softmax(-1).flatten(0, 1)
        total = _block_product(weights[..., parts[0]], value[:, parts[0]])
        for part in parts[1:]:
            total = total + _block_product(weights[..., part], value[:, part])
        mixed.append(total)
    whole = torch.cat(mixed, 1).view(rows, kinds, queries, group, -1)
    return whole.transpose(2, 3).reshape(rows, heads, queries, -1).to(query.dtype)


def _block_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a batched product of at most :data:`QUERIES` rows, computed with as many."""
    missing = QUERIES - left.shape[1]
    if not missing:
        return torch.bmm(left, right)
    return torch.bmm(functional.pad(left, (0, 0, 0, missing)), right)[:, :-missing]


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """Return the width of a sliding window instead of a mask."""
    return None if local_size is None else torch.full((1, 1, 1, 1), local_size)  # 4-D as a mask


AttentionInterface.register(INVARIANT_ATTENTION, attention_forward)
AttentionMaskInterface.register(INVARIANT_ATTENTION, _mask)
