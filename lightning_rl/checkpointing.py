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

from lightning_rl.archive import load_archive
from lightning_rl.description import restore
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


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint of this library, in values that load under ``weights_only=True``.

    Raises:
        ValueError: for the folder of a sharded strategy, saying how to make one file of it, and for other checkpoints
            and files; nothing that is in them is run.
    """
    if Path(path).is_dir():
        raise ValueError(f"expected a checkpoint of one file, got the folder {path}: {_consolidation(Path(path))}")
    checkpoint = load_archive(path, map_location)
    if not isinstance(checkpoint, dict) or "lightning_rl" not in checkpoint:
        raise ValueError(
            f"expected a checkpoint of an RLLightningModule, got {path}, which holds none of its state: pass a file "
            "that trainer.save_checkpoint or ModelCheckpoint wrote"
        )
    if "model" in checkpoint:  # what was a folder of FSDP1
        checkpoint["state_dict"] = checkpoint.pop("model")
    return checkpoint


def _consolidation(folder: Path) -> str:
    if (folder / ".metadata").exists():
        command = f"python -m lightning.fabric.utilities.consolidate_checkpoint {folder}"
        return f"a sharded strategy wrote it, and {command!r} makes one file of it, {folder}.consolidated"
    if (folder / "checkpoint").is_dir():
        return "DeepSpeed wrote it: resume with its strategy, and call module.save_pretrained on every rank"
    return "pass a file"


def restore_options(described: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's constructor, from its configuration and from what is given.

    Args:
        described: every argument as :func:`lightning_rl.description.describe` says it.
        arguments: what is given again, which comes first.

    Raises:
        ValueError: naming every argument that is code of somebody's own and is not given again.
    """
    options, lost = dict(arguments), dict[str, str]()
    for name, description in described.items():
        if name in options:
            continue
        if name == "tokenizer" and isinstance(description, Mapping) and description.get("path"):
            options[name] = description["path"]
            continue
        try:
            options[name] = restore(description)
        except ValueError as named:
            lost[name] = str(named)
    if lost:
        names = " and ".join(f"{name}=" for name in lost)
        was = "; ".join(f"{name} was {what}" for name, what in lost.items())
        raise ValueError(f"expected {names} to be given again, because a checkpoint keeps no code: {was}")
    rewards = options.get("rewards")
    if "rewards" not in arguments and isinstance(rewards, Mapping):
        options["rewards"] = {name: tuple(pair) for name, pair in rewards.items()}
    return options


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
