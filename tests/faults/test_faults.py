"""Each fault is found with its culprit, and no clean configuration gives an alarm."""

import pytest

from faults import __main__ as faults
from faults.clean import CONFIGURATIONS, alarms_of
from faults.fault import Fault
from faults.tables import classes_two, conversations, edits, hooks, logs, rewards, samples, stages, step

TABLES = (stages, step, logs, samples, rewards, edits, hooks, conversations, classes_two)
COMPLETE = ("grpo with every correction, 32-true", "ppo with every correction, 32-true")
PRECISE = ("weights in float64", "weights in bfloat16", "bf16-true", "only ended responses rewarded")


def is_quick(name: str) -> bool:
    """Return True for the configurations of `make test`; the others are nightly."""
    return name in PRECISE or name in COMPLETE


def nightly_marks(number: int) -> list[pytest.MarkDecorator]:
    """Mark all but every 48th fault as nightly; ``make test-faults`` runs all of them."""
    return [pytest.mark.nightly] if number % 48 else []


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=nightly_marks(number)) for number, fault in enumerate(faults.FAULTS)],
)
def test_every_fault_is_found_with_its_culprit(fault: Fault) -> None:
    found = faults.found_by_audit(fault)
    assert any(fault.named_by(check, culprit) for check, culprit in found), found


def test_there_are_faults_of_every_class_none_twice_and_what_they_replace_exists() -> None:
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) >= 230
    assert all(len(table.FAULTS) >= 8 for table in TABLES)
    assert all(fault.culprit for table in TABLES for fault in table.FAULTS)
    assert all(patch.get_original()[0] is not None for fault in faults.FAULTS for patch in fault.patches)


@pytest.mark.nightly
@pytest.mark.parametrize("name", classes_two.MISSED)
def test_a_fault_of_the_documented_limits_is_still_missed(name: str) -> None:
    (fault,) = (fault for fault in classes_two.ALL if fault.name == name)
    assert not any(fault.named_by(check, culprit) for check, culprit in faults.found_by_audit(fault))


def test_the_runs_of_the_faults_are_clean_without_them() -> None:
    assert faults.found_by_audit(None) == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.name, marks=[] if is_quick(one.name) else [pytest.mark.nightly]) for one in CONFIGURATIONS],
)
def test_a_clean_configuration_gives_no_alarm(name: str) -> None:
    (configuration,) = (one for one in CONFIGURATIONS if one.name == name)
    assert alarms_of(configuration) == ([], "")


def test_a_finding_names_one_of_the_alternatives() -> None:
    known = Fault("one", "engine", check="versions|masks")
    assert known.named_by("masks", "engine Altering") and not known.named_by("masks", "stage generate")
    assert not known.named_by("finite", "engine Altering")
    anything = Fault("another", "plan|update")
    assert anything.named_by("masks", "stage update") and not anything.named_by("masks", "stage generate")
