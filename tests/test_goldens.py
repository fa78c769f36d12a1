"""Compare recorded calls of other systems with this library. The replays are in :mod:`goldens`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from goldens.cases import Case, Field, read_folder
from goldens.registry import NOT_COMPARED, NOT_OFFERED, replay_of
from goldens.rules import RULES
from goldens.verdict import Status, Verdict, verdict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "goldens"
FURTHER = ROOT / "tests" / "data" / "goldens_more"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [*read_folder(FOLDER), *read_folder(FURTHER)]


@pytest.fixture(scope="module")
def verdicts(cases: list[Case]) -> list[Verdict]:
    return [verdict(case) for case in cases]


def test_no_case_fails(verdicts: list[Verdict]) -> None:
    assert [(one.case.id, one.detail) for one in verdicts if one.status is Status.FAILED] == []
    counts = Counter(one.status for one in verdicts)
    assert counts == {Status.MATCHED: 1722, Status.RULE: 48, Status.NOT_OFFERED: 9}
    assert {one.case.algorithm for one in verdicts if one.status is Status.NOT_OFFERED} == set(NOT_OFFERED)
    pulls = Counter(one.status for one in verdicts if one.case.from_pull_request)
    assert pulls == {Status.MATCHED: 34}


def test_the_page_lists_every_rule_and_its_number_of_cases(verdicts: list[Verdict]) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    ruled = Counter(one.detail for one in verdicts if one.status is Status.RULE)
    assert set(ruled) == {rule.name for rule in RULES}
    for rule in RULES:
        assert f"| {rule.name} | {rule.reason} | {', '.join(rule.algorithms)} | {ruled[rule.name]} |" in page
    for name, reason in {**NOT_OFFERED, **{f"`{field}`": reason for field, reason in NOT_COMPARED.items()}}.items():
        assert f"| {name} | {reason} |" in page
    for status, number in Counter(one.status for one in verdicts).items():
        assert f"| {status} | {number} |" in page


def with_output(case: Case, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Case:
    field = case.outputs[name]
    return replace(case, outputs={**case.outputs, name: replace(field, value=change(field.value.copy()))})


@pytest.mark.parametrize("topic", sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
def test_one_per_cent_off_is_a_failure(topic: str, cases: list[Case], verdicts: list[Verdict]) -> None:
    matched = [one.case for one in verdicts if one.status is Status.MATCHED and one.case.topic == topic]
    case = next(case for case in matched if decisive(case))
    name = decisive(case)
    found = verdict(with_output(case, name, lambda value: value * np.asarray(1.01, value.dtype)))
    assert (found.status, found.detail.split()[0]) == (Status.FAILED, name)


def decisive(case: Case) -> str:
    """Return a compared output with a value so large that one per cent is no rounding."""
    named = ("loss", "kl", "advantages", "y", "rewards_out", "token_rewards", "logp", "is_weights", "returns")
    return next((name for name in named if name in case.outputs and largest(case.outputs[name]) > 0.1), "")


def largest(field: Field) -> float:
    counted = field.value if field.where is None else field.value[field.where]
    return float(np.abs(counted).max(initial=0.0))


def test_a_rule_excuses_nothing_but_what_it_predicts(verdicts: list[Verdict]) -> None:
    ruled = [one.case for one in verdicts if one.status is Status.RULE and one.detail == RULES[0].name]
    rows = next(case for case in ruled if "advantages" in case.outputs)
    alone = (rows.ids()[:, None] == rows.ids()).sum(-1) == 1
    assert verdict(with_output(rows, "advantages", added_to(alone.numpy()))).status is Status.RULE
    assert verdict(with_output(rows, "advantages", added_to(~alone.numpy()))).status is Status.FAILED


def added_to(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda value: (value + 0.5 * rows[:, None]).astype(value.dtype)


@pytest.mark.parametrize("delta", [1.05, 1.2, 2.0])
def test_a_cap_on_the_ratio_is_trls_wherever_it_lies(delta: float, cases: list[Case]) -> None:
    case = next(case for case in cases if case.algorithm == "ppo_clip_two_sided_delta")
    case = replace(case, params={**case.params, "delta": delta})
    ratio, advantages, mask = (case["logp"] - case["old_logp"]).exp(), case["advantages"].view(-1, 1), case.mask()
    clipped = ratio.clamp(1 - case.params["epsilon_low"], 1 + case.params["epsilon_high"])
    loss = -torch.minimum(ratio.clamp(max=delta) * advantages, clipped * advantages)[mask].mean()
    assert replay_of(case)(case)["loss"].item() == pytest.approx(loss.item(), rel=1e-5)


def test_an_exception_or_a_missing_output_fails_the_case(cases: list[Case]) -> None:
    case = next(case for case in cases if case.algorithm == "value_clip")
    raised = verdict(replace(case, arrays={}))
    assert raised.status is Status.FAILED and "KeyError" in raised.detail
    missing = verdict(replace(case, outputs={**case.outputs, "advantages": case.outputs["loss"]}))
    assert missing.status is Status.FAILED and "no value" in missing.detail
