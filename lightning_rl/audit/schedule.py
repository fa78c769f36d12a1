"""Schedule of checks over the audits of a run, so that audits stay cheap and persistent faults are found early."""

from collections.abc import Sequence

from lightning_rl.testing.properties.check import Check

OF_TRACE = (
    *("step_rows", "first_forward", "rank_denominators", "step_gradient"),
    *("parameter_gradient", "optimizer_moves", "optimizer_rule", "logged_metrics"),
)
"""Checks that need the traces of every optimizer step of a rollout."""

REPEATED = (
    ("masked_values", "excluded_rows", "padding_width", "group_isolation", "reward_shift", "row_order"),
    ("partition", "loss_padding_width", "loss_masked_values", "denominators", "sequence_decisions"),
    ("contribution_rows", "contribution_groups", "contribution_ranks", "provided_fields", "contributions_fit"),
    OF_TRACE,
    (
        *("advantage_direction", "reward_conservation"),
        *("logprob_alignment", "reference_stays", "silent_environments"),
    ),
    ("gradient_liveness", "loss_direction", "terms_add_up", "loss_fits"),
    ("metric_populations", "token_gradients", "values_ignore_temperature"),
)
"""Checks that repeat or follow a stage of the run, the same code in every rollout; those of a group share work."""

PLACES = {name: place for place, group in enumerate(REPEATED) for name in group}

FORMULAS = (
    *("loss_formula", "loss_needs_advantages", "value_loss_formula", "single_precision", "declared_ratio"),
    *("joint_ratio", "distances_pull_back", "terms_keep_tokens", "term_figures", "knob_liveness"),
    *("parent_promises", "evaluation_figures", "counted_padding"),
)
"""Checks whose results depend on the algorithm alone."""


def is_full(number: int) -> bool:
    """Return True if an audit, counted from 1, repeats every stage: at 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0


def calls_again(audit: int) -> bool:
    """Return True if an audit, counted from 1, calls rewards and environments again: at 1, 2, 4, 8, 16, 32, 48, ..."""
    return audit in (1, 2, 4, 8) or audit % 16 == 0


def takes_turn(check: Check, number: int, every_n_rollouts: int) -> bool:
    """Return True if a check runs at an audit, counted from 1.

    Checks of formulas run at the audits 1, 2, 16, 128, ... Checks that repeat or follow stages run at the audits 1, 2,
    4, 8, ... At the others their groups take turns: one group if every rollout is audited, three if every third or
    fewer are. Checks of what was sampled always run.

    Example:
        >>> from lightning_rl.audit.checks import CHECKS
        >>> [[number for number in range(1, 16) if takes_turn(CHECKS["partition"], number, every)] for every in (1, 10)]
        [[1, 2, 4, 8, 15], [1, 2, 4, 5, 7, 8, 9, 12, 14]]
    """
    if check.name in FORMULAS:
        return number == 1 or (is_full(number) and number.bit_length() % 3 == 2)
    share, place = min(every_n_rollouts, 3), PLACES.get(check.name)
    return is_full(number) or place is None or (place - share * number) % len(REPEATED) < share


def part_of(number: int) -> int:
    """Return which part of the samples an audit, counted from 1, scores: all at 1, 2, 4, 8, ..., else a third."""
    return 1 if is_full(number) else 3


def in_turn(checks: Sequence[Check], number: int, every_n_rollouts: int, *, of_step: bool) -> list[Check]:
    """Return the checks of the rollout, or of its steps, that run at an audit."""
    return [check for check in checks if check.of_step is of_step and takes_turn(check, number, every_n_rollouts)]
