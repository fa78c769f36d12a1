"""Logged metrics are recomputed, and a figure that is changed on its way to a logger is found."""

import re
from typing import Any

import pytest
from kit.metric_names import Rows
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch import Callback
from typing_extensions import override

from lightning_rl import RLCallback
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    NoEOSMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    TruncatedIS,
)

NOT_RECOMPUTED = re.compile(
    r"(time|trainer|in_flight|val|signal_audit|reward_metric)/.*|prompts/dropped|optim/skipped|epoch|tokens_per_second"
)

RUNS: dict[str, tuple[dict[str, Any], list[RLCallback]]] = {
    "many corrections": (
        {"minibatches_per_rollout": 2, "epochs_per_rollout": 2},
        [
            *(OPSM(against="rollout"), IcePop(), TruncatedIS(), RolloutKL(), EntropyBonus(0.001), NoEOSMask()),
            *(OverlongPenalty(8, 4), DynamicSampling(), ReferenceKL(0.01, as_loss=True), SignalLedger()),
        ],
    ),
    "critic": ({"advantages": "gae", "critic": "shared", "minibatches_per_rollout": 2}, [ReferenceKL(0.1)]),
    "greedy": ({"advantages": "remax"}, [NoEOSMask("drop_tokens")]),
    "adaptive": ({"advantages": "reinforce_plus_plus", "policy": tiny_policy}, [AdaptiveKL(0.1)]),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*groups are missing:UserWarning")
@pytest.mark.parametrize("name", RUNS)
def test_every_metric_of_a_training_step_is_recomputed(name: str) -> None:
    (options, callbacks), rows, audit = RUNS[name], Rows(), SignalAudit(1, "raise", checks=["logged_metrics"])
    seen: dict[str, set[str]] = {}

    class Seen(Callback):
        @override
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            step = vars(vars(audit)["_run"])["_step"]
            if step is not None:
                seen.setdefault("handed", set()).update(step.figures)
                seen.setdefault("logged", set()).update(step.row_figures)

    data = tiny_prompts(8, 4, validation=[[2, 3]])
    fit(tiny_module(**options), callbacks=[*callbacks, audit, Seen()], data=data, logger=rows, val_check_interval=1.0)
    names = {name for row in rows.rows for name in row if not NOT_RECOMPUTED.fullmatch(name)}
    names -= {"reward/shaped", "groups/zero_variance", "kl/penalty"} if name == "adaptive" else set()
    assert names - seen["handed"] == set() == names - seen["logged"]


def test_a_figure_that_lightning_shows_is_compared_too() -> None:
    class Overwriting(Callback):
        @override
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            pl_module.log("reward/task", 2.0, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    audit = SignalAudit(1, checks=["logged_metrics"])
    with pytest.warns(UserWarning, match="reward/task = .* in callback_metrics"):
        fit(tiny_module(), callbacks=[Overwriting(), audit], data=tiny_prompts(4, 4))
    assert [finding.culprit for finding in audit.findings] == ["metric reward/task"]


def test_rows_over_rollouts_that_were_not_looked_at_are_skipped_aloud() -> None:
    audit = SignalAudit(2, "raise", checks=["logged_metrics"])
    fit(tiny_module(), callbacks=[audit], logger=Rows(), log_every_n_steps=4)
    assert audit.skipped == {
        "logged_metrics": "no row was logged with this step, or it spans ranks or steps that were not audited"
    }


def test_nobody_else_meets_the_logger_of_the_audit() -> None:
    rows, met = Rows(), list[int]()

    class Looking(Callback):
        @override
        def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
            met.append(len(trainer.loggers))

        on_train_batch_end = on_before_backward = on_before_optimizer_step = on_train_batch_start

    audit = SignalAudit(1, "raise")
    trainer = fit(tiny_module(), callbacks=[Looking(), audit], logger=rows, data=tiny_prompts(8, 4))
    assert set(met) == {1} and trainer.loggers == [rows] and "logged_metrics" not in audit.skipped
