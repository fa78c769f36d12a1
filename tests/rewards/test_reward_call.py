"""Call: reward functions written for TRL run unchanged: by place or keyword, with chat and plain prompts, async too."""

import asyncio
import re
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from kit.rows import Rows
from kit.scores import Scores, scores_of
from kit.support import fit, tiny_module, tiny_tokenizer
from transformers import TrainerState

from lightning_rl import PromptDataModule
from lightning_rl.rewards import ExactMatch, SubprocessReward
from lightning_rl.rewards.scoring import may_read
from lightning_rl.testing import PropertyError, check_reward

CHAT = [{"role": "user", "content": "a b"}]


def scores(rewards: Any, prompts: Sequence[Any] = ("q", "r"), **options: Any) -> Scores:
    completions = ["<think>x</think>4", "no"][: len(prompts)]
    known: dict[str, Any] = {"completion_ids": [[1, 2], [3]], "columns": {"answer": ["4", "5"]}, **options}
    return scores_of(rewards, list(prompts), completions, **known)


# Each is written as the documentation of TRL's GRPOTrainer has them.


def reward_len(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def positional(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [float(text.endswith(truth)) for text, truth in zip(completions, answer, strict=True)]


def think_format(completions: Any, **kwargs: Any) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]


def only_some(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float | None]:
    return [1.0 if truth == "4" else None for truth in answer]


async def judged(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [2.0] * len(prompts)


def test_functions_that_take_completions_alone_are_called_by_keyword() -> None:
    assert scores(reward_len).total.tolist() == [17.0, 2.0]


def by_name(completions: Any, environment_reward: Any, **_: Any) -> Any:
    return environment_reward


def by_key(completions: Any, **columns: Any) -> Any:
    return columns["environment_reward"]


def by_passing_on(prompts: Any, completions: Any, **columns: Any) -> Any:
    return by_key(completions, **columns)


def by_another_key(completions: Any, **columns: Any) -> Any:
    return [float(text == columns["answer"]) for text in completions]


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (by_name, True), (by_key, True), (by_passing_on, True), (lambda *rows, **rest: (rows, rest), True),
        (SubprocessReward(by_name), True), (partial(by_key, place=0), True),
        (ExactMatch(answer="environment_reward"), True),
        (by_another_key, False), (positional, False), (reward_len, False), (SubprocessReward(positional), False),
        (ExactMatch(), False),
    ],
)  # fmt: skip
def test_a_function_reads_a_column_if_its_signature_or_its_source_may(function: Any, reads: bool) -> None:
    assert may_read(function, "environment_reward") == reads


def test_names_of_ones_own_are_called_by_place() -> None:
    assert scores(lambda p, c, **_: [float(p == ["q", "r"]), float(len(c))]).total.tolist() == [1.0, 2.0]
    assert scores(lambda *rows, **_: [float(len(rows))] * 2).total.tolist() == [2.0, 2.0]


def test_a_chat_prompt_gets_messages_and_a_plain_one_text() -> None:
    assert scores(think_format, [CHAT, CHAT]).total.tolist() == [1.0, 0.0]
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(prompts)

    scores(look, [CHAT, [3, 4]])
    assert seen == [[{"role": "assistant", "content": "<think>x</think>4"}], "no"]


def test_none_is_a_row_that_does_not_apply() -> None:
    found = scores([positional, only_some])
    assert found.total.tolist() == [2.0, 0.0] and found.scored.tolist() == [True, True] and not found.failed.any()


