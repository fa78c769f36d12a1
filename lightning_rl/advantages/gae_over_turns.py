"""GAEOverTurns: generalized advantage estimation over the turns of a conversation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from lightning_rl.advantages.estimator import Advantages, Estimator, RewardSignal
from lightning_rl.advantages.trace_decay import TraceDecay, check_trace_decay, decay_of
from lightning_rl.signal.discounted_returns import TurnEstimates, check_decay, turn_gae, turn_starts
from lightning_rl.signal.masked import whiten
from lightning_rl.utils.arguments import check_bools


@dataclass(frozen=True, slots=True, kw_only=True)
class GAEOverTurns(Estimator):
    r"""GAE with turns as actions: the tokens of a turn share an advantage, and discounts count turns.

    .. math::
        A_k = \sum_{l \ge 0} (\gamma \lambda)^l\, \delta_{k+l}, \qquad
        \delta_k = \sum_{t \in \text{turn } k} r_t + \gamma V_{k+1} - V_k

    The value of a turn is the critic's value before its first token. Helps in conversations with tools or an
    environment, where the decay per token would suppress rewards of later turns. Turns are those of the
    rollout's ``segments``; a response without them is one turn.

    Source: Zhou et al. 2024 (ArCHer), arXiv:2402.19446, whose upper level takes an utterance for an action; Schulman et
    al. 2015, arXiv:1506.02438.

    Args:
        gamma: Discount of a turn, in [0, 1].
        lam: Decay of later temporal differences, in [0, 1], or a function of the row's number of turns:
            :class:`~lightning_rl.advantages.LengthAdaptive`, :class:`~lightning_rl.advantages.RelativePosition`.
        lam_critic: Decay for the critic's returns; None for ``lam``. With 1 they are Monte Carlo returns, without bias
            from the critic.
        whitened: Normalize advantages to mean 0 and standard deviation 1 over all valid tokens.
        turn_rewards: Place turn rewards of an environment at their turns instead of at the end of the row.

    Raises:
        ValueError: If ``gamma`` or a decay is outside [0, 1].
    """

    reads = ("values",)
    per_token: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float | TraceDecay = 1.0
    lam_critic: float | TraceDecay | None = None
    whitened: bool = True
    turn_rewards: bool = False  # pyrefly: ignore[bad-override]

    def __post_init__(self) -> None:
        """Check the options."""
        check_decay(gamma=self.gamma)
        check_trace_decay(lam=self.lam, **({} if self.lam_critic is None else {"lam_critic": self.lam_critic}))
        check_bools(whitened=self.whitened, turn_rewards=self.turn_rewards)

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        values, valid = signal.require("values", "GAEOverTurns"), signal.valid_tokens
        turns = torch.ones(valid.shape, dtype=torch.int64, device=valid.device)
        turns = turns if signal.turns is None else signal.turns.long()
        steps = turn_starts(valid, turns).sum(-1)

        def estimate(decay: float | TraceDecay) -> TurnEstimates:
            return turn_gae(signal.shaped, values, valid, turns, gamma=self.gamma, lam=decay_of(decay, steps))

        advantages, returns = estimate(self.lam)
        if self.lam_critic is not None:
            returns = estimate(self.lam_critic).returns
        return Advantages(whiten(advantages, valid, signal.global_sum) if self.whitened else advantages, returns)
