"""An algorithm's loss: what multiplies what, which denominator counts whom, and that cuts do not matter."""

import math
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, callback_of, ragged_rollout, run_step, view_of, view_of_rollout
from torch.testing import assert_close

from lightning_rl import (
    LossTerm,
    LossView,
    Reinforce,
    SequenceSumNorm,
    Stat,
    ValueLoss,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from lightning_rl.algorithm import LossParts
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction

NAN, INF = math.nan, math.inf
HALVE = callback_of("halve", token_weight=lambda view: torch.full_like(view.advantages, 0.5))
REJECT = callback_of("reject", sequence_mask=lambda view: view.sample_ids != 0)
REDUCTIONS = [token_mean, sequence_mean, SequenceSumNorm(7), prompt_mean]
reductions = pytest.mark.parametrize("reduction", REDUCTIONS, ids=["token", "sequence", "sum-norm", "prompt"])


def ragged_view(seed: int = 0) -> LossView:
    """Twelve ragged rows in float64 with a critic and an entropy that has a gradient, 0 outside."""
    rollout = ragged_rollout(seed=seed, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed + 1)
    noise, entropy, values = torch.randn(3, *rollout.response_ids.shape, generator=draw, dtype=torch.float64).unbind()
    logprobs = torch.where(rollout.valid_tokens, rollout.require("old_logprobs") + noise / 3, 0.0)
    rollout = rollout.map(lambda tensor, _axis, _pad: tensor.nan_to_num() if tensor.is_floating_point() else tensor)
    view = view_of_rollout(rollout, logprobs.requires_grad_())
    return view.replace(entropy=entropy.abs().requires_grad_(), current_values=values.requires_grad_())


def evaluate(view: LossView, reduction: Reduction = sequence_mean, **options: Any) -> LossParts:
    algorithm = an_algorithm(reduction=reduction, **options)
    return algorithm.microbatch_loss(view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, local_sum))


def term(coef: float = 0.1, **options: Any) -> Any:
    return callback_of("term", loss_term=lambda view: LossTerm(per_token=view.logprobs**2, coef=coef, **options))


def test_masks_and_weights_multiply_the_policy_loss_and_nothing_else() -> None:
    view = ragged_view()
    options: dict[str, Any] = {"entropy_coef": 0.3, "value_loss": ValueLoss(coef=0.7)}
    plain = evaluate(view, callbacks=[term()], **options).parts
    halved = evaluate(view, callbacks=[term(), HALVE], **options).parts
    assert_close(halved.pop("loss/policy"), plain.pop("loss/policy") / 2)
    assert set(plain) == {"loss/total", "term/loss", "entropy_bonus/loss", "loss/value"}
    assert all(torch.equal(plain[name], halved[name]) for name in plain if name != "loss/total")


def test_a_masked_term_is_multiplied_as_well() -> None:
    view = ragged_view()
    plain = evaluate(view, callbacks=[term(masked=True)]).parts
    halved = evaluate(view, callbacks=[HALVE, term(masked=True)]).parts
    assert_close(halved["term/loss"], plain["term/loss"] / 2)
    assert torch.equal(plain["term/loss"], evaluate(view, callbacks=[term()]).parts["term/loss"])


@reductions
def test_a_term_may_bring_its_own_reduction(reduction: Reduction) -> None:
    view = ragged_view()
    found = evaluate(view, callbacks=[term(reduction=reduction)]).parts["term/loss"]
    weights = reduction(view.valid_tokens, view.trained, view.groups, local_sum)
    assert_close(found, (weights * view.logprobs.detach() ** 2 * view.valid_tokens).sum())


@reductions
def test_the_total_is_the_sum_of_what_is_logged(reduction: Reduction) -> None:
    options: dict[str, Any] = {"callbacks": [term(0.25), HALVE, REJECT]}
    found = evaluate(ragged_view(), reduction, entropy_coef=0.3, value_loss=ValueLoss(coef=0.7), **options)
    parts = found.parts
    joined = parts["loss/policy"] + 0.25 * parts["term/loss"] + 0.7 * parts["loss/value"]
    joined = joined + 0.3 * parts["entropy_bonus/loss"]
    assert_close(parts["loss/total"], joined)
    assert_close(found.total.detach(), joined)
    assert found.total.requires_grad and not any(part.requires_grad for part in parts.values())


