"""Results of conversations: failed ones cost their row, are reported once, and end the run above a share."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Echo, Talk, talking_module, wanted
from kit.rows import Rows
from kit.support import fit, recorder, tiny_module
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_rl import FinishReason, PromptDataModule, Rollout, SamplingParams
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.environments import EnvironmentReward, TokenStep
from lightning_rl.environments.outcome import FailedEnvironmentsError
from lightning_rl.generation import Request
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.failures import FailureSummary, check_failures


def train(
    folder: Path,
    fails: Callable[[int, Sequence[int]], bool],
    *,
    shut: Sequence[int] = (),
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> tuple[list[Rollout], list[str]]:
    """A short fit; whether a conversation fails goes by the place of its row and an answer, and some never begin."""

    class Partner(Talk):
        @override
        def reset(self, row: Any, seed: int) -> Sequence[int]:
            self.place = row["place"]
            if self.place in shut:
                raise ConnectionError("no answer")
            return ()

        @override
        def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            if fails(self.place, token_ids):
                raise ConnectionError(f"no answer for {self.place % 2} with api_key=sesame-1")
            return TokenStep(done=True, reward=1.0)

    seen = list[Rollout]()
    data = PromptDataModule([{"prompt": [2, 3], "place": place} for place in range(8)], 4, shuffle=False)
    module = tiny_module(environment=Partner, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, data=data, callbacks=[recorder(seen)("seen"), *callbacks], default_root_dir=folder)
    return seen, [str(warning.message) for warning in caught if "conversations" in str(warning.message)]


def test_failed_rows_neither_train_nor_count_and_are_said_once_and_kept_in_a_file(tmp_path: Path) -> None:
    (first, second), said = train(tmp_path, lambda place, _: place == 5)
    assert (first.finish != FinishReason.FAILED).all() and first.rewarded.all()
    failed = second.finish == FinishReason.FAILED
    assert failed.tolist() == [place == 5 for place in (4, 5, 6, 7) for _ in range(4)]
    assert second.rewarded.tolist() == second.trained.tolist() == (~failed).tolist()
    assert not second.valid_tokens[failed].any()
    path = tmp_path / "failed_environments" / "rollout-1-rank-0.jsonl"
    (text,) = said
    assert "4 of 16 conversations failed with their environment, so they neither train nor are rewarded" in text
    assert "First, ConnectionError: no answer for 1" in text and str(path) in text
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4 and all(row["failure"] == "ConnectionError: no answer for 1 with api_key=***" for row in rows)
    assert "Traceback" not in text and rows[0]["answer"] and "sesame" not in text + path.read_text()
    assert "in step\n" in rows[0]["log"] and rows[0]["metrics"]["retries"] == 1


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_failed_conversation_is_no_failure_of_a_reward(tmp_path: Path, value: float | None) -> None:
    def inherit(prompts: Any, completions: Any, *, environment_reward: Sequence[float | None], **_: Any) -> list[Any]:
        return [value if one is None else one for one in environment_reward]

    counts = Rows()
    strict = Rewards(inherit, max_failure_rate=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rows get no reward")
        train(tmp_path, lambda place, _: place == 5, rewards=strict, callbacks=[counts])
    assert [(row["reward/failed"], row["reward_failed/inherit"]) for row in counts.rows] == [(0, 0), (0, 0)]
    assert not (tmp_path / "failed_rewards").exists()


def test_a_rollout_in_which_too_many_fail_ends_the_run_with_a_checkpoint_and_the_causes(tmp_path: Path) -> None:
    message = (
        r"rollout 1, but 8 of 16 conversations failed \(max_failure_rate=0.5\): ConnectionError: no answer "
        r"for 0 with api_key=\*\*\* \(4 times\); ConnectionError: no answer for 1 with api_key=\*\*\* \(4 times\). Fix"
    )
    with pytest.raises(FailedEnvironmentsError, match=message):
        train(tmp_path, lambda place, _: place > 5)
    assert list(tmp_path.rglob(INTERRUPTED)), "of the step before"
    (_, second), _ = train(tmp_path, lambda place, _: place > 5, max_environment_failure_rate=None)
    assert int((second.finish == FinishReason.FAILED).sum()) == 8


def test_a_group_that_lost_a_row_is_judged_by_the_others(tmp_path: Path) -> None:
    (rollout, _), _ = train(tmp_path, lambda _, ids: ids[0] % 4 == 2, max_environment_failure_rate=None)
    failed = rollout.finish == FinishReason.FAILED
    assert 0 < int(failed.sum()) < len(rollout)
    for group in rollout.groups.unique():
        inside = (rollout.groups == group) & ~failed
        advantages, rewards = rollout.require("advantages")[inside][:, 0], rollout.rewards[inside]
        if len(rewards) > 1:
            torch.testing.assert_close(advantages.sum(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-5)
    assert (rollout.require("advantages")[failed] == 0).all()


@pytest.mark.parametrize(
    ("failed", "share", "ends"), [(0, 0.1, False), (3, 0.5, False), (4, 0.5, True), (8, None, False)]
)
def test_the_share_is_that_of_all_ranks(failed: int, share: float | None, ends: bool) -> None:
    parts = (failed - failed // 2, failed // 2)
    half, other = (
        FailureSummary(4, 0, conversations=4, broken={"timeout: step": part} if part else {}) for part in parts
    )
    if not ends:
        check_failures([half, other], 3, None, share)
        return
    with pytest.raises(FailedEnvironmentsError, match=r"4 of 8 .* timeout: step \(4 times\)"):
        check_failures([half, other], 3, None, share)


class Shut(Echo):
    """Fails for every second row of a validation."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        if row["shut"]:
            raise ConnectionError("shut")
        return ()


