"""Worker processes: an environment that hangs, dies, floods or forks costs its own conversation and leaves nothing."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from kit.conversations import response_of, wanted
from kit.forks import PATH, Fork
from kit.marks import gone, pids_with, wait_for
from typing_extensions import override

from lightning_rl import FakeEngine, FinishReason, SamplingParams
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.environments import (
    Action,
    Conversation,
    ConversationLimits,
    Environment,
    StepResult,
    TokenEnvironment,
    TokenStep,
    converse,
)
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.generation import Request
from lightning_rl.generation import engine as engine_module
from lightning_rl.processes.errors import CallError
from lightning_rl.samples import Trajectory

SAMPLING = SamplingParams(max_new_tokens=20, eos_token_ids=[9])
MARK = f"environments-{uuid.uuid4()}"  # in the environment of every process that a pool starts, and of their children
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test


def nothing_is_left(*but: int) -> bool:
    return gone(MARK, but)


def double_fork() -> None:
    subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True)


def fork() -> None:
    if os.fork() == 0:
        time.sleep(1000)


def sleep_without_end() -> Any:
    while True:
        try:
            time.sleep(1000)
        except BaseException:  # noqa: BLE001  no exception ends it
            continue


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


FIGURE: Any = np.float32(1.5)
WORDS: Any = ["a"]
LATE = "timeout: the environment took longer than 4.5 s for a conversation (timeout)"
ENDS: dict[str, tuple[Callable[[], Any], str]] = {  # with the failure
    "raise": (lambda: {}["gone"], "KeyError: 'gone'"),
    "hang": (sleep_without_end, LATE),  # a whole step first, then the rest of the conversation
    "exit": (lambda: os._exit(3), "lost process: the process exited with status 3 in step"),
    "sys-exit": (lambda: sys.exit(4), "SystemExit: 4"),
    "kill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "lost process: the process was ended by SIGKILL in step",
    ),
    "crash": (
        lambda: ctypes.string_at(0),
        "lost process: the process was ended by SIGSEGV in step",
    ),
    "text": (
        lambda: TokenStep(token_ids=WORDS),
        "TypeError: expected a token id in what Bad.step returns, got str 'a'",
    ),
    "object": (
        lambda: TokenStep(token_ids=[1], messages=user(object())),
        "TypeError: expected plain values, lists and mappings from an environment, got object",
    ),
}
HARMLESS: dict[str, Callable[[], Any]] = {
    "fork": fork,
    "double-fork": double_fork,
    "both": os.fork,
    "thread": start_thread,
}


class Bad(TokenEnvironment):
    """Echoes for three turns; in the second it does what its row names."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        self.row, self.turn = row, 0
        return [row["sample"] % 7, seed % 7]

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.turn += 1
        if self.turn == 2 and self.row["end"] in ENDS:
            return ENDS[self.row["end"]][0]()
        if self.turn == 2 and self.row["end"] in HARMLESS:
            HARMLESS[self.row["end"]]()
        if self.turn == 3:
            return TokenStep(done=True, reward=self.row["sample"] + 0.5)
        return TokenStep(token_ids=[5, *token_ids])

    @override
    def close(self) -> None: ...


class FailsOnce(Bad):
    """Raises in the second turn unless a file is there, which it writes before."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        if self.turn == 1 and not Path(self.row["file"]).exists():
            Path(self.row["file"]).touch()
            raise OSError("for once")
        return super().step(token_ids, finish)


class Waits(Bad):
    """Never ends its first step, in which it writes a file."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        Path(self.row["file"]).touch()
        return sleep_without_end()


