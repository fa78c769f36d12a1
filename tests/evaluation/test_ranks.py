"""Evaluations and predictions of several ranks are those of one device, to the last bit."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, TIMEOUT, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

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


def sanity(folder: Path, ranks: int, strategy: str) -> dict[str, Any]:
    """Return the figures of the validations of a fit, of which the last batch has one prompt of one evaluation."""
    torch.set_num_threads(1)
    prompts = [[2 + n % 13, 3 + n % 5, 4][: 1 + n % 3] for n in range(41)]
    options = {"policy": partial(tiny_policy, dtype=torch.float64), "rewards": thirds, "max_new_tokens": 1}
    module = tiny_module(evaluation=[Evaluation("small", prompts[:30]), Evaluation("large", prompts)], **options)
    figures: list[dict[str, float]] = []

    class Keeps(Callback):
        @override
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            figures.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")})

    given: dict[str, Any] = {"num_sanity_val_steps": 3, "limit_train_batches": 1, "default_root_dir": folder}
    given |= {"strategy": STRATEGIES[strategy](), "devices": ranks} if ranks > 1 else {}
    data = tiny_prompts(4, 2, validation=prompts[:1], validation_batch_size=20)
    fit(module, data=data, callbacks=[Keeps()], **given)
    return {"figures": figures}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_rank_without_a_prompt_validates_as_one_device(tmp_path: Path, strategy: str) -> None:
    one = sanity(tmp_path, 1, strategy)["figures"]
    run_ranks(__file__, 2, tmp_path, strategy, "sanity")
    several = json.loads((tmp_path / "several.json").read_text())["figures"]
    assert len(one) == len(several) == 2 and several[0] == one[0]
    assert several[1].keys() == one[1].keys() and len(one[1]) > 9


def rank(folder: Path, strategy: str, run: str = "") -> None:
    """One rank of several; all return the same predictions and figures."""
    ranks = int(os.environ["WORLD_SIZE"])
    found = sanity(folder, ranks, strategy) if run else evaluate(folder / "several", ranks, strategy)
    everyone: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(everyone, {name: found[name] for name in found if name != "files"})
    if torch.distributed.get_rank() == 0:
        assert all(other == everyone[0] for other in everyone)
        (folder / "several.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank(Path(sys.argv[1]), *sys.argv[2:])
