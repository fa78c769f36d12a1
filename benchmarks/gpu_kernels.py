"""Checks of `gpu_smoke.py` on the basics: the machine, versions, the head, attention."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from unittest.mock import patch

import torch
from gpu_findings import Findings, SkipError, needs, needs_gpu
from gpu_models import SHAPES, dense_peak
from measure import ROOT
from torch import Tensor

from lightning_rl.policy import logprobs as vocabulary_head
from lightning_rl.policy.logprobs import chunk_elements, kernels_for, token_logprobs

CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"
PACKAGES = ("vllm", "flash-attn", "flash-attn-3", "triton", "liger-kernel", "transformers", "trl")


def seconds_of(work: Callable[[], object], device: str, rounds: int = 5) -> float:
    """Return the seconds of the fastest round, after a warm-up."""
    best = float("inf")
    for number in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin) if number else best
    return best


def matmul_rate(device: str, size: int) -> float:
    """FLOP a second of square matrix products, bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: one @ other, device)


def ceilings(findings: Findings) -> None:
    """Measure the ceilings of the device, which shares of the peak refer to."""
    device, size, length = findings.device, 512 if findings.tiny else 8192, 2**20 if findings.tiny else 2**28
    if device == "cuda":
        clocks = subprocess.run(
            ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        findings.figure(CLOCKS, clocks.stdout.strip() or clocks.stderr.strip()[:100])
    rate, peak = matmul_rate(device, size), dense_peak(device)
    findings.at_least(f"TFLOP/s of {size} x {size} products", rate / 1e12, 0.001 if peak is None else 0.5 * peak / 1e12)
    source = torch.randn(length, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
    findings.at_least("copies on the device, GB/s read and written", copied / 1e9, 0.5 if findings.tiny else 1000)
    if device == "cuda":
        pinned = torch.empty(length, pin_memory=True)
        sent = pinned.nbytes / seconds_of(lambda: target.copy_(pinned, non_blocking=True), device)
        findings.at_least("copies from pinned memory, GB/s", sent / 1e9, 10)


def branches(findings: Findings) -> None:
    """Which code will run."""
    from lightning_rl.policy.attention import KERNELS, hardware_of  # here, so that other checks run without it

    for name in PACKAGES:
        try:
            findings.figure(name, version(name))
        except PackageNotFoundError:
            findings.figure(name, "not installed")
    hardware = hardware_of(torch.device(findings.device))
    dtype = torch.float32 if findings.tiny else torch.bfloat16
    obstacles = {name: kernel.obstacle(hardware, dtype, frozenset({64})) for name, kernel in KERNELS.items()}
    for name, obstacle in obstacles.items():
        findings.figure(f"attention {name}", "runs" if obstacle is None else f"needs {obstacle}")
    if not findings.tiny:
        fast = sum(obstacle is None for name, obstacle in obstacles.items() if name != "sdpa")
        findings.at_least("attention kernels for packed sequences", fast, 1)
    with findings.part("Triton"):
        needs_gpu(findings)
        needs("triton")
        from gpu_triton import kernel_error

        findings.at_most("error of a Triton kernel", kernel_error(findings.device), 0)
    if find_spec("vllm") is None:
        raise SkipError("vllm is not installed, whose version this checks")
    with findings.part("vLLM's version and import"):
        from lightning_rl.generation.vllm.vllm_version import load_vllm

        load_vllm()
        findings.at_most("vLLM outside of the window of versions", 0, 0)


def same_numbers(findings: Findings) -> None:
    """Run the tests that use a simulated GPU on a real one."""
    needs_gpu(findings)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_other_device.py"]
    findings.at_most("status of pytest", subprocess.run(command, cwd=ROOT, check=False).returncode, 0)


def head(findings: Findings) -> None:
    """Values and gradients against float64 where both fit, then time and memory."""
    shape, device = SHAPES["tiny" if findings.tiny else "0.5B"], findings.device
    few, many = (32, 256) if findings.tiny else (256, 16_384)
    findings.figure("logits at once", chunk_elements(torch.device(device)))
    for dtype, bounds in {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-3, 2e-2)}.items():
        name = str(dtype).removeprefix("torch.")
        with findings.part(name):
            values, gradients = _head_errors(_head_inputs(shape.vocabulary, shape.width, few, device, dtype))
            findings.at_most(f"{name}, log-probabilities, largest error", values, bounds[0])
            findings.at_most(f"{name}, gradients, largest error of the largest", gradients, bounds[1])
            hidden, weight, targets = _head_inputs(shape.vocabulary, shape.width, many, device, dtype)
            weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            took = seconds_of(lambda h=hidden, w=weight, t=targets: _head_pass(h, w, t), device, 2)
            findings.figure(f"{name}, ms for {many} tokens, forward and backward", 1e3 * took)
            if device == "cuda":
                share = (torch.cuda.max_memory_allocated() - before) / (3 * 4 * many * shape.vocabulary)
                findings.at_most(f"{name}, memory, of logits, softmax and gradient at once", share, 1 / 4)
                compiled = kernels_for(hidden, weight) is not None
                findings.at_least(f"{name}, Triton kernels compile and equal plain operations", compiled, 1)
                with plain_head():
                    took = seconds_of(lambda h=hidden, w=weight, t=targets: _head_pass(h, w, t), device, 2)
                findings.figure(f"{name}, ms without Triton kernels", 1e3 * took)


@contextmanager
def plain_head() -> Iterator[None]:
    """Compute the vocabulary head without its Triton kernels."""
    with patch.object(vocabulary_head, "kernels_for", lambda *_: None):
        yield


def _head_inputs(vocabulary: int, width: int, tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(device, dtype).requires_grad_()
    weight = (0.05 * torch.randn(vocabulary, width, generator=draw)).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw).to(device)


def _head_pass(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs, _ = token_logprobs(hidden, weight, None, targets)
    torch.dot(logprobs, torch.linspace(-1, 2, len(logprobs), device=logprobs.device, dtype=logprobs.dtype)).backward()
    return logprobs.detach()


def _head_errors(inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    hidden, weight, targets = inputs
    logprobs = _head_pass(hidden, weight, targets).double()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = (exact[0] @ exact[1].t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.dot(expected, torch.linspace(-1, 2, len(expected), device=expected.device, dtype=expected.dtype)).backward()
    pairs = [(hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)]
    gradients = [
        float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None
    ]
    return float((logprobs - expected).abs().max()), max(gradients)


def packed_attention(findings: Findings) -> None:
    """Every kernel on ragged sequences with grouped heads, with a window and without."""
    from lightning_rl.policy.attention import KERNELS, PackedSequences, attend, choose_attention, hardware_of

    device, dtype = torch.device(findings.device), torch.float32 if findings.tiny else torch.bfloat16
    longest, number, heads, key_heads, size = (48, 8, 4, 2, 16) if findings.tiny else (4096, 32, 14, 2, 64)
    lengths = tuple(longest * place // number for place in range(number, 0, -1))
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, each, sum(lengths), size) for each in (heads, key_heads, key_heads)]
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    pairs_of_lengths = tuple((length, length) for length in lengths)
    hardware, head_sizes = hardware_of(device), frozenset({size})
    findings.figure("auto", choose_attention("auto", hardware, dtype, head_sizes))
    for window in (None, longest // 4):
        expected = _plain(tensors, lengths, window)
        for name, kernel in KERNELS.items():
            title = name if window is None else f"{name}, window {window}"
            with findings.part(title):
                obstacle = kernel.obstacle(hardware, dtype, head_sizes)
                if obstacle is not None:
                    raise SkipError(f"needs {obstacle}")
                sequences = PackedSequences(pairs_of_lengths, ends, ends, name)
                attention = partial(attend, sequences=sequences, window=window)
                pairs = zip(_results(attention, tensors), expected, strict=True)
                error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
                findings.at_most(f"{title}: largest error, of the largest", error, 1e-4 if findings.tiny else 3e-2)
                took = seconds_of(partial(_results, attention, tensors), findings.device, 3)
                findings.figure(f"{title}: ms, forward and backward", 1e3 * took)


def _results(attention: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the output [1, N, H, D] and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = attention(*leaves)
    place = torch.arange(result.shape[-1], device=result.device, dtype=result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, torch.cos(place).expand_as(result))]


def _plain(tensors: list[Tensor], lengths: tuple[int, ...], window: int | None) -> list[Tensor]:
    """Return the same in float64, by a full softmax, one sequence at a time."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(query.shape[2], device=query.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or query.shape[2]))
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = (query @ key.transpose(-1, -2)) / query.shape[-1] ** 0.5
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)

    sequences = zip(*(tensor.double().split(lengths, 2) for tensor in tensors), strict=True)
    results = [_results(attention, list(sequence)) for sequence in sequences]
    first, *gradients = zip(*results, strict=True)
    return [torch.cat(first, 1), *(torch.cat(parts, 2) for parts in gradients)]
