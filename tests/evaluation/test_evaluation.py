"""Options of Evaluation, valid and invalid."""

from dataclasses import replace
from typing import Any

import pytest
from kit.support import fit, parity_reward, tiny_module, tiny_prompts

from lightning_rl import (
    Engine,
    Evaluation,
    FakeEngine,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
)


def test_an_evaluation_says_what_it_measures() -> None:
    evaluation = Evaluation("gsm8k", [[2]], samples=8, stages="val")
    assert (evaluation.pass_at, evaluation.stages) == ((1, 8), ("val",))
    assert Evaluation("gsm8k", [[2]]).pass_at == (1,)
    assert Evaluation("gsm8k", [[2]], samples=8, pass_at=[4, 2, 4]).pass_at == (2, 4)
    assert Evaluation("gsm8k", [[2]], samples=8, pass_at=4).pass_at == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, r"expected a name of letters, digits, _, \. and - for an evaluation, got 'a/b'"),
        ({"name": ".."}, "expected a name of letters"),
        ({"name": "reward"}, r'expected another name .* \[.length., .reward., .validation.\].* got "reward"'),
        ({"samples": 0}, "expected samples to be a whole number above 0, got 0"),
        ({"samples": 2.0}, "expected samples to be a whole number above 0, got 2.0"),
        ({"pass_at": (1, 2)}, r"expected pass_at to be whole numbers from 1 to samples=1, got \(1, 2\)"),
        ({"pass_at": (0,)}, "expected pass_at to be whole numbers from 1"),
        ({"pass_at": "all"}, "expected pass_at to be whole numbers from 1"),
        ({"correct": float("nan")}, "expected correct .*got nan"),
        ({"correct": "1"}, "expected correct .*got str '1': remove the quotes"),
        ({"save": "yes"}, "expected save to be True or False, got 'yes'"),
        ({"rewards": {"task": parity_reward}}, "expected names of rewards other than"),
        ({"answer": "answer"}, "expected answer to be a function of a text, got 'answer'"),
        ({"stages": ("fit",)}, r"expected stages among \('val', 'test'\), got \('fit',\)"),
        (
            {"sampling": 0.6},
            r"expected sampling to be a SamplingParams, such as SamplingParams\(temperature=0.6\), got 0.6",
        ),
        (
            {"samples": 4, "sampling": SamplingParams(temperature=0)},
            "expected random sampling for samples=4 of evaluation a, got temperature=0, .* equal: raise temperature",
        ),
        ({"samples": 4, "sampling": SamplingParams(top_k=1)}, "samples=4 of evaluation a, got top_k=1, .* raise top_k"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evaluation(**dict[str, Any](name="a", prompts=[[2]]) | options)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ("gsm8k", "expected evaluation to be an Evaluation or a list of them, got 'gsm8k'"),
        ({"name": "a"}, "expected evaluation to be an Evaluation or a list of them, got {'name': 'a'}"),
        ([Evaluation("a", [[2]]), Evaluation("a", [[3]])], r"evaluations with different names, got \['a', 'a'\]"),
    ],
)  # fmt: skip
def test_the_module_takes_evaluations_with_different_names(evaluation: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_module(evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (Evaluation("a", [[2], []]), r'evaluation "a": expected prompt 1 to have at least one token'),
        (Evaluation("a", [[99]]), r'evaluation "a": expected token ids in \[0, 16\), got 99 to 99 in prompt 0'),
        (Evaluation("a", []), 'evaluation "a": expected at least one prompt, got none'),
        (Evaluation("a", [[2] * 60]), r'evaluation "a": expected prompts of at most 56 tokens'),
        (
            Evaluation("a", [[2]], sampling=SamplingParams(max_new_tokens=64)),
            "expected max_new_tokens below the context",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else value.name,
)
def test_a_prompt_that_does_not_fit_is_named_before_training(evaluation: Evaluation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(evaluation=evaluation))


def test_filters_that_the_engine_would_ignore_are_refused_at_setup() -> None:
    evaluation = Evaluation("a", [[2]], samples=2, sampling=SamplingParams(top_p=0.9))
    module = tiny_module(evaluation=evaluation, engine=FakeEngine(lambda _: [2, 1]), rewards=parity_reward)
    with pytest.raises(ValueError, match=r"top_p=0.9.* of an evaluation, got FakeEngine, which ignores them"):
        fit(module, data=tiny_prompts())


@pytest.mark.parametrize("engine", [VLLMEngine(), VLLMServerEngine("http://127.0.0.1:1")], ids=["in process", "server"])
@pytest.mark.parametrize("place", ["training", "evaluation", "answers"])
@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused_at_setup(
    engine: Engine, place: str, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature)
    options = {
        "training": {"temperature": temperature},
        "evaluation": {"evaluation": Evaluation("a", [[2]], samples=2, sampling=sampling)},
    }
    module = tiny_module(engine=engine, **options.get(place, {}))
    with pytest.raises(
        ValueError, match=rf"temperature 0 or within \[0.01, 2\] for {type(engine).__name__}, got {temperature}: "
    ):
        module.generate([2], sampling=sampling) if place == "answers" else fit(module)


def test_an_evaluation_without_a_filter_is_refused_where_sampling_masks_are_lists() -> None:
    class Listing(TransformersEngine):
        capabilities = replace(TransformersEngine.capabilities, lists_masks=True)

    plain = Evaluation("a", [[2]], samples=2, sampling=SamplingParams(temperature=0.7, max_new_tokens=4))
    with pytest.raises(
        ValueError, match=r"greedy or filtered evaluation, because training filters, got temperature=0.7 alone: Listing"
    ):
        fit(tiny_module(evaluation=plain, engine=Listing(), top_p=0.9), max_steps=1)
    filtered = replace(plain, sampling=SamplingParams(min_p=0.1, max_new_tokens=4))
    for evaluation in (filtered, Evaluation("a", [[2]])):
        fit(tiny_module(evaluation=evaluation, engine=Listing(), top_p=0.9), max_steps=1)
    fit(tiny_module(evaluation=plain, engine=Listing()), max_steps=1)
