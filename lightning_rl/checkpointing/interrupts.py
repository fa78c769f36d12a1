"""Interrupts: whatever ends a run between two optimizer steps leaves a checkpoint of the last one."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl.checkpointing.atomic import is_local, reason_of
from lightning_rl.checkpointing.farewells import clear_farewells, first_farewell, leave_farewell, way_on
from lightning_rl.checkpointing.folder import RunFolder, release
from lightning_rl.checkpointing.slurm import requeue, requeue_path, requeue_signal
from lightning_rl.distributed import RunEndError, cure_of, failing_together, meet, process_maximum
from lightning_rl.naming import name_of
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
        self._begun = self._stepping = self._saved = self._saving = False
        self._requeue: int | None = None
        self._alarm: threading.Timer | None = None
        self._handlers: dict[int, Any] = {}
        self._folders: list[RunFolder] = []

    def attach(self, trainer: Trainer) -> None:
        """Begins a stage of a trainer: hears of errors before its other callbacks do, and in a fit of signals."""
        callbacks = _callbacks_of(trainer)
        if not any(isinstance(callback, FirstToHear) for callback in callbacks):
            callbacks.insert(0, FirstToHear(self))
        self._begun = self._stepping = self._saved = self._saving = False
        self.received = 0
        if trainer.state.fn == TrainerFn.FITTING:
            self.install(SIGNALS)

    def install(self, numbers: Iterable[int]) -> None:
        """Takes signals over, from whoever has them by now; they go back to who had them first."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in numbers:
            handler = signal.getsignal(number)
            if handler != self._receive:
                self._handlers.setdefault(number, handler)
                signal.signal(number, self._receive)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        CLOCK.reset()
        CLOCK.abandon = lambda reason, status: self._abandon(trainer, pl_module, reason, status)
        self._claim(trainer, pl_module)
        meet(MEETING)  # makes what the ranks meet by, while all are here
        self._requeue = requeue_signal(trainer)
        self._begun = self._stepping = True
        self.install((*SIGNALS, *([] if self._requeue is None else [self._requeue])))

    def _claim(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the folders that checkpoints go to, before hours have gone by."""
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        paths = dict.fromkeys(str(saver.dirpath) for saver in savers if saver.dirpath and is_local(saver.dirpath))
        with failing_together("a folder for checkpoints"):
            for path in paths if trainer.is_global_zero else ():
                folder = RunFolder(Path(path))
                folder.claim(self._run(pl_module))
                self._folders.append(folder)
            if trainer.is_global_zero:
                clear_farewells(_folder_of(trainer))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._saving and number != signal.SIGINT:
            return  # it ends anyway
        if number == self._requeue and not self._stepping:
            return  # there is nothing left to go on with
        if self.received or not self._stepping:
            self.received = self.received or number
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
        self._end_on_signal(trainer)

    def _end_on_signal(self, trainer: Trainer) -> None:
        """Ends the run on all ranks, with a checkpoint, if a signal came to any of them."""
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
        self._end_on_signal(trainer)
        self._stepping = False
        self._silence()

    def rescue(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the last optimizer step of a fit that an exception ended, and gives everything back."""
        self._saving = True
        self._silence()
        if isinstance(exception, SIGTERMException) and exception.code is None:  # raised by Lightning
            exception.code = 128 + signal.SIGTERM
        if cure := "" if self._begun else cure_of(exception):
            exception.add_note(cure)
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        try:
            if self._begun and fitting and not self._saved:
                self._save_last_step(trainer, pl_module, exception)
            elif self.received and not self._saved:
                name = signal.Signals(self.received).name
                rank_zero_info(f"{name} came before the first optimizer step of this fit: earlier checkpoints are kept")
        finally:
            self._restore(trainer)
            try:
                self._close(pl_module)
            except Exception as failure:  # noqa: BLE001  what ended the run is the news
                exception.add_note(f"the engine could not be closed: {reason_of(failure)}")

    def _abandon(self, trainer: Trainer, pl_module: LightningModule, reason: str, status: int) -> NoReturn:
        """Ends the process where no exception can: in the midst of a reward that swallows all of them."""
        try:
            sys.stderr.write(f"{reason}\n")
            self.rescue(trainer, pl_module, RunEndError(reason))
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _save_last_step(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves after the last optimizer step, if every rank can; the exception keeps its place in any case."""
        if isinstance(exception, torch.OutOfMemoryError):  # what is alive in its frames is needed to save
            traceback.clear_frames(exception.__traceback__)
        folder = _folder_of(trainer)
        if trainer.world_size > 1:
            leave_farewell(folder, trainer.global_rank, exception)
        reason = self._settle(pl_module, exception)
        places = meet(MEETING, (reason, trainer.global_step))
        if places is None:
            reason = _absence(folder, trainer.global_rank)
        elif len(set(places)) > 1:
            reason = f"the ranks stopped at different places: {places}"
        if reason is not None:
            _tell(exception, f"no {INTERRUPTED} was written: {reason}; {way_on(folder)}")
            return
        clear_farewells(folder)
        for note in getattr(exception, "__notes__", ()):
            rank_zero_info(note)
        try:
            lost = _save_what_can_be(trainer, f"{type(exception).__name__} ended the run")
        except Exception as failure:  # noqa: BLE001  what ended the run is the news
            _tell(exception, f"no {INTERRUPTED} was written: {reason_of(failure)}")
            return
        for name, failure in lost.items():
            _tell(exception, f"{INTERRUPTED} is without the state of {name}, which raised {reason_of(failure)}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore(trainer)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _restore(self, trainer: Trainer) -> None:
        """Gives signals, folders and clock back."""
        self._silence()
        kept = trainer._signal_connector._original_handlers  # noqa: SLF001  which it puts back when it ends
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            if kept.get(signal.Signals(number)) == self._receive:
                kept[signal.Signals(number)] = handler
        self._handlers, self._stepping = {}, False
        release(self._folders)
        self._folders = []
        CLOCK.reset()


class FirstToHear(Callback):
    """Stands before every other callback, whose errors on the way out would leave nothing to hear of.

    Args:
        interrupts: what is told.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupts.install(SIGNALS)  # Lightning has put its own handlers there

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupts.install(SIGNALS)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._interrupts.rescue(trainer, pl_module, exception)


def _absence(folder: str | Path, rank: int) -> str:
    """Why a checkpoint of all ranks cannot be had from this one: whose end was the first."""
    farewell = first_farewell(folder)
    if farewell is None or farewell.rank == rank:
        return f"the other ranks did not fail as well within {MEETING:g} s, and a checkpoint takes all of them"
    return f"rank {farewell.rank} failed alone, with {farewell.error}, and a checkpoint takes all ranks"


def _folder_of(trainer: Trainer) -> str | Path:
    """Where the checkpoint goes."""
    return getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir


def _callbacks_of(trainer: Trainer) -> list[Callback]:
    return vars(trainer)["callbacks"]


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
    path = Path(_folder_of(trainer)) / INTERRUPTED if path is None else path
    trainer.save_checkpoint(path)
    rank_zero_info(f"{why} after optimizer step {trainer.global_step}: go on with ckpt_path={str(path)!r}")


def _save_what_can_be(trainer: Trainer, why: str) -> dict[str, Exception]:
    """Saves, without the callbacks whose own part cannot be saved.

    Returns:
        What those raised, by their names.
    """
    callbacks, lost = _callbacks_of(trainer), dict[str, Exception]()
    try:
        while True:
            try:
                _save(trainer, why)
            except Exception as failure:
                culprit = _callback_behind(failure)
                if culprit is None or meet(MEETING) is None:
                    raise
                lost[name_of(culprit)] = failure
                vars(trainer)["callbacks"] = [other for other in _callbacks_of(trainer) if other is not culprit]
            else:
                return lost
    finally:
        vars(trainer)["callbacks"] = callbacks


def _callback_behind(failure: Exception) -> Callback | None:
    """The callback that Lightning asked for its state when something was raised."""
    for frame, _ in walk_tb(failure.__traceback__):
        callback = frame.f_locals.get("callback")
        if frame.f_globals.get("__name__") == call.__name__ and isinstance(callback, Callback):
            return callback
    return None
