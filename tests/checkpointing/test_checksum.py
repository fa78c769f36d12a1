"""Seals: any flipped bit is refused, and a file that is no whole checkpoint is told in one sentence."""

import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_policy

from lightning_rl import RLLightningModule
from lightning_rl.checkpointing import AtomicCheckpointIO
from lightning_rl.checkpointing.checksum import LENGTH, Seal, check_seal, read_seal, seal_folder

FLIPS = 25


def sealed(path: Path, **content: Any) -> Path:
    AtomicCheckpointIO().save_checkpoint({"weights": torch.arange(64.0), **content}, path)
    return path


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short run."""
    path = tmp_path_factory.mktemp("saved") / "whole.ckpt"
    fit(tiny_module(), limit_train_batches=1).save_checkpoint(path)
    return path


def test_torch_reads_a_sealed_file_as_ever_and_the_seal_says_run_and_step(tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.ckpt", global_step=12, lightning_rl={"run": "0123abcd"})
    assert torch.load(path, weights_only=True)["global_step"] == 12
    assert torch.load(path, weights_only=True, mmap=True)["weights"].tolist() == list(range(64))
    assert read_seal(path) == Seal("0123abcd", 12)
    check_seal(path)


def test_every_bit_of_a_small_file_is_covered(tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.ckpt")
    whole = path.read_bytes()
    places = random.Random(0).sample(range(8 * (len(whole) - LENGTH)), 400)
    for bit in [*places, *range(8 * (len(whole) - LENGTH), 8 * len(whole))]:
        flip(path, bit)
        with pytest.raises(ValueError, match="expected"):
            check_seal(path)
        path.write_bytes(whole)
    check_seal(path)


@pytest.mark.parametrize("missing", [1, 2, 10, 60, LENGTH - 1])
def test_a_file_without_the_end_of_its_seal_is_refused(missing: int, tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(ValueError, match="expected"):
        check_seal(path)


@pytest.mark.parametrize("more", [b"x", bytes(512), b"x" * 4096])
def test_a_file_with_bytes_behind_its_seal_is_refused(more: bytes, tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(ValueError, match="expected"):
        check_seal(path)


def test_any_flip_in_a_checkpoint_is_refused_by_a_resume_and_by_whoever_loads_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    whole, draw = checkpoint.read_bytes(), random.Random(1)
    damaged = tmp_path / "damaged.ckpt"
    for _ in range(FLIPS):
        damaged.write_bytes(whole)
        flip(damaged, draw.randrange(8 * len(whole)))
        with pytest.raises(ValueError, match=r"as it was written, got other bytes|cut off|expected a checkpoint"):
            RLLightningModule.load_from_checkpoint(damaged, policy=tiny_policy, rewards=parity_reward)
    with pytest.raises(ValueError, match="as it was written, got other bytes"):
        fit(tiny_module(), ckpt_path=damaged, max_epochs=2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "got the empty file"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "is truncated or not"),
        (lambda path: path.write_text("no checkpoint"), "is truncated or not a checkpoint"),
        (lambda path: torch.save([1, 2], path), "expected a checkpoint of an RLLightningModule"),
    ],
    ids=["empty", "truncated", "text", "foreign"],
)
def test_a_file_that_is_no_whole_checkpoint_gives_one_sentence(
    damage: Any, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint, tmp_path / "wrong.ckpt")
    damage(tmp_path / "wrong.ckpt")
    for load in (
        lambda path: fit(tiny_module(), ckpt_path=path, max_epochs=2),
        lambda path: RLLightningModule.load_from_checkpoint(path, policy=tiny_policy, rewards=parity_reward),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            load(tmp_path / "wrong.ckpt")
        assert "\n" not in str(refused.value) and "wrong.ckpt" in str(refused.value)


def test_what_is_no_checkpoint_at_all_gives_one_sentence_that_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "pipe.ckpt")
    with zipfile.ZipFile(tmp_path / "end.ckpt", "w"):
        pass
    shutil.copy(tmp_path / "end.ckpt", tmp_path / "run" / "a.ckpt")
    for name, message in {
        "folder": r"expected a checkpoint, got the folder .*folder: resume from another checkpoint",
        "run": r"expected a checkpoint, got the folder .*run: pass one of a\.ckpt in it",
        "pipe.ckpt": r"expected a checkpoint, got .*pipe\.ckpt, which is a pipe or a device: resume from another",
        "end.ckpt": r"expected a checkpoint, got .*end\.ckpt, an archive without a checkpoint: resume from another",
    }.items():
        with pytest.raises(ValueError, match=message) as refused:
            fit(tiny_module(), ckpt_path=tmp_path / name)
        assert "\n" not in str(refused.value)


def test_what_is_no_file_or_has_no_numbers_has_no_seal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert read_seal(tmp_path / "pipe.ckpt") is None
    (tmp_path / "folder").mkdir()
    assert read_seal(tmp_path / "folder") is None
    os.mkfifo(tmp_path / "folder" / "SHA256SUMS")
    assert read_seal(tmp_path / "folder") is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "SHA256SUMS").write_text("# run 0123abcd step seven\n")
    assert read_seal(tmp_path / "other") is None


def test_a_folder_is_sealed_by_a_list_that_covers_itself(tmp_path: Path) -> None:
    folder = tmp_path / "sharded.ckpt"
    (folder / "inner").mkdir(parents=True)
    (folder / "one").write_bytes(b"one")
    (folder / "inner" / "two").write_bytes(b"two")
    seal_folder(folder, Seal("0123abcd", 7))
    assert read_seal(folder) == Seal("0123abcd", 7)
    check_seal(folder)
    for file in ("one", "inner/two", "SHA256SUMS"):
        whole = (folder / file).read_bytes()
        for bit in range(0, 8 * len(whole), 7):
            flip(folder / file, bit)
            with pytest.raises(ValueError, match=r"as it was written, got other bytes|without"):
                check_seal(folder)
            (folder / file).write_bytes(whole)
    (folder / "one").unlink()
    with pytest.raises(ValueError, match=r"expected a complete checkpoint, got .* without one"):
        check_seal(folder)
