"""Packed attention: every kernel against each sequence alone, the choice among them, and what is refused."""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kit.support import fit, ragged_rollout, tiny_model, tiny_module
from torch import Tensor
from torch.nn.attention import varlen

from lightning_rl.policy import PolicyModel, attention, pack
from lightning_rl.policy.attention import AUTO, KERNELS, Hardware, PackedSequences, attend, choose_attention

LENGTHS = ((1, 1), (5, 5), (5, 5), (2, 5), (2, 5), (3, 7))  # queries and keys
QUERIES, KEYS = (sum(numbers) for numbers in zip(*LENGTHS, strict=True))
NAMES = tuple(KERNELS)
TOLD = list[bool]()  # whether FlashAttention's packages were asked for a deterministic backward
exactly = torch.testing.assert_close


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    *, softmax_scale: float | None, causal: bool, window_size: tuple[int, int], deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """As its documentation has it: [N, H, D] tensors, int32 boundaries, a window that leaves the token itself out."""
    assert causal and window_size[1] in (-1, 0)
    TOLD.append(deterministic)
    return in_sequences(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale, window_size[0])


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """As its documentation has it: causal by a window that ends at the token."""
    assert window_size[1] == 0 and (enable_gqa or q.shape[1] == k.shape[1])
    return in_sequences(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, window_size[0])


def in_sequences(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    scale: float | None, before: int,
) -> Tensor:  # fmt: skip
    """Softmax of scores, sequence by sequence."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    mixed = []
    for (start, end), (first, last) in zip(*(itertools.pairwise(ends.tolist()) for ends in (cu_q, cu_k)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[first:last])
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(last - first)[last - first - (end - start) :, None] - torch.arange(last - first)
        seen = (distance >= 0) & ((distance <= before) | (before < 0))
        mixed.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[first:last]))
    return torch.cat(mixed)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace kernels that need a GPU by references, so that every name can be chosen."""
    for package in attention.PACKAGES:
        stand_in = ModuleType(package)
        stand_in.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, package, stand_in)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "hardware_of", lambda _: CPU)
    monkeypatch.setattr(attention, "choose_attention", lambda name, *_: name)


def sequences_for(name: str) -> PackedSequences:
    queries, keys = (
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32) for sizes in zip(*LENGTHS, strict=True)
    )
    return PackedSequences(LENGTHS, queries, keys, name)


