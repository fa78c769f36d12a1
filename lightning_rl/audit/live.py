"""Live run: all that the audit reads from a module and its Trainer; no other file of the audit imports the module."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.data import PromptDataModule, data_module_of
from lightning_rl.metrics import MetricLog
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import PolicyModel
from lightning_rl.recording.recorder import RecordingDraft, Vocabulary
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.utils.trainer import OWN

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)
OF_MODULE = STEP_HOOKS[1:]  # the core generates the rollout in the first one


class LiveRun:
    """Parts of a run during a fit.

    Args:
        trainer: Trainer of the fit.
        module: Its module.

    Attributes:
        environments: Environments of the samples; None for single-turn completions.
        sampling: Sampling parameters, with the ids that end a response.
        options: Arguments of the module.
    """

    def __init__(self, trainer: Trainer, module: RLLightningModule) -> None:
        self.trainer, self._module, self._state, options = trainer, module, module.run, module.options
        self.models, self.parallel, self.engine = module.models, module.parallel, options.engine
        self.rewards, self.evaluator, self.tokenizer = options.rewards, module.run.evaluator, options.tokenizer
        self.environments, self.sampling = self._state.environments, self._state.sampling
        self.options = options

    def __reduce__(self) -> tuple[type, tuple[Trainer, RLLightningModule]]:
        """Return what makes a copy of this object, which shares Trainer and module."""
        return type(self), (self.trainer, self._module)

    @property
    def data(self) -> PromptDataModule:
        """Data module of the fit."""
        return data_module_of(self.trainer)

    @property
    def policy(self) -> PolicyModel:
        """Policy that trains."""
        return self._module.required_policy

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm with the corrections among the callbacks."""
        return self._module.algorithm

    @property
    def corrections(self) -> Corrections:
        """Corrections among the callbacks."""
        return self.algorithm.corrections

    @property
    def current(self) -> CurrentRollout | None:
        """Rollout in progress."""
        return self._state.progress.current

    @property
    def metrics(self) -> MetricLog:
        """Metrics that have not been logged yet."""
        return self._state.metrics

    @property
    def changes_configuration(self) -> bool:
        """True if the loaded checkpoint has another configuration."""
        return bool(self._state.changes)

    @property
    def device(self) -> torch.device:
        """Device of the policy on this rank."""
        return self.parallel.strategy.root_device

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the fit."""
        return self.trainer.optimizers

    @property
    def scheduler(self) -> Any:
        """Scheduler of the learning rate; None without one."""
        configs = self.trainer.lr_scheduler_configs
        return configs[0].scheduler if configs else None

    def row_number(self, step_index: int) -> int:
        """Return the number under which the metrics of an optimizer step are logged."""
        return self._state.progress.axis(step_index)

    def draft(self, number: int) -> RecordingDraft:
        """Return a recording in progress."""
        return RecordingDraft(self._module, number, Vocabulary(self.tokenizer))

    def overridden(self, hook: str) -> str:
        """Return a method of the module that the user's class overrides, as a culprit; empty if it does not."""
        kind = type(self._module)
        return f"module {kind.__name__}.{hook}" if overrides(self._module, hook, RLLightningModule) else ""

    def hooks(
        self,
        callbacks: Iterable[Callback],
        names: Sequence[str] = STEP_HOOKS,
        of_module: Sequence[str] = OF_MODULE,
    ) -> dict[str, str]:
        """Return the culprit of every overridden hook by action of the Trainer's profiler."""
        culprits = {
            f"[Callback]{callback.state_key}.{hook}": f"callback {name_of_callback(callback)}.{hook}"
            for callback in callbacks
            for hook in names
            if overrides(callback, hook, Callback)
        }
        methods = [hook for hook in of_module if hasattr(RLLightningModule, hook)]
        action = f"[LightningModule]{type(self._module).__name__}"
        return culprits | {f"{action}.{hook}": culprit for hook in methods if (culprit := self.overridden(hook))}


def live_run(trainer: Trainer, pl_module: LightningModule) -> LiveRun | None:
    """Return the run of a fit; None if another module trains."""
    return LiveRun(trainer, pl_module) if isinstance(pl_module, RLLightningModule) else None


def name_of_callback(callback: Callback) -> str:
    """Return the callback's name for messages."""
    return callback.name if isinstance(callback, RLCallback) else type(callback).__name__


def overrides(part: object, hook: str, base: type) -> bool:
    """Return True if an object's method differs from its base's, on the class, the instance or by patching the base."""
    method = getattr(part, hook)
    function = getattr(method, "__func__", method)
    home = str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return function is not getattr(base, hook) or home not in OWN
