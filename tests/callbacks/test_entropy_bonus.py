"""EntropyBonus: the entropy's gradient in the loss, and a coefficient that holds a target over all ranks."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from kit.support import callback_of, fit, run_step, tiny_module, view_of, weights_of
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import FakeEngine, LossTerm, LossView, Reinforce, RLCallback, RLLightningModule, Stat, token_mean
from lightning_rl.callbacks import EntropyBonus, NoEOSMask


def witness(**given: Any) -> LossView:
    """Three valid tokens of entropy logprob squared, whose gradient is twice the log-probability."""
    view = view_of([[-1.0, -2.0], [-0.5, -9.0]], valid=[[1, 1], [1, 0]], advantages=[[0.0] * 2] * 2, **given)
    return view.replace(entropy=view.logprobs.square())


def moments(*values: float) -> Tensor:
    return Stat.of(torch.tensor(values)).moments


def test_the_gradient_is_minus_the_coefficient_times_that_of_the_mean_entropy() -> None:
    step = run_step(witness(), callbacks=[EntropyBonus(0.3)], loss=Reinforce(), reduction=token_mean)
    assert_close(step.gradient, -0.3 * torch.tensor([[-2.0, -4.0], [-1.0, 0.0]]) / 3)
    assert step.metrics["entropy_bonus/loss"] == pytest.approx(-(1 + 4 + 0.25) / 3)
    assert float(step.loss) == pytest.approx(-0.3 * 5.25 / 3)
    assert step.metrics["entropy_bonus/coef"] == pytest.approx(0.3)


def test_at_rest_it_gives_no_gradient_and_says_so() -> None:
    callback = EntropyBonus(0.3, target=1.0)
    callback.entropy = 1.5
    step = run_step(witness(), callbacks=[callback], loss=Reinforce())
    assert not step.gradient.any() and step.metrics["entropy_bonus/coef"] == 0.0
    assert step.metrics["entropy_bonus/loss"] < 0, "what is logged has no coefficient"


def test_the_coefficient_moves_by_a_step_and_rests_above_the_target() -> None:
    callback, trace = EntropyBonus(0.5, target=1.0, step=0.25), []
    for mean in (0.8, 0.9, 1.2, 1.1, 0.5, 1.0, 1.5, 1.5, 1.5, 0.9):
        callback.adapt(moments(mean)[None])
        trace.append((callback.coef, callback.alpha))
    assert trace == [
        (0.75, 0.75),
        (1.0, 1.0),
        (0.75, 0.0),
        (0.5, 0.0),
        (0.75, 0.75),
        (0.5, 0.5),
        (0.25, 0.0),
        (0.0, 0.0),
        (0.0, 0.0),
        (0.25, 0.25),
    ]


def test_ranks_weigh_as_much_as_they_have_tokens() -> None:
    callback = EntropyBonus(0.5, target=1.0, step=0.25)
    callback.adapt(torch.stack([moments(0.9, 0.9, 0.9), moments(1.2)]))  # 0.975 of tokens, 1.05 of ranks
    assert (callback.coef, callback.resting) == (0.75, False)
    callback.adapt(torch.stack([moments(1.1), moments()]))  # a rank without a token has no say
    assert (callback.coef, callback.resting) == (0.5, True)


def test_nothing_changes_without_a_token_or_a_target() -> None:
    adaptive, fixed = EntropyBonus(0.5, target=1.0), EntropyBonus(0.5)
    adaptive.adapt(torch.stack([moments(), moments()]))
    fixed.adapt(moments(0.1)[None])
    assert (adaptive.coef, adaptive.resting, fixed.coef, fixed.resting) == (0.5, False, 0.5, False)


def test_its_state_is_the_coefficient_and_the_entropy() -> None:
    callback, other = EntropyBonus(0.5, target=1.0, step=0.25), EntropyBonus(0.1, target=1.0)
    callback.adapt(moments(2.0)[None])
    other.load_state_dict(callback.state_dict())
    assert (other.coef, other.resting, other.alpha) == (0.25, True, 0.0)
    other.load_state_dict({"coef": 0.75, "resting": False})  # of earlier versions
    assert (other.coef, other.alpha) == (0.75, 0.75)


def test_a_fixed_one_has_no_state() -> None:
    fixed, adaptive = EntropyBonus(0.5), EntropyBonus(0.25, target=1.0)
    fixed.load_state_dict(adaptive.state_dict())
    assert fixed.state_dict() == {} and fixed.alpha == 0.5


def trained(*callbacks: RLCallback, **options: Any) -> RLLightningModule:
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, **options)
    fit(module, callbacks=callbacks)
    return module


def same(one: RLLightningModule, other: RLLightningModule) -> bool:
    first, second = weights_of(one), weights_of(other)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.nightly
def test_a_fixed_one_is_a_loss_term_of_minus_the_entropy_bit_for_bit() -> None:
    bonus = callback_of("bonus", loss_term=lambda view: LossTerm(per_token=-view.entropy, coef=0.05))
    bonus.trains_entropy = True
    expected = trained(bonus)
    assert same(trained(EntropyBonus(0.05)), expected) and not same(expected, trained())


class Trace(EntropyBonus):
    """Keeps coefficient and mean entropy of every optimizer step."""

    @override
    def after_step(self, outputs: Mapping[str, Tensor]) -> None:
        used = self.alpha
        super().after_step(outputs)
        self.steps = [*getattr(self, "steps", []), (used, float(outputs["policy/entropy"][1]), self.coef)]


@pytest.mark.nightly
def test_in_a_fit_every_optimizer_step_moves_it() -> None:
    callback = Trace(0.02, target=2.2, step=0.01)
    trained(callback, max_tokens_per_microbatch=30)
    coef, alpha = 0.02, 0.02
    for used, mean, after in callback.steps:
        assert used == alpha
        coef = max(coef + (0.01 if mean < 2.2 else -0.01), 0.0)
        alpha = 0.0 if mean > 2.2 else coef
        assert after == coef
    assert len(callback.steps) == 16
    assert {mean < 2.2 for _, mean, _ in callback.steps} == {True, False}, "both sides of the target are met"


@pytest.mark.filterwarnings("ignore:rollout . taught the policy nothing")
def test_a_step_without_a_token_leaves_the_coefficient() -> None:
    callback = EntropyBonus(0.02, target=9.0)
    module = tiny_module(engine=FakeEngine(lambda request: [5] * request.sampling.max_new_tokens))
    fit(module, callbacks=[callback, NoEOSMask("drop_tokens")], max_epochs=1)
    assert module.run.progress.skipped == 4 and callback.coef == 0.02


def test_a_second_entropy_bonus_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `EntropyBonus`"):
        fit(tiny_module(), callbacks=[EntropyBonus(0.1), EntropyBonus()])
