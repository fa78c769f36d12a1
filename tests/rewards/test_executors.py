"""SubprocessReward rewards on an executor: threads, processes, and workers of Dask if it is installed."""

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

WORKERS = 2


@pytest.fixture(scope="module", params=["threads", "processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Executor with two workers."""
    if request.param == "dask":
        with dask() as made:
            yield made
        return
    kinds = {"threads": lambda: ThreadPoolExecutor(WORKERS), "processes": processes}
    with kinds[request.param]() as made:
        yield ready(made)


@contextmanager
def dask() -> Iterator[Executor]:
    """Executor of a Dask client with local processes."""
    distributed = pytest.importorskip("dask.distributed")
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield ready(client.get_executor())


def ready(executor: Executor) -> Executor:
    """Return the executor after a worker has loaded the library."""
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


@pytest.mark.nightly
def test_closures_and_coroutines_run_elsewhere_in_order(executor: Executor) -> None:
    bonus = 0.5

    def closure(prompts: Any, completions: Any, answer: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("rows", len(completions))
        return [len(text) + bonus + more for text, more in zip(completions, answer, strict=True)]

    async def judge(completions: Any, **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    texts = ["a", "bbb", "", "cc"]
    for per_sample, rows in ((False, [4]), (True, [1, 1, 1, 1])):
        found = scores(
            SubprocessReward(closure, executor=executor, per_sample=per_sample), texts, answer=[0, 10, 20, 30]
        )
        assert found.total.tolist() == [1.5, 13.5, 20.5, 32.5] and found.calls[0].metrics == {"rows": rows}
    assert scores(SubprocessReward(judge, executor=executor), texts).total.tolist() == [1.0, 3.0, 0.0, 2.0]


@pytest.mark.nightly
def test_values_keep_their_places(executor: Executor, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def waits(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if prompts[0]:
            done.touch()
        while not done.exists():
            time.sleep(0.01)
        return [float(prompts[0])]

    assert scores(SubprocessReward(waits, executor=executor, per_sample=True), ["a", "b"]).total.tolist() == [0.0, 1.0]


def test_a_call_that_takes_too_long_fails_and_the_next_one_is_made(executor: Executor, tmp_path: Path) -> None:
    over = tmp_path / "over"

    def hangs(prompts: Any, completions: Any, **_: Any) -> list[float]:
        while "hang" in completions and not over.exists():
            time.sleep(0.01)
        return [float(len(text)) for text in completions]

    found = scores(SubprocessReward(hangs, executor=executor, per_sample=True, seconds=1.0), ["a", "hang"])
    over.touch()
    assert causes(found) == [((1,), "took longer than 1 s for all samples together")]
    assert scores(SubprocessReward(hangs, executor=executor), ["a", "hang"]).total.tolist() == [1.0, 4.0]


@pytest.mark.nightly
def test_a_fit_equals_that_of_local_processes(executor: Executor) -> None:
    def rewards(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(len(text) % 3) for text in completions]

    def train(reward: SubprocessReward) -> dict[str, Any]:
        module = tiny_module(rewards=reward)
        fit(module, data=tiny_prompts(8, 4))
        return weights_of(module)

    expected, weights = train(SubprocessReward(rewards)), train(SubprocessReward(rewards, executor=executor))
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def deadly() -> Any:
    """Return a reward that ends its worker at one word; a closure, so that it is pickled by value."""

    def dies(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if "die" in completions:
            os._exit(3)
        return [1.0] * len(completions)

    return dies


@pytest.mark.nightly
def test_workers_that_die_fail_their_rows_and_a_broken_executor_fails_later_ones() -> None:
    with processes() as made:
        executor = ready(made)
        reward = SubprocessReward(deadly(), executor=executor)
        assert scores(reward, ["a"]).total.tolist() == [1.0]
        ((rows, cause),) = causes(scores(reward, ["a", "die"]))
        assert rows == (0, 1) and cause.startswith("failed in its executor: BrokenProcessPool(")
        ((rows, cause),) = causes(scores(reward, ["a"]))
        assert rows == (0,) and cause.startswith("failed in its executor: BrokenProcessPool(")


def test_a_worker_of_dask_that_dies_every_time_fails_only_its_sample() -> None:
    with dask() as executor:
        found = scores(
            SubprocessReward(deadly(), executor=executor, per_sample=True, seconds=240.0), ["a", "die", "bb"]
        )
    assert found.scored.tolist() == [True, False, True]
    ((rows, cause),) = causes(found)
    assert rows == (1,) and "KilledWorker" in cause


class Unloadable:
    """Object that no worker can load."""

    def __reduce__(self) -> tuple[Any, ...]:  # noqa: D105
        return (int, ("no number",))


def test_a_reward_that_cannot_be_loaded_and_a_closed_executor_fail_their_rows() -> None:
    unloadable = Unloadable()
    with ThreadPoolExecutor(1) as executor:
        ((_, cause),) = causes(scores(SubprocessReward(lambda *_, **__: unloadable, executor=executor), ["a"]))
        assert cause.startswith("could not be loaded in a process: Traceback") and "ValueError" in cause
    ((_, cause),) = causes(scores(SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=executor), ["a"]))
    assert cause.startswith("failed in its executor: RuntimeError('cannot schedule new futures")


def test_other_objects_and_limits_of_processes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected executor to be a concurrent.futures.Executor, got 'dask'"):
        SubprocessReward(len, executor="dask")  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(ValueError, match='expected no "memory", "environment" with executor='):
            SubprocessReward(len, executor=executor, memory=2**30, environment={"HOME": "/tmp"})
        with pytest.raises(ValueError, match='expected no "processes" with executor='):
            SubprocessReward(len, executor=executor, processes=4)


class Odd(Executor):
    """Executor that returns bytes that are no result."""

    def submit(self, *_: Any, **__: Any) -> Any:
        """Return a future with the bytes."""
        future = Future[Any]()
        future.set_result(b"bytes")
        return future


def test_an_invalid_result_fails_its_rows_at_once() -> None:
    found = causes(scores(SubprocessReward(lambda _, c, **__: [1.0] * len(c), executor=Odd()), ["a", "b"]))
    assert found[0][1].startswith("failed in its executor: UnpicklingError(")
