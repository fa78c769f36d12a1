"""Evaluations and predictions of several ranks are those of one device, to the last bit."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import TIMEOUT, run_ranks
from kit.support import tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_rl import Evaluation, FSDP2Strategy, SamplingParams


def thirds(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Rewards that no sum in another order would add up alike."""
    return [(sum(ids) % 7) / 3 for ids in completion_ids]


def evaluate(folder: Path, ranks: int, strategy: str = "ddp") -> dict[str, Any]:
    """Figures of validation and test, files, and predictions, of three evaluations with prompts that do not divide."""
    torch.set_num_threads(1)
    prompts = [[2 + n, 3 + n % 5, 4][: 1 + n % 3] for n in range(11)]
    module = tiny_module(
        policy=partial(tiny_policy, dtype=torch.float64), tokenizer=tiny_tokenizer(), rewards=thirds,
        evaluation=[
            Evaluation("greedy", prompts[:5]),
            Evaluation(
                "several", prompts, samples=3, sampling=SamplingParams(max_new_tokens=6), correct=1.5,
                answer=lambda text: text[:1] or None,
            ),
        ],
    )  # fmt: skip
    data = tiny_prompts(7, 4, validation=prompts[:3], validation_batch_size=3)
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    if ranks > 1:
        options["strategy"] = {
            "ddp": lambda: DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT),
            "tensor": lambda: FSDP2Strategy(tensor_parallel_size=2, process_group_backend="gloo", timeout=TIMEOUT),
        }[strategy]()
    trainer = Trainer(
        devices=ranks, logger=CSVLogger(folder, "logs", version=0), default_root_dir=folder,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    module.generate(prompts[0])  # builds the policy before there is a strategy, which then splits it
    found: dict[str, Any] = {"val": trainer.validate(module, data, verbose=False)[0]}
    found["test"] = trainer.test(module, data, verbose=False)[0]
    found["predictions"] = trainer.predict(module, data)
    if trainer.is_global_zero:
        files = sorted((folder / "logs" / "version_0").rglob("*.jsonl"))
        found["files"] = {str(path.relative_to(folder)): path.read_text() for path in files}
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "ddp"), pytest.param(4, "ddp", marks=pytest.mark.nightly), (2, "tensor")]
)
def test_ranks_evaluate_bit_for_bit_as_one_device(tmp_path: Path, ranks: int, strategy: str) -> None:
    one = evaluate(tmp_path / "one", 1)
    run_ranks(__file__, ranks, tmp_path, strategy)
    several = json.loads((tmp_path / "several.json").read_text())
    assert several == json.loads(json.dumps(one))
    assert len(one["files"]) == 2 * 3 + 1 and {len(batch) for batch in one["predictions"]} == {3, 1}
    assert 0 < one["val"]["val/several/maj@3"] < 1 and 0 < one["val"]["val/several/pass@3"] < 1


def rank(folder: Path, strategy: str) -> None:
    """One rank of several; all return the same predictions and figures."""
    ranks = int(os.environ["WORLD_SIZE"])
    found = evaluate(folder / "several", ranks, strategy)
    everyone: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyone, {name: found[name] for name in ("val", "test", "predictions")})
    if torch.distributed.get_rank() == 0:
        assert all(other == everyone[0] for other in everyone)
        (folder / "several.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2])
