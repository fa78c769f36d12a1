"""Checks of `gpu_smoke.py` in the configuration of the recipes: float32 weights, bf16-mixed, ``VLLMEngine()``."""

import csv
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_engines import PROMPT, SHORT, mismatch_bound
from gpu_findings import GIB, Findings, SkipError, needs, needs_gpu
from gpu_models import chat_prompts, pretrained_model, random_model, random_prompts
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_rl import (
    Engine,
    ModelOptions,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
)
from lightning_rl.callbacks import RouterReplay
from lightning_rl.corrections.trace import StepTrace

VOCABULARY = 512


class Noted(RLCallback):
    """Keeps every rollout, and the mismatch of engine and trainer in its first optimizer step."""

    name = "noted"

    def __init__(self) -> None:
        super().__init__()
        self.rollouts, self.mismatches = list[Rollout](), list[float]()

    def observe(self, rollout: Rollout) -> None:
        """Keep a rollout."""
        self.rollouts.append(rollout)

    def traces_step(self, rollout_number: int, step: int) -> bool:
        """Return True for the first step on a rollout."""
        del rollout_number
        return step == 0

    def observe_step(self, trace: StepTrace) -> None:
        """Keep the mean absolute difference of log-probabilities, in nats."""
        views = [microbatch.view for microbatch in trace.microbatches]
        gaps = [(view.logprobs - view.require("rollout_logprobs")).abs()[view.valid_tokens] for view in views]
        self.mismatches.append(float(torch.cat(gaps).mean()))


def _policy(findings: Findings, kind: str = "") -> PreTrainedModel:
    if kind == "pretrained" and findings.model is not None:
        return pretrained_model(findings.model, "cpu", torch.float32)
    if kind == "mixture":
        size: dict[str, Any] = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        experts: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 64,
        }
        torch.manual_seed(0)
        config = Qwen3MoeConfig(vocab_size=VOCABULARY, max_position_embeddings=1024, eos_token_id=1, **size, **experts)
        return Qwen3MoeForCausalLM(config)
    model = random_model("tiny" if findings.tiny else "0.5B", "cpu", torch.float32, longest=1024)
    if kind == "lora":
        peft: Any = import_module("peft")
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    return model


def _run(
    findings: Findings, engine: Engine | None, *, kind: str = "", rows: int = 8, longest: int = 16, **options: Any
) -> tuple[RLLightningModule, PromptDataModule]:
    def rewards(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 5) for ids in completion_ids]

    module = RLLightningModule(
        partial(_policy, findings, kind),
        rewards,
        engine=engine,
        group_size=8,
        sampling=options.pop("sampling", SamplingParams(max_new_tokens=longest, eos_token_ids=(1,))),
        model=ModelOptions(max_tokens_per_microbatch=16_384),
        optimizer=partial(AdamW, lr=1e-6, fused=True),
        **dict[str, Any](minibatches_per_rollout=1) | options,
    )
    number, chat = 3 * rows // 8, kind == "pretrained" and findings.model
    prompts = chat_prompts(number, chat) if chat else random_prompts(number, PROMPT, VOCABULARY)
    data = PromptDataModule(prompts, rows // 8, validation=prompts[:2], shuffle=False)
    return module, data


def _trainer(findings: Findings, folder: str, steps: int = 2, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu" if findings.tiny else "gpu",
        devices=1,
        max_steps=steps,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **dict[str, Any](precision="bf16-mixed", logger=False, log_every_n_steps=1) | options,
    )


def _state() -> dict[str, Any]:
    """Return what an engine may change in its process."""
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
        "default dtype": torch.get_default_dtype(),
        "environment": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
    }


def stages(findings: Findings) -> None:
    """Validate, fit and test with one ``VLLMEngine()``: its dtype, speed, memory, and the process afterwards."""
    needs("vllm")
    vllm: Any = import_module("vllm")
    built, whole = list[dict[str, Any]](), vllm.LLM.__init__

    def count(llm: Any, *arguments: Any, **options: Any) -> None:
        built.append(options)
        whole(llm, *arguments, **options)

    rows, longest = (8, 16) if findings.tiny else (256, 256)
    noted = Noted()
    engine = VLLMEngine(**(SHORT if findings.tiny else {}))
    options: dict[str, Any] = {"kind": "pretrained", "rows": rows, "longest": longest}
    module, data = _run(findings, engine, **options)
    torch.set_float32_matmul_precision("high")
    before = _state()
    if not findings.tiny:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, patch.object(vllm.LLM, "__init__", count):
        trainer = _trainer(findings, folder, callbacks=[noted])
        trainer.validate(module, data, verbose=False)
        begin = time.perf_counter()
        trainer.fit(module, data)
        took = time.perf_counter() - begin
        trainer.test(module, PromptDataModule([[2, 3]], 1, validation=[[2, 3]]), verbose=False)
        after = _state()
        module.close_engine()
    findings.at_most("engines that were built", len(built), 1)
    dtypes = [options["dtype"] for options in built]
    findings.figure("dtype of the engine", ", ".join(dtypes))
    findings.at_most("engines that are not bfloat16", sum(dtype != "bfloat16" for dtype in dtypes), 0)
    changed = [name for name in before if before[name] != after[name]]
    findings.figure("changed in the process", ", ".join(changed) or "nothing")
    findings.at_most("parts of the process that changed", len(changed), 0)
    findings.at_least("rollouts", len(noted.rollouts), 2)
    tokens = sum(int(rollout.valid_tokens.sum()) for rollout in noted.rollouts)
    findings.figure("tokens a second of the whole fit", tokens / took)
    findings.headline(f"{tokens / took:,.0f} tokens/s of the whole fit")
    _compare(findings, module, noted, "bf16-mixed")
    if not findings.tiny:
        findings.figure("GiB at most, of PyTorch", torch.cuda.max_memory_allocated() / GIB)
        findings.figure("GiB free of the device at the end", torch.cuda.mem_get_info()[0] / GIB)


