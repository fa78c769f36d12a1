"""Every export has an example, so that it is covered by every property, or this fails the moment it is exported."""

import torch

import lightning_rl
import lightning_rl.callbacks
from lightning_rl import Estimator, PolicyLoss, RLCallback, ValueLoss
from lightning_rl.advantages import ESTIMATORS
from lightning_rl.losses import LOSSES
from lightning_rl.signal.reductions import REDUCTIONS
from lightning_rl.signal.statistics import group_statistics
from properties.batches import WITNESS
from properties.exports import (
    ESTIMATOR_EXAMPLES,
    LOSS_EXAMPLES,
    REDUCTION_EXAMPLES,
    VALUE_EXAMPLES,
    exported_estimators,
    exported_losses,
    exported_reductions,
)


def test_every_loss_has_an_example() -> None:
    assert {type(loss) for loss in LOSS_EXAMPLES.values()} == exported_losses()
    assert LOSSES.items() <= LOSS_EXAMPLES.items()
    assert {type(loss) for loss in VALUE_EXAMPLES.values()} == {ValueLoss}


def test_every_estimator_has_an_example() -> None:
    assert {type(estimator) for estimator in ESTIMATOR_EXAMPLES.values()} == exported_estimators()
    assert ESTIMATORS.items() <= ESTIMATOR_EXAMPLES.items()


def test_every_reduction_has_an_example() -> None:
    examples = REDUCTION_EXAMPLES.values()
    assert {one if one in exported_reductions() else type(one) for one in examples} == exported_reductions()
    assert REDUCTIONS.items() <= REDUCTION_EXAMPLES.items()


def test_the_package_exports_nothing_of_these_kinds_from_elsewhere() -> None:
    classes = {one for one in vars(lightning_rl).values() if isinstance(one, type)}
    covered = exported_losses() | exported_estimators()
    assert {one for one in classes if issubclass(one, PolicyLoss | Estimator)} - covered == {PolicyLoss, Estimator}
    assert {one for one in classes if issubclass(one, RLCallback)} == {RLCallback}


def test_the_witness_batch_holds_rows_of_every_kind() -> None:
    real, trained, valid = WITNESS.real, WITNESS.trained, WITNESS.valid_tokens.any(-1)
    assert (~real).any() and (real & ~trained).any() and (trained & ~valid).any() and (valid & ~WITNESS.rewarded).any()
    inside = torch.arange(WITNESS.width) < WITNESS.response_lengths[:, None]
    assert (inside & ~WITNESS.action_mask & valid[:, None]).any()
    spread = group_statistics(WITNESS.rewards, WITNESS.groups, WITNESS.rewarded).spread
    assert set(WITNESS.groups[spread].tolist()) == {0, 1}
