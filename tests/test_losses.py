"""Policy losses as objects: what they measure, how they are named, which bounds they refuse."""

import math

import pytest
from kit.support import run_step, view_of

from lightning_rl import ClippedSurrogate, Reinforce
from lightning_rl.losses import LOSSES, FunctionLoss, resolve_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(0.7, -1, 1, 0), (0.7, 1, 0, 0), (1.4, 1, 0, 1), (1.4, -1, 0, 0), (0.9, -1, 0, 0), (1.1, 1, 0, 0), (9, 0, 0, 0)],
)
def test_clip_fractions_count_tokens_that_lost_their_gradient(
    ratio: float, advantage: float, low: float, high: float
) -> None:
    view = view_of([math.log(ratio)], old_logprobs=[0.0], advantages=[advantage])
    step = run_step(view)
    assert (step.metrics["policy/clip_fraction_low"], step.metrics["policy/clip_fraction_high"]) == (low, high)
    assert (step.gradient == 0).all() == bool(low or high or advantage == 0)


def test_losses_resolve_from_names_objects_and_functions() -> None:
    assert resolve_loss("ppo") is LOSSES["ppo"] and resolve_loss("reinforce") == Reinforce()
    own = resolve_loss(lambda view: -view.logprobs)
    assert isinstance(own, FunctionLoss) and own.ratio is None and own.metrics(view_of([-1.0])) == {}
    assert run_step(view_of([-1.0]), loss=own).gradient.item() == -1
    with pytest.raises(ValueError, match=r"out of ppo, .*, dro, an object or a function, got 'grpo'"):
        resolve_loss("grpo")
    with pytest.raises(ValueError, match="expected an object as loss, got the class ClippedSurrogate: call it"):
        resolve_loss(ClippedSurrogate)  # pyrefly: ignore[bad-argument-type]
    for knobs in ({"clip_low": 2.0}, {"clip_high": -1.0}, {"dual_clip": 0.5}):
        with pytest.raises(ValueError, match="expected"):
            ClippedSurrogate(**knobs)
