"""Limit: a call in place that does not come back is ended, whatever it does, and the run that is told to stop stops."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, parity_reward, tiny_module, tiny_prompts, weights_of

from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.rewards import RewardError, Rewards, Scores, timeouts
from lightning_rl.rewards.timeouts import CLOCK, IntervalTimer, PosixTimer, RewardTimeoutError


def scores(rewards: Any, seconds: float | None = 0.3) -> Scores:
    return Rewards(rewards, seconds=seconds)(["q"], ["a"], completion_ids=[[1]], columns={})


def sleep_for_ever(*_: Any, **__: Any) -> list[float]:
    time.sleep(1000)
    return [0.0]


def loop_for_ever(*_: Any, **__: Any) -> list[float]:
    while True:
        pass


def backtrack(*_: Any, **__: Any) -> list[float]:
    return [float(bool(re.fullmatch(r"(a|a)*b", "a" * 60)))]


def swallow(*_: Any, **__: Any) -> list[float]:
    try:
        time.sleep(1000)
    except Exception:  # noqa: BLE001  as a reward does that gives 0 to whatever it cannot parse
        return [0.0]
    return [1.0]


def alarms(*_: Any, **__: Any) -> list[float]:
    """Has a time limit of its own, as math-verify does, and hangs after it."""

    def ring(*_: Any) -> None:
        raise ValueError("too long")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(1)
    try:
        time.sleep(1000)
    except ValueError:
        signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    time.sleep(1000)
    return [0.0]


def endless(*_: Any, **__: Any) -> Any:
    time.sleep(1000)
    yield 1.0


async def wait_for_ever(*_: Any, **__: Any) -> list[float]:
    await asyncio.sleep(1000)
    return [0.0]


async def block(*_: Any, **__: Any) -> list[float]:
    time.sleep(3)
    return [0.0]


@pytest.mark.parametrize("reward", [sleep_for_ever, loop_for_ever, backtrack, swallow, endless, wait_for_ever])
def test_a_call_that_does_not_come_back_fails_its_rows_in_time(reward: Any) -> None:
    begin = time.monotonic()
    found = scores({"stuck": reward, "fine": lambda *_, **__: [1.0]})
    assert time.monotonic() - begin < 10
    assert [call.failures for call in found.calls][1] == [] and found.raw["fine"].tolist() == [1.0]
    assert found.calls[0].failures[0].cause == "took longer than 0.3 s" and found.failed.tolist() == [True]


@pytest.mark.slow
def test_a_reward_with_an_alarm_of_its_own_keeps_it_and_loses_no_limit() -> None:
    found = scores(alarms, 1.5)
    assert found.calls[0].failures[0].cause == "took longer than 1.5 s"
    assert found.calls[0].failures[0].traceback.count("in alarms") == 1, "it hung after its own alarm, in its last line"


@pytest.mark.slow
def test_a_coroutine_that_blocks_the_loop_costs_no_later_one() -> None:
    assert scores(block).calls[0].failures[0].cause == "took longer than 0.3 s"

    async def fine(*_: Any, **__: Any) -> list[float]:
        return [1.0]

    assert scores(fine, 20.0).total.tolist() == [1.0]


def test_math_verify_works_under_the_limit() -> None:
    module = pytest.importorskip("math_verify")

    def verified(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(module.verify(module.parse("$0.5$"), module.parse(r"$\frac{1}{2}$")))]

    assert scores(verified, 60.0).total.tolist() == [1.0]


@pytest.mark.parametrize("make", [PosixTimer, IntervalTimer])
def test_either_timer_rings_and_leaves_nothing_behind(make: Callable[[], Any]) -> None:
    clock = timeouts.Clock(timer=make())
    before = signal.getsignal(make().signal)
    with pytest.raises(RewardTimeoutError, match=r"took longer than 0.05 s"):
        clock.run(lambda: time.sleep(1000), 0.05)
    assert clock.run(lambda: 5, 0.05) == 5 and clock.run(lambda: 6, None) == 6
    assert signal.getsignal(make().signal) == before
    time.sleep(0.1)  # nothing rings any more


def test_in_another_thread_a_call_has_all_its_time() -> None:
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


def retry(*_: Any, **__: Any) -> list[float]:
    while True:
        try:
            time.sleep(1000)
        except:  # noqa: E722  as around a request
            time.sleep(0.2)


def insist(*_: Any, **__: Any) -> list[float]:
    while True:
        try:
            sum(range(1000))
        except BaseException:  # noqa: BLE001
            continue


def answer_anyway(*_: Any, **__: Any) -> list[float]:
    try:
        time.sleep(1000)
    except:  # noqa: E722
        return [0.0]
    return [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("reward", [retry, insist])
def test_a_loop_that_swallows_everything_is_told_ever_sooner(reward: Any) -> None:
    begin = time.monotonic()
    assert scores(reward).failed.tolist() == [True] and time.monotonic() - begin < 20


def test_what_a_late_call_says_in_spite_of_its_end_is_not_taken() -> None:
    found = scores(answer_anyway)
    assert found.failed.tolist() == [True] and not found.scored.any()
    assert "took longer than 0.3 s and caught the timeout: wrap it in SubprocessReward" in (
        found.calls[0].failures[0].cause
    )


HOLDS = """
import os, signal, sys, threading, time
from lightning_rl.rewards import limit
from tests.kit.support import fit, tiny_module, tiny_prompts
limit.HURRY, limit.LAST, limit.AGAIN = 0.3, 1.0, 2.0

def holds(completions, **_):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        try: time.sleep(1000)
        except: pass

fit(tiny_module(rewards=holds), data=tiny_prompts(16, 4), default_root_dir=sys.argv[1])
"""


@pytest.mark.slow
def test_a_call_that_holds_on_is_left_with_a_checkpoint_and_the_status_of_the_signal(tmp_path: Path) -> None:
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=paths)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-2000:]
    assert "because SIGTERM stopped the run and does not return: wrap it in SubprocessReward" in done.stderr
    assert "in holds" in done.stderr
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sleep_for_ever, wait_for_ever])
def test_a_run_that_is_told_to_stop_leaves_a_hanging_reward_and_resumes_with_its_rollout(
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


@pytest.mark.slow
def test_prints_and_a_debugger_work_in_place() -> None:
    code = (
        "from lightning_rl.rewards import Rewards\n"
        "def look(prompts, completions, **_):\n    print('seen', completions)\n    breakpoint()\n    return [1.0]\n"
        "print(Rewards(look)(['q'], ['a'], completion_ids=[[1]], columns={}).total.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="p prompts\nc\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert "seen ['a']" in done.stdout and "(Pdb) ['q']" in done.stdout and done.stdout.strip().endswith("[1.0]")
