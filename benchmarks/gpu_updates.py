"""Checks of `gpu_smoke.py` on the update: what it makes of the device, and where its time goes."""

import gc
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from gpu_findings import GIB, Findings, needs, needs_gpu
from gpu_kernels import matmul_rate, plain_head, seconds_of
from gpu_models import CONVENTIONS, dense_peak, random_model, rows_of, update_flops
from measure import RESULTS
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from lightning_rl import ClippedSurrogate, token_mean
from lightning_rl.advantages import GRPO
from lightning_rl.algorithm import Algorithm
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.update import accumulate_gradient

ALGORITHM = Algorithm(loss=ClippedSurrogate(), advantages=GRPO(), reduction=token_mean)
MEASURED = 3  # optimizer steps, after one that warms up
TRACE = "gpu_smoke_trace.json"
KINDS = {  # names of kernels and operators; the first kind that matches is taken
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|nvjet|cutlass|xmma|split_?k|::(?:add|b|badd)?mm$|::matmul|::linear",
    "optimizer": r"adam|multi_tensor|optimizer",
    "copies": r"mem(?:cpy|set)|copy|fill|catarray|::(?:cat|clone|zero_)$",
}
OTHERS = "elementwise"  # and reductions


def _change_nothing(policy: PolicyModel) -> None:
    del policy


def _compile(policy: PolicyModel) -> None:
    from lightning_rl.policy.compilation import compile_layers  # here, so that a plain update runs without it

    compile_layers(policy, policy.layers(), "inductor")


def _with_liger(policy: PolicyModel) -> None:
    from lightning_rl.policy.liger import apply_liger  # as above

    apply_liger(policy.model)


