"""Failures: rows that rewards fail on are said once, kept in a file, counted; too many end the run, which resumes."""

import json
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Echo, talking_module
from kit.rows import Rows
from kit.support import fit, parity_reward, tiny_module, tiny_prompts, weights_of

from lightning_rl import PromptDataModule, RLLightningModule
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.rewards import RewardError, Rewards
from lightning_rl.rollouts.failures import FailureReport, FailureSummary, check_failures
from lightning_rl.samples import Failure, RewardCall

ROWS = 16  # of a rollout


class Breaks:
    """The parity of each response, but something else at some calls."""

    def __init__(self, *at: int, answer: Any) -> None:
        self.at, self.answer, self.calls = at, answer, 0

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> Any:
        """Counts its calls."""
        self.calls += 1
        values = parity_reward(prompts, completions, completion_ids=completion_ids)
        return self.answer(values) if self.calls in self.at else values


def explode(values: list[float]) -> list[float]:
    raise KeyError("no answer")


def run(rewards: Any, folder: Path, ckpt_path: Path | None = None, **options: Any) -> RLLightningModule:
    data = tiny_prompts(16, 4)
    module = tiny_module(rewards=rewards, minibatches_per_rollout=2, **options)
    fit(module, data=data, default_root_dir=folder, ckpt_path=ckpt_path, max_epochs=1)
    return module


def test_a_failing_rollout_is_said_once_and_its_samples_lie_in_a_file(tmp_path: Path) -> None:
    rewards = {"parity": parity_reward, "odd": Breaks(2, answer=lambda values: [math.nan, math.inf, *values[2:]])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(rewards, tmp_path)
    texts = [str(warning.message) for warning in caught if "reward odd" in str(warning.message)]
    path = tmp_path / "failed_rewards" / "rollout-1-rank-0.jsonl"
    assert len(texts) == 1 and str(path) in texts[0]
    assert "odd failed on 2. First, reward odd returned nan for completion" in texts[0]
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(sample["row"], sample["cause"]) for sample in samples] == [
        (0, "returned nan"), (1, "returned inf")
    ]  # fmt: skip
    assert samples[0]["completion_ids"] and list(path.parent.iterdir()) == [path]


def test_failures_are_counted_and_their_rows_are_not_rewarded(tmp_path: Path) -> None:
    seen = Rows()
    odd = Breaks(2, answer=lambda values: [math.nan, *values[1:]])
    module = tiny_module(rewards={"odd": odd, "logged": (Breaks(1, answer=explode), 0)})
    with pytest.warns(UserWarning, match="rows get no reward"):
        fit(module, data=tiny_prompts(8, 4), callbacks=[seen], default_root_dir=tmp_path)
    names = ("reward/failed", "reward_failed/odd", "reward_failed/logged", "reward/missing")
    assert [[row[name] for name in names] for row in seen.rows] == [[0, 0, ROWS, 0], [1, 1, 0, 1 / ROWS]]


def test_a_rollout_without_any_reward_ends_the_run_and_it_goes_on_from_there(tmp_path: Path) -> None:
    cause = r"reward Breaks raised KeyError\('no answer'\)\nTraceback"
    whole = run(parity_reward, tmp_path / "whole")
    with (
        pytest.warns(UserWarning, match="rows get no reward"),
        pytest.raises(RewardError, match=rf"(?s)rewards for rollout 2, but they failed on 16 of 16 rows.*{cause}"),
    ):
        run(Breaks(3, answer=explode), tmp_path)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 4, "after two rollouts of two steps"
    resumed = run(parity_reward, tmp_path, tmp_path / INTERRUPTED, allow_config_changes=["rewards"])
    assert all(torch.equal(weight, weights_of(whole)[name]) for name, weight in weights_of(resumed).items())


@pytest.mark.parametrize(("share", "ends"), [(0.25, True), (0.3, False), (None, False)])
def test_the_run_ends_from_the_stated_share_on(share: float | None, ends: bool, tmp_path: Path) -> None:
    rewards = Breaks(1, answer=lambda values: [*[math.nan] * 4, *values[4:]])
    message = r"failed on 4 of 16 rows \(max_failure_rate=0.25\)"
    ending = pytest.raises(RewardError, match=message) if ends else nullcontext()
    with pytest.warns(UserWarning, match="Breaks failed on 4"), ending:
        run(rewards, tmp_path, max_reward_failure_rate=share)


def test_every_rank_counts_and_a_signal_comes_first() -> None:
    there, fine = FailureSummary(4, 4, cause="reward x raised"), FailureSummary(4, 0)
    check_failures([there, fine], 0, 1.0)
    with pytest.raises(RewardError, match=r"failed on 4 of 8 rows .*\nreward x raised"):
        check_failures([fine, there], 0, 0.5)
    with pytest.raises(RewardError, match="rollout 7 was interrupted and is repeated on resume: reward x"):
        check_failures([fine, there._replace(interrupted=True)], 7, None)


def test_failed_environments_are_written_too_if_rewards_end_the_run(tmp_path: Path) -> None:
    data = PromptDataModule([{"prompt": [2, 3], "place": place} for place in range(4)], 4, shuffle=False)
    module = talking_module(environment=partial(Echo, breaks_at=1), rewards=Breaks(1, answer=explode))
    failing = pytest.warns(UserWarning, match="conversations failed with their environment")
    with failing, pytest.warns(UserWarning, match="rows get no reward"), pytest.raises(RewardError):
        fit(module, data=data, default_root_dir=tmp_path)
    folders = [path.parent.name for path in sorted(tmp_path.rglob("rollout-0-rank-0.jsonl"))]
    assert folders == ["failed_environments", "failed_rewards"]


def test_validation_warns_and_goes_on() -> None:
    data = PromptDataModule([[2, 3]] * 4, 2, validation=[[2, 4]] * 3)
    module = tiny_module(rewards=Breaks(3, answer=explode))  # after two rollouts
    unmeasured = pytest.warns(UserWarning, match="expected a value for each metric, got NaN for val/reward/task")
    with pytest.warns(UserWarning, match="Breaks failed on 3"), unmeasured:
        trainer = fit(module, data=data, num_sanity_val_steps=0)
    assert trainer.global_step == 2


@pytest.mark.parametrize(("completion", "hint"), [([{"role": "assistant", "content": "a"}], True), ("a", False)])
@pytest.mark.parametrize("error", ["TypeError", "ValueError"])
def test_a_reward_for_strings_that_gets_messages_is_shown_how_to_read_them(
    completion: Any, hint: bool, error: str
) -> None:
    failure = Failure(rows=(0,), cause="raised an error", traceback="Traceback\n...\nsecond line", kind=error)
    call: Any = RewardCall("own", [[1]], [0.0], 0.1, prompts=["p"], completions=[completion], failures=[failure])
    report = FailureReport(Rewards({"own": parity_reward}))
    for _ in range(2):  # two rounds
        report.add([], [call], torch.ones(1, dtype=torch.bool))
    with pytest.warns(UserWarning, match="rows get no reward .* own failed on 2"):
        summary = report.write()
    assert ("text_of(one) for one in completions" in summary.cause) == (hint and error == "TypeError")
