"""A file of torch.save from anywhere is plain values and tensors, or a sentence; nothing of it is run."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_prompts

from lightning_rl import RLLightningModule
from lightning_rl.archive import load_archive
from lightning_rl.audit import recheck
from lightning_rl.checkpointing import latest_checkpoint

EMPTY = b"\x80\x02]."


class Payload:
    """What touches a file as soon as it is unpickled."""

    def __init__(self, left: Path) -> None:
        self.left = left

    def __reduce__(self) -> Any:
        """What unpickling calls."""
        return os.system, (f"touch {self.left}",)


def packed(path: Path, pickled: bytes, *, compression: int = zipfile.ZIP_STORED, filler: int = 0) -> None:
    """An archive as torch.save lays it out, around a pickle of somebody's."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/version", "3\n")
        archive.writestr("a/filler", bytes(filler))


def saved(path: Path, value: Any) -> None:
    torch.save(value, path)


def sparse(path: Path) -> None:
    """A tensor of a trillion numbers, none of which is there."""
    size = (10**6, 10**6)
    saved(path, torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), size))


def cut(path: Path) -> None:
    torch.save({"weights": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:900])


def longer(path: Path) -> None:
    """A tensor that says it is a thousand times as long as what lies in the file."""
    torch.save({"a": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            wrong = content.replace(b"K\x04", b"M\xa0\x0f") if name.endswith("data.pkl") else content
            archive.writestr(name, wrong)


def twice(path: Path) -> None:
    torch.save({"a": 1}, path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"\x80\x02}.")


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a payload": lambda path: saved(path, {"lightning_rl": Payload(path.with_name("left"))}),
    "a payload in the old format": lambda path: path.write_bytes(pickle.dumps(Payload(path.with_name("left")))),
    "a payload in protocol 5": lambda path: packed(path, pickle.dumps(Payload(path.with_name("left")), 5)),
    "plain values in protocol 4": lambda path: packed(path, b"\x80\x04]."),
    "the importer": lambda path: packed(path, b"\x80\x02cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85R."),
    "an attribute": lambda path: packed(path, b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."),
    "a class of ours": lambda path: packed(path, b"\x80\x02clightning_rl.recording.recorder\nRolloutRecorder\n)R."),
    "a bomb": lambda path: packed(path, EMPTY, compression=zipfile.ZIP_DEFLATED, filler=50_000_000),
    "all of the memory": lambda path: packed(
        path, b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + bytes(5) + b"\x7f\x85R."
    ),
    "a number a trillion times": lambda path: saved(path, {"a": torch.zeros(1).expand(10**12)}),
    "a sparse tensor": sparse,
    "a tensor without numbers": lambda path: saved(path, torch.zeros(10**12, device="meta")),
    "a tensor that is cut": longer,
    "an entry twice": twice,
    "a cut file": cut,
    "nothing": lambda path: path.touch(),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "text": lambda path: path.write_text("{}"),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
def test_an_attack_ends_in_a_sentence(attack: str, mmap: bool, tmp_path: Path) -> None:
    ATTACKS[attack](tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"^expected a whole file as torch.save writes it, .* got .*a\.pt: "
    ) as refused:
        load_archive(tmp_path / "a.pt", mmap=mmap)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "left").exists()


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    value = {"a": [torch.arange(3), (1, None)], "b": torch.zeros(2, 3).t(), "c": {"d": torch.ones(1)[:0]}}
    saved(tmp_path / "a.pt", value)
    loaded = load_archive(tmp_path / "a.pt")
    assert torch.equal(loaded["a"][0], torch.tensor([0, 1, 2])) and loaded["a"][1] == (1, None)
    assert loaded["b"].shape == (3, 2) and loaded["c"]["d"].numel() == 0


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")
def test_an_attack_beside_a_checkpoint_is_never_the_newest_one(attack: str, tmp_path: Path) -> None:
    saved(tmp_path / "good.ckpt", {"global_step": 1})
    if attack == "a folder":
        (tmp_path / "a.ckpt").mkdir()
    else:
        ATTACKS[attack](tmp_path / "a.ckpt")
    saved(tmp_path / "no_number.ckpt", {"global_step": []})
    assert latest_checkpoint(tmp_path) == tmp_path / "good.ckpt"
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize("attack", ["a payload", "a payload in the old format", "a bomb", "a number a trillion times"])
def test_the_audit_and_checkpoints_read_through_it(attack: str, tmp_path: Path) -> None:
    ATTACKS[attack](tmp_path / "a.pt")
    with pytest.raises(ValueError, match="expected a whole file"):
        recheck(tmp_path / "a.pt", tiny_module())
    with pytest.raises(ValueError, match=r"expected a (whole file|checkpoint)"):
        RLLightningModule.load_from_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize(
    "state", [{}, [], {"findings": [{}]}, {"findings": [{"check": "x"}], "rollout": {"__class__": 1}}]
)
def test_evidence_of_nobody_is_refused(state: Any, tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", state)
    with pytest.raises(ValueError, match=r"expected evidence as SignalAudit saves it, got .*a\.pt"):
        recheck(tmp_path / "a.pt", tiny_module())


def test_a_fit_does_not_unpickle_a_payload(tmp_path: Path) -> None:
    saved(tmp_path / "a.ckpt", {"lightning_rl": Payload(tmp_path / "left")})
    with pytest.raises(
        (ValueError, pickle.UnpicklingError), match=r"expected a (whole file|checkpoint)|Weights only load failed"
    ):
        fit(tiny_module(), ckpt_path=tmp_path / "a.ckpt", data=tiny_prompts(4, 4))
    assert not (tmp_path / "left").exists()


def test_a_checkpoint_that_names_an_unpickler_is_asked_for_the_policy(tmp_path: Path) -> None:
    fit(tiny_module(), limit_train_batches=1).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = load_archive(tmp_path / "a.ckpt")
    task = pickle.dumps(((), {}, Payload(tmp_path / "left"), 1))
    checkpoint["lightning_rl"]["configuration"]["module"]["policy"] = {
        "partial": "lightning_rl.rewards.worker.answer",
        "args": [None, task],
        "keywords": {},
    }
    saved(tmp_path / "a.ckpt", checkpoint)
    with pytest.raises(ValueError, match="expected policy= to be given again"):
        RLLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", rewards=parity_reward)
    assert not (tmp_path / "left").exists()