class Update:
    """An optimizer step on packed rows, again and again.

    Args:
        name: of the model's size.
        device: of everything.
        change: of the policy, before it trains.
        mixed: float32 weights under autocast, as bf16-mixed has them; otherwise the weights are bfloat16.
    """

    def __init__(
        self,
        name: str,
        device: str,
        change: Callable[[PolicyModel], None] = _change_nothing,
        *,
        mixed: bool = False,
    ) -> None:
        small, self.mixed, self.device = name == "tiny", mixed, device
        self.lengths, self.prompt = ([48, 40, 32, 24], 8) if small else ([4096] * 3 + [4095], 1024)
        model = random_model(name, device, torch.float32 if small or mixed else torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = PolicyModel(model, None, temperature=1.0, packed=True).train()
        change(self.policy)
        rollout = rows_of(self.lengths, model.config.vocab_size, self.prompt)
        self.microbatches = plan_of_rows(rollout, [[[*range(len(self.lengths))]]]).to(device).step(0)
        self.rollout = rollout.to(device)
        self.optimizer = AdamW(self.policy.parameters(), lr=1e-6, fused=True)
        self.moved = next(self.policy.parameters())

    @property
    def responses(self) -> list[int]:
        """Lengths without prompts."""
        return [length - self.prompt for length in self.lengths]

    def step(self) -> None:
        """Forward, loss, backward, optimizer."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            accumulate_gradient(
                self.rollout,
                self.microbatches,
                lambda microbatch: self.policy(microbatch.layout),
                ALGORITHM,
                backward=lambda loss: loss.backward(),
            )
        self.optimizer.step()
        self.optimizer.zero_grad()


class Operation(NamedTuple):
    """Of a profile: a kernel on a GPU, an operator on the CPU; in microseconds, the busy time without its parts."""

    name: str
    busy: float
    start: float
    end: float


def breakdown(operations: Sequence[Operation]) -> dict[str, float]:
    """Return the milliseconds of each kind of operation, and of the gaps between operations."""
    took = dict.fromkeys((*KINDS, OTHERS), 0.0)
    gaps, reached = 0.0, math.inf
    for one in sorted(operations, key=lambda one: one.start):
        kind = next((kind for kind, names in KINDS.items() if re.search(names, one.name, re.IGNORECASE)), OTHERS)
        took[kind] += one.busy / 1e3
        gaps += max(one.start - reached, 0.0) / 1e3
        reached = one.end if reached == math.inf else max(reached, one.end)
    return took | {"gaps": gaps}


def _profile(update: Update, *activities: ProfilerActivity) -> tuple[profile, list[Operation]]:
    """Return the profile of a step, and its operations on the device."""
    gpu = update.device == "cuda"
    with profile(activities=activities) as profiler:
        update.step()
        if gpu:
            torch.cuda.synchronize()
    return profiler, [
        Operation(
            event.name,
            event.self_device_time_total if gpu else event.self_cpu_time_total,
            event.time_range.start,
            event.time_range.end,
        )
        for event in profiler.events() or ()
        if event.device_type.name == update.device.upper()
    ]


def updates(findings: Findings) -> None:
    """MFU and profile of the update, activation checkpointing on: plain, with Liger, mixed, compiled."""
    small = "tiny" if findings.tiny else "1.5B"
    peak = _peak(findings)
    with findings.part(small):
        _update(findings, small, small, _change_nothing, peak, floor=0.001 if findings.tiny else 0.35)
    with findings.part(f"{small}, Liger"):
        needs_gpu(findings)
        needs("liger_kernel")
        _update(findings, f"{small}, Liger", small, _with_liger, peak, floor=0.35)
    with findings.part(f"{small}, bf16-mixed"):
        floor = 0.001 if findings.tiny else 0.3
        _update(findings, f"{small}, bf16-mixed", small, _change_nothing, peak, floor=floor, mixed=True)
    with findings.part(f"{small}, compiled"):
        needs_gpu(findings)
        _update(findings, f"{small}, compiled", small, _compile, peak, floor=0.35)


def large_update(findings: Findings) -> None:
    """MFU and profile of the plain update of a larger model."""
    needs_gpu(findings, 120)
    _update(findings, "7B", "7B", _change_nothing, _peak(findings), floor=0.4)


def _peak(findings: Findings) -> float:
    device = findings.device
    known = dense_peak(device)
    peak = known or matmul_rate(device, 512 if findings.tiny else 8192)
    findings.figure("peak", f"{peak / 1e12:.4g} TFLOP/s, {'of the data sheet' if known else 'as measured'}")
    findings.figure(
        "MFU counts", "3 x forward, no recomputation, the head on responses alone, optimizer's time included"
    )
    return peak


def _update(
    findings: Findings,
    title: str,
    name: str,
    change: Callable[[PolicyModel], None],
    peak: float,
    *,
    floor: float,
    mixed: bool = False,
) -> None:
    gpu = findings.device == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    update, seconds = Update(name, findings.device, change, mixed=mixed), list[float]()
    before = update.moved.detach().clone()
    for _ in range(MEASURED + 1):
        begin = time.perf_counter()
        update.step()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    least, mfus = min(seconds[1:]), list[float]()
    findings.figure(f"{title}: ms a step, the first one", [round(1e3 * least, 1), round(1e3 * seconds[0], 1)])
    for convention in CONVENTIONS:
        mfu = update_flops(name, update.lengths, update.responses, convention) / least / peak
        mfus.append(mfu)
        if convention == "full attention":
            findings.at_least(f"{title}: MFU, {convention}", mfu, floor)
        else:
            findings.figure(f"{title}: MFU, {convention}", mfu)
    findings.headline(f"{title} {1e3 * least:.0f} ms, MFU {mfus[-1]:.2f}")
    findings.at_least(f"{title}: entries that moved", int((update.moved.detach() != before).sum()), 1)
    if gpu:
        findings.figure(f"{title}: GiB at most", torch.cuda.max_memory_allocated() / GIB)
        with plain_head():
            took = seconds_of(update.step, findings.device, 1)
        findings.figure(f"{title}: ms a step, head without Triton kernels", 1e3 * took)
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU  # the device alone: reading takes few seconds
    _, operations = _profile(update, activity)
    parts = ", ".join(f"{kind} {took:.1f}" for kind, took in breakdown(operations).items())
    findings.at_least(f"{title}: operations on the device in a step", len(operations), 100)
    findings.figure(f"{title}: ms on the device", parts)


def trace(findings: Findings) -> None:
    """Write a trace of one optimizer step, and name the operations that take the most time."""
    update = Update("tiny" if findings.tiny else "1.5B", findings.device)
    update.step()
    kinds = [ProfilerActivity.CPU] if findings.tiny else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler, operations = _profile(update, *kinds)
    RESULTS.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(RESULTS / TRACE))
    took = defaultdict[str, float](float)
    for one in operations:
        took[one.name] += one.busy
    findings.at_least("operations on the device in a step", len(operations), 100)
    findings.at_least("bytes of the trace", (RESULTS / TRACE).stat().st_size, 10_000)
    findings.figure("trace", f"build/bench/{TRACE}")
    for name, microseconds in sorted(took.items(), key=lambda item: -item[1])[:5]:
        findings.figure(f"ms in {name[:60]}", microseconds / 1e3)
