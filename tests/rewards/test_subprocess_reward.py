"""SubprocessReward rewards: a process that crashes, hangs or leaks fails only its rows, and nothing of it is left."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.marks import gone, pids_with, wait_for
from kit.scores import Scores, scores_of
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from transformers import TrainerState

from lightning_rl.rewards import Failure, Rewards, SubprocessReward

MADE: list[SubprocessReward] = []
PLACES: list[Callable[[int], Any]] = []


def isolated(reward: Any, processes: int = 2, **options: Any) -> SubprocessReward:
    MADE.append(SubprocessReward(reward, processes=PLACES[-1](processes), **options))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _check_that_no_process_is_left(place: Callable[[int], Any]) -> Iterator[None]:
    PLACES.append(place)
    yield
    while MADE:
        reward = MADE.pop()
        pids = reward.pids()
        reward.close()
        assert all(map(eventually_dead, pids))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually_dead(pid: int) -> bool:
    return wait_for(lambda: not is_alive(pid), 20.0)


def scores(reward: Any, texts: list[str], **columns: Any) -> Scores:
    ids = [[ord(letter) for letter in text] for text in texts]
    return scores_of({"isolated": reward}, list(range(len(texts))), texts, completion_ids=ids, columns=columns)


def causes(found: Scores) -> list[tuple[tuple[int, ...], str]]:
    return [(failure.rows, failure.cause) for failure in found.calls[0].failures]


def test_closures_lambdas_and_coroutines_run_elsewhere_in_order() -> None:
    here, bonus = os.getpid(), 0.5

    def closure(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        assert os.getpid() != here and os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return [len(text) + bonus + more for text, more in zip(completions, answer, strict=True)]

    async def judge(completions: Any, **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    texts = ["a", "bbb", "", "cc"]
    for per_sample in (False, True):
        found = scores(isolated(closure, per_sample=per_sample), texts, answer=[0, 10, 20, 30])
        assert found.total.tolist() == [1.5, 13.5, 20.5, 32.5]
    assert scores(isolated(judge), texts).total.tolist() == [1.0, 3.0, 0.0, 2.0]
    assert scores(isolated(lambda _, c, **__: [1.0] * len(c)), texts).total.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda: os._exit(3), "lost its process, which exited with status 3"),
        (lambda: os._exit(0), "lost its process, which exited with status 0"),
        (lambda: sys.exit(0), "raised SystemExit(0)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "lost its process, which was ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "lost its process, which was ended by SIGKILL"),
    ],
    ids=["exit", "exit-0", "sys-exit", "segfault", "kill"],
)
def test_a_process_that_dies_loses_its_rows_alone(end: Any, cause: str) -> None:
    def dies(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if "die" in completions:
            end()
        return [float(len(text)) for text in completions]

    reward = isolated(dies, per_sample=True)
    found = scores(reward, ["a", "die", "bb", "die", "cc"])
    assert found.scored.tolist() == [True, False, True, False, True] and found.total.tolist() == [1.0, 0, 2, 0, 2]
    assert causes(found) == [((1, 3), cause)]
    assert scores(reward, ["again"]).total.tolist() == [5.0]
    found = scores(isolated(dies), ["a", "die", "bb"])
    assert causes(found) == [((0, 1, 2), cause)]


def test_exceptions_and_invalid_values_fail_their_rows() -> None:
    def odd(prompts: Any, completions: Any, **_: Any) -> Any:
        return {"x": "text", "y": [1.0], "n": [float("nan")]}[completions[0]]

    found = scores(isolated(odd, per_sample=True), ["y", "x", "z", "n"])
    assert found.scored.tolist() == [True, False, False, False]
    (first, raised, nan) = found.calls[0].failures
    assert (
        first.rows == (1,)
        and first.cause.endswith("got str 'text'")
        and nan == Failure((3,), "returned nan", kind="invalid")
    )
    assert raised.cause == "raised KeyError('z')" and "in odd" in raised.traceback


def dies_hangs_or_raises(prompts: Any, completions: Any, **_: Any) -> Any:
    if completions[0] == "dies":
        os._exit(3)
    if completions[0] == "hangs":
        time.sleep(1000)
    return {"invalid": "text"}[completions[0]]


@pytest.mark.parametrize(
    ("text", "kind"), [("dies", "lost process"), ("hangs", "timeout"), ("raises", "KeyError"), ("invalid", "invalid")]
)
def test_a_failure_has_the_same_kind_wherever_the_reward_runs(text: str, kind: str) -> None:
    elsewhere = isolated(dies_hangs_or_raises, seconds=0.5)
    for reward in [elsewhere] if text == "dies" else [elsewhere, dies_hangs_or_raises]:
        (call,) = Rewards(reward, timeout=0.5)(["q"], [text], completion_ids=[[1]], columns={})
        assert [failure.kind for failure in call.failures] == [kind]


class Unreadable:
    """Value that only the process of the reward can hold."""

    def __reduce__(self) -> Any:  # noqa: D105
        return int, ("not a number",)


def test_values_and_extras_that_cannot_be_unpickled_fail_their_rows() -> None:
    def odd(completions: Any, log_extra: Any, **_: Any) -> Any:
        log_extra("extra", [Unreadable() if text == "extra" else 0 for text in completions])
        return [Unreadable() if text == "value" else 1.0 for text in completions]

    found = scores(isolated(odd, per_sample=True), ["value", "fine", "extra"])
    assert found.scored.tolist() == [False, True, False]
    ((rows, cause),) = causes(found)
    assert rows == (0, 2) and cause.startswith("returned a value that cannot be unpickled: ValueError(")


def test_a_reward_or_column_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def holds_lock(completions: Any, **_: Any) -> Any:
        return [float(lock.locked())] * len(completions)

    with pytest.raises(
        ValueError, match=r"expected a reward holds_lock that can be sent to another process, got .*lock"
    ):
        scores(isolated(holds_lock), ["a"])
    with pytest.raises(ValueError, match=r"expected a column answer that can be sent to another process, got .*lock"):
        scores(isolated(lambda **_: [1.0]), ["a"], answer=[lock])


HANGS = """
import signal, sys, time
from lightning_rl.rewards import SubprocessReward

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background

