"""Interrupts: a signal or a lost engine ends a run between two optimizer steps with a checkpoint; any end closes the
engine.
"""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.generation import EngineError
from lightning_rl.run_module import RunModule

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted.ckpt"


class Interrupts(Callback):
    """Every run has one. The first SIGINT (Ctrl-C) or SIGTERM on any rank lets the optimizer step end, saves
    ``interrupted.ckpt`` beside the other checkpoints, and ends the run on all ranks; a second one acts at once.

    So does an engine that fails, since that happens between two steps. Any other exception saves nothing, because it
    may come in mid-step; the checkpoints of earlier steps stay.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in SIGNALS:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number
        self._restore()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        received = distributed.any_process(self.received, torch.device(pl_module.device))
        if not received:
            return
        _save(trainer, signal.Signals(received).name)
        raise KeyboardInterrupt if received == signal.SIGINT else SIGTERMException

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        if isinstance(exception, EngineError) and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            _save(trainer, "the engine failed")
        if isinstance(pl_module, RunModule):
            pl_module.close_engine()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _save(trainer: Trainer, why: str) -> None:
    """Saves beside the other checkpoints. Every rank takes part."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    path = Path(folder) / INTERRUPTED
    trainer.save_checkpoint(path)
    rank_zero_info(f"{why} after optimizer step {trainer.global_step}: go on with ckpt_path={str(path)!r}")
