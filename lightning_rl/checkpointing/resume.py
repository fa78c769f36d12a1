"""Checkpoint connector that compares a checkpoint with the run before and after Lightning loads it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl.checkpointing.checksum import read_options
from lightning_rl.checkpointing.optimizer_options import OptimizerChange, advance
from lightning_rl.checkpointing.same_checkpoint import identity_of
from lightning_rl.distributed import check_agreement, process_count
from lightning_rl.utils.trainer import callbacks_of


class ResumeConnector(_CheckpointConnector):
    """Checkpoint connector of :func:`protect_resume`."""

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if process_count() > 1:
            check_agreement({"checkpoint": identity_of(checkpoint_path)})
        trainer, module = self.trainer, self._module
        # Some strategies load optimizer states with the weights, before on_load_checkpoint can compare anything.
        early = trainer.state.fn == TrainerFn.FITTING and trainer.strategy.restore_checkpoint_after_setup
        saved = read_options(Path(str(checkpoint_path))) if early and checkpoint_path is not None else {}
        change: OptimizerChange | None = module.run.compare(saved) if saved else None
        with nullcontext() if change is None else change.loading(trainer):
            super().resume_start(checkpoint_path, weights_only)
        if self._loaded_checkpoint and not early:  # before hooks edit it
            for callback in callbacks_of(trainer):
                getattr(callback, "note_checkpoint", lambda _: None)(self._loaded_checkpoint)

    @override
    def restore_optimizers_and_schedulers(self) -> None:
        checkpoint: dict[str, Any] = self._loaded_checkpoint
        change: OptimizerChange | None = self._module.run.compare(checkpoint["lightning_rl"]) if checkpoint else None
        if change is None:
            super().restore_optimizers_and_schedulers()
            return
        steps, plain = self.trainer.global_step, self.trainer.strategy.lightning_restore_optimizer
        if change.reschedules:
            schedules, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []
            steps = next((state["last_epoch"] for state in schedules if "last_epoch" in state), steps)
        if change.discards:
            old, new = change.before["kind"], change.now.description["kind"]
            kinds = f"{old} in the checkpoint, {new} now" if old != new else "of other parameters or options"
            rank_zero_info(
                f"the states of the optimizer do not fit ({kinds}): they are discarded, so moments begin at 0"
            )
            checkpoint["optimizer_states"] = []
        elif plain:
            change.renew(checkpoint["optimizer_states"][0]["param_groups"])
        super().restore_optimizers_and_schedulers()
        if not change.discards and not plain:
            self._renew_optimizer(change)
        if change.reschedules:
            for config in self.trainer.lr_scheduler_configs:
                advance(config.scheduler, steps, change.now.description["rates"])

    def _renew_optimizer(self, change: OptimizerChange) -> None:
        """Write the options that changed into an optimizer that the strategy has loaded."""
        (optimizer,) = self.trainer.optimizers
        change.renew(optimizer.param_groups)
        if isinstance(optimizer, Optimizer):  # not of DeepSpeed
            optimizer.load_state_dict(optimizer.state_dict())  # moves step counts to where a changed kernel needs them

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module


def protect_resume(trainer: Trainer) -> None:
    """Make a Trainer refuse a checkpoint unless all ranks load the same one, and apply accepted changes of options."""
    connector = ResumeConnector(trainer)
    vars(connector).update(vars(trainer._checkpoint_connector))  # noqa: SLF001  Lightning offers no hook before it loads
    trainer._checkpoint_connector = connector  # noqa: SLF001
