"""Checks of `gpu_smoke.py` on engines: vLLM in the process and behind a server."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_findings import GIB, Findings, needs, needs_gpu
from gpu_models import random_model
from measure import ROOT
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import Engine, Rollout, SamplingParams, VLLMEngine
from lightning_rl.corrections import Corrections
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.weights.canary import CanaryError
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import Stream
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import make_plan
from lightning_rl.rollouts.logprob_passes import add_logprobs

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
PROMPT, SYNCS, CYCLES = 16, 20, 3


def a_model(findings: Findings, dtype: torch.dtype = torch.bfloat16, *, longest: int = 2048) -> PreTrainedModel:
    """Of 0.5B parameters, or a tiny one in float32."""
    if findings.tiny:
        return random_model("tiny", "cpu", torch.float32, longest=256)
    return random_model("0.5B", "cuda", dtype, longest=longest)


def started(engine: VLLMEngine, model: PreTrainedModel, version: int = 0) -> VLLMEngine:
    """Sync a model's weights to an engine, and return it."""
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    give(engine, model, version)
    return engine


def give(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """Sync the weights of a model to an engine."""
    engine.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), version)


def requests_of(number: int, longest: int, vocabulary: int) -> list[Request]:
    """Requests that nothing ends but the length."""
    prompts = torch.randint(2, vocabulary, (number, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = SamplingParams(max_new_tokens=longest, eos_token_ids=())
    return [Request(prefix_ids=tuple(ids), sample_id=n, seed=n, sampling=sampling) for n, ids in enumerate(prompts)]


def generation(findings: Findings) -> None:
    """Samples as fast as they come, and their log-probabilities beside the trainer's."""
    needs("vllm")
    rows, longest = (8, 16) if findings.tiny else (256, 512)
    model = a_model(findings)
    engine = started(VLLMEngine(canary=False, max_num_seqs=rows), model)
    requests = requests_of(rows, longest, model.config.vocab_size)
    engine.generate(requests[:4], logprobs=True)
    drawn = list[Completion]()
    for logprobs in (False, True):
        begin = time.perf_counter()
        drawn = engine.generate(requests, logprobs=logprobs)
        rate = sum(len(one.token_ids) for one in drawn) / (time.perf_counter() - begin)
        what = f"tokens a second {'with' if logprobs else 'without'} log-probabilities"
        findings.at_least(what, rate, 10 if findings.tiny else 5000)
    findings.at_most("requests of another length", sum(len(one.token_ids) != longest for one in drawn), 0)
    gap = _difference(model, requests, drawn)
    findings.at_most("difference to the trainer, mean of nats", float(gap.mean()), 1e-4 if findings.tiny else 0.05)
    findings.at_most(
        "difference to the trainer, 99th per cent", float(gap.quantile(0.99)), 1e-3 if findings.tiny else 0.5
    )
    if not findings.tiny:
        bfloat16 = _trainer_logprobs(model, requests, drawn)
        rounding = (bfloat16 - _trainer_logprobs(model.float(), requests, drawn)).abs().mean()
        findings.figure("difference of the trainer in bfloat16 and float32, mean of nats", float(rounding))
    engine.close()


def _difference(model: PreTrainedModel, requests: list[Request], drawn: list[Completion]) -> Tensor:
    engine = torch.cat([one.logprobs for one in drawn if one.logprobs is not None])
    return (_trainer_logprobs(model, requests, drawn) - engine).abs()


def _trainer_logprobs(model: PreTrainedModel, requests: list[Request], drawn: list[Completion]) -> Tensor:
    prompts, responses = [list(one.prefix_ids) for one in requests], [list(one.token_ids) for one in drawn]
    rollout = Rollout.of_samples(prompts, responses, groups=range(len(prompts)))
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=16_384).to(model.device)
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    scored = add_logprobs(rollout.to(model.device), plan, policy, None, Corrections(), old=True)
    return scored.require("old_logprobs")[scored.valid_tokens].cpu()


def sleep(findings: Findings) -> None:
    """Memory goes when the engine sleeps, comes back when it wakes, and does not grow; also with growing segments."""
    needs("vllm")
    needs_gpu(findings)
    growing = "expandable_segments:True" in os.environ.get(ALLOCATOR, "")
    if not growing:
        environment = {**os.environ, ALLOCATOR: "expandable_segments:True"}
        again = subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
        findings.at_most("status with expandable_segments", again, 0)
    suffix = " with expandable_segments" if growing else ""
    model = a_model(findings)
    engine, requests = started(VLLMEngine(canary=False, sleeps=True), model), requests_of(8, 16, 151_936)
    awake, asleep = list[float](), list[float]()
    for cycle in range(CYCLES):
        engine.generate(requests, logprobs=True)
        awake.append(torch.cuda.mem_get_info()[0] / GIB)
        engine.sleep()
        torch.cuda.empty_cache()
        asleep.append(torch.cuda.mem_get_info()[0] / GIB)
        give(engine, model, cycle + 1)
    findings.at_least(f"GiB that sleep gives back{suffix}", min(b - a for a, b in zip(awake, asleep, strict=True)), 8)
    findings.at_most(f"GiB lost over {CYCLES} cycles{suffix}", asleep[0] - asleep[-1], 0.5)
    drawn = engine.generate(requests, logprobs=True)
    findings.at_most(
        f"difference after the last one, nats{suffix}", float(_difference(model, requests, drawn).mean()), 0.05
    )
    engine.close()


class Deaf(VLLMEngine):
    """Loses the weights that it is given while it does not listen."""

    listens = True

    @override
    def _take(self, weights: Any, version: int) -> None:
        if self.listens:
            super()._take(weights, version)
        else:
            for _ in weights:
                pass


def canary(findings: Findings) -> None:
    """Passes twenty small syncs, and notices one that did not happen."""
    needs("vllm")
    model = a_model(findings, torch.float32)
    engine = Deaf(dtype=torch.float32 if findings.tiny else torch.bfloat16, sleeps=False)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    policy, row = PolicyModel(model, None, temperature=1.0, packed=True), [*range(2, 60)]

    def weights() -> Stream:
        return ((name, weight.detach()) for name, weight in model.named_parameters())

    sync = partial(synchronize, engine, policy=policy, dtype=model.dtype, packed=True, context=nullcontext)
    largest, other = list[float](), 0
    for version in range(SYNCS):
        proof = sync(weights(), version)
        largest += [] if proof is None else [proof[0]]
        other += not torch.equal(engine.score([row])[0], engine.score([row])[0])
        _move(model, 1e-6)
    findings.at_most(f"differences in {SYNCS} syncs, largest of nats", max(largest), 1e-3 if findings.tiny else 1.0)
    findings.at_least("syncs that the canary looked at", len(largest), SYNCS)
    findings.at_most("repeated scores that are not the same bit for bit", other, 0)
    _move(model, 0.02)
    engine.listens = False
    try:
        sync(weights(), SYNCS)
        missed = 1
    except CanaryError as error:
        missed = 0
        findings.figure("canary", str(error)[:120])
    findings.at_most("lost syncs that the canary let pass", missed, 0)
    engine.close()


@torch.no_grad()
def _move(model: PreTrainedModel, step: float) -> None:
    draw = torch.Generator(model.device).manual_seed(0)
    for parameter in model.parameters():
        parameter += step * torch.randn(parameter.shape, generator=draw, device=model.device)


def server(findings: Findings) -> None:
    """Check that a server loads weights from a file, and scores as the trainer does."""
    needs("vllm", "psutil")
    sys.path.insert(0, str(ROOT / "tests"))  # whose are servers on loopback
    from kit.served import Served
    from kit.served_runs import an_engine

    model = a_model(findings, torch.float32, longest=1024)
    size, row = sum(weight.nbytes for weight in model.parameters()), [*range(2, 62)]
    with tempfile.TemporaryDirectory() as folder:
        served = Served(model, Path(folder))
        try:
            engine = an_engine(served, canary=False, transfer="file")
            engine.start(model, None, device=model.device, dtype=model.dtype)
            engine.expect(model.named_parameters())
            give(engine, model, 0)
            _move(model, 0.01)
            begin = time.perf_counter()
            give(engine, model, 1)
            took = time.perf_counter() - begin
            with torch.no_grad():
                ids = torch.tensor([row], device=model.device)
                scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            gap = float((engine.score([row])[0] - scores.cpu()).abs().max())
            findings.at_most("score after a push, difference in nats", gap, 1e-3 if findings.tiny else 2e-2)
            findings.at_least("push through a file, GB/s", size / took / 1e9, 1e-6 if findings.tiny else 0.2)
            drawn = engine.generate([replace(one, seed=3) for one in requests_of(4, 8, 100)], logprobs=True)
            findings.at_least("answers of the server", len(drawn), 4)
            engine.close()
        finally:
            served.stop()
