"""Seal: run, step and SHA-256 at the end of a checkpoint file, or in a list beside the files of its folder.

A file of ``torch.save`` is a zip archive. The seal is its comment, which ``torch.load`` ignores. The digest covers
every byte before it, including the run and step of the seal.
"""

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

SUMS = "SHA256SUMS"
WORDS = (b"lightning-rl run ", b" step ", b" sha256 ")
RUN, STEP, DIGEST = 8, 12, 64  # characters of each value
LENGTH = sum(map(len, WORDS)) + RUN + STEP + DIGEST
ALIKE = 24  # bits that may differ in a damaged seal; in random bytes about half of 248 differ
NO_COMMENT = b"\0\0"
END_RECORD, END_LENGTH = b"PK\5\6", 22  # of a zip archive; its last two bytes hold the length of the comment
PARTS = (".metadata", "checkpoint", "meta.pt", "latest")  # files in folders of sharded strategies
NEAR = 2**20  # bytes before the end of a file that are searched for the record


class Seal(NamedTuple):
    """Origin of a checkpoint.

    Attributes:
        run: Name of the run; a resumed run keeps it.
        step: Number of optimizer steps.
    """

    run: str
    step: int


def seal_of(checkpoint: Any) -> Seal:
    """Return the seal of a checkpoint to write."""
    ours = checkpoint.get("lightning_rl", {}) if isinstance(checkpoint, dict) else {}
    step = checkpoint.get("global_step", -1) if isinstance(checkpoint, dict) else -1
    return Seal(str(ours.get("run", "")), int(step))


def seal_file(path: Path, seal: Seal) -> None:
    """Append the seal to a file of ``torch.save``."""
    head = b"".join([WORDS[0], seal.run[:RUN].rjust(RUN, "-").encode(), WORDS[1], _digits(seal.step), WORDS[2]])
    with path.open("r+b") as file:
        file.seek(-len(NO_COMMENT), os.SEEK_END)
        if file.read() != NO_COMMENT:
            return  # not an archive of torch.save
        file.seek(-len(NO_COMMENT), os.SEEK_END)
        file.write(LENGTH.to_bytes(2, "little") + head)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(digest.encode())


def seal_folder(folder: Path, seal: Seal) -> None:
    """Write the list of digests into a folder."""
    lines = [f"{_digest(folder / name)}  {name}" for name in _files(folder)]
    text = "\n".join([f"# run {seal.run or '-'} step {seal.step}", *lines, ""])
    (folder / SUMS).write_text(text + hashlib.sha256(text.encode()).hexdigest(), encoding="utf-8")


def read_seal(path: Path) -> Seal | None:
    """Return the seal of a checkpoint without verifying it, or None; pipes are not opened."""
    if path.is_dir():
        lines = (path / SUMS).read_text("utf-8", errors="replace").split("\n") if (path / SUMS).is_file() else [""]
        words = lines[0].split()
        told = len(words) == 5 and words[4].lstrip("-").isdigit()
        return Seal("" if words[2] == "-" else words[2], int(words[4])) if told else None
    tail = _tail(path) if path.is_file() else None
    if tail is None:
        return None
    run, step = tail[len(WORDS[0]) :][:RUN], tail[len(WORDS[0]) + RUN + len(WORDS[1]) :][:STEP]
    name = run.decode("ascii", errors="replace").lstrip("-")
    return Seal(name, int(step) if step.strip().lstrip(b"-").isdigit() else -1)


def digest_in(path: Path) -> str:
    """Return the recorded SHA-256 of a checkpoint, or '' if there is none; does not verify it."""
    if path.is_dir():
        return (path / SUMS).read_text("utf-8", errors="replace")[-DIGEST:] if (path / SUMS).is_file() else ""
    tail = _tail(path) if path.is_file() else None
    return "" if tail is None else tail[-DIGEST:].decode("ascii", errors="replace")


