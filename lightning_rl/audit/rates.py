"""Number of steps, learning rates and directions of a run's optimizers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.audit.live import LiveRun
from lightning_rl.audit.parameter_tracer import ParameterTrace
from lightning_rl.utils.naming import name_of

IDLE_ROLLOUTS = 2  # successive audited rollouts at a rate of 0
UPHILL = 0.1  # cosine of move and gradient above which a move is uphill
APART = 1e-5  # nats by which two forwards differ
PRIVATE = ("differentiable", "fused", "foreach", "capturable")


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """State of an optimizer that its update rule does not cover.

    Attributes:
        rule: Name of the PyTorch optimizer whose rule applies; empty if unknown.
        steps: Number of steps that it counts in one optimizer step.
        uphill: True if the weights moved along the gradient in every audited step: in the first one of a run, where
            there is no momentum, or in three.
        idle: ``"every parameter"`` in the second successive audited rollout without a learning rate above 0, or the
            name of a parameter in its second one, while others of the same model have a rate; empty at other times.
        rate_setter: Culprit that set these rates to 0; empty if unknown.
    """

    rule: str = ""
    steps: int = 1
    uphill: bool = False
    idle: str = ""
    rate_setter: str = ""


def rule_of(optimizer: Optimizer) -> str:
    """Return the name of the PyTorch optimizer whose rule an optimizer follows: its class or its base class.

    Empty for a subclass with additional options, since its rule may differ.
    """
    known = (
        one for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim") and one is not Optimizer
    )
    kind = next(known, None)
    if kind is None or kind is type(optimizer):
        return "" if kind is None else kind.__name__
    try:
        parent: Any = kind
        own = parent([torch.zeros(1, requires_grad=True)]).defaults.keys()
    except (TypeError, ValueError):  # a required argument
        return ""
    return kind.__name__ if optimizer.defaults.keys() <= own | set(PRIVATE) else ""


def scheduler_name(live: LiveRun) -> str:
    """Return the scheduler of a run as a culprit, with its functions and builder; empty without one."""
    scheduler = live.scheduler
    if scheduler is None:
        return ""
    functions = [function for function in getattr(scheduler, "lr_lambdas", None) or () if function is not None]
    named = list(dict.fromkeys(getattr(function, "__qualname__", type(function).__name__) for function in functions))
    builder = getattr(live.options.lr_scheduler, "func", live.options.lr_scheduler)  # of a partial
    return ", ".join([f"scheduler {type(scheduler).__name__}", *named, *([f"built by {name_of(builder)}"])])


class StepRates:
    """Tracks trained parameters, learning rates and directions of steps from audit to audit.

    Args:
        live: The run; trainable parameters must stay trainable.
        idled: Function that returns the hook that set all rates to 0, or an empty string.
        rates_set: True if a hook of the user could set a rate.
    """

    def __init__(self, live: LiveRun, idled: Callable[[], str], *, rates_set: bool = False) -> None:
        self._set = rates_set
        self._live, self._policy, self._idled = live, live.policy, idled
        self._trained = [name for name, parameter in self._policy.named_parameters() if parameter.requires_grad]
        self._idle, self._rollout, self._at_zero = 0, -1, dict[str, int]()
        self._steps, self._uphill = 0, 0
        self._first = -1 if live.trainer.global_step else 0
        self._counts: dict[int, float] = {}

    def begin_step(self) -> None:
        """Begin an audited optimizer step."""
        self._counts = _counts(self._live.optimizers)

    def note(self, rollout_number: int, parameters: Mapping[str, ParameterTrace], optimizer: str) -> Stepping:
        """Return the state of the optimizers after an audited step; ``optimizer`` is the name of a class."""
        idle = self._note_rates(rollout_number, parameters)
        self._note_direction(parameters)
        optimizers = self._live.optimizers
        return Stepping(
            rule=rule_of(optimizers[0]) if len(optimizers) == 1 else optimizer,
            steps=self._own_steps(optimizers),
            uphill=self._uphill == self._steps and self._steps >= (1 if self._first == rollout_number else 3),
            idle=idle,
            rate_setter=self._rate_setter() if idle else "",
        )

    def _note_rates(self, rollout_number: int, parameters: Mapping[str, ParameterTrace]) -> str:
        """Return the part that is in its second audited rollout at a rate of 0, once."""
        rates = {name: one.lr for name, one in parameters.items() if one.held}
        new, running = rollout_number != self._rollout, _parts_at_work(rates)
        self._rollout, stuck = rollout_number, self._never_start() if running else ()
        if running or not parameters:
            self._idle = 0
        elif new:
            self._idle += 1
        for name, rate in rates.items():
            waits = name.partition(".")[0] not in running and name not in stuck  # a schedule or hook may start it
            if rate > 0 or waits:
                self._at_zero.pop(name, None)
            elif new or name not in self._at_zero:
                self._at_zero[name] = self._at_zero.get(name, 0) + 1
        if not new:
            return ""
        if self._idle:
            return "every parameter" if self._idle == IDLE_ROLLOUTS else ""
        return next((name for name, number in self._at_zero.items() if number == IDLE_ROLLOUTS), "")

    def _never_start(self) -> set[str]:
        """Return the parameters whose rate is 0 from the start, which no hook sets."""
        names = {id(parameter): name for name, parameter in self._policy.named_parameters()}
        groups = [group for optimizer in self._live.optimizers for group in optimizer.param_groups]
        idle = [group for group in groups if not group.get("initial_lr", group["lr"]) > 0]
        return set() if self._set else {names[id(one)] for group in idle for one in group["params"] if id(one) in names}

    def _note_direction(self, parameters: Mapping[str, ParameterTrace]) -> None:
        moves, gradients = list[Tensor](), list[Tensor]()
        for one in parameters.values():
            if one.gradient is not None and one.before is not None and one.after is not None:
                moves.append(one.after.double() - one.before.double())
                gradients.append(one.gradient)
        if not moves:
            return
        move, gradient = torch.cat(moves), torch.cat(gradients)
        size = float(move.norm() * gradient.norm())
        if size > 0:
            self._steps += 1
            self._uphill += float(move @ gradient) > UPHILL * size

    def _own_steps(self, optimizers: list[Optimizer]) -> int:
        """Return the number of steps by the optimizers' own counts; 1 if they do not count."""
        grown = [after - self._counts.get(key, 0.0) for key, after in _counts(optimizers).items()]
        return int(max(grown, default=1.0)) if max(grown, default=1.0) > 1 else 1

    def _rate_setter(self) -> str:
        if culprit := self._idled():
            return culprit
        groups = [group for optimizer in self._live.optimizers for group in optimizer.param_groups]
        meant = all(group.get("initial_lr", 0.0) == 0 for group in groups if not group["lr"] > 0)
        return "" if meant else scheduler_name(self._live)

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters that no longer require a gradient."""
        needing = {name for name, parameter in self._policy.named_parameters() if parameter.requires_grad}
        return [name for name in self._trained if name not in needing]


def _parts_at_work(rates: Mapping[str, float]) -> set[str]:
    """Return the models, policy or critic, with a rate above 0."""
    return {name.partition(".")[0] for name, rate in rates.items() if rate > 0}


def _family(optimizers: list[Optimizer]) -> Iterator[Optimizer]:
    """Yield optimizers and those that they wrap."""
    for optimizer in optimizers:
        yield optimizer
        yield from (part for part in vars(optimizer).values() if isinstance(part, Optimizer))


def _counts(optimizers: list[Optimizer]) -> dict[int, float]:
    """Return the step count of each parameter from the optimizers' state."""
    kept = dict[int, Any]()
    for optimizer in _family(optimizers):
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict) and "step" in state:
                kept[id(parameter)] = state["step"]
    if kept and all(isinstance(step, Tensor) and step.is_cpu and not step.dim() for step in kept.values()):
        return dict(zip(kept, torch.stack([step.double() for step in kept.values()]).tolist(), strict=True))
    return {key: float(step) for key, step in kept.items()}


@torch.no_grad()
def dependencies(
    policy: nn.Module, names: Iterable[str], say: Callable[[Mapping[str, Tensor]], Tensor]
) -> Iterator[str]:
    """Yield the names of parameters that change the outputs of a policy, each perturbed separately."""
    parameters, plain = dict(policy.named_parameters()), None
    for name in names:
        plain = say({}) if plain is None else plain
        weight = parameters[name].detach()
        pattern = torch.sin(1.0 + 3.0 * torch.arange(weight.numel(), device=weight.device)).reshape(weight.shape)
        moved = weight + (pattern * (weight.double().abs().mean() + 1e-2)).to(weight.dtype)
        if float((say({name: moved}) - plain).abs().amax()) > APART:
            yield name
