"""A Triton kernel for `gpu_smoke.py`: without ``ptxas`` its compilation fails, as would that of vLLM's kernels."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source, target, length, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < length
    tl.store(target + place, 2 * tl.load(source + place, mask=inside), mask=inside)


def kernel_error(device: str) -> float:
    """Compile and run the kernel; return its largest error."""
    source = torch.arange(1000, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    _double[(4,)](source, target, len(source), block=256)
    return float((target - 2 * source).abs().max())
