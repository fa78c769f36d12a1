"""Time limit of calls in the process: a hanging reward fails its rows, and a signal to the run ends it early."""

import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.scores import Scores, scores_of
from kit.support import fit, parity_reward, tiny_module, tiny_prompts, weights_of

from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.processes.timeouts import CLOCK, RewardTimeoutError
from lightning_rl.rewards import RewardError, Rewards


def scores(rewards: Any, seconds: float | None = 0.3) -> Scores:
    return scores_of(Rewards(rewards, timeout=seconds), ["q"], ["a"], completion_ids=[[1]], columns={})


def sleep(*_: Any, **__: Any) -> list[float]:
    time.sleep(1000)
    return [0.0]


def loop(*_: Any, **__: Any) -> list[float]:
    while True:
        pass


def backtrack(*_: Any, **__: Any) -> list[float]:
    return [float(bool(re.fullmatch(r"(a|a)*b", "a" * 60)))]


def swallow(*_: Any, **__: Any) -> list[float]:
    try:
        time.sleep(1000)
    except Exception:  # noqa: BLE001  as in a reward that gives 0 to text that it cannot parse
        return [0.0]
    return [1.0]


def endless(*_: Any, **__: Any) -> Any:
    time.sleep(1000)
    yield 1.0


async def wait(*_: Any, **__: Any) -> list[float]:
    await asyncio.sleep(1000)
    return [0.0]


@pytest.mark.parametrize("reward", [sleep, loop, backtrack, swallow, endless, wait])
def test_a_call_that_hangs_fails_its_rows_in_time(reward: Any) -> None:
    begin = time.monotonic()
    found = scores({"stuck": reward, "fine": lambda *_, **__: [1.0]})
    assert time.monotonic() - begin < 10
    assert [call.failures for call in found.calls][1] == [] and found.raw["fine"].tolist() == [1.0]
    assert found.calls[0].failures[0].cause == "took longer than 0.3 s" and found.failed.tolist() == [True]


def test_math_verify_works_under_the_limit() -> None:
    module = pytest.importorskip("math_verify")

    def verified(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(module.verify(module.parse("$0.5$"), module.parse(r"$\frac{1}{2}$")))]

    assert scores(verified, 60.0).total.tolist() == [1.0]


def test_the_limit_ends_with_the_call() -> None:
    with pytest.raises(RewardTimeoutError, match=r"took longer than 0.05 s"):
        CLOCK.run(lambda: time.sleep(1000), 0.05)
    assert CLOCK.run(lambda: 5, 0.05) == 5 and CLOCK.run(lambda: 6, None) == 6
    time.sleep(0.1)  # no signal is left


def test_a_call_in_another_thread_has_no_limit() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(CLOCK.run(lambda: time.sleep(0.1) or 7, 0.01)))
    thread.start()
    thread.join()
    assert results == [7]


def test_exceptions_and_interrupts_pass() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CLOCK.run(interrupted, 5.0)
    assert not CLOCK.running


def answer_anyway(*_: Any, **__: Any) -> list[float]:
    try:
        time.sleep(1000)
    except:  # noqa: E722
        return [0.0]
    return [1.0]


def test_the_result_of_a_call_that_catches_the_timeout_is_dropped() -> None:
    found = scores(answer_anyway)
    assert found.failed.tolist() == [True] and not found.scored.any()
    assert "took longer than 0.3 s and caught the timeout: wrap it in SubprocessReward" in (
        found.calls[0].failures[0].cause
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [sleep, wait])
def test_a_signal_to_the_run_interrupts_a_hanging_reward_and_a_resume_begins_with_its_rollout(
    kind: Any, tmp_path: Path
) -> None:
    calls: list[int] = []

    def hangs(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) < 3:
            return parity_reward(prompts, completions, completion_ids=completion_ids)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return kind()

    def run(reward: Any, ckpt_path: Path | None = None) -> Any:
        module = tiny_module(rewards=reward, allow_config_changes=["rewards"])
        fit(module, data=tiny_prompts(16, 4), default_root_dir=tmp_path, ckpt_path=ckpt_path)
        return weights_of(module)

    begin = time.monotonic()
    ending = pytest.raises(RewardError, match=r"rollout 2 was interrupted .* because SIGTERM stopped the run")
    with pytest.warns(UserWarning, match="was interrupted, because SIGTERM"), ending:
        run(hangs)
    assert time.monotonic() - begin < 30
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 2
    whole, resumed = run(parity_reward), run(parity_reward, tmp_path / INTERRUPTED)
    assert all(torch.equal(weight, whole[name]) for name, weight in resumed.items())