def drawn(heads: int, shared: int) -> list[Tensor]:
    """Queries, keys and values of some tokens."""
    generator = torch.Generator().manual_seed(heads + shared)
    shapes = [(1, size, number, 8) for size, number in ((heads, QUERIES), (shared, KEYS), (shared, KEYS))]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def one_after_the_other(tensors: list[Tensor], scaling: float | None, window: int | None) -> Tensor:
    """Each sequence by itself, through a mask."""
    query, key, value = tensors
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    mixed, first, start = [], 0, 0
    for asked, length in LENGTHS:
        inside = slice(start, start + length)
        scores = query[:, :, first : first + asked] @ key[:, :, inside].transpose(2, 3)
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        place = torch.arange(length)
        behind = place[length - asked :, None] - place
        mask = (behind >= 0) & (behind < (length if window is None else window))
        mixed.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[:, :, inside])
        first, start = first + asked, start + length
    return torch.cat(mixed, 2).transpose(1, 2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("shared", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients_are_those_of_each_sequence_alone(
    name: str, window: int | None, shared: int, scaling: float | None
) -> None:
    tensors = query, key, value = drawn(4, shared)
    mixed = attend(query, key, value, sequences_for(name), scaling=scaling, window=window)
    expected = one_after_the_other(tensors, scaling, window)
    exactly(mixed, expected, rtol=0, atol=1e-12)
    slopes = torch.linspace(-1, 2, mixed.numel(), dtype=torch.float64).view_as(mixed)
    found, wanted = (torch.autograd.grad((result * slopes).sum(), tensors) for result in (mixed, expected))
    exactly(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
def test_no_token_sees_another_sequence_or_the_future(name: str) -> None:
    query, key, value = drawn(2, 2)
    mixed = attend(query, key, value, sequences_for(name))
    starts = itertools.accumulate((keys for _, keys in LENGTHS[:-1]), initial=0)
    seen = [
        (start, start + keys - asked + number)
        for start, (asked, keys) in zip(starts, LENGTHS, strict=True)
        for number in range(asked)
    ]
    for token, (start, end) in enumerate(seen):
        keys, values = torch.autograd.grad(mixed[0, token].sum(), (key, value), retain_graph=True)
        expected = [start <= place <= end for place in range(KEYS)]
        assert (values[0].abs().sum((0, 2)) > 0).tolist() == expected
        assert not keys[0].abs().sum((0, 2))[~torch.tensor(expected)].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_packages_follow_the_switch_of_pytorch(name: str, deterministic: bool) -> None:
    query, key, value = drawn(2, 2)
    torch.use_deterministic_algorithms(mode=deterministic)
    try:
        attend(query, key, value, sequences_for(name))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert TOLD[-1] is deterministic


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_a_policy_scores_the_same_through_every_kernel(name: str, family: str) -> None:
    rows, model = ragged_rollout(9, dtype=torch.float64), tiny_model(family)
    found = PolicyModel(model, None, temperature=0.7, packed=True, attention=name)(pack(rows)).logprobs
    expected = PolicyModel(model, None, temperature=0.7, packed=False)(pack(rows, packed=False)).logprobs
    exactly(found, expected, rtol=0, atol=1e-5 if family == "gemma3_text" else 1e-10)  # its norms are float32


def test_the_arguments_of_varlen_attn_are_those_of_torch() -> None:
    sizes = (4, QUERIES), (2, KEYS), (2, KEYS)
    query, key, value = (torch.empty(1, *size, 64, dtype=torch.bfloat16, device="meta") for size in sizes)
    ends = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    sequences = PackedSequences(LENGTHS, ends, ends)
    for window in (None, 3):
        assert KERNELS["varlen_attn"].attend(query, key, value, sequences, 0.5, window).shape == (1, QUERIES, 4, 64)


def gpu(major: int, *packages: str) -> Hardware:
    return Hardware(device="cuda", capability=(major, 0), packages=frozenset(packages))


CPU, BOTH = Hardware(device="cpu", packages=frozenset(attention.PACKAGES)), attention.PACKAGES
CHOICES = {
    "cpu": (CPU, torch.bfloat16, 64, "sdpa"),
    "a GPU of another maker": (Hardware(device="cuda"), torch.bfloat16, 64, "sdpa"),
    "before Ampere": (gpu(7, *BOTH), torch.float16, 64, "sdpa"),
    "float32": (gpu(9, *BOTH), torch.float32, 64, "sdpa"),
    "nothing installed": (gpu(9), torch.bfloat16, 64, "varlen_attn"),
    "float16": (gpu(8), torch.float16, 128, "varlen_attn"),
    "odd heads": (gpu(8), torch.bfloat16, 36, "sdpa"),
    "odd heads with the package": (gpu(8, "flash_attn"), torch.bfloat16, 36, "flash_attention_2"),
    "large heads": (gpu(9, *BOTH), torch.bfloat16, 512, "sdpa"),
    "Ampere with both": (gpu(8, *BOTH), torch.bfloat16, 128, "flash_attention_2"),
    "Ampere with 3 alone": (gpu(8, "flash_attn_interface"), torch.bfloat16, 128, "varlen_attn"),
    "Hopper with 2": (gpu(9, "flash_attn"), torch.bfloat16, 128, "flash_attention_2"),
    "Hopper with both": (gpu(9, *BOTH), torch.bfloat16, 128, "flash_attention_3"),
    "Blackwell with both": (gpu(10, *BOTH), torch.bfloat16, 128, "flash_attention_2"),
}


@pytest.mark.parametrize(("hardware", "dtype", "size", "expected"), CHOICES.values(), ids=CHOICES)
def test_auto_takes_the_fastest_that_can_run(hardware: Hardware, dtype: torch.dtype, size: int, expected: str) -> None:
    assert choose_attention(AUTO, hardware, dtype, frozenset((size,))) == expected
    assert choose_attention(expected, hardware, dtype, frozenset((size,))) == expected


def test_values_of_another_size_than_queries_go_through_sdpa() -> None:
    assert choose_attention(AUTO, gpu(9, *BOTH), torch.bfloat16, frozenset((192, 128))) == "sdpa"


REFUSALS = {
    "cpu": ("varlen_attn", CPU, torch.bfloat16, 64, "expected an NVIDIA GPU of capability 8.0.*got cpu"),
    "old": ("flash_attention_2", gpu(7, *BOTH), torch.bfloat16, 64, "capability 8.0.*got cuda of 7.0"),
    "package": ("flash_attention_3", gpu(9, "flash_attn"), torch.bfloat16, 64, "the package flash_attn_interface"),
    "dtype": ("varlen_attn", gpu(9), torch.float32, 64, r"bf16-mixed.*got torch\.float32"),
    "large": ("flash_attention_2", gpu(9, *BOTH), torch.bfloat16, 512, r"heads of one size up to 256.*got \[512\]"),
    "odd": ("varlen_attn", gpu(9), torch.bfloat16, 36, r"divisible by 8.*got \[36\]"),
}


@pytest.mark.parametrize(("name", "hardware", "dtype", "size", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_named_kernel_that_cannot_run_is_refused_with_the_cure(
    name: str, hardware: Hardware, dtype: torch.dtype, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message + '.*use attention="auto" or "sdpa"'):
        choose_attention(name, hardware, dtype, frozenset((size,)))


def test_a_kernel_of_a_gpu_is_refused_at_setup_before_the_model_is_built() -> None:
    built: list[Callable[[], object]] = []
    with pytest.raises(ValueError, match=r"an NVIDIA GPU of capability 8\.0, which varlen_attn needs, got cpu"):
        fit(tiny_module(policy=lambda: built.append(tiny_module), attention="varlen_attn"))
    assert not built


def test_an_unknown_kernel_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"attention.*flash_attention_2.*got 'flash'"):
        tiny_module(attention="flash")


def test_a_kernel_for_packed_sequences_is_refused_without_packing() -> None:
    with pytest.raises(ValueError, match='attention="auto" with packing=False, got "sdpa"'):
        tiny_module(attention="sdpa", packing=False)
