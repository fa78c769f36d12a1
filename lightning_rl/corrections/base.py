"""RLCallback: the base of every correction, a Lightning callback that contributes to the training signal."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from jaxtyping import Bool, Float
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView
from lightning_rl.rollout import Rollout
from lightning_rl.signal.reductions import Reduction

Policy = Literal["current", "old", "rollout"]
Ratio = tuple[Policy, Policy]
RLCallbackT = TypeVar("RLCallbackT", bound="RLCallback")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A term added to the loss: ``coef`` times the reduced ``per_token``.

    Args:
        per_token: shape [b, T], with gradient.
        coef: what the reduced term is multiplied with.
        reduction: how tokens are weighed; None for the module's own reduction.
        masked: whether the masks and weights of the corrections apply to it as they do to the policy loss.
    """

    per_token: Float[Tensor, "B T"]
    coef: float
    reduction: Reduction | None = None
    masked: bool = False


class RLCallback(Callback):
    """Contributes to the training signal through any of the methods below, each of which returns a new value.

    Nothing that comes in may be edited: the core checks and names the callback that did. Contributions of several
    callbacks combine with commutative operations in the order of their names, so the order of the list never matters.

    Attributes:
        name: the stem of the callback's file and the prefix of its metrics; unique in a run, see :meth:`named`.
        reads: names of the rollout fields that its once-per-rollout methods need.
        reads_at_loss: names of the fields that its loss-time methods need.
        records: what the engine has to record about every token for it, by the name in the extras.
        ratio: (numerator, denominator) of the importance ratio that its weight carries; None for masks and terms.
        alternative: what to use instead where this correction does not fit, for error messages.
        compares_rows: whether its bonus of a row depends on the other rows.
        compares_groups: whether it compares the samples of a prompt, so that groups of one make it senseless.
        trains_entropy: whether its loss term needs the gradient of ``view.entropy``.
        most_rounds: how often prompts are drawn at most until enough groups are kept, if it filters groups.
        LOOKING: the methods by which a callback only looks on, or brings what others read.
    """

    name: str = ""
    reads: tuple[str, ...] = ()
    reads_at_loss: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    ratio: Ratio | None = None
    alternative: str | None = None
    compares_rows: bool = False
    compares_groups: bool = False
    trains_entropy: bool = False
    most_rounds: int = 10

    METHODS: ClassVar[tuple[str, ...]] = (
        "reward_mask",
        "reward_bonus",
        "keep_groups",
        "exclude",
        "provide",
        "token_reward",
        "sequence_mask",
        "token_mask",
        "token_weight",
        "loss_term",
        "forward_context",
        "rollout_metrics",
        "metrics",
        "observe",
        "observe_drawn",
        "observe_update",
    )

    LOOKING: ClassVar[frozenset[str]] = frozenset(
        ("observe", "observe_drawn", "observe_update", "provide", "rollout_metrics")
    )

    @property
    @override
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: its name."""
        return self.name

    @property
    def contributes(self) -> frozenset[str]:
        """The contribution methods that this callback offers: by default those that its class overrides."""
        return frozenset(m for m in self.METHODS if getattr(type(self), m) is not getattr(RLCallback, m))

    def named(self: RLCallbackT, name: str) -> RLCallbackT:
        """A copy under another name, to use a correction twice in one run."""
        twin = copy.copy(self)
        twin.name = name
        return twin

    def reward_mask(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Rows that take part in the reward and in its statistics; combined by *and*."""
        raise NotImplementedError

    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """Added to the task reward of each row; combined by *sum*."""
        raise NotImplementedError

    def keep_groups(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Rows whose group is kept, the same for a whole group; the core refills the others; combined by *and*."""
        raise NotImplementedError

    def exclude(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Rows that leave training altogether, denominators included; combined by *or*."""
        raise NotImplementedError

    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        """Tensors by ``extras/<name>`` ([B, ...]) or ``token_extras/<name>`` ([B, T, ...]); a *disjoint union*."""
        raise NotImplementedError

    def token_reward(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Reward of each token, for estimators that work per token; combined by *sum*."""
        raise NotImplementedError

    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        """Rows whose policy loss counts. No token axis, so it cannot leak by token; combined by *and*."""
        raise NotImplementedError

    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        """Tokens whose policy loss counts; combined by *and*."""
        raise NotImplementedError

    def token_weight(self, view: LossView) -> Float[Tensor, "B T"]:
        """Factor on the policy loss of each token, without gradient; combined by *product*."""
        raise NotImplementedError

    def loss_term(self, view: LossView) -> LossTerm:
        """A term added to the loss, over all valid tokens; combined by *sum*."""
        raise NotImplementedError

    def forward_context(self, rows: Rollout) -> AbstractContextManager[object]:
        """Entered around every training forward of the policy (old, update); *nested* in the order of the names."""
        del rows
        return nullcontext()

    def rollout_metrics(self, rollout: Rollout) -> Mapping[str, Stat]:
        """Statistics of a finished rollout, before any rejection, with the same keys at every call."""
        raise NotImplementedError

    def metrics(self, view: LossView) -> Mapping[str, Stat]:
        """Statistics of a microbatch, before any rejection, with the same keys at every call."""
        raise NotImplementedError

    def observe(self, rollout: Rollout) -> None:
        """Looks at a finished rollout."""

    def observe_drawn(self, rollout: Rollout) -> None:
        """Looks at the samples of one round of drawing, scored, before any of them is masked or filtered."""

    def observe_update(self, view: LossView) -> None:
        """Looks at a microbatch of an optimizer step, between its loss and its backward."""
