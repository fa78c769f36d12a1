"""Tasks of reasoning-gym: the same questions in every process, strict rewards, and a fit that resumes on them."""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.reasoning_gym import ReasoningGym, ReasoningGymScore
from kit.chatter import chatting_module, generator_states
from kit.support import fit, recorder, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import PromptDataModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.testing import check_reward

pytest.importorskip("reasoning_gym")
HASHED = ["isomorphic_strings", "ransom_note"]  # go over sets of strings
SHOW = """
from lightning_rl.data import PromptDataset
from adapters.reasoning_gym import ReasoningGym
print([PromptDataset(ReasoningGym(task, size=2, seed=5)).fingerprint for task in {tasks}])
"""
SUMS = {"max_terms": 2, "max_digits": 1}
asked = cache(ReasoningGym)


def scored(task: str, answers: Sequence[str | None], **options: Any) -> list[float | None]:
    questions = asked(task, size=1)
    entry = questions[0]["entry"]
    texts = [entry["answer"] if answer is None else answer.replace("RIGHT", str(entry["answer"])) for answer in answers]
    return ReasoningGymScore(questions, **options)(["?"] * len(texts), texts, entry=[entry] * len(texts))


def test_a_row_is_its_question_and_its_entry_whatever_the_size() -> None:
    questions = ReasoningGym("chain_sum", size=3, seed=7)
    row = questions[2]
    assert len(questions) == 3 and len(list(questions)) == 3
    assert row["prompt"] == row["entry"]["question"] and sorted(row["entry"]) == ["answer", "metadata", "question"]
    assert ReasoningGym("chain_sum", size=5, seed=7)[2] == row == questions[-1] == questions[1:][1]
    assert ReasoningGym("chain_sum", size=3, seed=8)[2] != row
    assert pickle.loads(pickle.dumps(questions))[2] == row
    with pytest.raises(IndexError):
        questions[3]


def test_options_of_the_task_are_taken() -> None:
    questions = ReasoningGym("chain_sum", size=8, config={"max_terms": 2, "max_digits": 1})
    assert {row["entry"]["metadata"]["num_terms"] for row in questions} == {2}


def test_every_process_asks_the_same_whatever_the_order_of_its_sets() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", SHOW.format(tasks=HASHED)],
            cwd=Path(__file__).parents[2] / "recipes",
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] and said[0].count("'") == 2 * len(HASHED)


def test_making_questions_draws_from_no_generator_of_this_process() -> None:
    before = generator_states()
    questions = ReasoningGym("pool_matrix", size=2, seed=1)  # it seeds NumPy's
    assert questions[0] != questions[1] and generator_states() == before


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        (
            "chain_sums",
            None,
            "expected task to be a name that reasoning-gym knows, got 'chain_sums': write 'chain_sum'",
        ),
        ("chain_sum", {"max_term": 3}, "expected config to hold options of the task chain_sum, got {'max_term': 3} "),
        ("chain_sum", {"min_terms": -3}, r"min_terms must be positive\): see reasoning_gym.create_dataset"),
        ("chain_sum", 3, "expected config to map names of options to values, got 3"),
    ],
)
def test_wrong_tasks_and_options_are_named(task: str, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        ReasoningGym(task, config=config)


@pytest.mark.parametrize(
    ("task", "answers", "strict", "lenient"),
    [
        ("chain_sum", [None, "RIGHT.0", "The answer is RIGHT", "x", ""], [1, 1, 0, 0, 0], [1, 1, None, 0, 0]),
        ("basic_arithmetic", [None, "It is RIGHT!", "RIGHT or 5"], [1, 0, 0], [1, None, None]),
        ("base_conversion", [None, "I say: RIGHT", "no"], [1, 0, 0], [1, None, 0]),
    ],
)
def test_an_answer_that_merely_contains_the_right_one_earns_nothing(
    task: str, answers: list[str | None], strict: list[float], lenient: list[float | None]
) -> None:
    assert scored(task, answers) == strict
    for value, expected in zip(scored(task, answers, strict=False), lenient, strict=True):
        assert value is not None and (value == expected if expected is not None else 0 < value < 1)


def test_other_partial_credit_stays_as_the_scorer_gives_it() -> None:
    assert scored("tsumego", ["hello"]) == scored("tsumego", ["hello"], strict=False) == [0.01]


def test_commas_hide_no_reference() -> None:
    questions = asked("chain_sum", size=1)
    entry = {**questions[0]["entry"], "answer": "1000"}
    values = ReasoningGymScore(questions)(["?"] * 3, ["1,000", "about 1,000", "1000"], entry=[entry] * 3)
    assert values == [1.0, 0.0, 1.0] and questions.score("about 1,000", entry) > 0


def test_the_answer_may_stand_in_a_tag() -> None:
    answers = ["so <answer> 5 </answer>, no, <answer>RIGHT</answer>", "RIGHT", "<answer>5</answer> RIGHT"]
    assert scored("chain_sum", answers, tag="answer") == [1.0, 0.0, 0.0]


def test_a_scorer_that_raises_gives_no_reward_and_not_0() -> None:
    with pytest.warns(
        UserWarning, match="scorer of prime_factorization failed on 1 of 2 .* ValueError: invalid literal"
    ):
        value, right = scored("prime_factorization", ["hello", None])
    assert value is not None and math.isnan(value) and right == 1.0


def test_a_row_without_an_entry_is_not_scored() -> None:
    questions = asked("chain_sum", size=1)
    assert ReasoningGymScore(questions)(["?"], ["5"], entry=[None]) == [None]
    with pytest.raises(ValueError, match="expected a column 'entry' for ReasoningGymScore"):
        ReasoningGymScore(questions)(["?"], ["5"], answer=["5"])


def test_it_keeps_what_rewards_promise() -> None:
    questions = asked("chain_sum", size=1)
    check_reward(ReasoningGymScore(questions), entry=[questions[0]["entry"], None])


def module_of(questions: ReasoningGym) -> Any:
    return chatting_module(["5", "6", "7", "8", "9"], rewards=ReasoningGymScore(questions), max_new_tokens=8)


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:.*pre-optimization state")
def test_a_policy_trains_on_it_under_the_audit_and_resumes_on_the_same_questions(tmp_path: Path) -> None:
    def run(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], list[Rollout]]:
        rollouts: list[Rollout] = []
        questions = ReasoningGym("chain_sum", size=4, seed=3, config=SUMS)
        module, data = module_of(questions), PromptDataModule(questions, 2, chat=True)
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [saving, recorder(rollouts)("seen"), SignalAudit(every_n_rollouts=1, mode="raise")]
        fit(module, data=data, callbacks=callbacks, default_root_dir=folder, enable_checkpointing=True, **options)
        return weights_of(module), rollouts

    whole, rollouts = run(tmp_path / "whole")
    assert len(rollouts) == 2 and torch.cat([rollout.rewards for rollout in rollouts]).unique().numel() > 1
    weights, (resumed,) = run(tmp_path / "resumed", ckpt_path=tmp_path / "whole" / "step=1.ckpt")
    assert torch.equal(resumed.prompt_ids, rollouts[1].prompt_ids)
    assert torch.equal(resumed.response_ids, rollouts[1].response_ids)
    assert [name for name, weight in whole.items() if not torch.equal(weight, weights[name])] == []
