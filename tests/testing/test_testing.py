"""The kit: every export of the library passes it, and wrong code fails with the property that it breaks."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.parts import (
    DetachedKL,
    OverPadding,
    OverTheLongest,
    Random,
    Repelling,
    TokenwiseOPSM,
    Unmasked,
    by_position,
    by_row,
    mean_minus_score,
    over_everyone,
    over_the_batch,
    wrong_way,
)
from hypothesis import settings
from kit.support import callback_of
from properties.exports import ESTIMATOR_EXAMPLES, LOSS_EXAMPLES, correction_examples, quick, quick_corrections
from torch import Tensor
from typing_extensions import override

from lightning_rl import Estimator, LossTerm, LossView, PolicyLoss, RLCallback, Rollout, Stat
from lightning_rl.testing import PropertyError, check_advantage, check_callback, check_loss, check_reward, shrinking

PAGE = Path(__file__).parents[2] / "docs" / "checking.md"


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the number of generated batches: what passes takes all of them, and many exports run the same code."""
    monkeypatch.setattr(shrinking, "HOW", settings(shrinking.HOW, max_examples=6))


@pytest.mark.nightly
@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("name", quick(ESTIMATOR_EXAMPLES))
def test_every_estimator_passes(name: str) -> None:
    check_advantage(ESTIMATOR_EXAMPLES[name])


@pytest.mark.nightly
@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("name", quick(LOSS_EXAMPLES))
def test_every_loss_passes(name: str) -> None:
    check_loss(LOSS_EXAMPLES[name])


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("number", quick_corrections())
def test_every_correction_passes(number: int) -> None:
    check_callback(correction_examples()[number])


def right_length(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
    """A reward without a fault."""
    return [None if not completion else min(len(completion), 10) / 10 for completion in completions]


def test_a_plain_reward_passes() -> None:
    check_reward(right_length)


def test_columns_are_drawn_from_their_examples() -> None:
    def exact(prompts: Any, completions: Sequence[str], *, completion_ids: Any, answer: Sequence[str]) -> list[float]:
        assert set(answer) <= {"4", "7"} and len(completion_ids) == len(answer)
        return [float(given == wanted) for given, wanted in zip(completions, answer, strict=True)]

    check_reward(exact, answer=["4", "7"], completions=["4", "7", "8"])


def first_word(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float(completion.split()[0] == "4") for completion in completions]


def best_of_the_batch(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion) == max(map(len, completions))) for completion in completions]


def for_the_first(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0]


def sorting(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    completions.sort()
    return [0.0 for _ in completions]


def infinite(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float("inf") if not completion else 0.0 for completion in completions]


def drawn(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return torch.rand(len(completions)).tolist()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("reward", "broken"),
    [
        (first_word, "reward_accepts"),
        (best_of_the_batch, "reward_order"),
        (by_row, "reward_order"),
        (for_the_first, "reward_values"),
        (infinite, "reward_values"),
        (sorting, "reward_inputs"),
        (drawn, "reward_repeats"),
    ],
)
def test_a_wrong_reward_fails_with_its_property(reward: Any, broken: str) -> None:
    with pytest.raises(PropertyError) as raised:
        check_reward(reward)
    assert raised.value.property == broken


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("advantages", "broken"),
    [
        (over_everyone, {"excluded_rows"}),
        (over_the_batch, {"group_isolation"}),
        (by_position, {"row_order", "group_isolation", "excluded_rows"}),
        (mean_minus_score, {"advantage_direction"}),
        (OverPadding(), {"padding_width"}),
        (OverTheLongest(), {"padding_width"}),
    ],
)
def test_wrong_advantages_fail_with_their_property(advantages: Any, broken: set[str]) -> None:
    with pytest.raises(PropertyError) as raised:
        check_advantage(advantages)
    assert raised.value.property in broken


def loss_without_gradient(view: LossView) -> Tensor:
    return -(view.logprobs.detach() - view.require("old_logprobs")).exp() * view.require("advantages")


def in_place(view: LossView) -> Tensor:
    return -view.require("advantages").mul_(2.0) * view.logprobs


def mean_of_the_microbatch(view: LossView) -> Tensor:
    advantages = view.require("advantages")
    return -(view.logprobs - view.require("old_logprobs")).exp() * (advantages - advantages.mean())


def already_reduced(view: LossView) -> Tensor:
    return (-view.logprobs * view.require("advantages")).mean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loss", "broken"),
    [
        (loss_without_gradient, {"gradient_liveness"}),
        (in_place, {"loss_fits"}),
        pytest.param(already_reduced, {"loss_fits"}, marks=pytest.mark.nightly),
        (wrong_way, {"loss_direction"}),
        (mean_of_the_microbatch, {"partition", "loss_direction"}),
    ],
)
def test_a_wrong_loss_fails_with_its_property(loss: Callable[[LossView], Tensor], broken: set[str]) -> None:
    with pytest.raises(PropertyError) as raised:
        check_loss(loss)
    assert raised.value.property in broken