def _compare(findings: Findings, module: RLLightningModule, noted: Noted, precision: str, name: str = "") -> None:
    policy = module.required_policy.to(torch.device(findings.device))
    bound = mismatch_bound(findings, policy.model, noted.rollouts[-1], autocast=precision == "bf16-mixed")
    mismatch = max(noted.mismatches)
    findings.at_most(f"{name}difference of engine and trainer, mean of nats", mismatch, bound)
    findings.headline(f"{name}mismatch {mismatch:.2g} nats")


def requests(findings: Findings) -> None:
    """One rollout of each kind of request on a GPU: filters, expert routes, an external launcher."""
    needs("vllm")
    cases: dict[str, tuple[VLLMEngine, dict[str, Any]]] = {
        "top_p": (VLLMEngine(**SHORT), {"sampling": SamplingParams(max_new_tokens=16, top_p=0.9, eos_token_ids=(1,))}),
        "top_k": (VLLMEngine(**SHORT), {"sampling": SamplingParams(max_new_tokens=16, top_k=20, eos_token_ids=(1,))}),
        "expert routes": (VLLMEngine(**SHORT), {"kind": "mixture"}),
        "external launcher": (VLLMEngine(distributed_executor_backend="external_launcher", **SHORT), {}),
    }
    for name, (engine, options) in cases.items():
        with findings.part(name), tempfile.TemporaryDirectory() as folder:
            if findings.tiny and name != "external launcher":
                raise SkipError("needs a GPU")
            noted = Noted()
            callbacks = [noted, RouterReplay()] if options.get("kind") == "mixture" else [noted]
            before = _free_memory(findings)
            module, data = _run(findings, engine, **options)
            strategy = "ddp" if name == "external launcher" else "auto"  # which makes a process group of one rank
            _trainer(findings, folder, 1, callbacks=callbacks, strategy=strategy).fit(module, data)
            module.close_engine()
            findings.at_least(f"{name}: rollouts", len(noted.rollouts), 1)
            del module, data
            after = _free_memory(findings)
            findings.figure(
                f"{name}: GiB free after close_engine(), GiB left behind", [round(after, 2), round(before - after, 2)]
            )
            findings.headline(name)


def _free_memory(findings: Findings) -> float:
    """Return the GiB that are free on the device, without those that PyTorch caches."""
    gc.collect()
    torch.cuda.empty_cache()
    return 0.0 if findings.tiny else torch.cuda.mem_get_info()[0] / GIB


def embedded(findings: Findings) -> None:
    """Tokens a second of the policy itself: bf16-mixed and LoRA against weights that are bfloat16."""
    rows, longest = (8, 16) if findings.tiny else (64, 128)
    rates = dict[str, float]()
    cases = {
        "bf16-true": ("", "bf16-true"),
        "bf16-mixed": ("", "bf16-mixed"),
        "LoRA, bf16-mixed": ("lora", "bf16-mixed"),
    }
    for name, (kind, precision) in cases.items():
        with findings.part(name), tempfile.TemporaryDirectory() as folder:
            if kind:
                needs("peft")
            noted, logger = Noted(), CSVLogger(folder)
            module, data = _run(findings, TransformersEngine(), kind=kind, rows=rows, longest=longest)
            trainer = _trainer(findings, folder, precision=precision, callbacks=[noted], logger=logger)
            trainer.fit(module, data)
            with (Path(logger.log_dir) / "metrics.csv").open() as lines:
                seconds = [float(row["time/generate"]) for row in csv.DictReader(lines) if row.get("time/generate")]
            rates[name] = int(noted.rollouts[-1].valid_tokens.sum()) / seconds[-1]
            findings.figure(f"{name}: tokens a second", rates[name])
            _compare(findings, module, noted, precision, f"{name}: ")
    floor = 0.0 if findings.tiny else 0.8
    findings.at_least("bf16-mixed, of bf16-true", rates.get("bf16-mixed", 0.0) / rates.get("bf16-true", 1.0), floor)


def half(findings: Findings) -> None:
    """Two optimizer steps under 16-mixed: the gradient is finite after the scaler has found its scale."""
    needs_gpu(findings)
    module, data = _run(findings, TransformersEngine())
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(findings, folder, 3, precision="16-mixed")
        trainer.fit(module, data)
    findings.at_least("optimizer steps", trainer.global_step, 3)
    finite = all(bool(weight.isfinite().all()) for weight in module.parameters())
    findings.at_most("weights that are not finite", not finite, 0)
