"""The reward function that decides if a response is correct: named, the only one, or the first that applies."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.support import a_trainer, fit, recorder, rollout_of, tiny_module, tiny_prompts

from lightning_rl import Evaluation, Rollout, presets
from lightning_rl.callbacks import DynamicSampling, PositiveNLL
from lightning_rl.rewards.correctness import deciding_scores
from lightning_rl.utils.naming import name_of

NAN = float("nan")


def right(prompts: Sequence[Any], completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def wrong(prompts: Sequence[Any], completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(prompts)


def brevity(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float]:
    return [1.0 - len(ids) / 10 for ids in completion_ids]


def penalty(prompts: Any, completions: Any, *, completion_ids: Sequence[Any], **_: Any) -> list[float]:
    return [-len(ids) / 10 for ids in completion_ids]


def code(prompts: Sequence[Any], completions: Any, **_: Any) -> list[float | None]:
    return [None if prompt[0] == 2 else 1.0 for prompt in prompts]


@pytest.mark.parametrize(
    ("rewards", "by", "solved"),
    [
        ({"right": right, "short": (penalty, 0.1)}, None, 1.0),
        ({"right": right, "short": (penalty, 0.1)}, "right", 1.0),
        ({"short": (penalty, 0.1), "right": right}, "right", 1.0),
        ({"short": (penalty, 0.1), "right": right}, None, 0.0),
        ({"cost": (brevity, -0.1), "right": right}, None, 1.0),
        ({"length": (brevity, 0.0), "right": (right, 0.5)}, None, 1.0),
        ({"right": (right, 0.0), "short": brevity}, "right", 1.0),
        ({"wrong": wrong, "short": (brevity, 9.0)}, None, 0.0),
        ({"code": code, "math": right}, None, 1.0),
        ({"code": code, "math": right}, "code", 1.0),  # of the prompts to which it applies
        (right, None, 1.0),
        (wrong, None, 0.0),
    ],
)
@pytest.mark.filterwarnings("ignore:expected some samples of evaluation")  # "short" alone decides in one case
def test_an_evaluation_counts_what_the_function_finds_correct(rewards: Any, by: str | None, solved: float) -> None:
    evaluations = [
        Evaluation("own", [[2], [3]], samples=2, rewards=rewards, correct_by=by),
        Evaluation("of_the_module", [[2], [3]], samples=2, correct_by=by),
    ]
    trainer = a_trainer()
    (logged,) = trainer.validate(tiny_module(rewards=rewards, evaluation=evaluations), tiny_prompts(), verbose=False)
    assert logged["val/own/pass@1"] == logged["val/of_the_module/pass@1"] == solved


@pytest.mark.parametrize(("function", "share"), [(right, 1.0), (wrong, 0.0)])
@pytest.mark.parametrize("named", [True, False])
def test_brevity_does_not_make_a_response_positive(function: Any, share: float, named: bool) -> None:
    seen: list[Rollout] = []
    positive = PositiveNLL(0.1, correct_by=name_of(function) if named else None)
    module = tiny_module(rewards={name_of(function): function, "short": (brevity, 0.1)})
    fit(module, callbacks=[positive, recorder(seen)("seen")], max_steps=1)
    assert positive.rollout_metrics(seen[0])["positive_nll/positive"].value() == share
    assert bool(seen[0].extras["positive_nll"].any()) == bool(share)


@pytest.mark.parametrize(("by", "kept"), [("right", False), ("short", True), (None, False)])
def test_dynamic_sampling_filters_groups_that_are_all_right_or_all_wrong(by: str | None, kept: bool) -> None:
    values = {"right": torch.tensor([0.0, 0.0, 1.0, 1.0]), "short": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    rollout = rollout_of([0.1, 0.2, 1.3, 1.4], [[1]] * 4, groups=[0, 0, 1, 1]).replace(rewards_by_function=values)
    assert DynamicSampling(correct_by=by).keep_groups(rollout).tolist() == [kept] * 4
    (callback, _) = presets.dapo(correct_by=by).callbacks
    assert callback.keep_groups(rollout).tolist() == [kept] * 4


def test_a_preset_passes_the_name_on() -> None:
    (positive,) = presets.vapo(correct_by="right").callbacks
    assert isinstance(positive, PositiveNLL) and positive.correct_by == "right"


def test_each_row_is_decided_by_the_first_function_that_applies() -> None:
    values = {"code": torch.tensor([NAN, 0.5, NAN]), "math": torch.tensor([0.25, 1.0, NAN])}
    rollout = rollout_of([9.0, 9.0, 9.0], [[1]] * 3)
    assert deciding_scores(rollout, None).tolist() == [9.0] * 3
    rollout = rollout.replace(rewards_by_function=values)
    torch.testing.assert_close(deciding_scores(rollout, None), torch.tensor([0.25, 0.5, NAN]), equal_nan=True)
    torch.testing.assert_close(deciding_scores(rollout, "math"), values["math"], equal_nan=True)


@pytest.mark.parametrize("callback", [PositiveNLL(correct_by="accuracy"), DynamicSampling(correct_by="accuracy")])
def test_an_unknown_function_is_refused(callback: Any) -> None:
    message = rf'expected correct_by of {type(callback).__name__} among the reward functions "right", got .accuracy.'
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(rewards=right), callbacks=[callback], max_steps=1)
    with pytest.raises(ValueError, match='expected correct_by of evaluation "a" among the reward functions "right"'):
        fit(tiny_module(rewards=right, evaluation=Evaluation("a", [[2]], correct_by="accuracy")), max_steps=1)


def test_a_function_of_negative_weight_has_to_be_named() -> None:
    rewards = {"cost": (brevity, -1.0)}
    with pytest.raises(ValueError, match=r'of positive weight .* for PositiveNLL, got "cost" of weight -1: name one'):
        fit(tiny_module(rewards=rewards), callbacks=[PositiveNLL()], max_steps=1)
    fit(tiny_module(rewards=rewards), callbacks=[PositiveNLL(correct_by="cost"), DynamicSampling()], max_steps=1)


@pytest.mark.parametrize(
    ("rewards", "by", "lines"),
    [
        ({"right": right, "short": (brevity, 0.1)}, None, 1),
        ({"right": right, "short": (brevity, 0.1)}, "right", 0),
        ({"right": right, "length": (brevity, 0.0)}, None, 0),
        (right, None, 0),
    ],
)
def test_a_line_names_the_first_of_several(rewards: Any, by: Any, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    fit(tiny_module(rewards=rewards), callbacks=[PositiveNLL(correct_by=by)], max_steps=1)
    texts = [text for text in caplog.messages if text.startswith('PositiveNLL: a response is correct by "right", or')]
    assert len(texts) == lines
