"""Property checks of advantages, losses and corrections: checks of an algorithm on generated batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.advantages import DrGRPO, Estimator, RawReward, ReinforcePlusPlus, RowFunction, resolve_advantages
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import TOKEN_REWARDS, LossView, RLCallback
from lightning_rl.corrections.recorded import ReplayCorrections
from lightning_rl.losses import ClippedSurrogate, PolicyLoss, resolve_loss
from lightning_rl.signal.reductions import token_mean
from lightning_rl.testing.probes import FURTHER, MEANINGS
from lightning_rl.testing.properties import PROPERTIES
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import run_checks
from lightning_rl.testing.properties.fixed_batch import ROWS
from lightning_rl.testing.properties.rows import Row, add_fields_of, rollout_of_rows
from lightning_rl.testing.properties.subsample import some_groups, some_rows
from lightning_rl.testing.random_batches import batches
from lightning_rl.testing.shrinking import PropertyError, smallest
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.naming import name_of

Example = tuple[tuple[Row, ...], int]
"""Rows, and the seed of their numbers."""
PLAIN = Algorithm(
    loss=ClippedSurrogate(), advantages=RawReward(), reduction=token_mean, corrections=ReplayCorrections()
)
ADVANTAGE = (
    "masked_values",
    "excluded_rows",
    "padding_width",
    "group_isolation",
    "reward_shift",
    "advantage_direction",
    "row_order",
    "advantage_support",
    "knob_liveness",
)
LOSS = (
    "loss_fits",
    "gradient_liveness",
    "loss_direction",
    "partition",
    "loss_padding_width",
    "loss_masked_values",
    "knob_liveness",
)
CALLBACK = (
    "contributions_fit",
    "declared_reads",
    "masked_values",
    "padding_width",
    "row_order",
    "reward_conservation",
    "partition",
    "loss_padding_width",
    "counted_padding",
    "loss_masked_values",
    "denominators",
    "sequence_decisions",
    "gradient_liveness",
    "distances_pull_back",
    "terms_add_up",
    "metric_populations",
    "knob_liveness",
    "padding_blindness",
)


def check_advantage(advantages: Estimator | RowFunction | str) -> None:
    """Check an ``advantages=`` estimator or function.

    Args:
        advantages: An Estimator or a function of (scores [B], groups [B], rewarded [B]) -> [B].

    Raises:
        PropertyError: With the broken property and the smallest batch that shows it.
    """
    estimator = resolve_advantages(advantages)
    _check(f"advantages={estimator.name}", PLAIN.replace(advantages=estimator), ADVANTAGE)


def check_loss(loss: PolicyLoss | Callable[[LossView], Tensor] | str) -> None:
    """Check a ``loss=``.

    Args:
        loss: A PolicyLoss or a function of a LossView -> [b, T].

    Raises:
        PropertyError: With the broken property and the smallest batch that shows it.
    """
    resolved = resolve_loss(loss)
    _check(f"loss={name_of(resolved if isinstance(loss, str) else loss)}", PLAIN.replace(loss=resolved), LOSS)


def check_callback(callback: RLCallback) -> None:
    """Check a correction: every contribution of its class.

    Its models and Trainer hooks are not run. Fields in its ``provides`` are computed first or taken from the batch.

    Raises:
        PropertyError: With the broken property and the smallest batch that shows it.
    """
    estimator = ReinforcePlusPlus() if callback.contributes & {*TOKEN_REWARDS} else DrGRPO()
    algorithm = PLAIN.replace(advantages=estimator, corrections=ReplayCorrections([callback]))
    _check(f"callback {callback.name}", algorithm, CALLBACK)


def _check(what: str, algorithm: Algorithm, names: Sequence[str]) -> None:
    def look(example: Example, wanted: str | None) -> list[Finding]:
        rollout = add_fields_of(rollout_of_rows(*example), algorithm.corrections.callbacks)
        groups = some_groups(rollout, 0)
        case = AlgorithmCase(algorithm=algorithm, rollout=rollout, groups=groups, rows=some_rows(groups, 0))
        for name in names if wanted is None else [wanted]:
            if name == "advantage_support":
                try:
                    case = replace(case, rollout=case.signal(rollout)[0])
                except ValueError:  # reported by masked_values and excluded_rows
                    continue
            findings = list(FURTHER[name](case)) if name in FURTHER else run_checks([PROPERTIES[name]], case)
            if findings:
                return findings
        return []

    broken = smallest(st.tuples(batches(min_rows=2), st.integers(0, 9)), look) or _smallest_part(look)
    if broken is not None:
        (rows, _), finding = broken
        raise PropertyError(what, finding, [str(row) for row in rows], MEANINGS.get(finding.check, ""))


def _smallest_part(look: Callable[[Example, str | None], list[Finding]]) -> tuple[Example, Finding] | None:
    """Return the rows of the check at setup without those that a finding does not need; None without a finding."""
    rows: tuple[Row, ...] = ROWS
    findings = look((rows, 0), None)
    for row in ROWS if findings else ():
        rest = tuple(other for other in rows if other is not row)
        if fewer := look((rest, 0), findings[0].check):
            rows, findings = rest, fewer
    return ((rows, 0), findings[0]) if findings else None