class ForeignName(RLCallback):
    """Logs under a name that is not its own."""

    name = "foreign"

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"policy/mine": Stat.of(view.entropy, view.valid_tokens)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("callback", "broken"),
    [
        (DetachedKL(0.1, as_loss=True), {"gradient_liveness"}),
        pytest.param(Repelling(0.1, as_loss=True), {"distances_pull_back"}, marks=pytest.mark.nightly),
        pytest.param(TokenwiseOPSM(0.05), {"sequence_decisions"}, marks=pytest.mark.nightly),
        (Unmasked(), {"padding_blindness"}),
        (Random(), {"contributions_fit"}),
        (callback_of("negative", token_weight=lambda view: -torch.ones_like(view.logprobs)), {"denominators"}),
        pytest.param(ForeignName(), {"contributions_fit"}, marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_correction_fails_with_its_property(callback: RLCallback, broken: set[str]) -> None:
    with pytest.raises(PropertyError) as raised:
        check_callback(callback)
    assert raised.value.property in broken


class MeanEntropy(RLCallback):
    """Leaves out responses by their mean entropy, padding among it."""

    name = "mean_entropy"

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @override
    def sequence_mask(self, view: LossView) -> Tensor:
        return view.entropy.mean(-1) > self.threshold


@pytest.mark.nightly
@pytest.mark.parametrize("threshold", [0.003, 0.4, 60.0])
def test_a_mean_over_padding_is_found_whatever_its_threshold(threshold: float) -> None:
    with pytest.raises(PropertyError) as raised:
        check_callback(MeanEntropy(threshold))
    assert raised.value.property in ("padding_blindness", "counted_padding")
    assert "sequence_mask" in str(raised.value) or "callback mean_" in str(raised.value)


class Undeclared(RLCallback):
    """Reads a field that it does not declare."""

    name = "undeclared"

    def __init__(self, field: str, *, declares: bool = False) -> None:
        self.field = field
        self.reads_at_loss = (field,) if declares else ()

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        field, _, key = self.field.partition("/")
        other = getattr(view, field)[key] if key else view.require(field)
        return LossTerm(per_token=(view.logprobs - other).square() / 2, coef=0.1)


class TooEarly(RLCallback):
    """Reads advantages before there are any."""

    name = "too_early"
    reads = ("advantages",)

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return torch.where(rollout.valid_tokens, rollout.require("advantages"), 0.0).sum(-1).double() * 0.1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (
            Undeclared("ref_logprobs"),
            ['Expected "ref_logprobs" among its reads_at_loss', 'reads_at_loss = ("ref_logprobs",)'],
        ),
        (
            Undeclared("token_extras/teacher_logprobs"),
            ['declare it: reads_at_loss = ("token_extras/teacher_logprobs",)'],
        ),
        (TooEarly(), ['Expected "advantages" among its reads', "in a later method, such as rollout_metrics"]),
    ],
)
def test_a_field_that_is_read_and_not_declared_is_named_with_the_cure(callback: RLCallback, said: list[str]) -> None:
    with pytest.raises(PropertyError) as raised:
        check_callback(callback)
    assert raised.value.property == "declared_reads"
    assert all(part in str(raised.value) for part in said)


def test_a_field_that_is_declared_may_be_read() -> None:
    check_callback(Undeclared("ref_logprobs", declares=True))


def by_margin(view: LossView) -> Tensor:
    return view.token_extras["margin"]


def test_a_declared_extra_of_an_engine_is_made_up() -> None:
    check_callback(callback_of("weighs", token_weight=by_margin, records=("margin",)))


def test_an_extra_that_is_not_declared_is_named_with_the_cure() -> None:
    with pytest.raises(PropertyError, match=r'declare it: records = \("margin",\)'):
        check_callback(callback_of("weighs", token_weight=by_margin))


def test_a_failure_says_what_is_broken_and_shows_the_smallest_batch() -> None:
    with pytest.raises(AssertionError) as raised:
        check_reward(by_row)
    said = str(raised.value)
    assert said.startswith(
        "reward by_row breaks the property reward_order.\nThe reward of a completion does not depend on"
    )
    assert said.count("'completion': ") == 2, "two rows are the fewest that show it"
    assert "What to do: score each row from its own arguments" in said


def test_without_hypothesis_properties_can_be_imported_and_the_kit_says_what_to_install() -> None:
    lines = 'sys.modules["hypothesis"] = None', "import lightning_rl.testing.properties, lightning_rl.audit"
    code = "\n".join(["import sys", *lines, "from lightning_rl.testing import check_reward"])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip().endswith(
        "ImportError: lightning_rl.testing needs hypothesis: pip install 'lightning-rl[testing]'"
    )


@pytest.mark.nightly
def test_the_examples_of_the_page_pass() -> None:
    section = PAGE.read_text().partition("## Test your own code")[2]
    blocks = [part.partition("```")[0] for part in section.split("```python\n")[1:]]
    tests: dict[str, Any] = {}
    exec("\n".join(blocks), tests)  # the page is ours
    called = [test() for name, test in tests.items() if name.startswith("test_")]
    assert len(called) == 4


def test_the_kit_accepts_what_a_module_accepts() -> None:
    assert all(isinstance(one, Estimator) for one in ESTIMATOR_EXAMPLES.values())
    assert all(isinstance(one, PolicyLoss) for one in LOSS_EXAMPLES.values())
