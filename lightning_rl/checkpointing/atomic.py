"""Atomic: every checkpoint of every strategy is written aside, sealed and renamed, and checked before it is loaded."""

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

from lightning_rl.checkpointing.folder import latest_checkpoint
from lightning_rl.checkpointing.seal import check_seal, seal_file, seal_folder, seal_of, unreadable
from lightning_rl.distributed import RunEndError, failing_together
from lightning_rl.files import PART, move_over, remove, write_atomically


class CheckpointError(RunEndError):
    """A checkpoint could not be written, and ``checkpoint_errors="raise"`` ends the run."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, seals, then renames. Every run of an RLLightningModule has it unless another plugin is
    given; remote paths, which Lightning writes in one piece, are left to it.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def write(part: Path) -> None:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
            seal_file(part, seal_of(checkpoint))

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), write)


class SealedStrategy(Strategy):
    """What :func:`protect_checkpoints` adds to a strategy.

    Attributes:
        checkpoint_errors: ``"raise"`` if a checkpoint that cannot be written ends the run, ``"warn"`` if it goes on.
        last_checkpoint: that was written whole.
        failing: whether the last attempt failed.
    """

    checkpoint_errors: str
    last_checkpoint: Path | None
    failing: bool

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not is_local(filepath) or isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path, seal = Path(self.broadcast(filepath)), seal_of(checkpoint)
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
                        seal_folder(part, seal)
                    move_over(part, path)
        except (OSError, RuntimeError, CheckpointException) as failure:
            self._fail(path, part, failure)
        else:
            self.last_checkpoint, self.failing = path, False

    def _fail(self, path: Path, part: Path, failure: BaseException) -> None:
        """Ends the run, or says so and goes on; either way names the last checkpoint that is whole."""
        self.failing = True
        free = "none"
        if self.is_global_zero:
            try:
                remove(part)
                free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB"
            except OSError:
                free = "unknown"
        last = self.last_checkpoint if self.last_checkpoint and self.last_checkpoint.exists() else _latest(path.parent)
        good = f"the last whole checkpoint is {last}" if last else "there is no earlier checkpoint"
        cure, reason = "free some space", f"{reason_of(failure)} ({free} free)"
        if not path.parent.is_dir():
            other = "a link to nowhere" if path.parent.is_symlink() else "a file" if path.parent.exists() else "nothing"
            cure, reason = "put the folder back", f"{other} in the place of its folder"
        message = f"expected to write the checkpoint {path}, got {reason}: {good}"
        if self.checkpoint_errors == "raise":
            cure += ', or let the run go on by RLLightningModule(checkpoint_errors="warn")'
            raise CheckpointError(f"{message}; {cure}") from failure
        rank_zero_warn(f"{message}; the run goes on without (checkpoint_errors={self.checkpoint_errors!r})")

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.failing and self.last_checkpoint is not None and Path(filepath) == self.last_checkpoint:
            return  # whoever wants to replace it does not know that its successor was not written
        super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        local = is_local(checkpoint_path)
        with failing_together("a whole checkpoint"):
            if local and self.is_global_zero:
                check_seal(Path(checkpoint_path))
        try:
            # Lightning unpickles what comes from a URL unless it is told not to
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only is None or weights_only)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as failure:
            reading = isinstance(failure, pickle.UnpicklingError | EOFError) or "PytorchStreamReader" in str(failure)
            if not reading:
                raise
            raise ValueError(unreadable(Path(checkpoint_path), failure)) from failure
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise ValueError(
                f"expected a checkpoint of an RLLightningModule, got {checkpoint_path}, which something else wrote: "
                "pass a file that trainer.save_checkpoint or ModelCheckpoint wrote"
            )
        return checkpoint


def protect_checkpoints(strategy: Strategy, checkpoint_errors: str) -> None:
    """Lets a strategy write its checkpoints, files or folders, aside and sealed, and check them before they are loaded.

    Its object gets a class of its own, as ``fully_shard`` gives to modules; what the user chose stays its base.

    Args:
        strategy: of the Trainer.
        checkpoint_errors: ``"raise"`` or ``"warn"``.
    """
    kind = type(strategy)
    if not isinstance(strategy, SealedStrategy):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        strategy.__class__ = type(kind.__name__, (SealedStrategy, kind), names)
    sealed = cast(SealedStrategy, strategy)
    sealed.checkpoint_errors, sealed.last_checkpoint, sealed.failing = checkpoint_errors, None, False
    if type(sealed.checkpoint_io) is TorchCheckpointIO:
        sealed.checkpoint_io = AtomicCheckpointIO()


def is_local(path: Any) -> bool:
    """Whether a path is one of this machine's file systems."""
    return "://" not in str(path)


def _latest(folder: Path) -> Path | None:
    try:
        return latest_checkpoint(folder)
    except (OSError, ValueError):
        return None


def reason_of(failure: BaseException) -> str:
    """What was raised, in one line; many a failure has no text."""
    first = str(failure).strip().split("\n")[0][:200]
    return f"{type(failure).__name__}: {first}" if first else type(failure).__name__
