"""Vocabulary head: log-probability and entropy of given tokens, chunk by chunk, with a bound on the stored logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.policy.text_model import modules_behind

CPU_CHUNK = 2**25  # logits of a chunk: 128 MiB in float32
DEVICE_SHARE = 64  # divisor of an accelerator's memory for the logits of a chunk
CPU_KEPT, DEVICE_KEPT = 8, 2  # chunks of logits that a forward may keep: 1 GiB in float32; 1/32 of the memory
CPU_BLOCKS, DEVICE_BLOCKS = 64, 8  # parts of a chunk for elementwise operations: in a cache; few and small temporaries
KERNEL_TOLERANCE = 1e-2  # of a small head with kernels: far above rounding, also that of TF32 in its products
FILTERED = -1e30  # logit of a filtered token: finite, so that 0 times it is 0


def token_logprobs(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " A"],
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    sampling_mask: UInt8[Tensor, "A V8"] | None = None,
    batch_invariant: bool = False,
) -> tuple[Float[Tensor, " A"], Float[Tensor, " A"]]:
    r"""Return the log-probability of each target and the entropy, :math:`\log\operatorname{softmax}(hW^T/\tau)`.

    Logits, softmax and their gradient are float32 (float64 for float64 parameters) in every precision of the run, and
    so is the sum of the weight's gradient over tokens; in half precision a GPU only rounds the operands of matrix
    products. Both results are differentiable.

    Logits are computed chunk by chunk. A forward with gradient keeps those of its first :func:`kept_chunks` chunks for
    the backward, which computes the others again in one buffer, with the same bits. With frozen weight and bias, as
    under adapters, the forward keeps no logits. It stores the gradient of each log-probability by its hidden state, and
    the backward of log-probabilities only scales it: two matrix products instead of three.

    On a GPU, where Triton compiles, one kernel of :mod:`.policy.head_kernels` reads a chunk of float32 logits in the
    forward, and one overwrites it with its gradient in the backward: 60 launches for 12,000 tokens of a vocabulary of
    150,000. Otherwise elementwise operations process a chunk in blocks: 64, which stay in the cache of a CPU, or 8 on a
    GPU, 1,100 launches. Their temporaries take at most two blocks, 1/256 of the device's memory.

    Args:
        hidden: Last hidden state before each target, shape [A, H].
        weight: Matrix of the head, shape [V, H].
        bias: Bias of the head, shape [V], or None.
        targets: Token ids, shape [A].
        temperature: Divisor of the logits, above 0.
        soft_cap: Bound c of the logits, applied before as :math:`c\tanh(z/c)`, as in Gemma 2 (arXiv:2408.00118); None
            for no cap.
        sampling_mask: Bits of the tokens to normalize over, see :mod:`.policy.sampling_mask`, including every target;
            None for the whole vocabulary.
        batch_invariant: True for the bits of :func:`logprobs_of`, which Triton kernels do not give.

    Returns:
        Log-probabilities and entropies in nats, each of shape [A].
    """
    options = temperature, soft_cap, sampling_mask, None, None, torch.is_grad_enabled()
    kernels = None if batch_invariant else kernels_for(hidden, weight)
    return _Head.apply(hidden, weight, bias, targets, *options, kernels)[:2]


def token_logprobs_and_kl(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " A"],
    *,
    top_ids: Int[Tensor, "A K"],
    top_logprobs: Float[Tensor, "A K"],
    temperature: float = 1.0,
    soft_cap: float | None = None,
    sampling_mask: UInt8[Tensor, "A V8"] | None = None,
) -> tuple[Float[Tensor, " A"], Float[Tensor, " A"], Float[Tensor, " A"]]:
    r"""Return :func:`token_logprobs`, and the KL of another distribution from this one.

    .. math::
        \operatorname{KL} = \sum_{v \in K} q_v \log \frac{q_v}{p_v} + (1 - Q) \log \frac{1 - Q}{1 - P}, \qquad
        Q = \sum_{v \in K} q_v, \quad P = \sum_{v \in K} p_v

    over the k likeliest tokens K of q and all others together, so it is at most the KL over the vocabulary, and equal
    to it if K is the vocabulary. It is differentiable by p.

    Args as for :func:`token_logprobs`, and:
        top_ids: Likeliest tokens of q, different ones, [A, k].
        top_logprobs: Their log-probabilities under q; -inf for impossible ones.
    """
    options = temperature, soft_cap, sampling_mask, top_ids, top_logprobs, torch.is_grad_enabled()
    return _Head.apply(hidden, weight, bias, targets, *options, None)


@torch.no_grad()
def sum_of_squares(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    sampling_mask: UInt8[Tensor, "A V8"] | None = None,
) -> Float[Tensor, " A"]:
    r"""Return the sum of the squared probabilities of the vocabulary, :math:`\sum_v \pi(v)^2`, without gradient.

    Args as for :func:`token_logprobs`.
    """
    sums, operand = hidden.new_empty(len(hidden), dtype=exact_dtype(weight)), weight.to(_operand_dtype(hidden, weight))
    with torch.autocast(hidden.device.type, enabled=False):
        for part, logits in _chunks(hidden, operand, bias, temperature, soft_cap, sampling_mask):
            for block, scores in _blocks(part, logits):
                sums[block] = scores.softmax(-1).square_().sum(-1)
    return sums


@torch.no_grad()
def head_logits(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    *,
    soft_cap: float | None,
) -> Float[Tensor, "A V"]:
    """Return the logits that :func:`token_logprobs` computes, before the temperature; args as there."""
    operand = weight.to(_operand_dtype(hidden, weight))
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.cat([logits.clone() for _, logits in _chunks(hidden, operand, bias, 1.0, soft_cap, None)])


def logprobs_of(logits: Float[Tensor, "A V"]) -> Float[Tensor, "A V"]:
    """Return the log-probabilities of the vocabulary with the rounding of :func:`token_logprobs`."""
    scores, _, _, total = _subtract_largest(logits, torch.empty_like(logits))
    return scores.sub_(total.log()[:, None])


@contextmanager
def exact_logits(head: nn.Module | None) -> Iterator[None]:
    """Make a head return logits as training computes them: never rounded to the precision of the run.

    Its weight must not change inside, because it is cast once.

    Args:
        head: Head of a causal language model; only a plain linear layer is changed.
    """
    if type(head) is not nn.Linear:
        yield
        return
    layer: Any = head
    operand: Tensor | None = None

    def forward(hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        nonlocal operand
        operand = head.weight.to(_operand_dtype(hidden, head.weight)) if operand is None else operand
        exact, rows = exact_dtype(operand), hidden.to(operand.dtype)
        bias = None if layer.bias is None else layer.bias.to(exact)
        with torch.autocast(hidden.device.type, enabled=False):
            if operand.dtype == exact:
                return nn.functional.linear(rows, operand, bias)
            logits = torch.mm(rows.flatten(0, -2), operand.t(), out_dtype=exact).unflatten(0, rows.shape[:-1])
            return logits if bias is None else logits + bias

    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def logprob_tolerance(dtype: torch.dtype, *, exact: bool = True, model: PreTrainedModel | None = None) -> float:
    """Return the mean difference in nats that two computations of log-probabilities may have.

    Args:
        dtype: Dtype of the weights.
        exact: False under autocast.
        model: Model that runs in both; None if two programs compute. On a CPU a dense one only sums float32 in another
            order.
    """
    known = {torch.float64: 1e-6, torch.float32: 2e-3}
    if model is not None and model.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
        known[torch.float32] = 2e-3 if modules_behind(model, "router_logits") else 1e-4  # a tie may have other experts
    return known.get(dtype, 0.1) if exact else 0.1


def chunk_elements(device: torch.device) -> int:
    """Return the number of logits per chunk on a device: constant per kind of device, so that reruns round equally."""
    if device.type != "cuda":
        return CPU_CHUNK
    return chunk_of(torch.cuda.get_device_properties(device).total_memory)


def chunk_of(memory: int) -> int:
    """Return the number of logits per chunk on an accelerator with ``memory`` bytes."""
    return 2 ** ((memory // (4 * DEVICE_SHARE)).bit_length() - 1)


def kept_chunks(device: torch.device) -> int:
    """Return the maximum number of chunks whose logits a forward with gradient keeps for its backward on a device."""
    return DEVICE_KEPT if device.type == "cuda" else CPU_KEPT


def exact_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of logits and everything computed from them: float32, or float64 for float64 parameters."""
    return torch.promote_types(weight.dtype, torch.float32)


