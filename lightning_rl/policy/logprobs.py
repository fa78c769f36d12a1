"""The vocabulary head: log-probability and entropy of given tokens, in chunks, without ever holding all logits."""

from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_rl.policy.sampling_mask import from_bits

CHUNK_ELEMENTS = 2**24  # logits held at once: 64 MiB in float32
FILTERED = -1e30  # logit of a token that could not be drawn: finite, so that 0 times it is 0


def token_logprobs(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " A"],
    *,
    temperature: float = 1.0,
    sampling_mask: UInt8[Tensor, "A V8"] | None = None,
) -> tuple[Float[Tensor, " A"], Float[Tensor, " A"]]:
    r"""Log-probability of each target and entropy of its distribution, :math:`\log\operatorname{softmax}(hW^T/\tau)`.

    Logits, softmax and their gradient are float32 (float64 for float64 parameters) whatever the precision of the run.
    They are computed chunk by chunk, and once more in the backward; both results carry gradient.

    Args:
        hidden: the last hidden state before each target, shape [A, H].
        weight: the head's matrix, shape [V, H].
        bias: the head's bias, shape [V], or None.
        targets: token ids, shape [A].
        temperature: what the logits are divided by, above 0.
        sampling_mask: bits of the tokens to normalize over, see :mod:`.policy.sampling_mask`, among them every target;
            the others take no part in value or gradient. None for the whole vocabulary.

    Returns:
        Log-probabilities and entropies in nats, each of shape [A].
    """
    return _Head.apply(hidden, weight, bias, targets, temperature, sampling_mask)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def sum_of_squares(
    hidden: Float[Tensor, "A H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    *,
    temperature: float = 1.0,
    sampling_mask: UInt8[Tensor, "A V8"] | None = None,
) -> Float[Tensor, " A"]:
    r"""Sum of the squared probabilities of the vocabulary, :math:`\sum_v \pi(v)^2`, without gradient.

    Args:
        hidden: the last hidden state before each target, shape [A, H].
        weight: the head's matrix, shape [V, H].
        bias: the head's bias, shape [V], or None.
        temperature: what the logits are divided by, above 0.
        sampling_mask: bits of the tokens to normalize over; None for the whole vocabulary.
    """
    sums = torch.empty(len(hidden), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in _chunks(hidden, weight):
            logits = _exclude(_logits(hidden[part], weight, bias, temperature), sampling_mask, part)
            sums[part] = logits.softmax(-1).square_().sum(-1)
    return sums


def logprob_tolerance(dtype: torch.dtype, *, exact: bool = True) -> float:
    """Nats by which two ways to compute a log-probability may differ, on average over tokens.

    Args:
        dtype: of the weights.
        exact: whether everything is computed in it, and not under autocast.
    """
    return {torch.float64: 1e-6, torch.float32: 2e-3}.get(dtype, 0.1) if exact else 0.1


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
        sampling_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(weight.dtype, torch.float32)
        logprobs, entropy, normalizer = (torch.empty(len(hidden), dtype=exact, device=hidden.device) for _ in range(3))
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(hidden, weight):
                logits = _exclude(_logits(hidden[part], weight, bias, temperature), sampling_mask, part)
                normalizer[part] = torch.logsumexp(logits, -1)
                logits -= normalizer[part, None]
                logprobs[part] = logits.gather(1, targets[part, None])[:, 0]
                entropy[part] = -torch.linalg.vecdot(logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, sampling_mask)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, normalizer, entropy, sampling_mask = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(hidden, weight):
                logits = _exclude(_logits(hidden[part], weight, bias, ctx.temperature), sampling_mask, part)
                logits -= normalizer[part, None]
                grad = _logit_gradient(logits, part, targets, entropy, grad_logprobs, grad_entropy)
                grad /= ctx.temperature
                _accumulate(grad, hidden[part], weight, grad_hidden[part], grad_weight)
                if grad_bias is not None:
                    grad_bias += grad.sum(0).to(grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logit_gradient(
    logits: Tensor,
    part: slice,
    targets: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Overwrites normalized ``logits`` with the gradient of the logits, before the division by the temperature."""
    slope = torch.zeros_like(entropy[part]) if grad_logprobs is None else grad_logprobs[part].to(logits.dtype)
    if grad_entropy is None:
        grad = logits.exp_().mul_(-slope[:, None])
    else:  # dH/dz = -p (log p + H)
        factor = (logits + entropy[part, None]).mul_(grad_entropy[part, None]).add_(slope[:, None])
        grad = logits.exp_().mul_(factor).neg_()
    return grad.scatter_add_(1, targets[part, None], slope[:, None])


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(16, CHUNK_ELEMENTS // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    exact = torch.promote_types(weight.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype != exact:  # half-precision operands, float32 results: no rounding of the logits
        logits = torch.mm(hidden, weight.to(hidden.dtype).t(), out_dtype=exact)
    else:
        logits = torch.mm(hidden.to(exact), weight.to(exact).t())
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def _exclude(logits: Tensor, sampling_mask: Tensor | None, part: slice) -> Tensor:
    if sampling_mask is None:
        return logits
    return logits.masked_fill_(~from_bits(sampling_mask[part], logits.shape[1]), FILTERED)


def _accumulate(grad: Tensor, hidden: Tensor, weight: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None) -> None:
    compute = hidden.dtype if hidden.is_cuda else grad.dtype
    grad = grad.to(compute)
    grad_hidden.copy_(torch.mm(grad, weight.to(compute)))
    if grad_weight is None:
        return
    if grad_weight.dtype == compute:
        grad_weight.addmm_(grad.t(), hidden.to(compute))
    else:
        grad_weight += torch.mm(grad.t(), hidden.to(compute)).to(grad_weight.dtype)