def check_seal(path: Path) -> None:
    """Verify a checkpoint; without a seal it only has to be an archive.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is empty, truncated, another kind of file, or any bit has changed.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a checkpoint, got {path}, which does not exist")
    if path.is_dir():
        _check_folder(path)
        return
    if not _check_file(path):
        return
    with path.open("rb") as file:
        digest = hashlib.sha256()
        left = path.stat().st_size - DIGEST
        while left > 0:
            block = file.read(min(left, 2**22))
            digest.update(block)
            left -= len(block)
        whole = digest.hexdigest().encode() == file.read()
    if not whole:
        raise ValueError(_damage(path))


def _check_file(path: Path) -> bool:
    """Return True if a file has a seal; raise unless a file without one is an archive with a checkpoint."""
    if not path.is_file():
        raise ValueError(f"expected a checkpoint, got {path}, which is a pipe or a device: {_cure(path)}")
    if not path.stat().st_size:
        raise ValueError(f"expected a checkpoint, got the empty file {path}: {_cure(path)}")
    if _tail(path) is None:
        if _ends_otherwise(path):
            raise ValueError(_damage(path))
        if not zipfile.is_zipfile(path):
            raise ValueError(
                f"expected a checkpoint, got {path}, which is truncated or not a checkpoint: {_cure(path)}"
            )
        if _pickle_in(path) is None:
            raise ValueError(f"expected a checkpoint, got {path}, an archive without a checkpoint: {_cure(path)}")
        return False
    return True


def holds_weights_alone(path: Path) -> bool:
    """Return True for a file of ``save_weights_only=True``, which cannot be resumed; nothing is unpickled."""
    entry = None if path.is_dir() else _pickle_in(path)
    if entry is None or entry.compress_type != zipfile.ZIP_STORED:  # torch.save does not compress
        return False
    with zipfile.ZipFile(path) as archive:
        content = archive.read(entry)
    return b"pytorch-lightning_version" in content and b"lr_schedulers" not in content


def _pickle_in(path: Path) -> zipfile.ZipInfo | None:
    """Return the archive entry with the pickle of a checkpoint, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return None
    return next((entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"), None)


def unreadable(path: Path, failure: BaseException) -> str:
    """Return the error message for a file that ``torch.load`` cannot read."""
    reason = str(failure).strip().split("\n")[0][:200] or type(failure).__name__
    return f"expected a checkpoint of an RLLightningModule, got {path}, which cannot be read ({reason}): {_cure(path)}"


def _check_folder(folder: Path) -> None:
    if not (folder / SUMS).exists():
        if not any((folder / name).exists() for name in PARTS):
            within = ", ".join(sorted(path.name for path in folder.glob("*.ckpt"))[-3:])
            cure = f"pass one of {within} in it" if within else _cure(folder)
            raise ValueError(f"expected a checkpoint, got the folder {folder}: {cure}")
        return
    text, _, last = (folder / SUMS).read_text("utf-8", errors="replace").rpartition("\n")
    text += "\n"
    if hashlib.sha256(text.encode()).hexdigest() != last:
        raise ValueError(_damage(folder / SUMS))
    sums = {line[DIGEST + 2 :]: line[:DIGEST] for line in text.splitlines()[1:]}
    missing = sorted(sums.keys() - set(_files(folder)))
    if missing:
        raise ValueError(f"expected a complete checkpoint, got {folder} without {missing[0]}: {_cure(folder)}")
    for name, digest in sums.items():
        if _digest(folder / name) != digest:
            raise ValueError(_damage(folder / name))


def _damage(path: Path) -> str:
    return (
        f"expected {path} as it was written, got other bytes (SHA-256 differs), so the file is damaged: {_cure(path)}"
    )


def _cure(path: Path) -> str:
    others = [other.name for other in path.parent.glob("*.ckpt") if other != path]
    if not others:
        return "resume from another checkpoint, or start a new run"
    return f"resume from another checkpoint, such as one of {', '.join(sorted(others)[-3:])} beside it"


def _ends_otherwise(path: Path) -> bool:
    """Return True if bytes after the record of an archive are missing or in excess."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NEAR))
        end = file.read()
    at = end.rfind(END_RECORD)
    claimed = int.from_bytes(end[at + END_LENGTH - 2 : at + END_LENGTH], "little")
    return at >= 0 and len(end) - at - END_LENGTH != claimed


def _tail(path: Path) -> bytes | None:
    """Return the bytes of the seal, tolerating a few flipped bits."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < LENGTH:
            return None
        file.seek(-LENGTH, os.SEEK_END)
        tail = file.read()
    skips = (0, RUN, STEP)
    differing, at = 0, 0
    for word, skip in zip(WORDS, skips, strict=True):
        at += skip
        differing += sum((one ^ other).bit_count() for one, other in zip(word, tail[at:], strict=False))
        at += len(word)
    return tail if differing <= ALIKE else None


def _digits(step: int) -> bytes:
    return str(step).rjust(STEP).encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
