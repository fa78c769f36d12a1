"""Ranks with different files or options are refused before training."""

import os
import re
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Trainer

from lightning_rl.checkpointing import AtomicCheckpointIO
from lightning_rl.checkpointing.same_checkpoint import identity_of
from lightning_rl.distributed import agreement, check_agreement
from lightning_rl.policy.tensor_hash import hash_weights

ALIKE = {"checkpoint": "last.ckpt of run a at step 2", "policy": "p", "reference": "r", "data": "d"}


@pytest.mark.parametrize(
    ("what", "other"),
    [("checkpoint", "none (a new run)"), ("policy", "q"), ("reference", "s"), ("data", "e"), ("lightning-rl", "0")],
)
def test_the_ranks_that_differ_are_named_with_both_sides(
    what: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(value: tuple[str, dict[str, str]]) -> list[Any]:
        return [value, value, ("elsewhere", {**value[1], what: other})]

    monkeypatch.setattr(agreement, "process_objects", gather)
    mine = ALIKE.get(what, agreement.__version__)
    with pytest.raises(ValueError, match="on all ranks, got") as refused:
        check_agreement(ALIKE)
    assert f"the same {what} on all ranks, got {mine} on rank 0 ({socket.gethostname()})" in str(refused.value)
    assert f"{other} on rank 2 (elsewhere): " in str(refused.value)


def test_one_rank_agrees_with_itself() -> None:
    check_agreement(ALIKE)


@pytest.mark.parametrize("size", [1, 2, 255, 257, 5000])
def test_the_ends_of_every_tensor_are_looked_at(size: int) -> None:
    known = hash_weights([("a", torch.zeros(size)), ("b", torch.zeros(0))])
    for place in (0, -1):
        other = torch.zeros(size)
        other[place] = 1
        assert hash_weights([("a", other), ("b", torch.zeros(0))]) != known
    assert hash_weights([("a", torch.zeros(size)), ("b", torch.zeros(0))]) == known
    assert hash_weights([("a", torch.zeros(size + 1)), ("b", torch.zeros(0))]) != known


def test_a_checkpoint_is_identified_by_run_step_and_checksum(tmp_path: Path) -> None:
    trainer = fit(tiny_module(), data=tiny_prompts(8, 4), max_steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    told = identity_of(tmp_path / "a.ckpt")
    assert re.fullmatch(r"a\.ckpt of run \w{8} at step 1 \(CRC-32 [0-9a-f]{8}\)", told)
    assert identity_of(tmp_path / "b.ckpt") == "b.ckpt, which is missing on its disk"
    assert identity_of(None) == "none (a new run)"
    assert identity_of("s3://bucket/a.ckpt") == "s3://bucket/a.ckpt"


def on_two_ranks(folder: Path, strategy: str) -> None:
    """Start with one difference between the ranks at a time, then without one."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def run(**options: Any) -> Trainer:
        made = {"policy": options.pop("policy")} if "policy" in options else {}
        data = options.pop("data", tiny_prompts(8, 4))
        return fit(tiny_module(**made), data=data, strategy=STRATEGIES[strategy](), devices=2, **options)

    run(max_steps=2).save_checkpoint(folder / "2.ckpt")
    here = folder / f"disk-{rank}"
    (here / "changed").mkdir(parents=True)
    changed = torch.load(folder / "2.ckpt", weights_only=False)
    next(iter(changed["state_dict"].values())).view(-1)[7] += rank
    AtomicCheckpointIO().save_checkpoint(changed, here / "changed" / "last.ckpt")
    cases: dict[str, dict[str, Any]] = {
        "not on the disk": {"ckpt_path": (folder if rank == 0 else here) / "2.ckpt"},
        "other weights in it": {"ckpt_path": here / "changed" / "last.ckpt"},
        "other weights": {"policy": partial(tiny_policy, rank)},
        "other rows": {"data": tiny_prompts(8 + 4 * rank, 4)},
    }
    for name, options in cases.items():
        begin = time.monotonic()
        with pytest.raises(ValueError, match="on all ranks, got") as refused:
            run(**options)
        (here / name).write_text(f"{time.monotonic() - begin} {refused.value}")
    assert run(max_steps=3, max_epochs=9, ckpt_path=folder / "2.ckpt").global_step == 3


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_rank_with_other_files_than_rank_0_is_refused_on_both_within_seconds(strategy: str, tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, strategy)
    begins = {
        "not on the disk": ("2.ckpt of run", "2.ckpt, which is missing on its disk"),
        "other weights in it": ("last.ckpt of run", "at step 2 (CRC-32"),
        "other weights": ("the same policy", "model files"),
        "other rows": ("the same data", "the same rows"),
    }
    for name, words in begins.items():
        for rank in (0, 1):
            seconds, said = (tmp_path / f"disk-{rank}" / name).read_text().split(" ", 1)
            assert all(word in said for word in words), (name, said)
            assert float(seconds) < 10, (name, seconds)


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]), sys.argv[2])
