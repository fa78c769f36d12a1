"""Two ranks: waits that are longer than the group's own patience, errors of both and of one, checkpoints as folders."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_rl import FSDP2Strategy, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.checkpointing import INTERRUPTED, CheckpointError, latest_checkpoint
from lightning_rl.checkpointing.checksum import SUMS, check_whole
from lightning_rl.generation import Completion, Request

SHORT = timedelta(seconds=4)  # what a group of the strategy waits
LONG = 5.5  # seconds that one rank takes


def first() -> bool:
    """Return True on rank 0."""
    return os.environ["RANK"] == "0"


class Slow(TransformersEngine):
    """Generates for longer than the group waits, once, on the first rank."""

    left = 1

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if first() and self.left:
            self.left = 0
            time.sleep(LONG)
        return super().generate_batch(requests, logprobs=logprobs)


def slow_reward(prompts: Sequence[Any], *_: Any, trainer_state: Any, **__: Any) -> list[float]:
    """Scores for longer than the group waits, once, on the first rank."""
    if first() and trainer_state.global_step == 0:
        time.sleep(LONG)
    return [float(number % 2) for number in range(len(prompts))]


class Raises(RLCallback):
    """Raises in the second rollout, on both ranks or on the first alone."""

    name = "raises"

    def __init__(self, *, alone: bool) -> None:
        self.alone, self.seen = alone, 0

    @property
    @override
    def affects(self) -> bool:
        return False

    @override
    def observe(self, rollout: Rollout) -> None:
        self.seen += 1
        if self.seen == 2 and (first() or not self.alone):
            raise ValueError("the second rollout is wrong")


class Masks(RLCallback):
    """Raises in the second rollout, on the first rank alone, while rewards are masked, if there is something wrong."""

    name, wrong = "masks", False

    def __init__(self) -> None:
        self.seen = 0

    @override
    def reward_mask(self, rollout: Rollout) -> torch.Tensor:
        self.seen += 1
        if self.seen == 2 and first() and type(self).wrong:
            raise ValueError("the second rollout is wrong")
        return rollout.rewarded


class Saves(Callback):
    """A checkpoint of every step in one place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        trainer.save_checkpoint(self.path)


def sharded() -> FSDP2Strategy:
    """Saves a folder with a part of each rank."""
    return FSDP2Strategy(process_group_backend="gloo", timeout=timedelta(seconds=60))


def run(folder: Path, strategy: Any, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Two rollouts of two steps."""
    module = tiny_module(minibatches_per_rollout=2, **options)
    fit(module, callbacks=callbacks, data=tiny_prompts(16, 8), strategy=strategy, devices=2, default_root_dir=folder,
        ckpt_path=ckpt_path)  # fmt: skip
    return module


def local_weights(module: RLLightningModule) -> dict[str, torch.Tensor]:
    """Return the weights of this rank."""
    return {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in weights_of(module).items()}


def long_waits(folder: Path) -> None:
    """Neither a reward nor an engine that takes its time on one rank ends the other."""
    strategy = DDPStrategy(process_group_backend="gloo", timeout=SHORT)
    run(folder, strategy, rewards=slow_reward, engine=Slow())


def both_fail(folder: Path) -> None:
    """The checkpoint of both goes on bit for bit, for one file and for a folder."""
    for kind in (STRATEGIES["ddp"], sharded):
        whole = run(folder / "whole", kind())
        with pytest.raises(ValueError, match="the second rollout is wrong"):
            run(folder / kind.__name__, kind(), Raises(alone=False))
        resumed = run(folder, kind(), ckpt_path=folder / kind.__name__ / INTERRUPTED)
        for name, weight in local_weights(whole).items():
            assert torch.equal(local_weights(resumed)[name], weight), name


def one_fails(folder: Path) -> None:
    """Both end; nothing is saved, because a checkpoint takes both, and the messages say who failed and what is left."""
    begin, path = time.monotonic(), folder / "kept.ckpt"
    with pytest.raises((ValueError, RuntimeError)) as raised:
        run(folder, STRATEGIES["ddp"](), Raises(alone=True), Saves(path))
    said = raised.value.__notes__[-1]
    assert said.endswith(f"resume with ckpt_path={str(path)!r}"), said
    alone = "rank 0 failed alone, with ValueError: the second rollout is wrong, and a checkpoint needs all ranks"
    assert ("the other ranks did not fail within" if first() else alone) in said, said
    assert not (folder / INTERRUPTED).exists()
    assert time.monotonic() - begin < 60


def one_fails_at_rewards(folder: Path) -> None:
    """Both fail and save, and the run goes on bit for bit."""
    whole, Masks.wrong = run(folder / "whole", STRATEGIES["ddp"](), Masks()), True
    match = "the second rollout is wrong" if first() else r"it failed on \[0\].*ValueError: the second rollout is wrong"
    with pytest.raises(ValueError if first() else RuntimeError, match=match):
        run(folder, STRATEGIES["ddp"](), Masks())
    assert not list(folder.glob("failed-rank-*"))
    Masks.wrong = False
    resumed = run(folder, STRATEGIES["ddp"](), Masks(), ckpt_path=folder / INTERRUPTED)
    for name, weight in local_weights(whole).items():
        assert torch.equal(local_weights(resumed)[name], weight), name


def folders(folder: Path) -> None:
    """A folder is whole or not at all, keeps the last good one, and refuses a flipped bit."""
    path, module = folder / "kept.ckpt", None
    module = run(folder, sharded(), Saves(path))
    check_whole(path)
    assert latest_checkpoint(folder) == path and not list(folder.glob("*.part"))
    with pytest.raises((CheckpointError, ValueError)):
        run(folder, sharded(), Saves(folder / "kept.ckpt" / SUMS / "inside.ckpt"))
    check_whole(path)
    torch.distributed.barrier()
    if first():
        shard = next(path.glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)
    torch.distributed.barrier()
    with pytest.raises((ValueError, RuntimeError), match=r"CRC-32 differs|a whole checkpoint on every"):
        run(folder, sharded(), ckpt_path=path)
    assert module is not None


CASES: dict[str, Callable[[Path], None]] = {
    "long_waits": long_waits,
    "both_fail": both_fail,
    "one_fails": one_fails,
    "one_fails_at_rewards": one_fails_at_rewards,
    "folders": folders,
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, tmp_path: Path) -> None:
    run_ranks(__file__, 2, case, tmp_path)


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
