"""Training with vLLM: agreement of engine and trainer, exact resume, and several ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import vllm_rank
from kit.ranks import run_ranks
from kit.support import a_trainer, fit, tiny_module, tiny_prompts, weights_of
from kit.vllm_models import a_model
from kit.vllm_rank import Watch, an_engine
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import AdamW

from lightning_rl import RLLightningModule
from lightning_rl.callbacks import NoEOSMask, RolloutKL
from lightning_rl.generation import EngineState
from lightning_rl.generation.vllm.vllm_version import load_vllm


def a_run(**options: Any) -> RLLightningModule:
    known: dict[str, Any] = {
        "policy": a_model,
        "engine": an_engine(),
        "minibatches_per_rollout": 2,
        "temperature": 0.8,
        "max_new_tokens": 12,
        "optimizer": partial(AdamW, lr=1e-3),
        "eos_token_ids": [1, *range(20, 30)],
    }
    return tiny_module(**{**known, **options})


def with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(a_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


@pytest.mark.parametrize("policy", [partial(a_model, "qwen3_moe"), partial(a_model, "qwen2-tied"), with_adapters])
def test_a_run_sees_engine_and_trainer_agree(policy: Any) -> None:
    watch = Watch()
    module = a_run(policy=policy, optimizer=partial(AdamW, lr=1e-2 if policy is with_adapters else 1e-3))
    fit(module, callbacks=[watch, RolloutKL(0.1), NoEOSMask()], data=tiny_prompts(16, 4, validation=[[2, 3], [5]]))
    assert len(watch.rows) == 8 and len(watch.rollouts) == 4
    for row in watch.rows[::2]:
        assert abs(row["kl/rollout"]) < 1e-5
        assert row["policy/ratio_max"] == 1.0
        assert row["time/canary"] > 0
    for rollout in watch.rollouts:
        assert rollout.rollout_logprobs is not None and rollout.old_logprobs is not None
        difference = (rollout.rollout_logprobs - rollout.old_logprobs)[rollout.valid_tokens]
        assert float(difference.abs().max()) < 1e-4
    assert module.options.engine.state is EngineState.ASLEEP


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    def run(folder: Path, **options: Any) -> RLLightningModule:
        module, saving = a_run(), ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"enable_checkpointing": True, "max_epochs": 2, **options}
        fit(module, callbacks=[RolloutKL(0.1), saving], data=tiny_prompts(8, 4), **options)
        return module

    whole = run(tmp_path / "whole")
    for step in (3, 4):  # in the middle of a rollout and between two
        resumed = run(tmp_path / f"from-{step}", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
        assert resumed.global_step == whole.global_step == 8
        first, second = weights_of(whole), weights_of(resumed)
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("policy", [partial(a_model, "qwen3_moe"), with_adapters])
def test_stages_of_trainers_share_an_engine(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, built = load_vllm(), []

    def build(**options: Any) -> Any:
        built.append(options)
        return llm(**options)

    llm = vllm.LLM
    monkeypatch.setattr(vllm, "LLM", build)
    module, data = a_run(policy=policy, engine=an_engine()), tiny_prompts(8, 4, validation=[[2, 3], [5]])
    watch = Watch()
    for number in range(2):
        trainer = a_trainer([watch, RolloutKL(0.1)])
        trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        trainer.predict(module, data)
        assert len(built) == 1 and len(watch.rows) == 4 * (number + 1)
    for row in watch.rows[::2]:
        assert abs(row["kl/rollout"]) < 1e-5
    module.close_engine()


@pytest.mark.parametrize(
    ("strategy", "shared"),
    [
        pytest.param("ddp", 1, id="ddp-an-engine-each"),
        pytest.param("ddp", 2, id="ddp-one-engine-split-in-two", marks=pytest.mark.nightly),
        pytest.param("fsdp2", 1, id="fsdp2-an-engine-each", marks=pytest.mark.nightly),
        pytest.param("fsdp1", 2, id="fsdp1-one-engine-split-in-two"),
    ],
)
def test_two_ranks_train_as_one(strategy: str, shared: int, tmp_path: Path) -> None:
    run_ranks(Path(vllm_rank.__file__), 2, tmp_path, strategy, "2", str(shared), timeout=300)
    vllm_rank.main(tmp_path, strategy, 1, 1)
    first, second, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("2-0", "2-1", "1-0"))
    assert (first["world"], second["world"], first["sum"], second["sum"]) == (2, 2, 2.0, 2.0)
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
        torch.testing.assert_close(weight, alone["weights"][name], rtol=0, atol=1e-5)
    assert not torch.equal(first["weights"]["model.model.norm.weight"], torch.ones(128)), "nothing was trained"
    for number, (ids, responses) in enumerate(alone["samples"]):
        parts = [run["samples"][number] for run in (first, second)]
        known = {int(i): row for part in parts for i, row in zip(*part, strict=True)}
        assert sorted(known) == sorted(ids.tolist())
        for place, row in zip(ids.tolist(), responses, strict=True):
            assert row[row != 0].tolist() == known[place][known[place] != 0].tolist()
    for row in [*first["rows"], *second["rows"]]:
        assert abs(row["kl/rollout"]) < 1e-5
