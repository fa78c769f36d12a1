"""The audit calls the rewards of evaluations again, and recomputes their metrics."""

from typing import Any
from unittest.mock import patch

import pytest
from kit.support import fit, tiny_module, tiny_policy, tiny_tokenizer

from lightning_rl import Evaluation, PromptDataModule
from lightning_rl.audit import SignalAudit
from lightning_rl.evaluation.run import EvaluationRun
from lightning_rl.evaluation.tally import Tally

MEANS, COUNT = Tally._means, EvaluationRun._count  # noqa: SLF001


def lengths(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float | None]:
    return [None if len(ids) == 2 else float(len(ids) > 3) for ids in completion_ids]


def late(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    values = [float(len(ids)) for ids in completion_ids]
    return values[-1:] + values[:-1]


def over_all(tally: Tally, rows: Any, **options: Any) -> dict[str, float]:
    means = MEANS(tally, rows, **options)
    return means | {"reward/task": means["reward/task"] * (1 - means["reward/missing"])}


def nothing_solved(run: EvaluationRun, number: int, prompts: Any, rollout: Any, *rest: Any) -> None:
    COUNT(run, number, prompts, rollout, *rest)
    if run.questions[number].name == "own":
        run.tallies[number].table[:, 4] = 0.0


@pytest.mark.parametrize(
    ("check", "reward", "wrong"),
    [
        ("", lengths, patch.dict({})),
        ("reward_order", late, patch.dict({})),
        ("logged_evaluations", lengths, patch.object(Tally, "_means", over_all)),
        ("logged_evaluations", lengths, patch.object(EvaluationRun, "_count", nothing_solved)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*")
def test_a_wrong_evaluation_is_found(check: str, reward: Any, wrong: Any) -> None:
    audit, rows = SignalAudit(1), [f"a b c {place}" for place in range(16)]
    evaluations = [
        Evaluation("own", [f"d {place} e" for place in "abcdefgh"], samples=3, rewards=reward, save=False),
        Evaluation("one", [f"e {place} e" for place in "abcdefgh"], save=False),
    ]
    module = tiny_module(policy=tiny_policy, tokenizer=tiny_tokenizer(), group_size=4, evaluation=evaluations)
    with wrong:
        data, options = PromptDataModule(rows, 4), {"val_check_interval": 1, "num_sanity_val_steps": 0}
        fit(module, callbacks=[audit], data=data, max_steps=3, **options)
    found = {(finding.check, "own" in finding.culprit) for finding in audit.findings}
    assert found == ({(check, True)} if check else set())
