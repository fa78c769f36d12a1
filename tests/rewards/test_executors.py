"""Executors of others make the calls: threads, processes, and Dask's workers, as its package is installed or not."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, weights_of

from lightning_rl.rewards import Rewards, Scores, SubprocessReward

pytestmark = pytest.mark.slow
WORKERS = 2


@pytest.fixture(scope="module", params=["threads", "processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """One with two workers."""
    if request.param == "dask":
        with dask() as made:
            yield made
        return
    kinds = {"threads": lambda: ThreadPoolExecutor(WORKERS), "processes": processes}
    with kinds[request.param]() as made:
        yield ready(made)


@contextmanager
def dask() -> Iterator[Executor]:
    """That of a client of Dask, with processes of this machine as its workers."""
    distributed = pytest.importorskip("dask.distributed")
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield ready(client.get_executor())


def ready(executor: Executor) -> Executor:
    """The same, once a worker has loaded the library, which takes its time."""
    reward = SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=executor, seconds=240.0)
    assert scores(reward, ["warm"]).total.tolist() == [1.0]
    return executor


def processes() -> Executor:
    return ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("forkserver"))


def scores(reward: Any, texts: list[str], **columns: Any) -> Scores:
    ids = [[ord(letter) for letter in text] for text in texts]
    return Rewards({"elsewhere": reward})(list(range(len(texts))), texts, completion_ids=ids, columns=columns)


def causes(found: Scores) -> list[tuple[tuple[int, ...], str]]:
    return [(failure.rows, failure.cause) for failure in found.calls[0].failures]


@pytest.mark.parametrize("per_sample", [False, True])
def test_closures_and_coroutines_run_elsewhere_in_order(per_sample: bool, executor: Executor) -> None:
    bonus = 0.5

    def closure(prompts: Any, completions: Any, answer: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("rows", len(completions))
        return [len(text) + bonus + more for text, more in zip(completions, answer, strict=True)]

    async def judge(completions: Any, **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    texts = ["a", "bbb", "", "cc"]
    found = scores(SubprocessReward(closure, executor=executor, per_sample=per_sample), texts, answer=[0, 10, 20, 30])
    assert found.total.tolist() == [1.5, 13.5, 20.5, 32.5]
    assert found.calls[0].metrics == {"rows": [1, 1, 1, 1] if per_sample else [4]}
    found = scores(SubprocessReward(judge, executor=executor, per_sample=per_sample), texts)
    assert found.total.tolist() == [1.0, 3.0, 0.0, 2.0]


def test_what_is_done_last_keeps_its_place(executor: Executor, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def waits(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if prompts[0]:
            done.touch()
        while not done.exists():
            time.sleep(0.01)
        return [float(prompts[0])]

    assert scores(SubprocessReward(waits, executor=executor, per_sample=True), ["a", "b"]).total.tolist() == [0.0, 1.0]


def test_what_is_raised_and_rubbish_fail_their_rows(executor: Executor) -> None:
    def odd(prompts: Any, completions: Any, **_: Any) -> Any:
        return {"x": "text", "y": [1.0], "n": [float("nan")]}[completions[0]]

    found = scores(SubprocessReward(odd, executor=executor, per_sample=True), ["y", "x", "z", "n"])
    assert found.scored.tolist() == [True, False, False, False]
    (first, raised, nan) = found.calls[0].failures
    assert first.rows == (1,) and first.cause.endswith("got str 'text'") and nan == ((3,), "returned nan", "")
    assert raised.cause == "raised KeyError('z')" and "in odd" in raised.traceback


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_call_that_takes_too_long_fails_and_the_next_one_is_made(
    per_sample: bool, executor: Executor, tmp_path: Path
) -> None:
    over = tmp_path / "over"

    def hangs(prompts: Any, completions: Any, **_: Any) -> list[float]:
        while "hang" in completions and not over.exists():
            time.sleep(0.01)
        return [float(len(text)) for text in completions]

    reward = SubprocessReward(hangs, executor=executor, per_sample=per_sample, seconds=1.0)
    found = scores(reward, ["a", "hang"])
    over.touch()
    if per_sample:
        assert causes(found) == [((1,), "took longer than 1 s for all samples together")]
    else:
        assert causes(found) == [((0, 1), "took longer than 1 s")]
    later = SubprocessReward(hangs, executor=executor, per_sample=per_sample)
    assert scores(later, ["a", "hang"]).total.tolist() == [1.0, 4.0]


def test_a_fit_is_bitwise_that_of_processes_of_its_own(executor: Executor) -> None:
    def rewards(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(text) % 3) for text in completions]

    def train(reward: SubprocessReward) -> dict[str, Any]:
        module = tiny_module(rewards=reward)
        fit(module, data=tiny_prompts(8, 4))
        return weights_of(module)

    expected, weights = train(SubprocessReward(rewards)), train(SubprocessReward(rewards, executor=executor))
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def deadly() -> Any:
    """A reward that ends its worker at one word; a closure, so that it is pickled whole."""

    def dies(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if "die" in completions:
            os._exit(3)
        return [1.0] * len(completions)

    return dies


def test_workers_that_die_lose_their_rows_and_a_broken_executor_is_said_to_be() -> None:
    with processes() as made:
        executor = ready(made)
        reward = SubprocessReward(deadly(), executor=executor)
        assert scores(reward, ["a"]).total.tolist() == [1.0]
        ((rows, cause),) = causes(scores(reward, ["a", "die"]))
        assert rows == (0, 1) and cause.startswith("lost its worker: BrokenProcessPool(")
        ((rows, cause),) = causes(scores(reward, ["a"]))
        assert rows == (0,) and cause.startswith("could not be submitted to its executor: BrokenProcessPool(")


def test_a_worker_of_dask_that_dies_every_time_loses_its_sample_alone() -> None:
    with dask() as executor:
        found = scores(
            SubprocessReward(deadly(), executor=executor, per_sample=True, seconds=240.0), ["a", "die", "bb"]
        )
    assert found.scored.tolist() == [True, False, True]
    ((rows, cause),) = causes(found)
    assert rows == (1,) and "KilledWorker" in cause


class Unloadable:
    """What no worker can load."""

    def __reduce__(self) -> tuple[Any, ...]:  # noqa: D105
        return (int, ("no number",))


def test_a_reward_that_cannot_be_loaded_and_an_executor_that_is_closed_are_said() -> None:
    unloadable = Unloadable()
    with ThreadPoolExecutor(1) as executor:
        ((_, cause),) = causes(scores(SubprocessReward(lambda *_, **__: unloadable, executor=executor), ["a"]))
        assert cause.startswith("could not be loaded in a worker: Traceback") and "ValueError" in cause
    ((_, cause),) = causes(scores(SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=executor), ["a"]))
    assert cause.startswith("could not be submitted to its executor: RuntimeError('cannot schedule new futures")


def test_what_is_no_executor_and_limits_that_it_cannot_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected executor to be a concurrent.futures.Executor, got 'dask'"):
        SubprocessReward(len, executor="dask")  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ValueError, match='expected no "memory", "environment" with executor='):
            SubprocessReward(len, executor=executor, memory=2**30, environment={"HOME": "/tmp"})
        with pytest.raises(ValueError, match='expected no "processes" with executor='):
            SubprocessReward(len, executor=executor, processes=4)


class Odd(Executor):
    """Hands out what it was made with, in the place of what a worker says."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def submit(self, *_: Any, **__: Any) -> Any:
        """The same for every call."""
        return self.said


@pytest.mark.parametrize("said", ["rubbish", None, b"rubbish", b"\x80\x05N."], ids=["text", "nothing", "bytes", "none"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_what_no_worker_says_fails_its_rows_at_once(said: Any, per_sample: bool) -> None:
    future = Future[Any]()
    future.set_result(said)
    reward = SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=Odd(future), per_sample=per_sample)
    found = causes(scores(reward, ["a", "b"]))
    assert found[0][1].startswith("got an invalid result from its executor")


def test_an_executor_whose_submit_returns_no_future_is_said() -> None:
    ((_, cause),) = causes(scores(SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=Odd(b"")), ["a"]))
    assert cause.startswith("could not be submitted to its executor: TypeError('its submit() returned no Future, but")
