"""Checkpoint of the last optimizer step when a signal or an exception ends a run."""

import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl.checkpointing.atomic import is_local, protect_checkpoints, reason_of
from lightning_rl.checkpointing.checkpoint_folder import RunFolder, release
from lightning_rl.checkpointing.rank_errors import clear_rank_errors, first_rank_error, resume_hint, write_rank_error
from lightning_rl.checkpointing.resume import protect_resume
from lightning_rl.checkpointing.slurm import requeue, requeue_path, requeue_signal
from lightning_rl.distributed import cure_of, failing_together, meet, process_maximum
from lightning_rl.processes.timeouts import CLOCK
from lightning_rl.utils.arguments import check_choices
from lightning_rl.utils.trainer import CoreCallback, callbacks_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted.ckpt"
GRACE = 20.0  # seconds for the step to end after a signal; schedulers kill after 30
# Lightning warns of checkpoints that are saved after the optimizer step; resuming here relies on them.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
MEETING = 8.0  # seconds within which every rank must fail for a joint checkpoint


class RescuedRun(Protocol):
    """Progress of a run, as far as the last checkpoint after an error needs it."""

    name: str

    @property
    def made_step(self) -> bool:
        """False within an optimizer step, until it is made or skipped."""
        ...

    @property
    def save_problem(self) -> str | None:
        """Reason why no checkpoint can be saved; None if one can."""
        ...

    def note_error(self, error: BaseException) -> None:
        """Record an error."""
        ...


