"""The Triton kernels of the head against its plain version; `make test-liger` runs them in Triton's interpreter."""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl.policy import logprobs as head
from lightning_rl.policy.logprobs import token_logprobs
from lightning_rl.policy.sampling_mask import to_bits

ROWS, VOCABULARY = 40, 8195  # three chunks; two whole blocks of columns and a part
MASK = torch.arange(VOCABULARY).expand(ROWS, -1) % 7 != 3
CPU = torch.device("cpu")
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_rl.policy import head_kernels

tensors = ["*fp32", "*i64", "*fp32", "*fp32", "*fp32"]
for kernel, types, constants in (
    (head_kernels._score_row, [*tensors, "i32"], {"lanes": 4096}),
    (head_kernels._write_row, [*tensors, "*fp32", "i32"], {"cap": 30.0, "lanes": 4096}),
    (head_kernels._write_row, [*tensors, "constexpr", "i32"], {"by_entropy": None, "cap": None, "lanes": 4096}),
):
    signature = dict(zip(kernel.arg_names, types)) | dict.fromkeys(constants, "constexpr")
    for capability in (80, 90):
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert code.asm["cubin"] and "st.local" not in code.asm["ptx"], "registers are spilled"
"""
exactly = torch.testing.assert_close
pytestmark = pytest.mark.filterwarnings("default")  # NumPy, which interprets, warns of 0 times infinity


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("needs Triton's interpreter: make test-liger")
    monkeypatch.setattr(head, "CPU_CHUNK", 1)  # the smallest chunk is 16 tokens
    monkeypatch.setattr(head, "CPU_KEPT", 1)
    return pytest.importorskip("lightning_rl.policy.head_kernels")


def inputs(rows: int = ROWS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(size, generator=draw) for size in ((rows, 8), (vocabulary, 8), (vocabulary,))]
    targets = 7 * torch.randint(vocabulary // 7, (rows,), generator=draw)  # none of those that are masked
    return [*(leaf.to(dtype) for leaf in leaves), targets]


def outputs_and_gradients(used: ModuleType | None, given: list[Tensor], outputs: str, **options: Any) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_(leaf.requires_grad or leaf is given[0]) for leaf in given[:3]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "kernels_for", lambda *_: used)  # which are for GPUs only
        logprobs, entropy = token_logprobs(leaves[0], leaves[1], leaves[2], given[3], **options)
    slopes = torch.linspace(-1, 2, len(given[3]))
    losses = {"logprobs": slopes @ logprobs, "entropy": slopes.flip(0) @ entropy}
    loss = torch.stack([losses[name] for name in outputs.split()]).sum()
    return [logprobs, entropy, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])]


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    """Outputs, and gradients, which products round as well, in parts of the largest."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        exactly(one, other, rtol=0, atol=(1e-6 if place < 2 else 3e-6) * float(other.detach().abs().max()))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("outputs", ["logprobs", "entropy", "logprobs entropy"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((ROWS, VOCABULARY), {}, id="plain"),
        pytest.param((1, VOCABULARY), {"temperature": 0.7}, id="one row"),
        pytest.param((ROWS, 9), {"temperature": 2.5}, id="small vocabulary"),
        pytest.param((ROWS, 4096), {}, id="one whole block"),
        pytest.param((ROWS, VOCABULARY), {"soft_cap": 2.0, "temperature": 0.7}, id="cap"),
        pytest.param((ROWS, VOCABULARY), {"sampling_mask": to_bits(MASK)}, id="mask"),
        pytest.param((ROWS, VOCABULARY), {"sampling_mask": to_bits(MASK), "soft_cap": 2.0}, id="mask and cap"),
    ],
)
def test_they_equal_plain_operations(
    shape: tuple[int, int], options: dict[str, Any], outputs: str, *, frozen: bool, kernels: ModuleType
) -> None:
    given = inputs(*shape)
    for leaf in given[1:3]:
        leaf.requires_grad_(not frozen)
    expected, found = (outputs_and_gradients(used, given, outputs, **options) for used in (None, kernels))
    compare(found, expected)


def test_weights_in_bfloat16_have_values_and_gradients_in_float32(kernels: ModuleType) -> None:
    given = inputs(dtype=torch.bfloat16)
    for leaf in given[1:3]:
        leaf.requires_grad_()
    expected, found = (outputs_and_gradients(used, given, "logprobs entropy") for used in (None, kernels))
    assert {one.dtype for one in found[:2]} == {torch.float32}
    compare(found[:2], expected[:2])
    for one, other in zip(found[2:], expected[2:], strict=True):
        exactly(one, other, rtol=2**-7, atol=1e-6)  # a last digit


def test_the_largest_logit_as_target_and_logits_of_minus_infinity(kernels: ModuleType) -> None:
    given = inputs()
    given[3] = (given[0] @ given[1].t() + given[2]).where(MASK, -torch.inf).argmax(-1)
    infinite = [*given[:2], given[2].where(MASK[0], -torch.inf), given[3]]
    finite = [*given[:2], given[2].where(MASK[0], -1e30), given[3]]
    expected = outputs_and_gradients(None, finite, "logprobs entropy")
    compare(outputs_and_gradients(kernels, infinite, "logprobs entropy"), expected)


def test_kernels_that_do_not_compile_or_compute_something_else_are_not_used(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score_wrongly(*tensors: Tensor) -> None:
        kernels.score_rows(*tensors)
        tensors[3].add_(0.1)

    wrong: Any = SimpleNamespace(score_rows=score_wrongly, write_gradient=kernels.write_gradient)
    assert head._largest_difference(kernels, CPU) < 1e-5 < head.KERNEL_TOLERANCE < head._largest_difference(wrong, CPU)  # noqa: SLF001
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"expected Triton kernels .*: the head is computed by plain operations"):
        assert head._compiled_kernels.__wrapped__() is None  # noqa: SLF001  there is no GPU


def test_they_compile_for_gpus_and_spill_no_registers(kernels: ModuleType) -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=compiling, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
