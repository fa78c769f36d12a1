"""Checks at setup: a broken property is a warning with its name, other algorithms have none, and nothing changes."""

import random
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from faults.parts import (
    DetachedKL,
    OverTheLongest,
    Repelling,
    TokenwiseOPSM,
    by_position,
    mean_minus_score,
    over_everyone,
    over_the_batch,
    without_gradient,
    wrong_way,
)
from kit.support import a_trainer, an_algorithm, callback_of, differing, fit, tiny_module, tiny_prompts
from properties.exports import (
    ESTIMATOR_EXAMPLES,
    LOSS_EXAMPLES,
    REDUCTION_EXAMPLES,
    correction_examples,
    quick,
    quick_corrections,
)
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl import DrGRPO, Estimator, LossTerm, LossView, ReinforcePlusPlus, RLCallback, setup_checks
from lightning_rl.advantages import Advantages, RewardSignal, RowEstimator, resolve_advantages
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import AdaptiveKL, NoEOSMask, ReferenceKL
from lightning_rl.cli.doctor.command import examine
from lightning_rl.cli.recipes import Recipe
from lightning_rl.corrections import TOKEN_REWARDS
from lightning_rl.losses import resolve_loss
from lightning_rl.reporting.summary import RolloutSummary
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties import fixed_batch
from lightning_rl.testing.properties.fixed_batch import judge_fixed_batch, skipped_checks
from lightning_rl.utils.finding import Finding


def surrogate(view: LossView) -> Tensor:
    return -(view.logprobs - view.require("old_logprobs")).exp() * view.require("advantages")


def over_all_columns(view: LossView) -> Tensor:
    """A loss whose mean counts padding."""
    return surrogate(view) - surrogate(view).mean()


