"""The faults themselves: enough of them, each real, and a harness that sees the difference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.support import tiny_policy
from lightning.pytorch import Callback
from typing_extensions import override

from faults import __main__ as faults
from faults.clean import CONFIGURATIONS, alarms_of
from faults.fault import Fault
from faults.runs import differences, faulty_run, sound_run, wrong
from faults.tables import conversations, edits, hooks, logs, rewards, samples, stages, step

CLASSES = {"stages": stages, "step": step, "logs": logs, "samples": samples, "rewards": rewards, "edits": edits}
CLASSES |= {"hooks": hooks, "conversations": conversations}
BY_NAME = {fault.name: fault for fault in faults.FAULTS}
PRECISE = ("weights in float64", "weights in bfloat16", "bf16-true", "nobody rewarded but who ended")


def test_there_are_faults_of_every_class_and_none_twice() -> None:
    assert len(faults.FAULTS) >= 150
    assert len(BY_NAME) == len(faults.FAULTS)
    assert all(len(part.FAULTS) >= 10 for part in CLASSES.values())
    assert all(fault.culprit for part in CLASSES.values() for fault in part.FAULTS), "somebody is to be named"


def test_what_the_audit_misses_is_listed_apart() -> None:
    missed = {fault.name for fault in faults.MISSED}
    assert missed == conversations.UNNAMED, "no name of a fault that is gone"
    assert not missed & BY_NAME.keys()
    assert len(conversations.FAULTS) + len(missed) == len(conversations.CONVERSATIONS) >= 70
    assert all(fault.culprit for fault in faults.MISSED)


@pytest.mark.parametrize("fault", [*faults.FAULTS, *faults.MISSED], ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there(fault: Fault) -> None:
    assert all(replaced.get_original()[0] is not None for replaced in fault.patches)


def test_there_are_clean_configurations_and_none_twice() -> None:
    names = {configuration.name for configuration in CONFIGURATIONS}
    assert len(names) == len(CONFIGURATIONS) >= 77


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.name, marks=[] if one.name in PRECISE else [pytest.mark.long]) for one in CONFIGURATIONS],
)
def test_nothing_is_said_of_a_configuration_in_which_nothing_is_wrong(name: str) -> None:
    (configuration,) = (one for one in CONFIGURATIONS if one.name == name)
    found, rollouts, raised = alarms_of(configuration)
    assert (found, raised) == ([], "") and rollouts >= 1


def test_a_finding_has_to_name_one_of_the_culprits_words() -> None:
    known = faults.Fault("one", "versions|ends", "engine")
    assert known.named_by("ends", "engine Altering") and not known.named_by("ends", "stage draw")
    assert not known.named_by("masks", "engine Altering")
    anything = faults.Fault("another", "", "plan|update")
    assert anything.named_by("whatever", "stage update") and not anything.named_by("whatever", "stage draw")


def test_a_run_without_a_fault_does_not_differ_from_itself() -> None:
    nothing = faults.Fault("nothing", "", "nobody", max_steps=2)
    assert differences(faulty_run(nothing), sound_run(nothing)) == []


def test_a_sound_run_has_none_of_the_faults_parts() -> None:
    fault = BY_NAME["a reward of the answer above"]
    assert wrong(fault.options["rewards"]) and not wrong(tiny_policy)
    faulty, sound = faulty_run(replace(fault, max_steps=1)), sound_run(replace(fault, max_steps=1))
    assert torch.equal(faulty.rollouts[0]["response_ids"], sound.rollouts[0]["response_ids"])
    assert "rollout rewards" in differences(faulty, sound)


class Raising(Callback):
    """Ends the run."""

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        raise ValueError("loud")


def test_a_fault_that_ends_the_run_is_not_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    loud = faults.Fault("bang", "", "Raising", callbacks=lambda: [Raising()], max_steps=1, sound={"callbacks": list})
    assert faults.effect_of(loud) == []
    assert "bang: ValueError: loud" in capsys.readouterr().err


def test_updates_are_lost_in_bfloat16_where_the_fault_says_so() -> None:
    fault = BY_NAME["updates lost in bfloat16"]
    start = dict(tiny_policy(dtype=torch.bfloat16).named_parameters())
    weights = faulty_run(fault).weights
    kept = [weights[f"policy.model.{name}"] == value for name, value in start.items() if name.endswith("weight")]
    assert len(kept) == 2 * 9 + 3 and all(float(same.double().mean()) > 0.99 for same in kept)


@pytest.mark.long
@pytest.mark.parametrize("fault", [*faults.FAULTS, *faults.MISSED], ids=lambda fault: fault.name)
def test_every_fault_changes_the_run_and_does_not_end_it(fault: faults.Fault) -> None:
    assert faults.effect_of(fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", faults.MISSED, ids=lambda fault: fault.name)
def test_what_is_listed_as_missed_is_missed(fault: faults.Fault) -> None:
    """One that is found belongs to the others: take its name out of the list."""
    assert not any(fault.named_by(*finding) for finding in faults.found_by_audit(fault))
