"""Compare recorded calls of other systems with this library. The replays are in :mod:`goldens`."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens.__main__ import main
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


def test_a_rule_without_its_inputs_does_not_end_the_command(cases: list[Case]) -> None:
    named = {algorithm for rule in RULES for algorithm in rule.algorithms}
    calls = {(case.peer, case.function): case for case in cases if case.algorithm in named}
    for case in calls.values():
        name = next((name for name, field in case.outputs.items() if field.value.dtype.kind == "f"), "")
        found = verdict(with_output(case, name, lambda value: value + np.asarray(0.5, value.dtype)))
        assert found.status in (Status.FAILED, Status.RULE), case.id


def test_every_algorithm_with_another_rule_for_a_group_of_one_row_is_listed(cases: list[Case]) -> None:
    ours = {"advantage 0", "baseline = reward, std 0"}
    theirs = {case.algorithm: case.implicit.get("singleton_group") for case in cases if case.topic != "normalization"}
    theirs |= {case.algorithm: "raw" for case in cases if case.calls("Normalization") and case["x"].dim() == 1}
    named = {one for rule in RULES if "group of one row" in rule.name for one in rule.algorithms}
    assert {name for name, rule in theirs.items() if rule and rule not in ours} - named == set()


def first(cases: list[Case], function: str, algorithm: str) -> Case:
    return next(case for case in cases if case.calls(function) and case.algorithm == algorithm)


def write_folder(folder: Path, cases: list[Case]) -> Path:
    """Write cases of one topic in the layout of ``tests/data/goldens``."""
    inputs: dict[str, np.ndarray] = {}
    outputs: dict[str, np.ndarray] = {}
    entries: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        keys = {name: f"{number}.{name}" for name in (*case.arrays, *case.outputs)}
        inputs |= {keys[name]: value for name, value in case.arrays.items()}
        outputs |= {keys[name]: field.value for name, field in case.outputs.items()}
        tolerances = {name: {"rtol": one.rtol, "atol": one.atol} for name, one in case.outputs.items()}
        entry = {name: getattr(case, name) for name in ("id", "peer", "function", "algorithm", "params", "implicit")}
        entry["inputs"] = {name: {"key": keys[name]} for name in case.arrays}
        entry["outputs"] = {name: {"key": keys[name], **tolerances[name]} for name in case.outputs}
        entries.append(entry)
    topic = folder / cases[0].topic
    topic.mkdir(parents=True)
    (topic / "manifest.json").write_text(json.dumps({"topic": topic.name, "cases": entries}))
    np.savez(topic / "inputs.npz", **inputs)  # pyrefly: ignore[bad-argument-type]
    np.savez(topic / "outputs.npz", **outputs)  # pyrefly: ignore[bad-argument-type]
    return folder


def test_the_command_prints_a_table_of_any_folder(
    cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = first(cases, "compute_rloo_vectorized_outcome_advantage", "rloo")
    ruled = next(
        case for case in cases if case.calls("compute_grpo_outcome_advantage") and verdict(case).status is Status.RULE
    )
    unknown = replace(equal, params={"of_tomorrow": 0.5})
    wrong = with_output(equal, "advantages", lambda value: value + np.float32(0.25))
    assert main([str(write_folder(tmp_path / "passes", [equal, ruled, unknown]))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "system"
    assert ["verl", "core_algos.py:compute_rloo_vectorized_outcome_advantage", "1", "0", "1", "0"] in map(
        str.split, lines
    )
    assert lines[-2].startswith("differs on purpose: ") and lines[-2].endswith(f"{RULES[0].name} (1)")
    assert lines[-1].startswith("not offered: verl ") and lines[-1].endswith(": of_tomorrow=0.5 (1)")
    assert main([str(write_folder(tmp_path / "fails", [equal, wrong]))]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"failed: {equal.id}: advantages  off by 0.25"
    assert main([str(tmp_path / "none")]) == 2
    assert "python -m tests.goldens FOLDER" in capsys.readouterr().out