class OverAllTokens(DrGRPO):
    """Divides by the number of tokens of all groups, and declares that it works within groups."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(super().__call__(signal).advantages / signal.valid_tokens.sum().clamp(min=1))


def minus_one(view: LossView) -> Tensor:
    return -torch.ones_like(view.logprobs)


def every_second_row(view: LossView) -> Tensor:
    """A mask by the place of a row in its microbatch."""
    return torch.arange(len(view.logprobs)) % 2 == 0


def findings_of(
    *callbacks: RLCallback, advantages: Any = "grpo", loss: Any = "ppo", **options: Any
) -> Sequence[Finding]:
    algorithm = an_algorithm(advantages=resolve_advantages(advantages), loss=resolve_loss(loss), **options)
    return judge_fixed_batch(algorithm, callbacks).findings


def found(*callbacks: RLCallback, **options: Any) -> dict[str, str]:
    return {finding.check: finding.culprit for finding in findings_of(*callbacks, **options)}


FAULTS: dict[str, tuple[str, dict[str, Any], tuple[RLCallback, ...]]] = {
    "a loss that ignores its mask": ("partition", {"loss": over_all_columns}, ()),
    "a loss that pushes the wrong way": ("loss_direction", {"loss": wrong_way}, ()),
    "a loss without a gradient": ("gradient_liveness", {"loss": without_gradient}, ()),
    "an estimator over other groups": ("group_isolation", {"advantages": over_the_batch}, ()),
    "an estimator over the longest response": ("padding_width", {"advantages": OverTheLongest()}, ()),
    "an estimator over lengths of other groups": ("group_isolation", {"advantages": OverAllTokens()}, ()),
    "an estimator over rows without a reward": ("excluded_rows", {"advantages": over_everyone}, ()),
    "an estimator of the wrong sign": ("advantage_direction", {"advantages": mean_minus_score}, ()),
    "an estimator by position": ("row_order", {"advantages": by_position}, ()),
    "a decision over a sequence for each token": ("sequence_decisions", {}, (TokenwiseOPSM(0.05),)),
    "a mask of every second row": ("partition", {}, (callback_of("half", sequence_mask=every_second_row),)),
    "weights below 0": ("denominators", {}, (callback_of("negative", token_weight=minus_one),)),
    "a term without a gradient": ("gradient_liveness", {}, (DetachedKL(0.1, as_loss=True),)),
    "a term that repels": ("distances_pull_back", {}, (Repelling(0.1, as_loss=True),)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_property_is_found(fault: str) -> None:
    name, options, callbacks = FAULTS[fault]
    assert name in found(*callbacks, **options)


def lengths(rollout: Rollout) -> Tensor:
    return rollout.response_lengths.float()


CENTERED = callback_of("bonus", reward_bonus=lambda rollout: lengths(rollout) - lengths(rollout).mean())
WITHIN_ROWS = callback_of("wordy", reward_bonus=lambda rollout: 0.01 * lengths(rollout))
ROLLED = callback_of("roll", replace_reward=lambda rollout: rollout.rewards.roll(1))


@pytest.mark.parametrize(
    ("name", "culprit", "cure", "advantages", "callbacks"),
    [
        ("excluded_rows", "callback bonus.reward_bonus", "count only", "reinforce", [WITHIN_ROWS, CENTERED]),
        (
            "advantage_direction",
            "callback roll.replace_reward",
            "correct replace_reward",
            "grpo",
            [WITHIN_ROWS, ROLLED],
        ),
        ("excluded_rows", "estimator over_everyone", "count only", over_everyone, [WITHIN_ROWS]),
        ("advantage_direction", "estimator mean_minus_score", "subtract", mean_minus_score, [WITHIN_ROWS]),
    ],
)
def test_the_culprit_is_the_correction_without_which_the_estimator_has_the_property(
    name: str, culprit: str, cure: str, advantages: Any, callbacks: list[RLCallback]
) -> None:
    finding = {finding.check: finding for finding in findings_of(*callbacks, advantages=advantages)}[name]
    assert finding.culprit == culprit
    assert finding.cure.startswith(cure)


def pulled_to_reference(view: LossView) -> Tensor:
    return -view.logprobs * view.require("advantages") + (view.logprobs - view.require("ref_logprobs")).square()


def with_k1(view: LossView) -> Tensor:
    return surrogate(view) + 0.3 * (view.logprobs - view.require("ref_logprobs"))


@pytest.mark.parametrize("loss", [pulled_to_reference, with_k1])
def test_a_penalty_within_the_loss_is_no_wrong_direction(loss: Any) -> None:
    assert found(loss=loss) == {}


def entropy_term(view: LossView) -> LossTerm:
    return LossTerm(per_token=-view.entropy, coef=0.1)


CURES = {
    "a term of the entropy": (
        "gradient_liveness",
        {},
        (callback_of("bonus", loss_term=entropy_term),),
        "trains_entropy",
    ),
    "a whitening over the batch": ("group_isolation", {"advantages": over_the_batch}, (), "within_groups = False"),
}


@pytest.mark.parametrize("fault", CURES)
def test_a_cure_names_the_declaration(fault: str) -> None:
    name, options, callbacks, cure = CURES[fault]
    (finding,) = [one for one in findings_of(*callbacks, **options) if one.check == name]
    assert cure in finding.cure


def test_an_estimator_that_declares_its_whitening_has_no_finding() -> None:
    class Whitening(RowEstimator):
        @override
        def per_row(self, scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
            return over_the_batch(scores, groups, rewarded)

    assert found(advantages=Whitening()) == {}


def legal(correction: RLCallback) -> Estimator:
    return ReinforcePlusPlus() if correction.contributes & {*TOKEN_REWARDS} else DrGRPO()


@pytest.mark.parametrize("estimator", quick(ESTIMATOR_EXAMPLES))
def test_no_estimator_of_the_library_has_a_finding(estimator: str) -> None:
    assert found(advantages=ESTIMATOR_EXAMPLES[estimator]) == {}


@pytest.mark.parametrize("loss", quick(LOSS_EXAMPLES))
def test_no_loss_of_the_library_has_a_finding(loss: str) -> None:
    for reduction in REDUCTION_EXAMPLES.values():
        assert found(loss=LOSS_EXAMPLES[loss], reduction=reduction) == {}


@pytest.mark.parametrize("number", quick_corrections())
def test_no_correction_of_the_library_has_a_finding(number: int) -> None:
    correction = correction_examples()[number]
    assert found(correction, advantages=legal(correction)) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("loss", LOSS_EXAMPLES)
def test_no_loss_with_an_estimator_or_correction_has_a_finding(loss: str) -> None:
    for estimator in ESTIMATOR_EXAMPLES.values():
        assert found(advantages=estimator, loss=LOSS_EXAMPLES[loss]) == {}, estimator.name
    for correction in correction_examples():
        assert found(correction, advantages=legal(correction), loss=LOSS_EXAMPLES[loss]) == {}, correction.name


@pytest.mark.nightly
@pytest.mark.parametrize("estimator", ESTIMATOR_EXAMPLES)
def test_no_correction_with_an_estimator_has_a_finding(estimator: str) -> None:
    for correction in correction_examples():
        assert found(correction, advantages=ESTIMATOR_EXAMPLES[estimator]) == {}, correction.name


class Counting:
    """A loss of the wrong sign that counts its calls, draws from every generator and prints."""

    def __init__(self, *held: object) -> None:
        self.calls, self.held = torch.zeros(()), held

    def __call__(self, view: LossView) -> Tensor:
        """Count a call."""
        self.calls += 1
        sys.stdout.write(f"{torch.rand(())} {random.random()} {np.random.rand()}")
        return wrong_way(view)


def global_states() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state()), torch.default_generator.get_state().tolist()


def test_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    loss, before = Counting(), global_states()
    assert "loss_direction" in found(loss=loss)
    assert loss.calls == 0 and global_states() == before and capsys.readouterr() == ("", "")


def test_defaults_of_arguments_are_copied() -> None:
    seen: list[LossView] = []

    def remembering(view: LossView, seen: list[LossView] = seen) -> Tensor:
        seen.append(view)
        return wrong_way(view)

    assert "loss_direction" in found(loss=remembering) and seen == []


def running_mean() -> Any:
    seen = [0.0]

    def estimate(scores: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
        seen[0] = 0.9 * seen[0] + 0.1 * float(scores[rewarded].mean())
        return torch.where(rewarded, scores - seen[0], 0.0)

    return estimate


class Growing(RLCallback):
    """A weight of the wrong sign that grows with every call."""

    name = "growing"

    def __init__(self) -> None:
        self.weight = 0.0

    @override
    def token_weight(self, view: LossView) -> Tensor:
        self.weight -= 1.0
        return torch.full_like(view.logprobs.detach(), self.weight)


@pytest.mark.parametrize(
    ("options", "callbacks"),
    [
        ({"loss": Counting(nn.Linear(1, 1))}, ()),
        ({"loss": Counting(threading.Lock())}, ()),
        ({"loss": lambda view: view.token_extras["mine"] * wrong_way(view)}, ()),
        ({"advantages": running_mean()}, ()),
        ({"loss": wrong_way}, (Growing(),)),
    ],
    ids=["holds a model", "holds a lock", "reads a field of the run", "an estimator with state", "a weight with state"],
)
def test_what_cannot_be_evaluated_is_left_out(options: dict[str, Any], callbacks: tuple[RLCallback, ...]) -> None:
    assert found(*callbacks, **options) == {}


def by_margin(view: LossView) -> Tensor:
    return view.token_extras["margin"]


OWN_EXTRA: list[dict[str, Any]] = [{"records": ("margin",)}, {"reads_at_loss": ("token_extras/margin",)}]


@pytest.mark.parametrize("declaration", OWN_EXTRA)
def test_a_correction_that_reads_an_extra_of_its_engine_skips_nothing(declaration: dict[str, Any]) -> None:
    callbacks = [
        callback_of("weighs", token_weight=by_margin, **declaration),
        callback_of("half", sequence_mask=every_second_row),
    ]
    verdict = judge_fixed_batch(an_algorithm(), callbacks)
    assert [finding.check for finding in verdict.findings] == ["partition"] and verdict.skipped == {}


def test_skipped_checks_are_named_with_the_reason() -> None:
    verdict = judge_fixed_batch(an_algorithm(loss=resolve_loss(lambda view: view.token_extras["mine"])), [])
    assert {"partition", "loss_direction"} <= verdict.skipped.keys() and "row_order" not in verdict.skipped
    assert "KeyError: 'mine'" in skipped_checks(verdict)[0]


def test_slow_code_ends_the_checks_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_batch, "MAX_SECONDS", 0.0)
    verdict = judge_fixed_batch(an_algorithm(loss=resolve_loss(wrong_way)), [])
    (line,) = skipped_checks(verdict)
    assert (
        not verdict.findings and line.startswith("masked_values, excluded_rows, ") and line.endswith("took 0 seconds")
    )


def test_the_doctor_names_skipped_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_batch, "MAX_SECONDS", 0.0)
    recipe = Recipe(a_trainer(), tiny_module(), tiny_prompts())
    facts = [one.observed for one in examine(recipe, prompts=1, limit=9.0, quick=True) if one.check == "algorithm"]
    assert len(facts) == 1 and "skipped, because the checks before took 0 seconds" in facts[0]


def test_a_fault_is_found_beside_a_part_that_cannot_be_evaluated() -> None:
    assert found(advantages=over_the_batch, loss=Counting(nn.Linear(1, 1))).keys() >= {"group_isolation"}


def test_a_fit_warns_and_trains_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [tiny_module(loss=wrong_way) for _ in range(2)]
    text = "on a fixed batch of 12 rows, loss_direction: loss wrong_way: expected a gradient of the sign of minus"
    with pytest.warns(UserWarning, match=text) as warned:
        fit(
            modules[0],
            callbacks=[NoEOSMask(), AdaptiveKL(as_loss=True), RolloutSummary(), SignalAudit(checks=["partition"])],
            max_steps=2,
        )
    assert sum(text in str(one.message) for one in warned) == 1
    monkeypatch.setattr(setup_checks, "warn_of_broken_properties", lambda _: None)
    fit(
        modules[1],
        callbacks=[NoEOSMask(), AdaptiveKL(as_loss=True), RolloutSummary(), SignalAudit(checks=["partition"])],
        max_steps=2,
    )
    assert not differing(*modules)


def test_an_evaluation_and_a_run_without_faults_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "on a fixed batch")
        fit(tiny_module(), callbacks=[NoEOSMask(), ReferenceKL(0.1, as_loss=True)], max_steps=1)
        a_trainer().validate(tiny_module(loss=wrong_way), tiny_prompts(validation=[[2, 3]]), verbose=False)


def test_the_doctor_reports_an_error() -> None:
    recipe = Recipe(a_trainer([DetachedKL(0.1, as_loss=True)]), tiny_module(), tiny_prompts())
    errors = [finding for finding in examine(recipe, prompts=1, limit=9.0, quick=True) if finding.severity == "error"]
    assert [one.check for one in errors] == ["algorithm"]
    assert errors[0].observed.startswith(
        "gradient_liveness: callback reference_kl.loss_term: expected a term with a gr"
    )
    assert "without detach()" in errors[0].cure