def kernels_for(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the Triton kernels for the logits of a head: on a GPU, in float32, where they compile; otherwise None."""
    return _compiled_kernels() if hidden.is_cuda and exact_dtype(weight) == torch.float32 else None


@cache
def _compiled_kernels() -> ModuleType | None:
    """Return the Triton kernels if this process has a GPU, on which they compile and compute as plain operations do."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return None
    try:
        from lightning_rl.policy import head_kernels as kernels

        difference = _largest_difference(kernels, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # noqa: BLE001  of Triton's compiler: it needs a C compiler and ptxas
        obstacle = f"{type(error).__name__}: {error}"
    else:
        if difference <= KERNEL_TOLERANCE:
            return kernels
        obstacle = f"a difference of {difference:.2g}"
    rank_zero_warn(
        f"expected Triton kernels of the vocabulary head that compute as torch does, got {obstacle}: the head is "
        "computed by plain operations, which take longer. Triton needs a C compiler (CC) and ptxas (TRITON_PTXAS_PATH)"
    )
    return None


def _largest_difference(kernels: ModuleType, device: torch.device) -> float:
    """Return the largest difference of outputs and gradients of a small head with and without kernels."""
    results, draw = list[Tensor](), torch.Generator().manual_seed(0)
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        leaves = [torch.randn(size, 4, generator=draw).to(device).requires_grad_() for size in (8, 5003)]
        options = None, torch.arange(8, device=device), 1.0, 4.0, None, None, None, True
        for used in (None, kernels):
            logprobs, entropy, _ = _Head.apply(*leaves, *options, used)
            grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), leaves)
            results.append(torch.cat([result.detach().flatten() for result in (logprobs, entropy, *grads)]))
    return float((results[0] - results[1]).abs().max())