def partly(prompts: Sequence[Any], *_: Any, shut: Sequence[bool], **__: Any) -> list[float]:
    return [0.5 if one else 0.75 for one in shut]


def test_failed_conversations_of_a_validation_are_counted_and_their_rewards_are_not(tmp_path: Path) -> None:
    whole, broken = ({"prompt": [2, 3], "shut": shut} for shut in (False, True))
    data = PromptDataModule([whole] * 4, 4, validation=[whole, broken, broken])
    module = talking_module(environment=Shut, rewards={"partly": partly})
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"2 of 3 conversations failed .* First, ConnectionError: shut; all are in"):
        (figures,) = trainer.validate(module, data, verbose=False)
    assert figures["val/env/failed"] == 2.0
    assert figures["val/reward/partly"] == figures["val/reward/task"] == 0.75
    assert len(list((tmp_path / "failed_environments").iterdir())) == 1


@pytest.mark.parametrize("nothing", [0.0, -1.0, None])
def test_the_reward_for_nothing_needs_an_answer(nothing: float | None) -> None:
    rewards = EnvironmentReward(nothing)(
        ["?"] * 4, [""] * 4, completion_ids=[[5], [6], [], []], environment_reward=[1.0, None, None, 2.0]
    )
    assert rewards == [1.0, nothing, None, 2.0]


def test_a_reset_that_fails_has_no_extras(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=4, top_p=0.9)
    seen, _ = train(tmp_path, lambda *_: False, shut=[1], sampling=sampling)
    failed = seen[0].finish == FinishReason.FAILED
    assert int(failed.sum()) == 4 and not seen[0].valid_tokens[failed].any()


ASKED, BEGUN = {"role": "user", "content": "?"}, {"role": "assistant", "content": "an example"}
CALLED = {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT, LAST = {"role": "tool", "name": "f", "content": "7"}, {"role": "assistant", "content": "read"}
CONTEXT = [{**message, "rewritten": True} for message in (ASKED, BEGUN, ASKED)]


@pytest.mark.parametrize(
    ("messages", "opening", "completion"),
    [
        ([ASKED, CALLED, RESULT, LAST], 1, [CALLED, RESULT, {**LAST, "content": "whole"}]),
        ([ASKED, BEGUN, ASKED, CALLED, RESULT, LAST], 3, [CALLED, RESULT, {**LAST, "content": "whole"}]),
        ([ASKED, CALLED, RESULT], 1, [{**CALLED, "content": "whole"}]),
        ([ASKED, CALLED, *CONTEXT, LAST], 1, [CALLED, {**LAST, "content": "whole"}]),
        ([ASKED, LAST], 1, [{**LAST, "content": "whole"}]),
        ([], 0, "whole"),
        ([ASKED], 1, "whole"),
    ],
    ids=["tool", "example", "limit", "rewritten", "one answer", "tokens", "failed"],
)
def test_a_completion_is_the_conversation_from_the_first_answer_to_the_last(
    messages: list[Any], opening: int, completion: Any
) -> None:
    request = Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=SamplingParams(eos_token_ids=[1]))
    sample = replace(wanted(request), messages=tuple(messages), opening=opening)
    assert sample.completion("whole") == completion
