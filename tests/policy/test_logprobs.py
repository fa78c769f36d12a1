"""The chunked head against log_softmax and gather: values, gradients, chunks, precisions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.other_device import OTHER, other_device
from kit.support import tiny_model
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_rl.policy import logprobs as head
from lightning_rl.policy.logprobs import (
    chunk_elements,
    exact_logits,
    logprobs_of,
    sum_of_squares,
    token_logprobs,
    token_logprobs_and_kl,
)
from lightning_rl.policy.sampling_mask import to_bits

exactly = torch.testing.assert_close
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
temperatures = pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
biased = pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])


def inputs(
    tokens: int = 40, *, dtype: torch.dtype = torch.float64, with_bias: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    hidden = (torch.randn(tokens, 6, generator=draw, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = torch.randn(11, 6, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(11, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() if with_bias else None
    return hidden, weight, bias, torch.randint(11, (tokens,), generator=draw)


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    logits = logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], of: list[Tensor]) -> tuple[Tensor, ...]:
    logprobs, entropy = outputs
    slopes = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    return torch.autograd.grad((logprobs * slopes).sum() + (entropy * slopes.flip(0)).sum(), of)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK", 1)  # the smallest chunk is 16 tokens, of one token the smallest block


@precisions
@temperatures
@biased
@pytest.mark.parametrize("soft_cap", [None, 0.5, 4.0])
def test_equals_log_softmax_with_its_entropy_and_squares(
    dtype: torch.dtype, temperature: float, with_bias: bool, soft_cap: float | None
) -> None:
    hidden, weight, bias, targets = given = inputs(dtype=dtype, with_bias=with_bias)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    options: dict[str, Any] = {"temperature": temperature, "soft_cap": soft_cap}
    found, expected = token_logprobs(*given, **options), plain(*given, **options)
    assert found[0].dtype == found[1].dtype == dtype
    exactly(found, expected, rtol=0, atol=tolerance)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    exactly(gradients(found, leaves), gradients(expected, leaves), rtol=0, atol=10 * tolerance)
    frozen = token_logprobs(hidden, weight.detach(), None if bias is None else bias.detach(), targets, **options)
    theirs = plain(*given, **options)
    alone = [torch.autograd.grad(each[0].sum(), hidden, retain_graph=True) for each in (frozen, theirs)]
    exactly(alone[0], alone[1], rtol=0, atol=10 * tolerance)  # log-probabilities alone have a path of two products
    exactly(gradients(frozen, [hidden]), gradients(theirs, [hidden]), rtol=0, atol=10 * tolerance)
    every = torch.arange(len(weight)).repeat(len(hidden))
    scores, _ = plain(hidden.repeat_interleave(len(weight), 0), weight, bias, every, **options)
    squares = sum_of_squares(hidden, weight, bias, **options)
    assert squares.dtype == dtype and not squares.requires_grad
    exactly(squares, scores.detach().view(len(hidden), -1).exp().square().sum(-1), rtol=0, atol=tolerance)


@pytest.mark.nightly
@temperatures
@biased
@pytest.mark.parametrize("outputs", [slice(1), slice(1, 2), slice(2)], ids=["logprobs", "entropy", "both"])
def test_gradcheck_over_several_chunks(
    temperature: float, with_bias: bool, outputs: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    hidden, weight, bias, targets = inputs(18, with_bias=with_bias)

    def some(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return token_logprobs(hidden, weight, bias, targets, temperature=temperature)[outputs]

    assert torch.autograd.gradcheck(some, (hidden, weight) if bias is None else (hidden, weight, bias))


@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 40])
def test_chunks_change_nothing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(tokens)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    whole = token_logprobs(*given, temperature=0.7)
    whole_gradients = gradients(whole, leaves)
    small_chunks(monkeypatch)
    cut = token_logprobs(*given, temperature=0.7)
    exactly(cut, whole, rtol=0, atol=1e-14)
    exactly(gradients(cut, leaves), whole_gradients, rtol=0, atol=1e-13)


class LargeTensors(TorchDispatchMode):
    """Gathers the number of elements of every large storage that operations make."""

    def __init__(self, above: int) -> None:
        super().__init__()
        self.above, self.sizes = above, dict[int, int]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                number = storage.nbytes() // tensor.element_size()
                if number > self.above:
                    self.sizes[storage.data_ptr()] = number
        return made


@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("kept", [0, 2, 8])
def test_kept_chunks_and_one_buffer_hold_all_logits_and_nothing_else_is_large(
    kept: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK", 32 * 1000)
    monkeypatch.setattr(head, "CPU_KEPT", kept)
    hidden, weight = torch.randn(160, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    targets, everything = torch.zeros(160, dtype=torch.int64), to_bits(torch.ones(160, 1000, dtype=torch.bool))
    with torch.no_grad(), LargeTensors(above=25_000) as scoring:
        token_logprobs(hidden, weight, None, targets, sampling_mask=everything)
    with LargeTensors(above=25_000) as forward:
        outputs = token_logprobs(hidden, weight, None, targets, sampling_mask=everything)
    loss = outputs[0].sum() + (outputs[1].sum() if entropy else 0)
    with LargeTensors(above=25_000) as backward:
        loss.backward()
    assert len(scoring.sizes) == 1
    assert list(forward.sizes.values()) == [32 * 1000] * min(kept + 1, 5)
    assert set(backward.sizes.values()) == {32 * 1000} and len(backward.sizes) <= len(forward.sizes)


def repeated_gradients(*, top: bool, **options: Any) -> list[Tensor]:
    """Outputs, and the gradients of two backwards through one forward."""
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    assert bias is not None
    ids = torch.arange(3).expand(40, 3)
    other = {"top_ids": ids, "top_logprobs": torch.full(ids.shape, -2.0)}
    score = partial(token_logprobs_and_kl, **other) if top else token_logprobs
    outputs = score(hidden, weight, bias, targets, temperature=0.7, **options)
    slopes = torch.linspace(-1, 2, 40)
    loss = torch.stack([(number + slopes) @ output for number, output in enumerate(outputs)]).sum()
    leaves = [hidden, weight, bias]
    return [*outputs, *(grad for _ in range(2) for grad in torch.autograd.grad(loss, leaves, retain_graph=True))]


@pytest.mark.parametrize("soft_cap", [None, 4.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top", [False, True])
def test_kept_logits_change_no_bit(
    soft_cap: float | None, masked: bool, top: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    options = {"soft_cap": soft_cap, "sampling_mask": to_bits(filtered()[1]) if masked else None}
    with ProductCount() as products:
        found = repeated_gradients(top=top, **options)
    assert products.number == 3 * (3 + 3)  # per chunk: three with its logits kept, three in the second backward
    for kept in (0, 2):
        monkeypatch.setattr(head, "CPU_KEPT", kept)
        for one, other in zip(repeated_gradients(top=top, **options), found, strict=True):
            assert torch.equal(one, other)


def test_a_weight_is_cast_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    hidden, weight, bias, targets = inputs(100, dtype=torch.float32)
    halves = [None if leaf is None else leaf.detach().bfloat16().requires_grad_() for leaf in (hidden, weight, bias)]
    assert halves[0] is not None and halves[1] is not None
    casts: list[torch.Size] = []
    cast = Tensor.to

    def watched(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        casts.extend([tensor.shape] if tensor is halves[1] else [])
        return cast(tensor, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", watched)
    token_logprobs(halves[0], halves[1], halves[2], targets)[0].sum().backward()
    assert casts == [weight.shape] * 2  # in the forward and in the backward


def test_the_gradient_of_a_half_precision_weight_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    hidden, weight, _, targets = inputs(400, dtype=torch.float32, with_bias=False)
    half = weight.detach().bfloat16().requires_grad_()
    exact = half.detach().float().requires_grad_()
    states = hidden.detach().bfloat16()
    token_logprobs(states, half, None, targets)[0].sum().backward()
    token_logprobs(states.float(), exact, None, targets)[0].sum().backward()
    assert half.grad is not None and exact.grad is not None
    exactly(half.grad, exact.grad.bfloat16(), rtol=0, atol=0)


def test_the_chunk_of_a_device_is_a_constant_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk_elements(torch.device("cpu")) == 2**25
    for gigabytes, elements in ((16, 2**26), (24, 2**26), (80, 2**28), (141, 2**29)):
        device = SimpleNamespace(total_memory=gigabytes * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, device=device: device)
        assert chunk_elements(torch.device("cuda", 0)) == elements
        assert 4 * elements * 64 <= device.total_memory < 8 * elements * 64


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (func.is_view or func.overloadpacket.__name__.startswith(("empty", "new_empty", "detach")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize(("kernels", "most"), [(False, 1200), (True, 60)], ids=["plain", "kernels"])
def test_on_a_gpu_a_large_chunk_takes_few_launches(
    kernels: bool, most: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12,285 tokens of 7 chunks, as with a vocabulary of 151,936 on 80 GB, where 64 blocks a chunk took 9,100."""
    stand_ins = dict.fromkeys(("score_rows", "write_gradient"), lambda logits, *_, **__: logits.neg_())  # a launch each
    monkeypatch.setattr(head, "kernels_for", lambda *_: SimpleNamespace(**stand_ins) if kernels else None)
    device = SimpleNamespace(total_memory=4 * 64 * 2**14)
    hidden, weight, targets = torch.randn(12_285, 4), torch.randn(9, 4), torch.zeros(12_285, dtype=torch.int64)
    with other_device(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        leaves = [leaf.to(OTHER).requires_grad_() for leaf in (hidden, weight)]
        targets = targets.to(OTHER)
        with Launches() as launches:
            found = token_logprobs(leaves[0], leaves[1], None, targets)
            torch.autograd.grad(found[0].sum() + (found[1].sum() if entropy else 0), leaves)
    assert launches.number <= most


@biased
def test_no_tokens_give_zero_gradients_and_not_none(with_bias: bool) -> None:
    hidden, weight, bias, targets = inputs(0, with_bias=with_bias)
    logprobs, entropy = token_logprobs(hidden, weight, bias, targets)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for leaf in (hidden, weight, bias):
        assert leaf is None or (leaf.grad is not None and not leaf.grad.any())


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [
        pytest.param(torch.bfloat16, torch.bfloat16, id="bf16-true"),
        pytest.param(torch.bfloat16, torch.float32, id="bf16-mixed"),
    ],
)
def test_half_precision_rounds_the_inputs_only(hidden_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = inputs(40, dtype=torch.float32)
    assert bias is not None
    leaves = [part.detach().to(dtype) for part, dtype in ((hidden, hidden_dtype), (weight, weight_dtype))]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, bias.detach().to(weight_dtype))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = token_logprobs(leaves[0], leaves[1], leaves[2], targets, temperature=0.7)
    expected = plain(exact[0], exact[1], exact[2], targets, temperature=0.7)
    assert found[0].dtype == found[1].dtype == torch.float32
    exactly([part.double() for part in found], list(expected), rtol=0, atol=1e-5)
    for mine, theirs, leaf in zip(gradients(found, leaves), gradients(expected, exact), leaves, strict=True):
        assert mine.dtype == leaf.dtype
        exactly(
            mine.double(), theirs, rtol=0, atol=1e-4 if leaf.dtype == torch.float32 else 0.01 * float(theirs.norm())
        )


