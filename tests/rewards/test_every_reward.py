"""Every reward of the library: any text gets a value, the same when repeated and without other rows."""

import copy
import math
import pickle
from typing import Any

import pytest

import lightning_rl.rewards
from lightning_rl.rewards import (
    AnswerMatch,
    ChoiceMatch,
    CodeTests,
    ExactMatch,
    Failure,
    JSONSchema,
    Judge,
    Language,
    Length,
    MathMatch,
    NumberMatch,
    RegexMatch,
    Repetition,
    RewardModel,
    Rewards,
    Sandbox,
    SandboxResult,
    SandboxService,
    TagFormat,
    TokenF1,
    VerlReward,
)
from lightning_rl.testing import check_reward


def compute_score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, float]:
    return {"score": float(ground_truth in solution_str)}


EXAMPLES: list[Any] = [
    ChoiceMatch(),
    ChoiceMatch(choices="choices"),
    ExactMatch(ignore_case=True, ignore_punctuation=True, after="A"),
    JSONSchema(schema={"type": "integer"}),
    Language(language="en"),
    Length(max_length=3, margin=4),
    Length(target=3, unit="characters"),
    MathMatch(timeout=2.0),
    NumberMatch(),
    NumberMatch(strict=True, rel_tol=0.1),
    RegexMatch(pattern=r"\b(\w)\b", answer="answer"),
    Repetition(),
    Repetition(unit="words"),
    TagFormat(),
    TagFormat(partial=True, prefix="<think>"),
    TokenF1(),
    TokenF1(tag="a"),
    VerlReward(compute_score=compute_score),
]
COLUMNS: dict[str, Any] = {"answer": "B", "ground_truth": "B", "choices": ["a dog", "a whale", "7", ""]}
NASTY = {
    "empty": "",
    "space": " \n\t",
    "nul": "\0" * 100,
    "surrogate": "\ud800",
    "right-to-left": "\u202e42",
    "other-digits": "\u0664\u0662 \u00bd \u00b2",
    "huge-exponent": "1e999999999 2^999999999 \\boxed{9^{9^{9^{9}}}}",
    "huge-number": "9" * 10**5,
    "words": "a " * 50_000,
    "braces": "\\boxed{" * 14_000,
    "brackets": "[" * 10**5,
    "quotes": '"' * 10**5,
    "fences": "```\n" * 25_000,
    "tags": "<think>" * 14_000,
    "deep-json": "[" * 10**5 + "]" * 10**5,
    "format": "%s %d {0} {answer} \\1 $1",
}


def each(examples: list[Any]) -> Any:
    return pytest.mark.parametrize("reward", examples, ids=lambda reward: type(reward).__name__)


def values(reward: Any, completions: list[Any], answer: Any = None) -> list[float | None]:
    columns = {name: [value] * len(completions) for name, value in COLUMNS.items()}
    if type(reward) in (NumberMatch, MathMatch):
        columns["answer"] = ["7"] * len(completions)
    prompts = ["?"] * len(completions)
    ids = [list(range(len(str(completion)) % 50)) for completion in completions]
    return reward(prompts, completions, completion_ids=ids, **columns)


@each(EXAMPLES)
@pytest.mark.parametrize("name", NASTY)
def test_no_text_of_a_completion_raises_or_scores_more_than_a_right_one(reward: Any, name: str) -> None:
    (value,) = values(reward, [NASTY[name]])
    assert value is None or (math.isfinite(value) and -1 <= value <= 1)


@each(EXAMPLES)
def test_chat_messages_score_like_their_text(reward: Any) -> None:
    texts = ["", "B", "7", "[1]", "<think>a</think><answer>b</answer>", "The answer is a whale."]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [value] * 6 for name, value in COLUMNS.items()}
    if type(reward) in (NumberMatch, MathMatch):
        columns["answer"] = ["7"] * 6
    ids = [[1] * len(text) for text in texts]
    plain = reward(["?"] * 6, texts, completion_ids=ids, **columns)
    assert reward([[{"role": "user", "content": "?"}]] * 6, chats, completion_ids=ids, **columns) == plain


@each(EXAMPLES)
def test_no_rows_no_values(reward: Any) -> None:
    assert values(reward, []) == []


@each(EXAMPLES)
def test_a_copy_scores_alike_and_is_equal(reward: Any) -> None:
    completions = ["B", "7", "<think>a", "no"]
    for twin in (pickle.loads(pickle.dumps(reward)), copy.deepcopy(reward)):
        assert twin == reward and values(twin, completions) == values(reward, completions)


@pytest.mark.nightly
@each([reward for reward in EXAMPLES if not isinstance(reward, MathMatch)])
def test_the_kit_finds_nothing_wrong(reward: Any) -> None:
    columns: dict[str, Any] = {"answer": ["A", "B"], "choices": [["x", "y", "z", "4"], ["1", "2", "3", "5"]]}
    columns["ground_truth"] = ["4", "7"]
    if isinstance(reward, NumberMatch):
        columns["answer"] = ["4", "7"]
    check_reward(reward, **columns)


@each(EXAMPLES)
def test_what_the_loop_passes_beside_columns_changes_nothing(reward: Any) -> None:
    columns = {
        "answer": ["7"] if type(reward) in (NumberMatch, MathMatch) else ["B"],
        "choices": [["x", "7", "y", "z"]],
        "ground_truth": ["7"],
    }
    extras = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    plain = reward(["?"], ["7 B"], completion_ids=[[1, 2]], **columns)
    assert reward(["?"], ["7 B"], completion_ids=[[1, 2]], **columns, **extras) == plain


@each([reward for reward in EXAMPLES if isinstance(reward, AnswerMatch | RegexMatch)])
def test_a_missing_column_is_named(reward: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"expected a column 'answer' for {type(reward).__name__}.*columns \['gold'\]"
    ):
        reward(["?"], ["x"], completion_ids=[[1]], gold=["x"])


def test_every_exported_reward_has_an_example() -> None:
    exported = {getattr(lightning_rl.rewards, name) for name in lightning_rl.rewards.__all__}
    classes = {one for one in exported if isinstance(one, type) and hasattr(one, "__dataclass_fields__")}
    elsewhere = {
        AnswerMatch,
        Judge,
        RewardModel,
        CodeTests,
    }  # a base, and those that need a model, a server, namespaces
    elsewhere |= {Failure, Rewards, Sandbox, SandboxResult, SandboxService}
    assert classes - {type(example) for example in EXAMPLES} == elsewhere