class InMessages(Environment):
    """Draws from every global generator of its process."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[Any]:
        return user(row["question"])

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.turn:
            return StepResult(rewritten=user(answer.text))
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return StepResult(messages=user(f"{answer.text} {drawn}"), metrics={"drawn": FIGURE})


def breaks() -> Any:
    raise RuntimeError("no data")


@pytest.fixture(scope="module", autouse=True)
def _marked(place: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    assert place, "a cluster has started without the mark"
    empty = tmp_path_factory.mktemp("forks") / "empty.py"
    empty.touch()
    Fork(0, [str(empty)], dict(os.environ), empty).wait()  # starts the parent of forks without the mark
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK", MARK)
        patch.setattr(engine_module, "LINGER", 0.0)
        yield
    assert nothing_is_left()


@pytest.fixture(scope="module")
def pool(_marked: None, place: Callable[[int], Any]) -> Iterator[WorkerPool]:
    factories: dict[str, Any] = {
        "bad": Bad,
        "messages": InMessages,
        "lambda": lambda: Bad(),
        "once": FailsOnce,
        "waits": Waits,
    }
    factories |= {"breaks": breaks}
    made = WorkerPool(factories, workers=place(8), step_seconds=3.0, conversation_seconds=4.5)
    yield made
    made.close()
    assert nothing_is_left(), "closing ends everything that a pool started"


def run(
    pool: WorkerPool, ends: Sequence[str], name: str = "bad", *, retry: bool = True, **row: Any
) -> list[Trajectory]:
    conversations: list[Conversation] = []
    for sample, end in enumerate(ends):
        first = Request(prefix_ids=(1,), sample_id=sample, seed=sample, sampling=SAMPLING)
        budget = pool.budget()

        def make(budget: Any = budget) -> Any:
            return pool.open(name, budget)

        sample_of_row = wanted(first, sample=sample, end=end, **row)
        again = make if retry else None
        conversations.append(Conversation(make(), sample_of_row, ConversationLimits(), again=again, seed=3))
    engine = FakeEngine(lambda request: (sum(request.prefix_ids) % 5, 9))
    engine.load_weights([], 0)
    with pool.executor() as executor:
        return converse(conversations, engine, executor=executor, limit=pool.workers)


@pytest.mark.nightly
def test_each_kind_of_failure_costs_its_own_conversation_alone(pool: WorkerPool) -> None:
    kinds = [*ENDS, *HARMLESS]
    ends = [end for kind in kinds for end in ("well", "well", kind)]
    clean, trajectories = run(pool, ["well"] * len(ends)), run(pool, ends)
    for sample, (end, trajectory, expected) in enumerate(zip(ends, trajectories, clean, strict=True)):
        if end in ENDS:
            failure = ENDS[end][1]
            assert trajectory.finish == FinishReason.FAILED and trajectory.failure is not None
            assert trajectory.failure.cause.startswith(failure) and trajectory.environment_reward is None
            assert [trajectory.metrics[name] for name in ("retries", "failed", "turns")] == [1, 1, 2]
            assert trajectory.metrics["timeouts"] == {"hang": 2}.get(end, 0), "one for each try"
            assert end != "raise" or "in <lambda>" in trajectory.failure.traceback
        else:
            assert (trajectory.failure, trajectory.environment_reward) == (None, sample + 0.5)
            assert trajectory.metrics["retries"] == 0
            assert response_of(trajectory) == response_of(expected)
    assert nothing_is_left(*pool.pids())


def test_a_second_try_begins_again_with_the_same_seeds(pool: WorkerPool, tmp_path: Path) -> None:
    (trajectory,), (clean,) = run(pool, ["well"], "once", file=str(tmp_path / "failed")), run(pool, ["well"])
    assert (response_of(trajectory), trajectory.finish) == (response_of(clean), FinishReason.STOP)
    assert [each.token_ids for each in trajectory.segments] == [each.token_ids for each in clean.segments]
    assert (trajectory.environment_reward, trajectory.metrics["retries"], trajectory.failure) == (0.5, 1, None)


def test_an_environment_in_messages_returns_plain_values_and_draws_by_its_seed(pool: WorkerPool) -> None:
    state = str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    def talk(seed: int) -> list[Any]:
        environment: Any = pool.open("messages", pool.budget())
        assert isinstance(environment, Environment)
        replies = [environment.reset({"question": "?"}, seed), environment.step(Action(text="!"))]
        assert environment.step(Action(text="!", turn=1)).rewritten == user("!")
        environment.close()
        return replies

    replies = talk(7)
    assert replies == talk(7) and replies[1] != talk(8)[1]
    assert replies[0] == user("?") and replies[1].metrics == {"drawn": 1.5}
    assert state == str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def test_factories_are_sent_or_refused(pool: WorkerPool) -> None:
    assert run(pool, ["well"], "lambda")[0].environment_reward == 0.5
    assert [pool.describe(name).begins_itself for name in ("messages", "bad")] == [True, True]
    lock = threading.Lock()
    with pytest.raises(ValueError, match="a factory for environment x that can be sent to another process, got"):
        WorkerPool({"x": lambda: lock}, workers=1)
    with pytest.raises(ValueError, match="breaks to be created in a worker process, got RuntimeError: no data"):
        pool.describe("breaks")


@pytest.mark.nightly
def test_closing_ends_busy_workers_and_the_pool_can_be_used_again(pool: WorkerPool, tmp_path: Path) -> None:
    trajectories: list[Trajectory] = []
    row = {"retry": False, "file": str(tmp_path / "busy")}
    thread = threading.Thread(target=lambda: trajectories.extend(run(pool, ["well"], "waits", **row)))
    environment: Any = pool.open("bad", pool.budget())
    environment.reset({"sample": 0, "end": "well"}, 0)
    thread.start()
    assert wait_for((tmp_path / "busy").exists)
    pool.close()
    with pytest.raises(CallError, match="the process was ended by SIGKILL in step"):
        environment.step((1,), FinishReason.STOP)
    thread.join(30)
    assert trajectories[0].failure is not None
    assert trajectories[0].failure.cause == "lost process: the process was ended by SIGKILL in step"
    assert nothing_is_left()
    assert run(pool, ["well"])[0].environment_reward == 0.5


def run_script(folder: Path, script: str) -> Fork:
    """Run a script in a fork, and return once it has written the file ``there``."""
    (folder / "run.py").write_text(script)
    (folder / "output").touch()
    environment = {**os.environ, "PYTHONPATH": PATH}
    trainer = Fork(0, [str(folder / "run.py"), str(folder)], environment, folder / "output")
    assert wait_for(lambda: (folder / "there").exists() or trainer.poll() is not None)
    assert trainer.poll() is None, (folder / "output").read_text()
    return trainer


HANGS = """
import os, sys, time
from pathlib import Path
from lightning_rl.environments.workers import WorkerPool
class Hangs:
    def reset(self, row, seed):
        os.system("setsid sleep 1000 &")
        Path(row["folder"], "there").touch()
        time.sleep(1000)
    def step(self, token_ids, finish): ...
    def close(self): ...