def test_autocast_does_not_reach_the_head() -> None:
    hidden, weight, bias, targets = inputs(40, dtype=torch.float32)
    assert bias is not None
    outside = token_logprobs(hidden, weight, bias, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = token_logprobs(hidden, weight, bias, targets)
        inside_gradients = gradients(inside, [hidden, weight, bias])  # the backward may run inside as well
    exactly(inside, outside, rtol=0, atol=0)
    exactly(inside_gradients, gradients(outside, [hidden, weight, bias]), rtol=0, atol=0)


def test_large_logits_neither_overflow_nor_lose_their_gradient() -> None:
    given = inputs(20, dtype=torch.float32, with_bias=False, scale=300.0)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    found = token_logprobs(*given)
    assert torch.isfinite(found[0]).all() and torch.isfinite(found[1]).all() and (found[1] >= -1e-6).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(found, leaves))


class ProductCount(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "mm" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trains_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_frozen_head_needs_two_products_for_the_gradient_of_log_probabilities(
    dtype: torch.dtype, trains_entropy: bool
) -> None:
    hidden, weight, bias, targets = (None if part is None else part.detach() for part in inputs(40))
    assert hidden is not None and weight is not None and bias is not None and targets is not None
    leaf, exact = hidden.to(dtype).requires_grad_(), hidden.to(dtype).double().requires_grad_()
    weight, bias, slopes = weight.to(dtype), bias.to(dtype), torch.linspace(-1, 2, 40, dtype=torch.float64)
    with ProductCount() as products:
        logprobs, entropy = token_logprobs(leaf, weight, bias, targets, temperature=0.7)
        loss = (logprobs * slopes).sum() + (entropy.sum() if trains_entropy else 0)
        (found,) = torch.autograd.grad(loss, leaf)
    expected, spread = plain(exact, weight.double(), bias.double(), targets, temperature=0.7)
    total = (expected * slopes).sum() + (spread.sum() if trains_entropy else 0)
    (gradient,) = torch.autograd.grad(total, exact)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.01 * float(gradient.norm())}[dtype]
    exactly(found.double(), gradient, rtol=0, atol=tolerance)
    assert products.number == (4 if trains_entropy else 2)


