"""Rollouts that are generated all at once: what the bound admits is in flight, batches stay in the order of prompts."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.scripted_clock import ScriptedClock, window
from kit.support import fit, recorder, tiny_module, tiny_prompts
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from benchmarks.paced import PacedEngine, lognormal_lengths
from lightning_rl import RLCallback, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import TruncatedIS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning",  # Lightning, of every checkpoint under manual optimization
    "ignore:The dirpath has changed:UserWarning",  # a resumed run of these tests saves elsewhere
    "ignore:Be aware that when using `ckpt_path`:UserWarning",  # or nowhere
)

PER_ROLLOUT, GROUP = 2, 4
SKEWED = lognormal_lengths(PER_ROLLOUT * GROUP, 24, mean=8.0, sigma=1.2, limit=56)
EVEN = [[10] * PER_ROLLOUT * GROUP] * 20


def run(
    clock: ScriptedClock,
    max_staleness: int,
    *callbacks: Any,
    lengths: Sequence[Sequence[int]] = SKEWED,
    step_seconds: float = 10.0,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> PacedEngine:
    """A fit of as many rollouts as there are lengths, in scripted time."""
    paced = clock.drive(lengths, **(engine or {"sync_seconds": 0.5}))
    module = tiny_module(max_staleness=max_staleness, engine=paced, group_size=GROUP, max_new_tokens=56, patience=None)
    data = options.pop("data", None) or tiny_prompts(PER_ROLLOUT * len(lengths), PER_ROLLOUT)
    fit(module, callbacks=[TruncatedIS(), *callbacks, clock.trains(step_seconds)], data=data, **options)
    return paced


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("max_staleness", "concurrent", "waits", "seconds"),
    [
        pytest.param(1, True, 5, 11, id="the-next-one-during-a-step"),
        pytest.param(2, True, 0, 6, id="two-at-once"),
        pytest.param(2, False, 5, 11, id="two-one-after-the-other"),
        pytest.param(4, True, 0, 6, id="more-than-needed"),
    ],
)
def test_the_trainer_waits_for_what_the_bound_leaves(
    max_staleness: int, concurrent: bool, waits: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers take 10 seconds, a step 5 and a sync 1."""
    clock = ScriptedClock(monkeypatch)
    run(clock, max_staleness, lengths=EVEN, step_seconds=5.0, engine={"sync_seconds": 1.0, "concurrent": concurrent})
    assert window(clock, max_staleness) == pytest.approx((waits / seconds, seconds))


class Watch(RLCallback):
    """Record the number of requested rollouts at each step, and its metrics."""

    name = "watch"

    def __init__(self) -> None:
        self.asked, self.rows = list[int](), list[dict[str, float]]()
        self.engine: PacedEngine | None = None

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.rows.append(pl_module.run.metrics.values())
        self.asked.append(pl_module.options.engine.asked)


@pytest.mark.nightly
def test_what_the_bound_admits_is_in_flight_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, rollouts, audit = Watch(), list[Rollout](), SignalAudit(1, "raise", ["versions", "trained_tokens"])
    run(ScriptedClock(monkeypatch), 2, watch, audit, recorder(rollouts)("seen"), lengths=SKEWED[:10])
    assert watch.asked == [3, 4, 5, 6, 7, 8, 9, 10, 10, 10], "(version + 1 + 2) rollouts"
    mixed = 0
    for number, rollout in enumerate(rollouts):
        versions = rollout.policy_version[rollout.action_mask]
        assert versions.min() == max(number - 2, 0) and versions.max() <= number
        mixed += sum(len(row[row >= 0].unique()) > 1 for row in rollout.policy_version)
    assert mixed, "long answers go on through a sync"
    assert max(row["staleness/max"] for row in watch.rows) == 2 == max(r["in_flight/staleness"] for r in watch.rows)
    assert watch.rows[0]["in_flight/tokens"] == 0 < max(row["in_flight/tokens"] for row in watch.rows) <= 3 * 8 * 56


def test_a_checkpoint_waits_for_nothing_and_holds_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    lengths = [[50 if number == 2 else 4] * 8 for number in range(6)]
    clock = ScriptedClock(monkeypatch)
    run(clock, 2, saving, lengths=lengths, step_seconds=8.0, enable_checkpointing=True)
    (rank,) = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["lightning_rl"]["ranks"]
    assert [(each["rollout"], each["samples"] is None) for each in rank["prefetched"]] == [(2, True), (3, False)]
    rollouts, resumed = list[Rollout](), ScriptedClock(monkeypatch)
    engine = run(resumed, 2, recorder(rollouts)("seen"), lengths=lengths, ckpt_path=tmp_path / "step=2.ckpt")
    versions = [sorted(set(rollout.policy_version[rollout.action_mask].tolist())) for rollout in rollouts]
    assert [rollout.groups.unique().tolist() for rollout in rollouts] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert versions[:2] == [[2], [1]], "the first is generated again, the second is from the checkpoint"
    assert engine.asked == 3


@pytest.mark.nightly
def test_prompts_that_replace_filtered_ones_come_in_the_order_in_which_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Once(RLCallback):
        """Drops a group of each rollout in its first round."""

        name = "once"
        max_rounds = 2

        @override
        def keep_groups(self, rollout: Rollout) -> torch.Tensor:
            return (
                rollout.groups != rollout.groups.min() if len(rollout) > GROUP else torch.ones_like(rollout.groups) > 0
            )

    found = list[list[list[int]]]()
    for step_seconds in (3.0, 300.0):
        with monkeypatch.context() as patched:
            rollouts, lengths = list[Rollout](), [[5] * 8] * 6
            data = tiny_prompts(40, PER_ROLLOUT)
            clock = ScriptedClock(patched)
            run(
                clock, 2, Once(), recorder(rollouts)("seen"), lengths=[[5] * 8] * 6, data=data,
                step_seconds=step_seconds, max_steps=5,
            )  # fmt: skip
            found.append([rollout.groups.unique().tolist() for rollout in rollouts])
            assert len(lengths) == 6
    assert found[0] == found[1] and found[0][0] == [1, 6]


def test_an_error_in_flight_ends_all_of_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ScriptedClock(monkeypatch)

    class Stops(RLCallback):
        name = "stops"

        @override
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(clock, 4, Stops(), lengths=[[4] * 8] + [[50] * 8] * 9)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