class FaultTolerance(Callback):
    """Callback of every run that saves a checkpoint on signals and exceptions.

    A run without one gets it with its defaults.

    The first SIGINT (Ctrl-C) or SIGTERM on any rank lets the optimizer step end, saves ``interrupted.ckpt`` beside the
    other checkpoints and ends the run on all ranks, after SIGTERM with exit code 143. A step that takes longer than
    :data:`GRACE` seconds is abandoned, a reward after a few seconds; a second signal abandons the step at once. The
    requeue signal of SLURM does the same and requeues the job.

    Any exception also saves a checkpoint of what the module committed last: work since the last optimizer step is
    repeated on resume. Two states cannot be saved: an optimizer step that broke off half way, and ranks at different
    steps. The engine is always closed.

    Args:
        skip_rollouts: Numbers of rollouts to skip, such as one that fails at every resume.
        on_checkpoint_error: ``"raise"`` ends the run if a checkpoint cannot be written, ``"warn"`` continues; both keep
            the last complete checkpoint.
        allow_config_changes: Options that may differ from the resumed checkpoint, such as
            ``["optimizer", "corrections"]``. Their new values hold from the first resumed optimizer step on.

    Raises:
        ValueError: If an argument has another form.
    """

    progress: RescuedRun  # of the fit in progress

    def __init__(
        self,
        *,
        skip_rollouts: Sequence[int] = (),
        on_checkpoint_error: str = "raise",
        allow_config_changes: Sequence[str] = (),
    ) -> None:
        _check_rollouts(skip_rollouts)
        check_choices(("raise", "warn"), on_checkpoint_error=on_checkpoint_error)
        _check_names(allow_config_changes)
        self.skip_rollouts, self.on_checkpoint_error = tuple(skip_rollouts), on_checkpoint_error
        self.allow_config_changes = tuple(allow_config_changes)
        self.received = 0
        self._begun = self._stepping = self._saved = self._saving = False
        self._requeue: int | None = None
        self._alarm: threading.Timer | None = None
        self._handlers: dict[int, Any] = {}
        self._folders: list[RunFolder] = []

    def attach(self, trainer: Trainer, close_engine: Callable[[], None]) -> None:
        """Start a stage of a trainer: receive errors before other callbacks do, and signals during a fit.

        Args:
            trainer: Trainer of the stage.
            close_engine: Function that closes the engine after an error.
        """
        self._close_engine = close_engine
        callbacks = callbacks_of(trainer)
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, FirstToHear)]
        callbacks.insert(0, FirstToHear(self))
        if self in callbacks:  # a signal ends the run after the hooks of the other callbacks
            callbacks.remove(self)
            callbacks.append(self)
        self._begun = self._stepping = self._saved = self._saving = False
        self.received = 0
        if trainer.state.fn == TrainerFn.FITTING:
            self.install(SIGNALS)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        protect_checkpoints(trainer.strategy, self.on_checkpoint_error)
        protect_resume(trainer)

    def install(self, numbers: Iterable[int]) -> None:
        """Install the signal handlers; the previous ones are restored at the end."""
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
        self._claim(trainer, self.progress.name)
        meet(MEETING)  # create the store while all ranks are alive
        self._requeue = requeue_signal(trainer)
        self._begun = self._stepping = True
        self.install((*SIGNALS, *([] if self._requeue is None else [self._requeue])))

    def _claim(self, trainer: Trainer, name: str) -> None:
        """Check the checkpoint folders at the start of the run."""
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        paths = dict.fromkeys(str(saver.dirpath) for saver in savers if saver.dirpath and is_local(saver.dirpath))
        with failing_together("a folder for checkpoints"):
            for path in paths if trainer.is_global_zero else ():
                folder = RunFolder(Path(path))
                folder.claim(name)
                self._folders.append(folder)
            if trainer.is_global_zero:
                clear_rank_errors(_folder_of(trainer))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._saving and number != signal.SIGINT:
            return  # the run ends anyway
        if number == self._requeue and not self._stepping:
            return  # nothing is left to train
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
        """End the run on all ranks, with a checkpoint, if any rank received a signal."""
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
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a checkpoint that leaves nothing to train, which Lightning does not report."""
        if trainer.fit_loop.restarting and not self._begun:
            rank_zero_warn(
                f"nothing is left to train: the checkpoint is at step {trainer.global_step} with "
                f"max_steps={trainer.max_steps}, and {trainer.current_epoch} of max_epochs={trainer.max_epochs} are "
                "complete: raise the limit that is reached"
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_on_signal(trainer)
        self._stepping = False
        self._silence()

    def rescue(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the last optimizer step of a fit that an exception ended, and restore signals and folders."""
        self._saving = True
        self._silence()
        if isinstance(exception, SIGTERMException) and exception.code is None:  # raised by Lightning
            exception.code = 128 + signal.SIGTERM
        if cure := "" if self._begun else cure_of(exception):
            exception.add_note(cure)
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        try:
            if self._begun and fitting and not self._saved:
                self._save_last_step(trainer, exception)
            elif self.received and not self._saved:
                name = signal.Signals(self.received).name
                rank_zero_info(f"{name} ended this fit before its first optimizer step: earlier checkpoints are kept")
        finally:
            self._restore(trainer)
            try:
                self._close_engine()
            except Exception as failure:  # noqa: BLE001  do not hide the error that ended the run
                exception.add_note(f"the engine could not be closed: {reason_of(failure)}")

    def _save_last_step(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the last optimizer step, if every rank can; the exception stays the cause."""
        if isinstance(exception, torch.OutOfMemoryError):  # free the tensors in its frames, since saving needs memory
            traceback.clear_frames(exception.__traceback__)
        folder = _folder_of(trainer)
        if trainer.world_size > 1:
            write_rank_error(folder, trainer.global_rank, exception)
        trainer.lightning_module.zero_grad()  # a partial gradient would enter a later fit
        self.progress.note_error(exception)
        _count_whole(trainer, made_step=self.progress.made_step)
        reason = self.progress.save_problem
        places = meet(MEETING, (reason, trainer.global_step))
        if places is None:
            reason = _absence(folder, trainer.global_rank)
        elif len(set(places)) > 1:
            reason = f"the ranks stopped at different places: {places}"
        if reason is not None:
            _tell(exception, f"no {INTERRUPTED} was written: {reason}; {resume_hint(folder)}")
            return
        clear_rank_errors(folder)
        for note in getattr(exception, "__notes__", ()):
            rank_zero_info(note)
        try:
            _save(trainer, f"{type(exception).__name__} ended the run")
        except Exception as failure:  # noqa: BLE001  do not hide the error that ended the run
            _tell(exception, f"no {INTERRUPTED} was written: {reason_of(failure)}; {resume_hint(folder)}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore(trainer)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _restore(self, trainer: Trainer) -> None:
        """Restore signal handlers, folders and clock."""
        self._silence()
        kept = trainer._signal_connector._original_handlers  # noqa: SLF001  the handlers that Lightning restores
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            if kept.get(signal.Signals(number)) == self._receive:
                kept[signal.Signals(number)] = handler
        self._handlers, self._stepping = {}, False
        release(self._folders)
        self._folders = []
        CLOCK.reset()


class FirstToHear(CoreCallback):
    """First callback, which forwards events before errors of other callbacks can skip them."""

    def __init__(self, fault_tolerance: FaultTolerance) -> None:
        self._fault_tolerance = fault_tolerance

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fault_tolerance.install(SIGNALS)  # Lightning has replaced the handlers

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fault_tolerance.install(SIGNALS)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._fault_tolerance.rescue(trainer, exception)


def _absence(folder: str | Path, rank: int) -> str:
    """Return the reason why there is no checkpoint of all ranks: the first failure of another rank."""
    failed = first_rank_error(folder)
    if failed is None or failed[0] == rank:
        return f"the other ranks did not fail within {MEETING:g} s, and a checkpoint needs all ranks"
    return f"rank {failed[0]} failed alone, with {failed[1]}, and a checkpoint needs all ranks"


def _count_whole(trainer: Trainer, *, made_step: bool) -> None:
    """Make Lightning's counters count the epochs that started, and the batch of an optimizer step that was made."""
    epochs: Any = trainer.fit_loop.epoch_progress
    for count in (epochs.current, epochs.total):  # an epoch whose on_train_epoch_start raised did not start
        count.ready = count.started
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    if made_step and batches.current.processed < batches.current.started:
        batches.increment_processed()


def _folder_of(trainer: Trainer) -> str | Path:
    """Return the folder of the checkpoint."""
    return getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir


def _check_rollouts(numbers: Any) -> None:
    """Raise ValueError for anything but a list of rollout numbers."""
    listed: list[Any] = list(numbers) if isinstance(numbers, Collection) and not isinstance(numbers, str) else [None]
    if not all(type(one) is int and one >= 0 for one in listed):
        raise ValueError(f"expected skip_rollouts to be a list of numbers of rollouts, such as [7], got {numbers!r}")


def _check_names(names: Any) -> None:
    """Raise ValueError for anything but a list of names."""
    if isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise ValueError(f'expected allow_config_changes to be a list of names, such as ["optimizer"], got {names!r}')


def _tell(exception: BaseException, text: str) -> None:
    """Add a note to the traceback and log it, since not every exception that ends a run is printed."""
    exception.add_note(text)
    rank_zero_info(text)


def _end(received: int) -> NoReturn:
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SIGTERMException(128 + received)


def _save(trainer: Trainer, why: str, path: Path | None = None) -> None:
    """Save beside the other checkpoints, or at a path; a collective call."""
    path = Path(_folder_of(trainer)) / INTERRUPTED if path is None else path
    trainer.save_checkpoint(path)
    rank_zero_info(f"{why} after optimizer step {trainer.global_step}: resume with ckpt_path={str(path)!r}")
