"""Curriculum: pools with spread in their groups get more prompts, mastered rows none, and places keep their rows."""

import math
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import TIMEOUT, run_ranks
from kit.support import differing, fit, tiny_module
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_rl import PromptDataModule, RLCallback, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import Curriculum, DynamicSampling

EASY = [{"prompt": [2 + n % 9, 3], "n": n} for n in range(9)]
HARD = [{"prompt": [2 + n % 9], "n": n} for n in range(9)]
OPTIONS: dict[str, Any] = {"minibatches_per_rollout": 2, "group_size": 4}


def score(prompts: Any, completion_ids: Sequence[Sequence[int]], source: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for every easy prompt, 0 or 1 for the others."""
    pairs = zip(completion_ids, source, strict=True)
    return [1.0 if name == "easy" else float(sum(ids) % 2) for ids, name in pairs]


class Diary(RLCallback):
    """Keeps the row of each place that rollouts hold."""

    name = "diary"

    def __init__(self, data: PromptDataModule) -> None:
        self.data, self.rows = data, dict[int, tuple[str, int]]()

    @override
    def observe(self, rollout: Rollout) -> None:
        places = sorted(set(rollout.groups.tolist()) - {-1})
        prompts = self.data.at(places)
        self.rows |= {prompt.index: (prompt.columns["source"], prompt.columns["n"]) for prompt in prompts}


def mixture(**options: Any) -> PromptDataModule:
    return PromptDataModule({"easy": EASY, "hard": HARD}, 4, **options)


def run(*callbacks: Any, module: dict[str, Any] | None = None, **options: Any) -> Diary:
    data = options.pop("data", None) or mixture(epoch_length=5)
    diary = Diary(data)
    fit(tiny_module(rewards=score, **OPTIONS | (module or {})), callbacks=[*callbacks, diary], data=data, **options)
    return diary


def test_the_pool_with_spread_gets_its_share_and_q_follows_the_formula() -> None:
    curriculum = Curriculum("source", temperature=0.25, rate=0.5, mastered=None)
    first = run(curriculum, limit_train_batches=2).rows
    assert Counter(source for source, _ in first.values()) == {"easy": 2, "hard": 2}
    assert curriculum.pools["easy"].value == 0.0
    value = curriculum.pools["hard"].value
    again = Curriculum("source", temperature=0.25, rate=0.5, mastered=None)
    rows = run(again).rows
    hard = sum(source == "hard" for place, (source, _) in rows.items() if place >= 4)
    assert 0 < value <= 0.5 and hard > 16 / (1 + math.exp(-value / 0.25)) - 1 > 8


def test_q_is_the_mean_absolute_advantage_of_a_pools_groups_times_their_wrong_share() -> None:
    curriculum = Curriculum("source", rate=1.0, mastered=None)
    seen: list[Rollout] = []
    watch = type("Watch", (RLCallback,), {"name": "watch", "observe": lambda _, rollout: seen.append(rollout)})()
    run(curriculum, watch, limit_train_batches=2)
    rates = [float(group.mean()) for group in seen[0].rewards.reshape(-1, 4)]
    signals = [(1 - rate) * 2 * math.sqrt(rate * (1 - rate)) for rate in rates if rate < 1]
    assert curriculum.pools["hard"].value == pytest.approx(sum(signals) / 2, abs=1e-4)


def test_a_mastered_row_is_not_drawn_again_until_all_are() -> None:
    data = PromptDataModule({"easy": EASY[:6], "hard": HARD[:4]}, 4, epoch_length=10)
    rows = list(run(Curriculum("source", temperature=9.0), data=data).rows.values())
    easy = [n for source, n in rows if source == "easy"]
    assert sorted(easy[:6]) == list(range(6)) and len(easy) == 6 < 20


def test_without_the_callback_the_order_is_that_of_the_seed_and_a_place_keeps_its_row() -> None:
    data = mixture(epoch_length=5)
    diary = run(Curriculum("source", temperature=0.1), data=data)
    plain = mixture(epoch_length=5)
    rows = run(data=plain).rows
    assert rows == {p.index: (p.columns["source"], p.columns["n"]) for p in plain.at(range(20))} != diary.rows
    assert diary.rows == {p.index: (p.columns["source"], p.columns["n"]) for p in data.at(range(20))}
    assert "rows" not in plain.state_dict() and data.state_dict()["rows"].tolist() == list(data.chosen)


@pytest.mark.parametrize("staleness", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_resuming_at_every_step_ends_bitwise_equal(staleness: int, tmp_path: Path) -> None:
    def trained(folder: Path, ckpt_path: Path | None = None) -> tuple[Any, Any, Any]:
        module = tiny_module(rewards=score, max_staleness=staleness, **OPTIONS)
        data, curriculum = mixture(epoch_length=3, weights={"easy": 2, "hard": 1}), Curriculum("source")
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [curriculum, DynamicSampling(max_rounds=2), saving]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, callbacks=callbacks, data=data, ckpt_path=ckpt_path, enable_checkpointing=True)
        return module, curriculum.state_dict(), data.chosen

    whole = trained(tmp_path / "whole")
    for step in range(1, 6):
        again = trained(tmp_path / str(step), tmp_path / "whole" / f"step={step}.ckpt")
        assert differing(whole[0], again[0]) == [] and whole[1:] == again[1:]


def test_the_audit_reads_the_rows_of_a_curriculum_again_without_findings() -> None:
    audit = SignalAudit(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(Curriculum("source", temperature=0.05), audit, module={"max_staleness": 1})
    assert [str(finding) for finding in audit.findings] == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (mixture, 'expected a column "level" of the data for Curriculum, got "n", "source": add it'),
        (lambda: PromptDataModule(stream(), 4, epoch_length=2), "data with a length for Curriculum, got a stream"),
    ],
)
def test_data_without_pools_is_refused_at_the_start(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(), callbacks=[Curriculum("level")], data=data())


def stream() -> Any:
    import datasets

    return datasets.Dataset.from_list(EASY).to_iterable_dataset()


def test_two_callbacks_that_choose_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one callback that chooses rows, got"):
        run(Curriculum("source"), Curriculum("n").with_name("other"))


@pytest.mark.nightly
def test_two_ranks_draw_the_rows_of_one(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)
    alone = Curriculum("source")
    data = mixture(epoch_length=4)
    run(alone, data=data)
    for rank in range(2):
        rows, pools = torch.load(tmp_path / str(rank))
        assert rows == data.chosen.tolist()
        for name, pool in alone.pools.items():
            assert pools[name] == pytest.approx(tuple(pool), rel=1e-9)


def rank(folder: Path) -> None:
    """One of two ranks."""
    strategy = DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    curriculum, data = Curriculum("source"), mixture(epoch_length=4)
    fit(tiny_module(rewards=score, **OPTIONS), callbacks=[curriculum], data=data, devices=2, strategy=strategy)
    pools = {name: tuple(pool) for name, pool in curriculum.pools.items()}
    torch.save((data.chosen.tolist(), pools), folder / str(torch.distributed.get_rank()))


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