class _Head(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        soft_cap: float | None,
        sampling_mask: Tensor | None,
        top_ids: Tensor | None,
        top_logprobs: Tensor | None,
        grad_enabled: bool,
        kernels: ModuleType | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logprobs, entropy, normalizer = hidden.new_empty(3, len(hidden), dtype=exact_dtype(weight)).unbind()
        other = None if top_ids is None or top_logprobs is None else _Other.of(top_ids, top_logprobs, logprobs)
        operand, (by_hidden, by_weight, by_bias, *_) = weight.to(_operand_dtype(hidden, weight)), ctx.needs_input_grad
        frozen = by_hidden and not (by_weight or by_bias) and other is None
        unit = torch.ones_like(logprobs) if frozen else None  # rates: d logprob / d hidden
        rates = hidden.new_empty(hidden.shape, dtype=operand.dtype) if frozen else None
        kept, keeps = list[Tensor](), grad_enabled and any(ctx.needs_input_grad) and not frozen
        separate, cap = kept_chunks(hidden.device) if keeps else 0, None if soft_cap is None else soft_cap / temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _chunks(hidden, operand, bias, temperature, soft_cap, sampling_mask, separate=separate):
                keep = len(kept) < separate
                kept += [logits] * keep
                if kernels is not None:
                    kernels.score_rows(logits, targets[part], logprobs[part], entropy[part], normalizer[part])
                    if unit is not None:
                        factors = {"by_logprob": unit[part], "by_entropy": None, "cap": cap}
                        kernels.write_gradient(logits, targets[part], normalizer[part], entropy[part], **factors)
                for block, raw in _blocks(part, logits) if kernels is None else ():
                    slope = None if unit is None or cap is None else _cap_slope(raw, cap)
                    scores, largest, weights, total = _subtract_largest(raw, torch.empty_like(raw) if keep else raw)
                    shift = total.log()
                    torch.add(largest[:, 0], shift, out=normalizer[block])
                    torch.sub(scores.gather(1, targets[block, None])[:, 0], shift, out=logprobs[block])
                    if other is not None:
                        other.compare(block, scores, weights, total)
                    torch.sub(shift, weights.mul_(scores).sum(-1) / total, out=entropy[block])
                    if unit is not None:
                        torch.sub(scores, shift[:, None], out=raw)
                        _logit_gradient(raw, targets[block], unit[block], entropy[block], None)
                        if slope is not None:
                            raw *= slope
                if rates is not None:
                    rates[part] = torch.mm(logits.to(operand.dtype), operand)
        saved = hidden, weight, bias, targets, normalizer, entropy, sampling_mask, rates
        ctx.save_for_backward(*saved, *((None,) * len(_Other._fields) if other is None else other))
        ctx.temperature, ctx.soft_cap, ctx.operand_dtype = temperature, soft_cap, operand.dtype
        ctx.kept, ctx.kernels, ctx.cap = kept, kernels, cap
        ctx.set_materialize_grads(False)
        return logprobs, entropy, None if other is None else other.kl

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        hidden, weight, bias, targets, normalizer, entropy, sampling_mask, rates, *saved = ctx.saved_tensors
        exact, other = exact_dtype(weight), _Other(*saved)
        by_logprob, by_entropy, by_kl = (None if grad is None else grad.to(exact) / ctx.temperature for grad in grads)
        slopes = torch.zeros_like(entropy) if by_logprob is None else by_logprob
        if rates is not None and by_entropy is None:
            return (rates * slopes[:, None]).to(hidden.dtype), *[None] * 10
        operand = weight.to(ctx.operand_dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, []  # overwritten below, so a second backward computes all logits again
        options = ctx.temperature, ctx.soft_cap, sampling_mask
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in _chunks(hidden, operand, bias, *options, kept=kept):
                if ctx.kernels is not None:
                    by_spread = None if by_entropy is None else by_entropy[part]
                    factors = {"by_logprob": slopes[part], "by_entropy": by_spread, "cap": ctx.cap}
                    ctx.kernels.write_gradient(logits, targets[part], normalizer[part], entropy[part], **factors)
                for block, scores in _blocks(part, logits) if ctx.kernels is None else ():
                    slope = None if ctx.cap is None else _cap_slope(scores, ctx.cap)
                    scores -= normalizer[block, None]
                    by_spread = None if by_entropy is None else by_entropy[block]
                    added = None if by_kl is None else other.logit_gradient(block, scores, by_kl[block])
                    _logit_gradient(scores, targets[block], slopes[block], entropy[block], by_spread)
                    if added is not None:
                        scores += added
                    if slope is not None:
                        scores *= slope
                grad = logits.to(operand.dtype)
                grad_hidden[part] = _product(grad, operand, exact)
                if grad_weight is not None:
                    _add_product(grad_weight, grad.t(), hidden[part].to(operand.dtype))
                if grad_bias is not None:
                    grad_bias += logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 8,
        )


class _Other(NamedTuple):
    """Another distribution before each target, and what its KL from the policy needs again in the backward.

    Attributes:
        ids: Its likeliest tokens, [A, k].
        logprobs: Their log-probabilities.
        kl: KL from the policy, [A].
        rest: Probability of all other tokens; 0 if the policy has no other token.
        tail: Probability of all other tokens under the policy, above 0.
    """

    ids: Tensor
    logprobs: Tensor
    kl: Tensor
    rest: Tensor
    tail: Tensor

    @staticmethod
    def of(ids: Tensor, logprobs: Tensor, like: Tensor) -> "_Other":
        """Return the distribution of some tokens; the tensors of the comparison have the dtype of ``like``."""
        logprobs = logprobs.to(like.dtype)
        rest = (1 - logprobs.exp().sum(-1)).clamp(min=0)
        return _Other(ids.long(), logprobs, torch.zeros_like(like), rest, torch.ones_like(like))

    def compare(self, block: slice, scores: Tensor, weights: Tensor, total: Tensor) -> None:
        """Compute the KL of some tokens from logits, their exponentials and the sums of these."""
        ids, logprobs = self.ids[block], self.logprobs[block]
        tail = weights.scatter(1, ids, 0.0).sum(-1) / total
        rest = torch.where(tail > 0, self.rest[block], 0.0)
        of_rest = torch.where(tail > 0, _divergence(rest.log(), tail.log()), 0.0)
        own = scores.gather(1, ids) - total.log()[:, None]
        self.rest[block], self.tail[block] = rest, torch.where(tail > 0, tail, 1.0)
        self.kl[block] = _divergence(logprobs, own).sum(-1) + of_rest

    def logit_gradient(self, block: slice, scores: Tensor, by_kl: Tensor) -> Tensor:
        """Return the gradient of the logits from the policy's log-probabilities of the vocabulary.

        It is the policy minus the other distribution, in which all other tokens share the rest as under the policy.
        """
        ids, probabilities, rest = self.ids[block], self.logprobs[block].exp(), self.rest[block]
        mass = probabilities.sum(-1) + rest
        policy = scores.exp()
        of_top = policy.gather(1, ids) * mass[:, None] - probabilities
        policy *= (mass - rest / self.tail[block])[:, None]
        return policy.scatter_(1, ids, of_top).mul_(by_kl[:, None])


def _divergence(logprobs: Tensor, own: Tensor) -> Tensor:
    r"""Return :math:`q\log(q/p) + p - q` of each event, of which the sum over all events is the KL of q from p.

    Each is at least 0, and exactly 0 for equal probabilities, so rounding does not add up over a vocabulary.
    """
    gap, probabilities = own - logprobs, logprobs.exp()
    far = own.exp() - probabilities - torch.where(probabilities > 0, probabilities * gap, 0.0)
    return torch.where(gap.abs() < 1, probabilities * (gap.expm1() - gap), far)


def _subtract_largest(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits less the largest of their row, in ``scores``; the largest, the exponentials, and their sum."""
    torch.sub(logits, largest := logits.amax(-1, keepdim=True), out=scores)
    weights = scores.exp()
    return scores, largest, weights, weights.sum(-1)


def _operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the operands of a matrix product; on a GPU that of the layers.

    Under autocast the last hidden states are float32, as are norms and the residual stream.
    """
    if not hidden.is_cuda:
        return exact_dtype(weight)
    autocast = torch.is_autocast_enabled("cuda") and hidden.dtype != torch.float64
    return torch.get_autocast_dtype("cuda") if autocast else hidden.dtype


def _chunks(
    hidden: Tensor,
    operand: Tensor,
    bias: Tensor | None,
    temperature: float,
    soft_cap: float | None,
    sampling_mask: Tensor | None,
    *,
    separate: int = 0,
    kept: list[Tensor] | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of consecutive tokens: ``separate`` chunks in separate memory, the others in one buffer.

    Those of the first chunks are taken out of ``kept`` instead of computed, as far as it has any.
    """
    exact, size = exact_dtype(operand), _chunk_rows(hidden.device, len(operand))
    buffer = None
    for number, start in enumerate(range(0, len(hidden), size)):
        part = slice(start, start + size)
        if kept:
            yield part, kept.pop(0)
            continue
        rows = hidden[part].to(operand.dtype)
        if buffer is None or number <= separate:
            buffer = hidden.new_empty(len(rows), len(operand), dtype=exact)
        logits = buffer[: len(rows)]
        if operand.dtype == exact:
            torch.mm(rows, operand.t(), out=logits)
        else:
            torch.mm(rows, operand.t(), out_dtype=exact, out=logits)
        if bias is not None:
            logits += bias
        if soft_cap is not None:
            logits.div_(soft_cap).tanh_().mul_(soft_cap)
        if temperature != 1:
            logits /= temperature
        if sampling_mask is not None:
            for block, scores in _blocks(part, logits):
                scores.masked_fill_(~from_bits(sampling_mask[block], len(operand)), FILTERED)
        yield part, logits


def _chunk_rows(device: torch.device, vocabulary: int) -> int:
    return max(16, chunk_elements(device) // vocabulary)


def _blocks(part: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of a chunk with their indices among all tokens."""
    blocks = DEVICE_BLOCKS if logits.is_cuda else CPU_BLOCKS
    size = -(-_chunk_rows(logits.device, logits.shape[1]) // blocks)
    for start in range(0, len(logits), size):
        yield slice(part.start + start, part.start + min(start + size, len(logits))), logits[start : start + size]


def _logit_gradient(
    scores: Tensor,
    targets: Tensor,
    slopes: Tensor,
    entropy: Tensor,
    by_entropy: Tensor | None,
) -> None:
    """Overwrite log-probabilities of the vocabulary with the gradient of the capped logits."""
    if by_entropy is None:
        scores.exp_().mul_(-slopes[:, None])
    else:  # dH/dz = -p (log p + H)
        factor = (scores + entropy[:, None]).mul_(-by_entropy[:, None]).sub_(slopes[:, None])
        scores.exp_().mul_(factor)
    scores.scatter_add_(1, targets[:, None], slopes[:, None])


def _cap_slope(scores: Tensor, cap: float) -> Tensor:
    """Return the derivative of capped logits by uncapped ones; 0 for filtered tokens."""
    return scores.div(cap).square_().neg_().add_(1).clamp_(min=0)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix product that is not rounded to the dtype of its operands."""
    return torch.mm(left, right) if left.dtype == dtype else torch.mm(left, right, out_dtype=dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a sum without rounding to the dtype of the operands."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right, total.dtype)
