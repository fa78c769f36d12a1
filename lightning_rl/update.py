"""Update: the gradient of one optimizer step, accumulated over its microbatches."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm, LossParts
from lightning_rl.corrections import OUTPUTS, Corrections, LossView, Outputs, Stat, StepTrace
from lightning_rl.corrections.stat import merge_moments
from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.policy import Microbatch
from lightning_rl.policy.batch_invariance import check_bitwise
from lightning_rl.policy.model import FiniteOutputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.reductions import Reduction

Forward = Callable[[Microbatch], Outputs]
"""Function that returns the outputs of a policy or of a table for a microbatch, with gradient."""


@dataclass(slots=True)
class StepWeights:
    """Weights of tokens by each reduction, over a step of all ranks: 1/300 for ``token_mean`` of 300 tokens.

    Each is computed once.

    All ranks have the same number of microbatches, so they request the same reductions in the same order.
    """

    rollout: Rollout
    microbatches: tuple[Microbatch, ...]
    global_sum: GlobalSum
    corrections: Corrections = field(default_factory=Corrections)
    _weights: dict[int, Tensor] = field(default_factory=dict)  # by id, since a reduction may be unhashable

    def of(self, reduction: Reduction, microbatch: Microbatch) -> Tensor:
        """Return the weights of a microbatch's tokens, shape [b, T]; zeros for padding."""
        if id(reduction) not in self._weights:
            self._weights[id(reduction)] = self._over_step(reduction)
        weights, (rows, width) = self._weights[id(reduction)], microbatch.layout.shape
        if not len(microbatch.index):
            return weights.new_zeros(rows, width)
        return weights[:, :width].index_select(0, microbatch.index)

    def _over_step(self, reduction: Reduction) -> Tensor:
        in_step = torch.zeros_like(self.rollout.trained)
        for microbatch in self.microbatches:
            in_step[microbatch.index] = True
        valid, trained = self.rollout.valid_tokens & in_step[:, None], self.rollout.trained & in_step
        name, groups = getattr(reduction, "__name__", type(reduction).__name__), self.rollout.groups.clone()
        fields = [("valid_tokens", valid), ("trained", trained), ("groups", groups)]
        args = valid, trained, groups, self.global_sum
        weights = self.corrections.call(f"the reduction {name}", reduction, *args, shown=lambda: fields)
        if weights.shape != valid.shape:
            raise ValueError(
                f"expected the reduction {name} to return a weight per token {list(valid.shape)}, got "
                f"{list(weights.shape)}"
            )
        return weights


