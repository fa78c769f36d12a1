"""Lines of a log that is no terminal, and warnings of rewards that fall or are masked."""

import re
from collections import deque
from typing import Any

import pytest
from kit.support import fit, tiny_module, tiny_prompts

from lightning_rl import SamplingParams
from lightning_rl.callbacks import NoEOSMask
from lightning_rl.reporting import RolloutSummary
from lightning_rl.rollouts.rollout_log import Groups, fall_reason, masked_reason

LINE = r"step (\d): reward [\d.e+-]+, kl [\d.e+-]+, length [\d.]+, [\d.]+ s"


@pytest.mark.parametrize("bar", [True, False])
def test_a_log_that_is_no_terminal_has_one_line_per_rollout_and_no_bar(
    bar: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(tiny_module(), enable_progress_bar=bar)
    steps = [match[1] for match in re.finditer(f"^{LINE}$", "\n".join(caplog.messages), re.MULTILINE)]
    assert steps == ["1", "2", "3", "4"]
    assert "\r" not in (shown := capsys.readouterr()).out + shown.err


def test_the_summary_takes_the_place_of_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(tiny_module(), callbacks=[RolloutSummary()])
    assert not re.search(LINE, "\n".join(caplog.messages))


def test_a_reward_that_falls_to_zero_is_warned_of_once() -> None:
    calls: list[int] = []

    def fall(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        calls.append(1)
        return [float(len(calls) < 3 and row % 2) for row in range(len(completions))]

    with pytest.warns(UserWarning, match=r"rollout 2: the reward fell to 0, from 0\.5 .* has no warmup") as caught:
        fit(tiny_module(rewards=fall), data=tiny_prompts(32, 8))
    assert len([one for one in caught if "fell to 0" in str(one.message)]) == 1


@pytest.mark.parametrize(
    ("before", "falls"),
    [([], False), ([(8, 8)], True), ([(1, 32)], False), ([(0, 8)], False), ([(1, 2)], False), ([(20, 32)] * 3, True)],
)
def test_a_reward_that_was_seldom_above_zero_does_not_fall(before: list[tuple[int, int]], falls: bool) -> None:
    history = deque(Groups(rewarded, sampled, 0.5) for rewarded, sampled in before)
    sampled = before[0][1] if before else 8
    figures = {"groups/sampled": sampled, "groups/unsolved": sampled, "reward/task": 0.0}
    assert bool(fall_reason(figures, history)) == falls
    assert not fall_reason({**figures, "reward/task": 0.1}, history) and not fall_reason({}, history)


@pytest.mark.parametrize("action", ["zero_reward", "drop_tokens"])
def test_a_mask_of_most_rows_is_warned_of_once(action: Any) -> None:
    module = tiny_module(sampling=SamplingParams(max_new_tokens=2))
    with pytest.warns(UserWarning, match="masked the rewards of") as caught:
        fit(module, callbacks=[NoEOSMask(action)])
    messages = [str(one.message) for one in caught if "masked the rewards of" in str(one.message)]
    assert len(messages) == 1 and "NoEOSMask" in messages[0] and "raise max_new_tokens" in messages[0]


def test_rows_that_no_correction_masks_and_recordings_without_counts_are_not_warned_of() -> None:
    assert not masked_reason({"rows": 8.0, "rewarded rows": 0.0}, [])
    assert not masked_reason({}, ["NoEOSMask"])
