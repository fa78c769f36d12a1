"""Interrupts: whatever ends a run between two optimizer steps leaves a checkpoint of the last one."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl.checkpointing.atomic import is_local
from lightning_rl.checkpointing.folder import RunFolder, release
from lightning_rl.checkpointing.slurm import requeue, requeue_path, requeue_signal
from lightning_rl.distributed import RunEndError, failing_together, meet, process_maximum
from lightning_rl.rewards.limit import CLOCK

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted.ckpt"
GRACE = 20.0  # seconds after a signal in which the step may end; schedulers kill after 30
MEETING = 8.0  # seconds in which every rank has to have failed for a checkpoint of all


class Interrupts(Callback):
    """Every run has one. The first SIGINT (Ctrl-C) or SIGTERM on any rank lets the optimizer step end, saves
    ``interrupted.ckpt`` beside the other checkpoints, and ends the run on all ranks, after SIGTERM with exit code 143.
    A step that takes longer than :data:`GRACE` seconds from then on is left where it is, a reward after a few; a second
    signal does so at once. Under SLURM the signal of a requeue does the same and queues the job again.

    So does any exception: what had begun since the last optimizer step is undone, and the checkpoint begins with it.
    Two things cannot be saved: an optimizer step that broke off half way, and a state that the ranks do not share.
    Whatever is raised, the engine is closed.

    Args:
        settle: takes a module and what was raised, and puts the module's run back to the last optimizer step; returns
            why that cannot be, or None.
        close: closes the engine of a module.
        run: the name of a module's run.
    """

    def __init__(
        self,
        settle: Callable[[Any, BaseException], str | None],
        close: Callable[[Any], None],
        run: Callable[[Any], str],
    ) -> None:
        self.received = 0
        self._settle, self._close, self._run = settle, close, run
        self._training = self._saved = self._saving = False
        self._requeue: int | None = None
        self._alarm: threading.Timer | None = None
        self._handlers: dict[int, Any] = {}
        self._folders: list[RunFolder] = []

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        CLOCK.reset()
        CLOCK.abandon = lambda reason, status: self._abandon(trainer, pl_module, reason, status)
        self._saved = self._saving = False
        self._claim(trainer, pl_module)
        meet(MEETING)  # makes what the ranks meet by, while all are here
        self._training = True
        self._install(trainer)

    def _claim(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the folders that checkpoints go to, before hours have gone by."""
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        paths = dict.fromkeys(str(saver.dirpath) for saver in savers if saver.dirpath and is_local(saver.dirpath))
        with failing_together("a folder for checkpoints"):
            for path in paths if trainer.is_global_zero else ():
                folder = RunFolder(Path(path))
                folder.claim(self._run(pl_module))
                self._folders.append(folder)

    def _install(self, trainer: Trainer) -> None:
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        self.received, self._requeue = 0, requeue_signal(trainer)
        for number in (*SIGNALS, *([] if self._requeue is None else [self._requeue])):
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._saving and number != signal.SIGINT:
            return  # it ends anyway
        if self.received:
            _end(self.received)
        self.received = number
        CLOCK.stop(number)
        self._alarm = threading.Timer(GRACE, signal.pthread_kill, (threading.get_ident(), number))
        self._alarm.daemon = True
        self._alarm.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        received = process_maximum(self.received)
        if not received:
            return
        self._saving = True
        self._silence()
        _save(trainer, signal.Signals(received).name, requeue_path(trainer) if received == self._requeue else None)
        self._saved = True
        if received == self._requeue and trainer.is_global_zero:
            requeue()
        _end(received)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._saving = True
        self._silence()
        if isinstance(exception, SIGTERMException) and exception.code is None:  # raised by Lightning
            exception.code = 128 + signal.SIGTERM
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        try:
            if self._training and fitting and not self._saved:
                self._save_last_step(trainer, pl_module, exception)
        finally:
            self._restore()
            self._close(pl_module)

    def _abandon(self, trainer: Trainer, pl_module: LightningModule, reason: str, status: int) -> NoReturn:
        """Ends the process where no exception can: in the midst of a reward that swallows all of them."""
        try:
            sys.stderr.write(f"{reason}\n")
            self.on_exception(trainer, pl_module, RunEndError(reason))
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _save_last_step(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves after the last optimizer step, if every rank can; the exception keeps its place in any case."""
        if isinstance(exception, torch.OutOfMemoryError):  # what is alive in its frames is needed to save
            traceback.clear_frames(exception.__traceback__)
        reason = self._settle(pl_module, exception)
        places = meet(MEETING, (reason, trainer.global_step))
        if places is None:
            reason = f"the other ranks did not fail as well within {MEETING:g} s, and a checkpoint takes all of them"
        elif len(set(places)) > 1:
            reason = f"the ranks stopped at different places: {places}"
        if reason is not None:
            _tell(exception, f"no {INTERRUPTED} was written: {reason}; go on from the last checkpoint")
            return
        for note in getattr(exception, "__notes__", ()):
            rank_zero_info(note)
        try:
            _save(trainer, f"{type(exception).__name__} ended the run")
        except Exception as failure:  # noqa: BLE001  what ended the run is the news
            _tell(exception, f"no {INTERRUPTED} was written: {failure}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _restore(self) -> None:
        """Gives signals, folders and clock back."""
        self._silence()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers, self._training = {}, False
        release(self._folders)
        self._folders = []
        CLOCK.reset()


def _tell(exception: BaseException, text: str) -> None:
    """Says something at the end of a traceback, and in the log, since not everything that ends a run has one."""
    exception.add_note(text)
    rank_zero_info(text)


def _end(received: int) -> NoReturn:
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SIGTERMException(128 + received)


def _save(trainer: Trainer, why: str, path: Path | None = None) -> None:
    """Saves beside the other checkpoints, or at a path. Every rank takes part."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    path = Path(folder) / INTERRUPTED if path is None else path
    trainer.save_checkpoint(path)
    rank_zero_info(f"{why} after optimizer step {trainer.global_step}: go on with ckpt_path={str(path)!r}")
