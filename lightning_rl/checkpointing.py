"""Checkpointing: files that a kill cannot cut in half, the newest of a folder, interrupts, and the export."""

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.distributed import RunEndError, process_maximum
from lightning_rl.files import PART, write_atomically
from lightning_rl.generation import EngineError
from lightning_rl.policy.build import ModelSource, build_model
from lightning_rl.policy.lora import base_model_of, merge_adapters
from lightning_rl.rewards.limit import CLOCK

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = "interrupted.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames: ``Trainer(plugins=[AtomicCheckpointIO()])``.

    For strategies that write one file. Whatever moment the machine dies at, a checkpoint is there whole or not at all.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save = super().save_checkpoint
        write_atomically(Path(path), lambda part: save(checkpoint, part, storage_options))


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of a folder that was finished last, or None; what a dying run was writing is left out."""
    checkpoints = [path for path in Path(folder).glob("*.ckpt") if not path.name.endswith(PART)]
    return max(checkpoints, key=lambda path: path.stat().st_mtime_ns, default=None)


class Interrupts(Callback):
    """Every run has one. The first SIGINT (Ctrl-C) or SIGTERM on any rank lets the optimizer step end, saves
    ``interrupted.ckpt`` beside the other checkpoints, and ends the run on all ranks; a second one acts at once.
    A reward that is being computed has a few seconds left.

    So do an engine or rewards that fail, since that happens between two steps. Any other exception saves nothing,
    because it may come in mid-step; the checkpoints of earlier steps stay. Whatever is raised, the engine is closed.

    Args:
        close: closes the engine of a module.
    """

    def __init__(self, close: Callable[[Any], None]) -> None:
        self.received = 0
        self._close = close
        self._handlers: dict[int, Any] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.received = 0
        CLOCK.reset()
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals
        for number in SIGNALS:
            self._handlers[number] = signal.getsignal(number)
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number
        self._restore()
        CLOCK.stop(number)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        received = process_maximum(self.received, torch.device(pl_module.device))
        if not received:
            return
        _save(trainer, signal.Signals(received).name)
        raise KeyboardInterrupt if received == signal.SIGINT else SIGTERMException

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        CLOCK.reset()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        ends = isinstance(exception, EngineError | RunEndError)
        if ends and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            _save(trainer, f"{type(exception).__name__} ended the run")
        CLOCK.reset()
        self._close(pl_module)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def _save(trainer: Trainer, why: str) -> None:
    """Saves beside the other checkpoints. Every rank takes part."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    path = Path(folder) / INTERRUPTED
    trainer.save_checkpoint(path)
    rank_zero_info(f"{why} after optimizer step {trainer.global_step}: go on with ckpt_path={str(path)!r}")


def write_pretrained(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, ModelSource],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    writing: bool,
) -> None:
    """Writes a policy as a Hugging Face folder, and a critic of its own, with its value head, to ``folder/critic``.

    Args:
        folder: where to.
        weights: of a :class:`PolicyModel`, whole; every rank has to go through them.
        sources: what ``"policy"`` and ``"critic"`` are built from.
        tokenizer: lies beside them.
        writing: whether this is the one rank that writes.
    """
    whole = {name: weight.cpu().clone() for name, weight in weights if writing}
    if not writing:
        return
    for prefix, source, place in (("model.", "policy", folder), ("critic.", "critic", folder / "critic")):
        part = {name.removeprefix(prefix): weight for name, weight in whole.items() if name.startswith(prefix)}
        if part:
            model = build_model(sources[source])
            _load(base_model_of(model) if source == "policy" else model.base_model, part)
            merge_adapters(model).save_pretrained(place)
    if "value_head.weight" in whole:
        (folder / "critic").mkdir(parents=True, exist_ok=True)
        save_file({"weight": whole["value_head.weight"]}, folder / "critic" / "value_head.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)