def hangs(completions, **columns):
    time.sleep(1_000)

SubprocessReward(hangs, environment={"MARK": sys.argv[1]})(["q"], ["a"])
"""


@pytest.mark.parametrize("place", ["here"], indirect=True)
def test_an_interrupted_call_ends_its_processes_and_the_trainer(tmp_path: Path) -> None:
    mark = str(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HANGS, f"{mark}/"]) as trainer:
        assert wait_for(lambda: len(pids_with(mark)) == 5), "trainer, server and worker with their guards"
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait(20) == -signal.SIGINT
    assert gone(mark)


def test_a_direct_call_warns_of_failures() -> None:
    def breaks(completions: Any, **_: Any) -> Any:
        return [1.0 / len(completions[0])]

    with pytest.warns(
        UserWarning, match=r"reward breaks raised ZeroDivisionError(.|\n)*for rows \[0\](.|\n)*in breaks"
    ):
        assert math.isnan(isolated(breaks)(["q"], [""])[0] or 0.0)


def test_a_sample_that_hangs_fails_alone_and_its_process_is_replaced() -> None:
    def sleepy(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if prompts[0] % 10 == 7:
            time.sleep(10_000)
        return [1.0]

    reward = isolated(sleepy, per_sample=True, seconds=2.0, processes=2)
    found = scores(reward, ["x"] * 20)
    assert causes(found) == [((7, 17), "took longer than 2 s")] and found.scored.sum() == 18
    assert len(reward.pids()) <= (6 if PLACES[-1] is int else 8), "servers, two workers and their guards"


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    def hangs(prompts: Any, completions: Any, **_: Any) -> list[float]:
        child = subprocess.Popen(["sleep", "1000"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:  # a daemon, outside of the process group
                (tmp_path / "pids").write_text(f"{os.getppid()} {child.pid} {os.getpid()}")
                time.sleep(1000)
            time.sleep(0.5)
            os._exit(0)
        time.sleep(1000)
        return [1.0]

    found = scores(isolated(hangs, seconds=2.0), ["a", "b"])
    assert causes(found) == [((0, 1), "took longer than 2 s")]
    assert all(eventually_dead(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_started_call_runs_before_its_result_is_collected(tmp_path: Path) -> None:
    def touches(prompts: Any, completions: Any, **_: Any) -> list[float]:
        (tmp_path / "done").touch()
        return [2.0] * len(prompts)

    rewards = Rewards({"isolated": isolated(touches), "here": lambda _, c, **__: [1.0] * len(c)})
    rows: dict[str, Any] = {"prompts": ["q"], "completions": ["a"], "completion_ids": [[1]], "columns": {}}
    started = rewards.start(**rows)
    assert list(started) == ["isolated"] and wait_for((tmp_path / "done").exists)
    (tmp_path / "done").unlink()
    assert scores_of(rewards, **rows, started=started).total.tolist() == [3.0]
    assert not (tmp_path / "done").exists()


def test_a_reward_that_takes_the_trainer_state_does_not_start_early() -> None:
    def asks(prompts: Any, completions: Any, trainer_state: Any, **_: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(prompts)

    rewards = Rewards({"isolated": isolated(asks)})
    rows: dict[str, Any] = {"prompts": ["q"], "completions": ["a"], "completion_ids": [[1]], "columns": {}}
    assert rewards.start(**rows) == {}
    assert scores_of(rewards, **rows, trainer_state=TrainerState(global_step=6)).total.tolist() == [6.0]


def test_processes_are_started_once_and_keep_their_state() -> None:
    def counts(prompts: Any, completions: Any, *, state: Any = {}, **_: Any) -> list[float]:  # noqa: B006
        state["calls"] = state.get("calls", 0) + 1
        return [float(state["calls"])] * len(prompts)

    reward = isolated(counts, processes=1)
    assert [scores(reward, ["a"]).total.tolist() for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_extras_and_metrics_are_returned_with_the_values() -> None:
    def notes(prompts: Any, completions: Any, log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("length", [len(text) for text in completions])
        log_metric("number", len(completions))
        return [0.0] * len(completions)

    call = scores(isolated(notes, per_sample=True), ["a", "bb"]).calls[0]
    assert call.extras == {"length": [1, 2]} and call.metrics == {"number": [1.0, 1.0]}


def test_too_much_memory_fails_the_rows() -> None:
    def greedy(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(bytearray(2**30)))]

    assert causes(scores(isolated(greedy, memory=2**29), ["a"])) == [((0,), "raised MemoryError()")]


def test_a_function_that_cannot_be_loaded_fails_its_rows() -> None:
    class Odd:
        def __call__(self, prompts: Any, completions: Any, **_: Any) -> list[float]:
            return [1.0] * len(prompts) + [len(completions)]

        def __reduce__(self) -> Any:
            return (int, ("no number",))

    ((rows, cause),) = causes(scores(isolated(Odd()), ["a", "b"]))
    assert rows == (0, 1) and cause.startswith("could not be loaded in a process: Traceback") and "no number" in cause


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples of earlier weights")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_fit_with_isolated_rewards_equals_the_one_without(staleness: int) -> None:
    def parity(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        return [float(len(ids) % 2) for ids in completion_ids]

    def weights(reward: Any) -> Any:
        module = tiny_module(rewards={"parity": reward}, max_staleness=staleness)
        fit(module, data=tiny_prompts(12, 4))
        return weights_of(module)

    plain = weights(parity)
    reward = isolated(parity, per_sample=True)
    assert all((weight == plain[name]).all() for name, weight in weights(reward).items())
    assert reward.pids() == []
