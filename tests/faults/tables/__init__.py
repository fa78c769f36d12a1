"""Every fault, in one file for each class of them."""

from faults.fault import Fault
from faults.tables import classes_two, conversations, edits, hooks, logs, ranks, rewards, run, samples, stages, step

FAULTS: tuple[Fault, ...] = (
    *run.FAULTS,
    *stages.FAULTS,
    *step.FAULTS,
    *logs.FAULTS,
    *samples.FAULTS,
    *rewards.FAULTS,
    *edits.FAULTS,
    *hooks.FAULTS,
    *conversations.FAULTS,
    *ranks.FAULTS,
    *classes_two.FAULTS,
)