def test_coroutines_are_awaited_all_at_once() -> None:
    met = threading.Barrier(2, timeout=20)  # each passes only while the other is there too

    async def meeting(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.to_thread(met.wait)
        return [1.0] * len(prompts)

    assert scores({"a": meeting, "b": meeting, "judged": judged}).total.tolist() == [4.0, 4.0]


def test_a_coroutine_that_raises_fails_its_rows_alone() -> None:
    async def broken(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        raise ConnectionError("refused")

    found = scores({"broken": (broken, 0.0), "judged": judged})
    assert found.total.tolist() == [2.0, 2.0]
    assert found.calls[0].failures[0].cause == "raised ConnectionError('refused')"


def test_extras_are_passed_to_those_that_name_them_and_no_others() -> None:
    seen: dict[str, Any] = {}

    def asks(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        seen["steps"] = trainer_state.global_step, trainer_state.max_steps, sorted(kwargs)
        return [0.0] * len(completions)

    def strict(prompts: Any, completions: Any, completion_ids: Any, answer: Any, log_extra: Any) -> list[float]:
        log_extra("seen", completions)
        return [0.0] * len(completions)

    found = scores([asks, strict], trainer_state=TrainerState(global_step=7, max_steps=9))
    assert seen["steps"] == (7, 9, ["answer", "completion_ids", "log_extra", "log_metric", "prompts"])
    assert found.calls[1].extras == {"seen": ["<think>x</think>4", "no"]}


def test_noted_metrics_are_kept_and_one_that_is_not_finite_is_left_out() -> None:
    def notes(completions: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        for value in (1, 2.0, float("nan")):
            log_metric("share", value)
        return [0.0] * len(completions)

    assert scores(notes).calls[0].metrics == {"share": [1.0, 2.0]}


@pytest.mark.parametrize(
    "arguments", ["prompts", "prompts, completions", "prompts, completions, question, **columns"], ids=str
)
def test_a_wrong_signature_is_an_error_at_once_and_no_failure_of_rows(arguments: str) -> None:
    function = eval(f"lambda {arguments}: None")
    with pytest.raises(TypeError, match=r"expected reward odd to accept .* with the columns \['answer'\], got odd"):
        scores({"odd": function})


def accuracy(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
    return [float(truth in text) for text, truth in zip(completions, solution, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("completions, solution", "solution"),
        ("c, prompts", "c"),
        ("prompts, c", "c"),
        ("completion_ids, texts", "texts"),
        ("answer, texts", "texts"),
        ("p, c, answer", "p"),
        ("p, c, solution", "solution"),
        ("texts, log_metric", "texts"),
    ],
)
def test_nothing_is_ever_passed_as_something_else(arguments: str, missing: str) -> None:
    function = eval(f"lambda {arguments}, **_: [0.0, 0.0]")
    with pytest.raises(TypeError, match=rf"with the columns \['answer'\], got odd.*, which needs .*\"{missing}\""):
        scores({"odd": function})


def test_what_a_function_names_goes_by_keyword_and_what_has_a_default_may_lack() -> None:
    def optional(completions: Any, solution: Any = None, **kwargs: Any) -> list[float]:
        assert solution is None and kwargs["prompts"] == ["q", "r"]
        return [float(len(text)) for text in completions]

    assert scores(optional).total.tolist() == [17.0, 2.0]
    assert scores(
        lambda answer, completions, **_: [float(len(completions)) + float(a) for a in answer]
    ).total.tolist() == [6.0, 7.0]
    assert scores(lambda p, c, *, answer, **_: [float(p == ["q", "r"]), len(c) + float(answer[0])]).total.tolist() == [
        1.0,
        6.0,
    ]
    assert scores(lambda _, c, /, **__: [float(len(text)) for text in c]).total.tolist() == [17.0, 2.0]


def test_a_missing_column_ends_the_run_at_once_and_fails_no_row() -> None:
    rows = [{"prompt": "a b", "answer": letter} for letter in "abcdefgh"]
    module = tiny_module(rewards=accuracy, tokenizer=tiny_tokenizer())
    with pytest.raises(
        TypeError, match=r'columns \[\'answer\'\], got accuracy.*needs "solution": use the names of columns'
    ):
        fit(module, data=PromptDataModule(rows, 4))


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_functions_written_for_trl_run_unchanged_in_a_fit(chat: bool) -> None:
    steps: list[tuple[int, int, float]] = []

    def content(completion: Any) -> str:
        assert isinstance(completion, list) is chat
        return completion[0]["content"] if chat else completion

    def correctness(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [float(truth in content(text)) for text, truth in zip(completions, answer, strict=True)]

    def lengths(
        completions: Any, completion_ids: Any, trainer_state: Any, log_metric: Any, **kwargs: Any
    ) -> list[float]:
        steps.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        if trainer_state.global_step:
            log_metric("later", trainer_state.global_step)
        return [float(len(ids)) for ids in completion_ids]

    async def sometimes(completions: Any, log_extra: Any, **kwargs: Any) -> list[float | None]:
        log_extra("text", [content(text) for text in completions])
        return [None if place % 2 else 1.0 for place in range(len(completions))]

    tokenizer, figures = tiny_tokenizer(), Rows()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    rows = [{"prompt": CHAT if chat else "a b", "answer": letter} for letter in "abcdefgh"]
    module = tiny_module(rewards=[correctness, lengths, sometimes], tokenizer=tokenizer)
    trainer = fit(module, data=PromptDataModule(rows, 4, shuffle=False), callbacks=[figures], max_epochs=2, max_steps=4)
    assert trainer.global_step == 4
    assert steps == [(0, 4, 0.0), (1, 4, 0.5), (2, 4, 1.0), (3, 4, 1.5)]
    assert [row.get("reward_metric/lengths/later") for row in figures.rows] == [None, 1.0, 2.0, 3.0]
    assert all(row["reward/sometimes"] == 1.0 and row["reward/failed"] == 0.0 for row in figures.rows)


def test_a_reward_that_exits_when_called_with_fewer_rows_is_named() -> None:
    def exits(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if len(prompts) < 2:
            raise SystemExit
        return [1.0] * len(prompts)

    with pytest.raises(PropertyError, match="reward_accepts"):
        check_reward(exits)
