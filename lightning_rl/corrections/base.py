"""RLCallback: the base of every correction, a Lightning callback that contributes to the training signal."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxtyping import Bool, Float
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.trace import StepTrace
from lightning_rl.corrections.view import LossView
from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.rollout import Rollout
from lightning_rl.signal.reductions import Reduction

Policy = Literal["current", "old", "rollout"]
Ratio = tuple[Policy, Policy]
RLCallbackT = TypeVar("RLCallbackT", bound="RLCallback")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What is known about a contribution method, so that nothing else has to keep a list of them.

    Attributes:
        when: ``"sampling"``, ``"signal"`` (both see the rollout), ``"update"`` (sees the view of a microbatch) or
            ``"watch"`` (sees, and returns nothing).
        returns: ``"row mask"``, ``"row float"``, ``"token mask"``, ``"token float"``, ``"term"``, ``"tensors"``,
            ``"context"``, ``"stats"`` or ``"nothing"``.
        combined_by: how those of several callbacks become one.
        bends: ``"prompts"``, ``"rows"``, ``"rewards"``, ``"policy loss"``, ``"loss"``, ``"forward"``, or ``""`` for
            what only brings what others read, measures or looks on.
    """

    when: Literal["sampling", "signal", "update", "watch"]
    returns: str
    combined_by: str
    bends: str = ""


CONTRIBUTIONS: Mapping[str, Contribution] = {
    "reward_mask": Contribution("sampling", "row mask", "and", "rewards"),
    "reward_bonus": Contribution("sampling", "row float", "sum", "rewards"),
    "keep_groups": Contribution("sampling", "row mask", "and", "prompts"),
    "exclude": Contribution("sampling", "row mask", "or", "rows"),
    "provide": Contribution("signal", "tensors", "disjoint union"),
    "token_reward": Contribution("signal", "token float", "sum", "rewards"),
    "sequence_mask": Contribution("update", "row mask", "and", "policy loss"),
    "token_mask": Contribution("update", "token mask", "and", "policy loss"),
    "token_weight": Contribution("update", "token float", "product", "policy loss"),
    "loss_term": Contribution("update", "term", "sum", "loss"),
    "forward_context": Contribution("update", "context", "nesting", "forward"),
    "rollout_metrics": Contribution("signal", "stats", "merging"),
    "metrics": Contribution("update", "stats", "merging"),
    "observe_generated": Contribution("watch", "nothing", ""),
    "observe_rewards": Contribution("watch", "nothing", ""),
    "observe": Contribution("watch", "nothing", ""),
    "observe_step": Contribution("watch", "nothing", ""),
}
"""Every contribution method, in the order of a rollout's life. :meth:`Corrections.contributors` says who offers one."""

BEFORE_LOGPROBS = ("reward_mask", "keep_groups", "observe_rewards", "exclude")
BEFORE_ADVANTAGES = (*BEFORE_LOGPROBS, "provide", "reward_bonus", "token_reward")
MADE_AFTER = {
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values"), BEFORE_LOGPROBS),
    **dict.fromkeys(("advantages", "returns"), BEFORE_ADVANTAGES),
}
"""Fields of a rollout that do not exist yet when some contribution methods are called."""

POLICY_LOSS_FACTORS = tuple(name for name, entry in CONTRIBUTIONS.items() if entry.bends == "policy loss")
REWARDS = tuple(name for name, entry in CONTRIBUTIONS.items() if entry.bends == "rewards" and "float" in entry.returns)
TOKEN_REWARDS = tuple(name for name in REWARDS if CONTRIBUTIONS[name].returns == "token float")


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

    Nothing that comes in may be edited: the core checks and names the callback that did. Corrections of several
    callbacks combine with commutative operations in the order of their names, so the order of the list never matters.

    Attributes:
        name: the stem of the callback's file and the prefix of its metrics; unique in a run, see :meth:`with_name`.
        reads: names of the rollout fields that its once-per-rollout methods need.
        reads_at_loss: names of the fields that its loss-time methods need.
        provides: names of the tensors that its ``provide`` returns, such as ``"extras/difficulty"``, so that readers of
            others are refused at setup; empty for whatever it likes.
        records: what the engine has to record about every token for it, by the name in the extras.
        ratio: (numerator, denominator) of the importance ratio that its weight carries; None for masks and terms.
        alternative: what to use instead where this correction does not fit, for error messages.
        replaces: names of corrections that it stands for, so that beside one of them it would count twice.
        idle_beside: names of corrections that leave it nothing to change.
        compares_rows: whether its bonus of a row depends on the other rows.
        scales_rewards: whether its bonus grows with the reward, so that a constant added to all of a group counts.
        compares_groups: whether it compares the samples of a prompt, so that groups of one make it senseless.
        batch_statistics: whether what it says of a row depends on the rows of other prompts, as a mean over the batch
            does; the audit takes that for a mistake unless it is said.
        chooses_rows: whether its loss term leaves rows out, which trains nothing where it leaves out all.
        trains_entropy: whether its loss term needs the gradient of ``view.entropy``.
        max_rounds: how often prompts are sampled at most until enough groups are kept, if it filters groups.
        traces_parameters: whether the steps that it observes need a few entries of every parameter.
        collectives: what the ranks of the run do together; the core hands it in at setup.
    """

    name: str = ""
    reads: tuple[str, ...] = ()
    reads_at_loss: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    ratio: Ratio | None = None
    alternative: str | None = None
    replaces: tuple[str, ...] = ()
    idle_beside: tuple[str, ...] = ()
    compares_rows: bool = False
    scales_rewards: bool = False
    compares_groups: bool = False
    batch_statistics: bool = False
    chooses_rows: bool = False
    trains_entropy: bool = False
    max_rounds: int = 10
    traces_parameters: bool = False
    collectives: Collectives = ALONE

    @property
    @override
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: its name."""
        return self.name

    @property
    def contributes(self) -> frozenset[str]:
        """The contribution methods that this callback offers: by default those that its class overrides."""
        return frozenset(m for m in CONTRIBUTIONS if getattr(type(self), m) is not getattr(RLCallback, m))

    @property
    def bends(self) -> bool:
        """Whether it takes part in what a run trains, rather than only looking on."""
        return any(CONTRIBUTIONS[m].bends or CONTRIBUTIONS[m].returns == "tensors" for m in self.contributes)

    def with_name(self: RLCallbackT, name: str) -> RLCallbackT:
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

    def observe_generated(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Looks at what the engine was asked and answered, pairs of Request and Completion in their order.

        Empty for samples that come out of a checkpoint.
        """

    def observe_rewards(self, rollout: Rollout, calls: Sequence[Any]) -> None:
        """Looks at the samples of one round with their rewards, before any of them is masked or filtered.

        Args:
            rollout: the samples.
            calls: a :class:`lightning_rl.rewards.RewardCall` for each reward function.
        """

    def observe(self, rollout: Rollout) -> None:
        """Looks at a finished rollout."""

    def traces_step(self, rollout_number: int, step: int) -> bool:
        """Whether it wants to observe an optimizer step, which costs a copy of what the policy says of its rows.

        Args:
            rollout_number: number of the rollout.
            step: number of the optimizer step within it.
        """
        del rollout_number, step
        return "observe_step" in self.contributes

    def observe_step(self, trace: StepTrace) -> None:
        """Looks at an optimizer step, once it is over; see :meth:`traces_step`."""
