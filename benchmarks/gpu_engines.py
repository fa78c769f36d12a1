"""Checks of `gpu_smoke.py` on engines: vLLM in the process and behind a server."""

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
from gpu_models import chat_prompts, pretrained_model, random_model, random_prompts
from measure import ROOT
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import Engine, Rollout, SamplingParams, VLLMEngine
from lightning_rl.corrections import Corrections
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.weights.canary import CanaryError
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.generation.weights.weight_stream import Weights
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import make_plan
from lightning_rl.rollouts.logprob_passes import add_logprobs

PROMPT, SYNCS, CYCLES = 16, 20, 3
MISMATCH = 0.05  # nats on average, for models whose rounding is small
SHORT: dict[str, Any] = {"enforce_eager": True, "kernel_config": {"enable_jit_warmup": False}}
"""Options of engines whose speed is not measured: they start in seconds."""
SHORT_SERVER = ("--enforce-eager", "--kernel-config", '{"enable_jit_warmup": false}')


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


def requests_of(prompts: list[list[int]], longest: int) -> list[Request]:
    """Requests that nothing ends but the length."""
    sampling = SamplingParams(max_new_tokens=longest, eos_token_ids=())
    return [Request(prefix_ids=tuple(ids), sample_id=n, seed=n, sampling=sampling) for n, ids in enumerate(prompts)]


def generation(findings: Findings) -> None:
    """Samples as fast as they come, and their log-probabilities beside the trainer's."""
    needs("vllm")
    rows, longest = (8, 16) if findings.tiny else (256, 512)
    if findings.model is None:
        model = a_model(findings)
        prompts = random_prompts(rows, PROMPT, model.config.vocab_size)
    else:
        dtype = torch.float32 if findings.tiny else torch.bfloat16
        model, prompts = pretrained_model(findings.model, findings.device, dtype), chat_prompts(rows, findings.model)
    engine = started(VLLMEngine(canary=False, max_num_seqs=rows, **(SHORT if findings.tiny else {})), model)
    requests = requests_of(prompts, longest)
    engine.generate(requests[:4], logprobs=True)
    drawn, rates = list[Completion](), list[float]()
    for logprobs in (False, True):
        begin = time.perf_counter()
        drawn = engine.generate(requests, logprobs=logprobs)
        rates.append(sum(len(one.token_ids) for one in drawn) / (time.perf_counter() - begin))
        what = f"tokens a second {'with' if logprobs else 'without'} log-probabilities"
        findings.at_least(what, rates[-1], 10 if findings.tiny else 5000)
    findings.at_most("requests of another length", sum(len(one.token_ids) != longest for one in drawn), 0)
    engine.close()
    without, with_logprobs = rates
    findings.headline(f"{without:,.0f} tokens/s, {with_logprobs:,.0f} with log-probabilities")
    _compare(findings, model, requests, drawn)


def _compare(findings: Findings, model: PreTrainedModel, requests: list[Request], drawn: list[Completion]) -> None:
    """Compare the log-probabilities of the engine with those of the trainer; afterwards the model is in float32."""
    prompts, responses = [list(one.prefix_ids) for one in requests], [list(one.token_ids) for one in drawn]
    rollout = Rollout.of_samples(prompts, responses, groups=range(len(prompts)))
    engine = torch.cat([one.logprobs for one in drawn if one.logprobs is not None])
    gap = (trainer_logprobs(model, rollout) - engine).abs()
    mean, far = float(gap.mean()), float(gap.quantile(0.99))
    findings.headline(f"mismatch {mean:.2g} nats")
    bound = 1e-4 if findings.tiny else mismatch_bound(findings, model, rollout)
    findings.at_most("difference to the trainer, mean of nats", mean, bound)
    findings.at_most("difference to the trainer, 99th per cent", far, 5 * bound)


def mismatch_bound(findings: Findings, model: PreTrainedModel, rollout: Rollout, *, autocast: bool = False) -> float:
    """Return the largest accepted mean difference of engine and trainer, in nats.

    It is the rounding of the trainer plus that of a bfloat16 engine, both against float32 with the weights that the
    engine has. Afterwards the model is in float32.

    Args:
        findings: of the check.
        model: of the trainer.
        rollout: with responses to score.
        autocast: True for a trainer under bf16-mixed.
    """
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        trainer = trainer_logprobs(model, rollout)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    engine = trainer_logprobs(model, rollout)
    exact = trainer_logprobs(model.float(), rollout)
    roundings = [float((rounded - exact).abs().mean()) for rounded in (trainer, engine)]
    findings.figure("rounding of the trainer and of bfloat16, mean of nats", [f"{each:.2g}" for each in roundings])
    return max(MISMATCH, sum(roundings))


def trainer_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return the log-probabilities [tokens] of the responses, as the trainer computes them."""
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=16_384).to(model.device)
    policy = PolicyModel(model, None, temperature=1.0, packed=True)
    scored = add_logprobs(rollout.to(model.device), plan, policy, None, Corrections(), old=True)
    return scored.require("old_logprobs")[scored.valid_tokens].cpu()


def sleep(findings: Findings) -> None:
    """Memory goes when the engine sleeps, comes back when it wakes, and does not grow."""
    needs("vllm")
    needs_gpu(findings)
    model = a_model(findings)
    engine = started(VLLMEngine(canary=False, sleeps=True, **SHORT), model)
    requests = requests_of(random_prompts(8, PROMPT, model.config.vocab_size), 16)
    awake, asleep = list[float](), list[float]()
    for cycle in range(CYCLES):
        engine.generate(requests, logprobs=True)
        awake.append(torch.cuda.mem_get_info()[0] / GIB)
        engine.sleep()
        torch.cuda.empty_cache()
        asleep.append(torch.cuda.mem_get_info()[0] / GIB)
        give(engine, model, cycle + 1)
    back, lost = min(b - a for a, b in zip(awake, asleep, strict=True)), asleep[0] - asleep[-1]
    findings.headline(f"{back:.1f} GiB back, {lost:.2g} lost")
    findings.at_least("GiB that sleep gives back", back, 8)
    findings.at_most(f"GiB lost over {CYCLES} cycles", lost, 0.5)
    drawn = engine.generate(requests, logprobs=True)
    engine.close()
    _compare(findings, model, requests, drawn)


class Deaf(VLLMEngine):
    """Loses the weights that it is given while it does not listen."""

    listens = True

    @override
    def load_stream(self, weights: Any, version: int) -> None:
        if self.listens:
            super().load_stream(weights, version)
        else:
            for _ in weights:
                pass


def canary(findings: Findings) -> None:
    """Passes twenty small syncs, and notices one that did not happen."""
    needs("vllm")
    model = a_model(findings, torch.float32)
    engine = Deaf(dtype=torch.float32 if findings.tiny else torch.bfloat16, sleeps=False, **SHORT)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    policy, row = PolicyModel(model, None, temperature=1.0, packed=True), [*range(2, 60)]

    def weights() -> Weights:
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
        served = Served(model, Path(folder), options=SHORT_SERVER)
        try:
            served.wait(0.7 * findings.seconds)  # so that its log is in the output of a check that runs out of time
            engine = an_engine(served, canary=False, transfer="file", patience=findings.seconds)
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
            findings.headline(f"difference {gap:.2g} nats, push {size / took / 1e9:.2g} GB/s")
            requests = requests_of(random_prompts(4, PROMPT, 100), 8)
            drawn = engine.generate([replace(one, seed=3) for one in requests], logprobs=True)
            findings.at_least("answers of the server", len(drawn), 4)
            engine.close()
        finally:
            served.stop()
