"""Checks of `gpu_smoke.py` on whole fits: with an engine, resumed, and with two ranks."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_findings import Findings, SkipError
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from measure import ROOT
from torch import Tensor
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM
from workload import SIZES, prompt_texts, qwen2, words

from lightning_rl import (
    FSDP2Strategy,
    PromptDataModule,
    RLLightningModule,
    SamplingParams,
    StopOnZeroGradient,
    VLLMEngine,
)
from lightning_rl.callbacks import TruncatedIS

STEPS, ROLLOUTS = 4, 25
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


def fits(findings: Findings) -> None:
    """Train the quickstart's task with vLLM, without and with a rollout ahead; check accuracy and idle time."""
    for staleness in (0, 1):
        with findings.part(f"max_staleness={staleness}"):
            _sort(findings, staleness)


def _sort(findings: Findings, staleness: int) -> None:
    sys.path.insert(0, str(ROOT / "recipes"))
    import sorting_task as task

    rollouts, size, held_out = (2, 2, 8) if findings.tiny else (ROLLOUTS, 32, 256)
    engine = VLLMEngine() if not staleness and find_spec("vllm") is not None else None
    findings.figure("engine", "vLLM" if engine is not None else "the embedded one")
    module = RLLightningModule(
        policy=partial(task.untrained_policy if findings.tiny else task.warm_started_policy, 0),
        rewards=task.exactly_sorted,
        engine=engine,
        tokenizer=task.sorting_tokenizer(),
        group_size=8,
        sampling=SamplingParams(max_new_tokens=12),
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0, fused=True),
        max_staleness=staleness,
    )
    lists = task.held_out_prompts(held_out)
    rows = task.sorting_prompts(rollouts * size, seed=0, exclude=lists)
    data = PromptDataModule(rows, size, validation=lists)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as waits:
        trainer = Trainer(
            accelerator="cpu" if findings.tiny else "gpu",
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            callbacks=[TruncatedIS()] if staleness else [],
            **QUIET,
        )
        before = trainer.validate(module, data, verbose=False)[0]["val/reward/task"]
        warnings.simplefilter("always")
        _note_waits(findings, "warn")
        begin = time.perf_counter()
        trainer.fit(module, data)
        took = time.perf_counter() - begin
        _note_waits(findings, "default")
        after = trainer.validate(module, data, verbose=False)[0]["val/reward/task"]
    name = f"max_staleness={staleness}"
    findings.at_least(f"{name}, optimizer steps", trainer.global_step, rollouts)
    findings.figure(f"{name}, seconds a rollout, validation included", took / rollouts)
    if not findings.tiny:
        findings.at_least(f"{name}, accuracy gained", after - before, 0.05)
        places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits if "synchroniz" in str(w.message))
        findings.figure(f"{name}, waits for the device per step", places.total() / rollouts)
        findings.figure(
            f"{name}, most waits", ", ".join(f"{place} {number}" for place, number in places.most_common(8))
        )


def _note_waits(findings: Findings, mode: str) -> None:
    if not findings.tiny:
        torch.cuda.set_sync_debug_mode(mode)


def a_run() -> RLLightningModule:
    """Return a module with a small random policy and the embedded engine."""

    def policy() -> Qwen2ForCausalLM:
        torch.manual_seed(0)
        return Qwen2ForCausalLM(qwen2(SIZES["width 64"]))

    def rewards(completions: Sequence[str], **_: Any) -> list[float]:
        return [float(len(text) % 5) for text in completions]

    return RLLightningModule(
        policy,
        rewards,
        tokenizer=words(),
        group_size=4,
        sampling=SamplingParams(max_new_tokens=16),
        optimizer=partial(AdamW, lr=1e-3, fused=True),
        max_grad_norm=0.5,
    )


def _fit(
    findings: Findings, folder: str, steps: int, strategy: Any, resumed: Path | None = None, **options: Any
) -> dict[str, Tensor]:
    """Fit and save a checkpoint; return the weights. Collective over all ranks."""
    module = a_run()
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu" if findings.tiny else "gpu",
        strategy=strategy,
        max_steps=steps,
        logger=False,
        callbacks=[keeper, StopOnZeroGradient(patience=None)],
        default_root_dir=folder,
        **dict[str, Any](devices=1) | QUIET | options,
    )
    trainer.fit(module, PromptDataModule(prompt_texts(4 * STEPS), 4), ckpt_path=resumed)
    weights = module.parallel.full_parameters(module.required_policy)
    return {name: weight.detach().cpu().clone() for name, weight in weights}


def resume(findings: Findings) -> None:
    """Weights after a run that was resumed halfway are those of one that was not."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)  # PyTorch's attention does not follow warn_only=True
    backend = "gloo" if findings.tiny else "nccl"
    with tempfile.TemporaryDirectory() as folder:

        def fit(steps: int, resumed: Path | None = None) -> dict[str, Tensor]:
            strategy = FSDP2Strategy(process_group_backend=backend, save_distributed_checkpoint=False)
            return _fit(findings, folder, steps, strategy, resumed, precision="bf16-mixed")

        whole = fit(STEPS)
        halfway = next(Path(folder).glob(f"step={STEPS // 2}*"))
        again = fit(STEPS, halfway)
    different = [name for name, weight in whole.items() if not torch.equal(weight, again[name])]
    findings.at_least("parameters", len(whole), 10)
    findings.at_most("parameters that are others after a resume", len(different), 0)


def two_ranks(findings: Findings) -> None:
    """DDP over gloo, as two nodes with the same device, and FSDP2 on the CPU: collectives get tensors they can take."""
    for name in ("ddp", "fsdp2"):
        with findings.part(name), tempfile.TemporaryDirectory() as folder:
            if name == "fsdp2" and not findings.tiny:
                raise SkipError("PyTorch 2.13 makes no device mesh of a gloo group whose ranks are on a GPU")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            ranks = [_start_rank(findings, name, rank, port, folder) for rank in range(2)]
            statuses = [rank.wait() for rank in ranks]
            findings.at_most(f"{name}, ranks that failed", sum(status != 0 for status in statuses), 0)
            sums = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
            findings.at_most(f"{name}, difference of the ranks' weights", abs(sums[0] - sums[1]), 0)


def _start_rank(findings: Findings, name: str, rank: int, port: int, folder: str) -> "subprocess.Popen[bytes]":
    """As torchrun starts a rank of the second of two nodes, or the first."""
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "smoke"}
    environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
    return subprocess.Popen([sys.executable, __file__, name, str(findings.tiny), folder], env=environment)


def one_rank(name: str, findings: Findings, folder: str) -> None:
    """Train, and writes down what its weights add up to."""
    strategy = DDPStrategy if name == "ddp" else partial(FSDP2Strategy, save_distributed_checkpoint=False)
    weights = _fit(findings, folder, 3, strategy(process_group_backend="gloo"), num_nodes=2)
    total = sum(float(weight.double().sum()) for weight in weights.values())
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(total))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    one_rank(sys.argv[1], Findings(Path(os.devnull), tiny=sys.argv[2] == "True"), sys.argv[3])