pool = WorkerPool({"hangs": Hangs}, workers=1)
pool.open("hangs", pool.budget()).reset({"folder": sys.argv[1]}, 0)
"""


@pytest.mark.nightly
def test_a_killed_trainer_leaves_no_process(tmp_path: Path, pool: WorkerPool) -> None:
    trainer = run_script(tmp_path, HANGS)
    assert len(set(pids_with(MARK)) - set(pool.pids())) >= 4, "server, guard, worker and its child"
    trainer.kill()
    trainer.wait()
    assert nothing_is_left(*pool.pids())


FIT = """
import sys, time
from pathlib import Path
from kit.support import fit, tiny_module
from lightning_rl import PromptDataModule
from lightning_rl.environments import TokenEnvironment, TokenStep
class Echo(TokenEnvironment):
    def reset(self, row, seed):
        self.row = row
        return ()
    def step(self, token_ids, finish):
        if self.row["place"] == 6:
            Path(self.row["folder"], "there").touch()
            time.sleep(1000)
        return TokenStep(done=True, reward=1.0)
    def close(self):
        pass
rows = [{"prompt": [2, 3], "place": place, "folder": sys.argv[1]} for place in range(8)]
module = tiny_module(environment=Echo, environment_workers=2)
fit(module, data=PromptDataModule(rows, 4, shuffle=False), default_root_dir=sys.argv[1], enable_checkpointing=True)
"""


@pytest.mark.nightly
def test_a_stopped_run_with_a_hanging_environment_saves_and_leaves_no_process(tmp_path: Path, pool: WorkerPool) -> None:
    trainer = run_script(tmp_path, FIT)
    begin = time.monotonic()
    os.kill(trainer.pid, signal.SIGTERM)
    trainer.wait()
    output = (tmp_path / "output").read_text()
    assert time.monotonic() - begin < 40, output
    assert "an environment was interrupted, because SIGTERM stopped the run" in output
    assert list(tmp_path.rglob(INTERRUPTED)), output
    assert nothing_is_left(*pool.pids())