def test_a_rejected_row_still_counts_in_the_denominator() -> None:
    view = view_of([[-1.0, -1.0], [-1.0, -1.0]], advantages=[[1.0, 1.0], [2.0, 2.0]])
    step = run_step(view, callbacks=[REJECT], loss=Reinforce())
    assert step.gradient.tolist() == [[0.0, 0.0], [-0.5, -0.5]]
    assert step.metrics["reject/rejected"] == 0.5
    assert run_step(view, callbacks=[REJECT], loss=Reinforce(), reduction=token_mean).gradient[1].tolist() == [-0.5] * 2


def test_a_rejected_token_may_have_an_infinite_loss() -> None:
    view = view_of([-1.0, -1.0], advantages=[INF, 1.0])
    first = callback_of("first", token_mask=lambda seen: torch.isfinite(seen.advantages))
    step = run_step(view, callbacks=[first], loss=Reinforce())
    assert float(step.loss) == 0.5


def test_a_metric_from_two_places_is_refused() -> None:
    twice = callback_of(
        "twice",
        token_weight=lambda seen: torch.ones_like(seen.advantages),
        metrics=lambda seen: {"twice/ess": Stat.of(seen.trained)},
    )
    with pytest.raises(ValueError, match=r'expected twice to log names in metrics .* it, got "twice/ess"'):
        run_step(view_of([-1.0]), callbacks=[twice])


def test_the_entropy_bonus_pushes_entropy_up() -> None:
    view = ragged_view()
    found = evaluate(view, token_mean, entropy_coef=0.5)
    (gradient,) = torch.autograd.grad(found.total, view.entropy)
    assert_close(gradient, -0.5 * view.valid_tokens.double() / view.valid_tokens.sum())
    assert found.parts["entropy_bonus/loss"] < 0
    assert not {name for name in evaluate(view).parts if "entropy" in name}


@pytest.mark.parametrize(("clip", "loss", "slope"), [(None, 0.125, -0.5), (0.25, 0.28125, 0.0)])
def test_the_value_loss_is_clipped_around_the_old_value(clip: float | None, loss: float, slope: float) -> None:
    view = view_of([-1.0], values=[0.0], returns=[1.0], current_values=[0.5])
    view = view.replace(current_values=view.require("current_values").requires_grad_())
    found = evaluate(view, value_loss=ValueLoss(clip=clip, coef=2.0))
    assert float(found.parts["loss/value"]) == loss
    assert torch.autograd.grad(found.total, view.require("current_values"))[0].item() == 2 * slope
    assert float(found.stats["value/error"].value()) == 0.5


def test_measures_come_from_untouched_log_probabilities_of_valid_tokens() -> None:
    given = {"old_logprobs": [-1.5, -1.0, 9], "rollout_logprobs": [-1.0, -3.0, 9], "ref_logprobs": [-2.0, -1.0, 9]}
    view = view_of([-1.0, -2.0, NAN], valid=[1, 1, 0], entropy=[0.5, 1.5, NAN], dtype=torch.float64, **given)
    found = {name: float(stat.value()) for name, stat in evaluate(view).stats.items() if "/" in name}
    ratio = [math.exp(0.5), math.exp(-1)]
    assert found == pytest.approx(
        {
            "policy/entropy": 1.0,
            "policy/ratio_max": math.exp(0.5),
            "policy/ess": sum(ratio) ** 2 / 2 / (ratio[0] ** 2 + ratio[1] ** 2),
            "kl/old": (ratio[0] - 1.5 + ratio[1] - 1 + 1) / 2,
            "kl/rollout": (math.e - 2) / 2,
            "kl/ref": (1.0 - 1.0) / 2,
            "policy/clip_fraction_low": 0.0,
            "policy/clip_fraction_high": 0.5,
        }
    )


def test_what_does_not_exist_is_not_measured() -> None:
    assert not {"kl/rollout", "kl/ref", "value/error"} & set(evaluate(view_of([-1.0])).stats)


@pytest.mark.parametrize("gap", [-6.0, 3.0, 19.0])
def test_the_divergence_of_samples_is_exact_and_has_no_clamp(gap: float) -> None:
    view = view_of([-30.0 + gap], rollout_logprobs=[-30.0], old_logprobs=[-30.0], dtype=torch.float64)
    stats = evaluate(view).stats
    assert float(stats["kl/rollout"].value()) == pytest.approx(math.exp(gap) - 1 - gap)
    assert float(stats["kl/old"].value()) == pytest.approx(math.exp(gap) - 1 - gap)
