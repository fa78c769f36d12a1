"""Atomic checkpoints: written to a temporary path and renamed; compared with their checksums before loading."""

import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import override

from lightning_rl.checkpointing.checkpoint_folder import latest_checkpoint, restore_old
from lightning_rl.checkpointing.checksum import LIGHTNING, check_whole, unreadable, write_sums
from lightning_rl.checkpointing.folder_pickles import check_pickles
from lightning_rl.distributed import RunEndError, failing_together
from lightning_rl.utils.atomic_write import PART, move_over, remove, write_atomically


class CheckpointError(RunEndError):
    """A checkpoint could not be written, and ``FaultTolerance(on_checkpoint_error="raise")`` ends the run."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames; the default of RLLightningModule.

    Remote paths, which Lightning writes in one piece, are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def write(part: Path) -> None:
            with part.open("wb") as file:
                torch.save(checkpoint, file)

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), write)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        remove(Path(path)) if is_local(path) else super().remove_checkpoint(path)


class AtomicStrategy(Strategy):
    """Strategy with the checks of :func:`protect_checkpoints`.

    Attributes:
        on_checkpoint_error: ``"raise"`` to end the run if a checkpoint cannot be written, ``"warn"`` to continue.
        last_checkpoint: Path of the last complete checkpoint.
        failing: True if the last attempt failed.
    """

    on_checkpoint_error: str
    last_checkpoint: Path | None
    failing: bool

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not is_local(filepath) or isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        part = path.with_name(path.name + PART)
        try:
            with failing_together("room for a checkpoint"):
                if self.is_global_zero:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    remove(part)
            with failing_together("a checkpoint"):
                super().save_checkpoint(checkpoint, part, storage_options)
            with failing_together("a checkpoint"):
                if self.is_global_zero:
                    if part.is_dir():
                        write_sums(part, checkpoint)
                    move_over(part, path)
        except (OSError, RuntimeError, CheckpointException) as failure:
            self._fail(path, part, failure)
        else:
            self.last_checkpoint, self.failing = path, False

    def _fail(self, path: Path, part: Path, failure: BaseException) -> None:
        """Raise or warn after a failed write, naming the last complete checkpoint."""
        self.failing = True
        free = "none"
        if self.is_global_zero:
            try:
                remove(part)
                free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB"
            except OSError:
                free = "unknown"
        last = self.last_checkpoint if self.last_checkpoint and self.last_checkpoint.exists() else _latest(path.parent)
        good = f"the last complete checkpoint is {last}" if last else "there is no earlier checkpoint"
        cure, reason = "free some space", f"{reason_of(failure)} ({free} free)"
        if not path.parent.is_dir():
            other = "a broken link" if path.parent.is_symlink() else "a file" if path.parent.exists() else "nothing"
            cure, reason = "put the folder back", f"{other} instead of its folder"
        message = f"expected to write the checkpoint {path}, got {reason}: {good}"
        if self.on_checkpoint_error == "raise":
            cure += ', or let the run continue with FaultTolerance(on_checkpoint_error="warn")'
            raise CheckpointError(f"{message}; {cure}") from failure
        rank_zero_warn(f"{message}; the run continues without it (on_checkpoint_error={self.on_checkpoint_error!r})")

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.failing and self.last_checkpoint is not None and Path(filepath) == self.last_checkpoint:
            return  # keep it: its replacement was not written
        super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        local = is_local(checkpoint_path)
        with failing_together("a whole checkpoint"):
            if local and self.is_global_zero:
                restore_old(Path(checkpoint_path).parent)
                check_whole(Path(checkpoint_path))
                check_pickles(Path(checkpoint_path))
        try:
            # Lightning unpickles URLs by default
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only is None or weights_only)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as failure:
            reading = isinstance(failure, pickle.UnpicklingError | EOFError) or "PytorchStreamReader" in str(failure)
            if not reading:
                raise
            raise ValueError(unreadable(Path(checkpoint_path), failure)) from failure
        if not isinstance(checkpoint, dict) or LIGHTNING not in checkpoint:
            raise ValueError(
                f"expected a checkpoint of an RLLightningModule, got {checkpoint_path}, which another program wrote: "
                "pass a file that trainer.save_checkpoint or ModelCheckpoint wrote"
            )
        return checkpoint


def protect_checkpoints(strategy: Strategy, on_checkpoint_error: str) -> None:
    """Make a strategy write checkpoints atomically, and compare them with their checksums before loading.

    Replaces the class of the strategy object by a subclass, like ``fully_shard`` for modules, because FSDP and
    DeepSpeed write checkpoints without a CheckpointIO.

    Args:
        strategy: Strategy of the Trainer.
        on_checkpoint_error: ``"raise"`` or ``"warn"``.
    """
    kind = type(strategy)
    if not isinstance(strategy, AtomicStrategy):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        strategy.__class__ = type(kind.__name__, (AtomicStrategy, kind), names)
    atomic = cast(AtomicStrategy, strategy)
    atomic.on_checkpoint_error, atomic.last_checkpoint, atomic.failing = on_checkpoint_error, None, False
    if type(atomic.checkpoint_io) is TorchCheckpointIO:
        atomic.checkpoint_io = AtomicCheckpointIO()


def is_local(path: Any) -> bool:
    """Return True if a path is on a local file system."""
    return "://" not in str(path)


def _latest(folder: Path) -> Path | None:
    try:
        return latest_checkpoint(folder)
    except (OSError, ValueError):
        return None


def reason_of(failure: BaseException) -> str:
    """Return the error in one line; its class if it has no text."""
    first = str(failure).strip().split("\n")[0][:200]
    return f"{type(failure).__name__}: {first}" if first else type(failure).__name__