@dataclass(slots=True)
class StepGradient:
    """Losses and statistics of one optimizer step: parts {"policy": 0.3}, norm 1.7, made True, 300 tokens.

    Attributes:
        parts: Parts of the loss, summed over microbatches.
        stats: Statistics of each microbatch.
        losses: Loss of each microbatch.
        untrained: For each part without a gradient in a microbatch, True if it is not 0 there, shape [] bool each.
        out_of_memory: True if this rank ran out of memory and rows are missing.
        trace: Trace for callbacks that observe the step.
        norm: Gradient norm before clipping.
        made: True once the optimizer has updated the weights, False for a non-finite norm, None without trained tokens.
        lr: Learning rate of the policy.
        tokens: Number of trained tokens of all ranks; a step without any is skipped.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)
    stats: list[dict[str, Stat]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    untrained: list[tuple[str, Tensor]] = field(default_factory=list)
    out_of_memory: bool = False
    trace: StepTrace | None = None
    norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    made: bool | None = None
    lr: float = 0.0
    tokens: int = 0

    def add(self, loss: LossParts) -> None:
        """Add the loss of a microbatch."""
        self.stats.append(loss.stats)
        self.losses.append(loss.total.detach())
        self.untrained += loss.untrained.items()
        for name, part in loss.parts.items():
            part = part.to(torch.float64, copy=True)  # observers of the trace are shown the part
            self.parts[name] = self.parts[name] + part if name in self.parts else part

    def joint(self, name: str) -> Tensor:
        """Return the moments of a statistic over all microbatches of this rank, shape [4]."""
        return merge_moments(torch.stack([stats[name].moments for stats in self.stats]))

    def metrics(self, world_size: int, *, norm: Tensor, **numbers: float) -> dict[str, Stat]:
        """Return the step's losses over all ranks, its gradient norm, and further numbers.

        The norm is the same on all ranks. If it is not finite, every rank omits its losses, since a mean over only some
        ranks would be misleading.
        """
        scale = float(world_size) if torch.isfinite(norm) else math.nan  # merging takes the mean over ranks
        values = {name: float(part) * scale for name, part in self.parts.items()}
        values["optim/grad_norm"] = float(norm)
        return Stat.numbers(values | {name.replace("__", "/"): number for name, number in numbers.items()})

    def outputs(self) -> dict[str, Tensor]:
        """Return copies of the outputs of the batch for callbacks."""
        if not self.tokens:
            return {}
        entropy = {"policy/entropy": self.joint("policy/entropy")} if torch.isfinite(self.norm) else {}
        outputs = {**self.parts, "optim/grad_norm": self.norm, **entropy}
        return {name: output.clone() for name, output in outputs.items()}


def accumulate_gradient(
    rollout: Rollout,
    microbatches: tuple[Microbatch, ...],
    forward: Forward,
    algorithm: Algorithm,
    *,
    backward: Callable[[Tensor], None],
    around: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext(),
    collectives: Collectives = ALONE,
    trace: StepTrace | None = None,
    bitwise: bool = False,
    record_out_of_memory: bool = False,
) -> StepGradient:
    """Run forward, loss and backward of every microbatch.

    A rank that runs out of memory continues with its other microbatches; otherwise the collectives of the other ranks
    would block. It raises the error only in the backward of the last microbatch, where ranks exchange gradients.

    Args:
        rollout: Rollout with advantages.
        microbatches: Microbatches of this optimizer step; their number is the same on every rank.
        forward: Returns the outputs of the policy for a microbatch.
        algorithm: Loss and corrections.
        backward: Runs the backward of a loss.
        around: Returns the context in which a microbatch runs; its argument is True for the last microbatch.
        collectives: Operations over the ranks.
        trace: Trace that stores outputs, gradients and parts of the loss; None for no trace.
        bitwise: Check that log-probabilities are bitwise equal to those of the rollout.
        record_out_of_memory: Record in the result that memory ran out instead of raising an error.

    Raises:
        FloatingPointError: If the policy's output is not finite at a valid token; the message names the sample. On an
            accelerator it is raised after all microbatches.
        RuntimeError: If log-probabilities differ with ``bitwise``.
        ValueError: If the loss has no gradient, or rows are divided for an algorithm that is not token_wise.
        torch.OutOfMemoryError: If memory runs out without ``record_out_of_memory``, or while ranks exchange gradients.
    """
    _check_parts(microbatches, algorithm)
    weights = StepWeights(rollout, microbatches, collectives.sum, algorithm.corrections)
    gradient = StepGradient(trace=trace)
    entropy_gradient, prepared, alone = algorithm.trains_entropy, None, collectives.ranks == 1
    finite = FiniteOutputs(rollout.groups.device)

    def view_of(microbatch: Microbatch) -> LossView:
        rows = microbatch.rows_of(rollout)
        with algorithm.corrections.forward_context(rows):
            outputs = forward(microbatch)
        finite.note(outputs, rows)
        if bitwise:
            check_bitwise(outputs.logprobs, rows)
        return loss_view(rows, outputs, entropy_gradient=entropy_gradient)

    if algorithm.loss.prepares:
        record_out_of_memory = record_out_of_memory and alone  # the values fit these microbatches only
        with torch.no_grad():
            views = [view_of(microbatch).sanitize() for microbatch in microbatches]
            finite.check()
            prepared = _prepare(algorithm, views, collectives)

    def loss_of(microbatch: Microbatch, number: int) -> LossParts:
        view = view_of(microbatch)
        if prepared is not None:
            view = view.replace(prepared=prepared[number])
        traced = None if trace is None else trace.follow(view)
        loss = algorithm.microbatch_loss(view, lambda reduction: weights.of(reduction, microbatch))
        if traced is not None:
            traced.parts = loss.parts
        return loss

    for number, microbatch in enumerate(microbatches):
        last = number == len(microbatches) - 1
        with around(last), _recording_out_of_memory(gradient, enabled=record_out_of_memory and (alone or not last)):
            loss = None
            with _recording_out_of_memory(gradient, enabled=record_out_of_memory):
                loss = loss_of(microbatch, number)
            loss = loss_of(_empty(rollout), number) if loss is None and last and not alone else loss
            if loss is not None:
                _check_gradient(loss.total, algorithm)
                backward(loss.total)
                gradient.add(loss)
        if gradient.out_of_memory and alone:
            break
    finite.check()
    return gradient


def _check_parts(microbatches: Sequence[Microbatch], algorithm: Algorithm) -> None:
    if any(microbatch.parts for microbatch in microbatches) and not algorithm.token_wise:
        raise ValueError(
            "expected whole rows for a loss or correction that is not token_wise, got parts of rows from the plan of "
            "another algorithm: change loss and corrections between two rollouts"
        )


def _check_gradient(loss: Tensor, algorithm: Algorithm) -> None:
    if not loss.requires_grad:
        off = "" if torch.is_grad_enabled() else ", because user code turned grad mode off"
        raise ValueError(
            f"expected a loss with a gradient, got none{off}: compute the loss {algorithm.loss.name} from "
            "view.logprobs, without detach() or no_grad"
        )


def _prepare(algorithm: Algorithm, views: list[LossView], collectives: Collectives) -> Sequence[Tensor] | None:
    """Return the output of the loss's ``prepare``."""
    who, args = f"prepare of the loss {algorithm.loss.name}", (views, collectives.sum, collectives.concat)

    def fields() -> list[tuple[str, Tensor]]:
        numbered = [(view.tensors(), number) for number, view in enumerate(views)]
        return [(f"{name} of microbatch {number}", one) for tensors, number in numbered for name, one in tensors]

    return algorithm.corrections.call(who, algorithm.loss.prepare, *args, shown=fields)