def test_confident_tokens_keep_their_gradient_under_a_frozen_head() -> None:
    hidden, weight, _, targets = inputs(40, dtype=torch.float32, with_bias=False, scale=4.0)
    exact = hidden.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(token_logprobs(hidden, weight.detach(), None, targets)[0].sum(), hidden)
    (expected,) = torch.autograd.grad(plain(exact, weight.detach().double(), None, targets)[0].sum(), exact)
    exactly(found.double(), expected, rtol=0, atol=1e-5)


def filtered(tokens: int = 40) -> tuple[Tensor, Tensor]:
    """Hidden states and more as of :func:`inputs`, and a random set of tokens around each target."""
    targets = inputs(tokens)[3]
    kept = torch.rand(tokens, 11, generator=torch.Generator().manual_seed(3)) > 0.6
    return targets, kept.scatter(1, targets[:, None], value=True)


def plain_filtered(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
    scores = ((hidden @ weight.t() + bias) / 0.7).masked_fill(~kept, -torch.inf).log_softmax(-1)
    finite = torch.where(kept, scores, 0.0)
    return scores.gather(1, targets[:, None])[:, 0], -(finite.exp() * finite * kept).sum(-1)


@pytest.mark.parametrize("tokens", [1, 40])
def test_kept_tokens_alone_are_normalised_over(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    hidden, weight, bias, targets = inputs(tokens)
    assert bias is not None
    _, kept = filtered(tokens)
    found = token_logprobs(hidden, weight, bias, targets, temperature=0.7, sampling_mask=to_bits(kept))
    expected = plain_filtered(hidden, weight, bias, targets, kept)
    exactly(found, expected, rtol=0, atol=1e-12)
    leaves = [hidden, weight, bias]
    exactly(gradients(found, leaves), gradients((expected[0], expected[1]), leaves), rtol=0, atol=1e-11)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_gradcheck_over_kept_tokens(soft_cap: float | None) -> None:
    hidden, weight, bias, targets = inputs(6)
    bits = to_bits(filtered(6)[1])

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"temperature": 0.7, "soft_cap": soft_cap, "sampling_mask": bits}
        return token_logprobs(leaves[0], leaves[1], leaves[2], targets, **options)

    assert bias is not None and torch.autograd.gradcheck(both, (hidden, weight, bias))


@precisions
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_what_is_left_out_may_be_anything(dtype: torch.dtype, soft_cap: float | None) -> None:
    hidden, weight, bias, targets = inputs(dtype=dtype)
    kept = torch.zeros(40, 11, dtype=torch.bool)
    kept[:, :3] = True
    targets = targets % 3
    assert bias is not None
    found = token_logprobs(hidden, weight, bias, targets, soft_cap=soft_cap, sampling_mask=to_bits(kept))
    exactly(found, token_logprobs(hidden, weight[:3], bias[:3], targets, soft_cap=soft_cap))
    *grads, of_bias = gradients(found, [hidden, weight, bias])
    assert not grads[1][3:].any() and not of_bias[3:].any() and all(grad.isfinite().all() for grad in grads)


def test_a_single_kept_token_is_certain() -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    alone = torch.zeros(40, 11, dtype=torch.bool).scatter(1, targets[:, None], value=True)
    logprobs, entropy = token_logprobs(hidden, weight, bias, targets, sampling_mask=to_bits(alone))
    assert not logprobs.any() and not entropy.any()
    assert not any(grad.any() for grad in gradients((logprobs, entropy), [hidden, weight]))


def test_all_tokens_kept_is_no_filter_bit_for_bit() -> None:
    given = inputs(dtype=torch.float32)
    everything = to_bits(torch.ones(40, 11, dtype=torch.bool))
    for found, expected in zip(token_logprobs(*given, sampling_mask=everything), token_logprobs(*given), strict=True):
        assert torch.equal(found, expected)


def test_the_sum_of_squared_probabilities_is_of_what_sampling_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    hidden, weight, bias, _ = inputs(20)
    assert bias is not None
    kept = torch.zeros(20, len(weight), dtype=torch.bool)
    kept[:, :3] = True
    found = sum_of_squares(hidden, weight, bias, sampling_mask=to_bits(kept))
    exactly((found,), (sum_of_squares(hidden, weight[:3], bias[:3]),))


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """The state of ``torch.autocast("cuda")``, which PyTorch refuses to enter without a GPU."""
    torch.set_autocast_enabled("cuda", enabled=True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", enabled=False)
        torch.set_autocast_dtype("cuda", torch.float16)  # the default of PyTorch


class Products(TorchDispatchMode):
    """Keeps the dtypes of operands and result of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self.dtypes.append((left.dtype, right.dtype, result.dtype))
        return result


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_under_autocast_a_gpu_rounds_operands_and_neither_logits_nor_sums(
    half: torch.dtype, weight_dtype: torch.dtype, frozen: bool
) -> None:
    hidden, weight, _, targets = inputs(40, dtype=torch.float32, with_bias=False)
    leaves = [hidden.detach(), weight.detach().to(weight_dtype)]
    with other_device():
        states, matrix = leaves[0].to(OTHER).requires_grad_(), leaves[1].to(OTHER).requires_grad_(not frozen)
        with cuda_autocast(half), Products() as products:
            found = token_logprobs(states, matrix, None, targets.to(OTHER), temperature=0.7)
            sums = sum_of_squares(states, matrix, None, temperature=0.7)
        with products:  # a backward need not be under autocast
            loss = (found[0] * torch.linspace(-1, 2, 40, device=OTHER)).sum()
            grads = torch.autograd.grad(loss, [states] if frozen else [states, matrix])
        outputs, grads = [part.detach().cpu() for part in (*found, sums)], [grad.cpu() for grad in grads]
    assert {product[:2] for product in products.dtypes} == {(half, half)}
    results = [product[2] for product in products.dtypes]
    assert results == [torch.float32, *([half] if frozen else []), *[torch.float32] * (1 if frozen else 3)]
    exact = [leaf.to(half).double().requires_grad_() for leaf in leaves]
    expected = plain(exact[0], exact[1], None, targets, temperature=0.7)
    squares = ((exact[0] @ exact[1].t()) / 0.7).softmax(-1).square().sum(-1)
    assert {part.dtype for part in outputs} == {torch.float32}
    exactly([part.double() for part in outputs], [*expected, squares], rtol=0, atol=1e-5)
    loss = (expected[0] * torch.linspace(-1, 2, 40)).sum()
    for mine, theirs, leaf in zip(grads, torch.autograd.grad(loss, exact), leaves, strict=not frozen):
        assert mine.dtype == leaf.dtype
        exactly(mine.double(), theirs, rtol=0, atol=4e-3 * float(theirs.norm()))  # gradients of logits are rounded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_autocast_a_gpu_multiplies_in_the_dtype_that_layers_return(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = inputs(40, dtype=dtype, with_bias=False)
    with other_device(), Products() as products:
        token_logprobs(hidden.detach().to(OTHER), weight.detach().to(OTHER), None, targets.to(OTHER))
    assert products.dtypes == [(dtype, dtype, torch.promote_types(dtype, torch.float32))]


def test_autocast_leaves_float64_as_it_is() -> None:
    hidden, weight, _, targets = inputs(40, with_bias=False)
    with other_device(), cuda_autocast(torch.bfloat16), Products() as products:
        token_logprobs(hidden.detach().to(OTHER), weight.detach().to(OTHER), None, targets.to(OTHER))
    assert products.dtypes == [(torch.float64,) * 3]


@biased
def test_a_head_is_called_exactly_inside_and_as_before_outside(*, with_bias: bool) -> None:
    layer = nn.Linear(8, 5, bias=with_bias, dtype=torch.bfloat16)
    hidden = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    exact = nn.functional.linear(hidden.float(), layer.weight.float(), layer.bias.float() if with_bias else None)
    rounded = layer(hidden)
    with exact_logits(layer), exact_logits(layer):
        assert torch.equal(layer(hidden), exact)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(hidden.float()), exact)
    assert torch.equal(layer(hidden), rounded) and rounded.dtype == torch.bfloat16 and "forward" not in vars(layer)
    other = nn.Sequential(layer)
    with exact_logits(other), exact_logits(None):
        assert torch.equal(other(hidden), rounded)


def test_on_a_gpu_products_of_half_precision_give_float32() -> None:
    with FakeTensorMode(), torch.no_grad():
        layer = nn.Linear(8, 5, device="meta")
        layer.weight = nn.Parameter(torch.empty(5, 8, dtype=torch.bfloat16, device="cuda"))
        layer.bias = nn.Parameter(torch.empty(5, dtype=torch.bfloat16, device="cuda"))
        with exact_logits(layer):
            logits = layer(torch.zeros(2, 3, 8, dtype=torch.bfloat16, device="cuda"))
    assert logits.is_cuda and logits.dtype == torch.float32 and logits.shape == (2, 3, 5)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("k", [1, 4, 10, 11])
def test_the_kl_of_another_distribution_and_all_gradients(k: int, soft_cap: float | None) -> None:
    """Over its k likeliest tokens and all others together, so at most that over the vocabulary."""
    draw = torch.Generator().manual_seed(0)
    shapes = (7, 5), (11, 5), (11,)
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    q = torch.randn(7, 11, generator=draw, dtype=torch.float64).log_softmax(-1)
    top, ids = q.topk(k)
    given: dict[str, Any] = {"top_ids": ids.int(), "top_logprobs": top, "temperature": 0.7, "soft_cap": soft_cap}
    targets = torch.randint(11, (7,), generator=draw)

    def scores(*leaves: Tensor) -> tuple[Tensor, ...]:
        hidden, weight, bias = leaves
        return token_logprobs_and_kl(hidden, weight, bias, targets, **given)

    hidden, weight, bias = leaves
    logits = hidden @ weight.t() + bias
    p = ((logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap) / 0.7).log_softmax(-1)
    rest, tail = 1 - top.exp().sum(-1), 1 - p.gather(1, ids).exp().sum(-1)
    expected = (top.exp() * (top - p.gather(1, ids))).sum(-1) + (rest * (rest / tail).log() if k < 11 else 0.0)
    logprobs, entropy, kl = scores(*leaves)
    torch.testing.assert_close(kl, expected)
    assert (kl <= (q.exp() * (q - p)).sum(-1) + 1e-12).all()
    plain = token_logprobs(hidden, weight, bias, targets, temperature=0.7, soft_cap=soft_cap)
    assert torch.equal(logprobs, plain[0]) and torch.equal(entropy, plain[1])
    assert torch.autograd.gradcheck(scores, leaves)
    assert torch.autograd.gradcheck(scores, [hidden, weight.detach(), bias.detach()])  # a head under adapters


def head_of(logprobs: Tensor) -> dict[str, Tensor]:
    """Return inputs of the head that give log-probabilities [A, V] as logits."""
    return {"hidden": torch.eye(len(logprobs), dtype=logprobs.dtype), "weight": logprobs.t().contiguous()}


def kl_of(own: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    targets = torch.zeros(len(own), dtype=torch.int64)
    given: dict[str, Any] = {**head_of(own), "top_ids": top_ids.int(), "top_logprobs": top_logprobs}
    return token_logprobs_and_kl(given.pop("hidden"), given.pop("weight"), None, targets, **given)[2]


@pytest.mark.parametrize("vocabulary", [11, 49_152])
def test_equal_distributions_have_a_kl_of_exactly_zero(vocabulary: int) -> None:
    logits = 4 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    own = logprobs_of(logits)
    same = torch.arange(vocabulary).expand_as(own)
    assert kl_of(logits, same, own).tolist() == [0.0] * 6
    order = own.argsort(-1)
    assert kl_of(logits, order, own.gather(1, order)).tolist() == [0.0] * 6
    top, ids = own.topk(5)
    assert float(kl_of(logits, ids, top).max()) < 1e-11  # the rest is a sum that rounds otherwise


@pytest.mark.parametrize("gap", [1e-5, 1e-3, 0.5, 3.0])
def test_a_small_kl_over_a_large_vocabulary_is_that_of_float64(gap: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(4, 49_152, generator=draw)
    other = logits + gap * torch.randn(4, 49_152, generator=draw)
    q, p = (part.double().log_softmax(-1) for part in (other, logits))
    kl = kl_of(logits, torch.arange(49_152).expand_as(other), other.log_softmax(-1))
    torch.testing.assert_close(kl.double(), (q.exp() * (q - p)).sum(-1), rtol=1e-3, atol=2e-11)


def test_the_kl_of_impossible_and_unlikely_tokens_is_finite_unless_it_is_infinite() -> None:
    inf = math.inf
    own = torch.tensor([[0.0, -200.0, -90.0, -inf], [0.0, -100.0, -1.0, -2.0]])
    other = torch.tensor([[-200.0, -95.0, -inf, 0.0], [-inf, -inf, 0.0, -inf]])
    expected = torch.tensor([inf, -float(own[1].log_softmax(-1)[2])])
    logits = own.clamp(min=-1e30)  # as a filter gives them
    assert_close = torch.testing.assert_close
    kl = kl_of(logits, torch.arange(4).expand_as(other), other)
    assert float(kl[0]) > 1e29
    assert_close(kl[1], expected[1])
    turned = kl_of(torch.tensor([[-200.0, 0.0]]), torch.tensor([[0, 1]]), torch.tensor([[0.0, -100.0]]))
    assert_close(turned, torch.tensor([200.0]))


def test_one_dense_model_on_a_cpu_differs_from_itself_by_float32_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, mixture = (tiny_model(family, dtype=torch.float32) for family in ("qwen3", "qwen3_moe"))
    assert [head.logprob_tolerance(torch.float32, model=each) for each in (dense, mixture, None)] == [1e-4, 2e-3, 2e-3]
    assert [head.logprob_tolerance(kind, model=dense) for kind in (torch.float64, torch.bfloat16)] == [1e-6, 0.1]
    assert head.logprob_tolerance(torch.float32, exact=False, model=dense) == 0.1
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert head.logprob_tolerance(torch.float32, model=dense) == 2e-3
