"""Runs of several ranks that are interrupted after any step end bitwise like the run that was not, on every rank."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.callbacks import ReferenceKL
from lightning_rl.cli.main import main
from lightning_rl.cli.resume_check import resume_check

RECIPE = Path(__file__).with_name("tiny_recipe.py")
STEPS = 6  # four for each of two epochs, one rollout each


def checked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Any, list[str]]:
    """Exit code and table of ``lightning-rl resume-check`` on one device."""
    with pytest.raises(SystemExit) as ended:
        main(["resume-check", str(RECIPE), "--steps", str(STEPS), "--", *options])
    return ended.value.code, capsys.readouterr().out.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize(("algorithm", "staleness"), [("grpo", "0"), ("ppo", "1")])
def test_one_device_resumes_bitwise(algorithm: str, staleness: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = checked(capsys, "--algorithm", algorithm, "--max_staleness", staleness)
    assert code == 0 and lines[-1] == "bitwise equal"
    assert [line.split() for line in lines if line[:1].isdigit()][1:] == [[str(n)] + ["equal"] * 5 for n in range(1, 6)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "first"),
    [("unseeded", "first difference: rollout of step 5"), ("forgetful", "first difference: metrics of step 2: loss/")],
)
def test_a_callback_that_cannot_resume_is_found(fault: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = checked(capsys, "--fault", fault)
    assert code == 1 and lines[-1] == "NOT EQUAL"
    found = [line.strip() for line in lines if "first difference" in line]
    assert found[0].startswith(first)


def test_a_recipe_that_would_start_its_ranks_itself_is_sent_to_torchrun() -> None:
    with pytest.raises(SystemExit, match="torchrun --nproc_per_node 2 "):
        resume_check(RECIPE, ["--strategy", "ddp", "--ranks", "2"], steps=2)


@pytest.mark.nightly
def test_two_ranks_resume_bitwise_and_save_what_they_should(tmp_path: Path) -> None:
    tiny_policy(3).save_pretrained(tmp_path / "policy")
    checks = f"ddp:ppo:1,fsdp2:grpo:0:{tmp_path}/policy,zero2:grpo"
    run_ranks(__file__, 2, tmp_path, checks, "4", "ddp,fsdp2")
    for strategy in ("ddp", "fsdp2"):
        path = tmp_path / f"{strategy}.ckpt"
        check_contents(torch.load(path, weights_only=True))
        with pytest.raises(ValueError, match="expected a checkpoint of 1 ranks, got one of 2: resume with as many dev"):
            fit_three_steps(ckpt_path=path)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_resume_bitwise_after_every_step(strategy: str, tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, f"{strategy}:grpo,{strategy}:ppo,{strategy}:grpo:1,{strategy}:ppo:1", "1", "")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_cannot_resume_what_two_saved(strategy: str, tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, "", "1", strategy)
    run_ranks(__file__, 1, tmp_path, "", "1", strategy)


def check_contents(checkpoint: dict[str, Any]) -> None:
    """Weights once, Adam's moments, the rollouts of both ranks; no reference, no copy of the engine."""
    own = sum(parameter.numel() for parameter in tiny_module().models.sources["policy"]().parameters())
    assert sum(weight.numel() for weight in checkpoint["state_dict"].values()) == own
    saved = {key: sum(tensor.numel() for tensor in tensors_in(part)) for key, part in checkpoint.items()}
    ours, moments = saved.pop("lightning_rl"), saved.pop("optimizer_states")
    assert sum(saved.values()) == own
    assert 2 * own <= moments < 2.01 * own and ours < own
    ranks = checkpoint["lightning_rl"]["ranks"]
    ids = [set(rank["current"]["rollout"]["sample_ids"].tolist()) for rank in ranks]
    assert len(ids) == 2 and ids[0] and ids[1] and not ids[0] & ids[1]


def tensors_in(part: Any) -> Iterator[Tensor]:
    """Every tensor of nested containers."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, dict | list | tuple):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from tensors_in(inner)


def fit_three_steps(*callbacks: Callback, **options: Any) -> None:
    """Ends within the first rollout, with a reference and an engine at work."""
    module, corrections = (
        tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2),
        [ReferenceKL(0.1, as_loss=True), *callbacks],
    )
    fit(module, callbacks=corrections, data=tiny_prompts(4, 4), max_steps=3, **options)


class Saves(Callback):
    """A checkpoint after the third optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def rank(folder: Path, checks: list[str], first: int, strategies: list[str]) -> None:
    """One rank: resume-check of some recipes, then a checkpoint each; or, alone, the attempt to resume from those."""
    alone = os.environ["WORLD_SIZE"] == "1"
    for strategy, algorithm, *more in (check.split(":") for check in checks):
        options = ["--strategy", strategy, "--algorithm", algorithm, "--ranks", "2"]
        for option, value in zip(("--max_staleness", "--policy"), more, strict=False):
            options += [option, value]
        assert resume_check(RECIPE, options, steps=STEPS, first=first) == 0, options
    for strategy in strategies:
        path, where = folder / f"{strategy}.ckpt", STRATEGIES[strategy]()
        if alone:
            with pytest.raises(Exception, match=r"(?s)2.*1|1.*2") as refused:  # DeepSpeed has another error
                fit_three_steps(strategy=where, ckpt_path=path)
            print(repr(refused.value))  # noqa: T201
        else:
            fit_three_steps(Saves(path), strategy=where, devices=2)


if __name__ == "__main__":
    rank(
        Path(sys.argv[1]),
        [c for c in sys.argv[2].split(",") if c],
        int(sys.argv[3]),
        [s for s in sys.argv[4].split(",") if s],
    )