@contextmanager
def _recording_out_of_memory(gradient: StepGradient, *, enabled: bool) -> Iterator[None]:
    """Set ``gradient.out_of_memory`` if memory runs out in the context; raise the error unless ``enabled``."""
    try:
        yield
    except torch.OutOfMemoryError:
        if not enabled:
            raise
        gradient.out_of_memory = True


def _empty(rollout: Rollout) -> Microbatch:
    """Return a microbatch without rows; it replaces a microbatch that does not fit into memory."""
    return plan_of_rows(rollout, [[[]]]).to(rollout.response_ids.device).microbatches()[0]


def from_table(outputs: Outputs) -> Forward:
    """Return a forward that looks up rows of a table of outputs [B, T] instead of running a policy."""

    def forward(microbatch: Microbatch) -> Outputs:
        index, (rows, width) = microbatch.index, microbatch.layout.shape
        if not len(index):  # the backward needs a graph even without rows
            zeros = outputs.logprobs.sum() * 0 + outputs.logprobs.new_zeros(rows, width)
            parts = Outputs._make(None if output is None else zeros for output in outputs)
            return parts._replace(entropy=zeros.detach())
        return Outputs._make(None if output is None else output[index, :width] for output in outputs)

    return forward


def loss_view(rows: Rollout, outputs: Outputs, *, entropy_gradient: bool = False) -> LossView:
    """Return the view for losses and corrections; missing old log-probabilities are the current ones, detached.

    Advantages and returns are cast to the dtype of the log-probabilities.
    """
    values = {spec.name: getattr(rows, spec.name) for spec in fields(rows)}
    for name in ("advantages", "returns"):
        values[name] = None if values[name] is None else values[name].to(outputs.logprobs.dtype)
    if rows.old_logprobs is None:
        values["old_logprobs"] = outputs.logprobs.detach()
    if not entropy_gradient:
        outputs = outputs._replace(entropy=outputs.entropy.detach())
    return LossView(**values, **{spec.name: getattr(outputs, spec.output) for spec in OUTPUTS})
