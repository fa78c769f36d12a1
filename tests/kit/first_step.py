"""Parts of the first optimizer step of a fit, and the step that a freshly configured optimizer would make."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl import LossView, RLCallback, Rollout, Stat

Group = dict[str, Any]


class SavesAt(Callback):
    """A checkpoint after an optimizer step, and the moments of the optimizer in it, in the order of its parameters."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.moments: list[dict[str, Tensor]] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        if trainer.global_step == self.step and not self.moments:  # a skipped step leaves the number
            state = trainer.optimizers[0].state
            self.moments = [_copies(state.get(parameter, {})) for parameter in _parameters(trainer.optimizers[0])]
            trainer.save_checkpoint(self.path)


class FirstStep(RLCallback):
    """Keeps what the first optimizer step of a fit is made with; it only looks on.

    Attributes:
        requests: Requests of the first rollout.
        rollout: First rollout, before coefficients adapt to it.
        states: States of the corrections at that moment.
        autocast: Dtype of autocast in the update; None without.
        given: Parameter groups that the builder of the optimizer gets, with gradients.
        options: Options of each parameter group of the optimizer.
        norm: Norm of the gradient in the step, after clipping.
        after: Weights after the step, in the order of the optimizer's parameters.
        logged: Metrics of the step.
    """

    name = "first_step"

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.rollout: Rollout | None = None
        self.states: dict[str, Any] = {}
        self.autocast: torch.dtype | None = None
        self.given: list[Group] = []
        self.options: list[Group] = []
        self.norm = 0.0
        self.after: list[Tensor] = []
        self.logged: dict[str, float] = {}
        self._run: Any = None

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._run, optimizer = pl_module.run, trainer.optimizers[0]
        if isinstance(optimizer, Optimizer):  # after the hooks of the fit, and clipping
            optimizer.register_step_pre_hook(lambda *_: self._look(pl_module, optimizer))

    @override
    def observe_generated(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self.requests = self.requests or [request for request, _ in pairs]

    @override
    def observe(self, rollout: Rollout) -> None:
        if self.rollout is None:
            self.rollout, self.states = rollout, self._run.corrections.states()

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        device = view.logprobs.device.type
        self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return {}

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not isinstance(trainer.optimizers[0], Optimizer):  # of DeepSpeed, which clips in its step
            self._look(pl_module, optimizer)

    def _look(self, pl_module: Any, optimizer: Any) -> None:
        if self.options:
            return
        groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        self.options = copy.deepcopy(groups)
        gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
        self.norm = float(nn.utils.get_total_norm(gradients))
        groups = pl_module.parallel.optimizer_groups(pl_module.required_policy.parameter_groups())
        self.given = [{**group, "params": [_twin(parameter) for parameter in group["params"]]} for group in groups]

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        if self.options and not self.after:
            self.after = [parameter.detach().clone() for parameter in _parameters(trainer.optimizers[0])]
            self.logged = dict(pl_module.run.metrics.values())

    def check_options(
        self, build: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any] | None, *, steps: int
    ) -> Optimizer:
        """The step has the options of an optimizer as configured, which is returned, with a schedule at ``steps``."""
        expected = build(self.given)
        scheduler = None if schedule is None else schedule(expected)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(steps):
                if scheduler is not None:
                    scheduler.step()
        for found, group in zip(self.options, expected.param_groups, strict=True):
            wanted = {key: _plain(value) for key, value in group.items() if key != "params"}
            assert {key: _plain(found.get(key)) for key in wanted} == wanted
        return expected

    def check_optimizer(
        self,
        build: Callable[[Any], Optimizer],
        schedule: Callable[[Optimizer], Any] | None = None,
        *,
        steps: int,
        moments: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """The step is, bit for bit, that of an optimizer as configured, with a schedule at ``steps``, and moments."""
        expected = self.check_options(build, schedule, steps=steps)
        for parameter, state in zip(_parameters(expected), moments, strict=bool(moments)):
            expected.state[parameter] = _copies(state)
        expected.step()
        pairs = list(zip(self.after, _parameters(expected), strict=True))
        assert pairs and all(torch.equal(_local(one), _local(other.detach())) for one, other in pairs)


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    """A copy with its gradient."""
    twin = nn.Parameter(parameter.detach().clone())
    twin.grad = None if parameter.grad is None else parameter.grad.clone()
    return twin


def _copies(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
