"""Workers: environments that hang, die, flood, fork or talk nonsense cost their own conversation, and leave nothing."""

import ctypes
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.environments import (
    Action,
    Conversation,
    ConversationLimits,
    Environment,
    Opening,
    StepResult,
    TokenEnvironment,
    TokenStep,
    Transcript,
    play,
)
from lightning_rl.environments.failure import EnvironmentFailureError
from lightning_rl.environments.workers import BOOT, WorkerPool
from lightning_rl.generation import Completion, Request

pytestmark = pytest.mark.slow
SAMPLING = SamplingParams(max_new_tokens=20, eos_token_ids=[9])
MARK = f"environments-{uuid.uuid4()}"  # in the environment of every process that a pool starts, and of their children
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test


def processes() -> list[int]:
    """Of all that carries the mark."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _is_marked(path)]


def _is_marked(path: Path) -> bool:
    try:
        return f"MARK={MARK}".encode() in path.read_bytes()
    except OSError:
        return False


def nothing_is_left(*but: int) -> bool:
    """Whether all processes but some are gone, within a few seconds."""
    end = time.monotonic() + 20
    while (left := set(processes()) - set(but)) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


def double_fork() -> None:
    subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True)


def fork() -> None:
    if os.fork() == 0:
        time.sleep(1000)


def print_for_ever() -> None:
    while True:
        sys.stdout.write("x" * 1000)


def sleep_for_ever() -> None:
    while True:
        try:
            time.sleep(1000)
        except BaseException:  # noqa: BLE001  it hangs whatever anybody says
            continue


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


FIGURE: Any = np.float32(1.5)
WORDS: Any = ["a"]
LATE = "timeout: the environment took longer than 7.5 s for a conversation (conversation_timeout)"
ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "raise": (lambda: {}["gone"], "KeyError: 'gone'"),
    "hang": (sleep_for_ever, LATE),  # the first try a whole deadline of a step, the second what is left
    "exit": (lambda: os._exit(3), "lost process: the process exited with status 3 in step"),
    "sys-exit": (lambda: sys.exit(4), "SystemExit: 4"),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "lost process: the process was ended by SIGKILL in step"),
    "crash": (lambda: ctypes.string_at(0), "lost process: the process was ended by SIGSEGV in step"),
    "flood": (print_for_ever, LATE),
    "nothing": (lambda: None, "TypeError: expected Bad.step to return a TokenStep, got None"),
    "nan": (lambda: TokenStep(done=True, reward=float("nan")), "ValueError: expected reward to be a number or None"),
    "text": (
        lambda: TokenStep(token_ids=WORDS),
        "TypeError: expected a token id in what Bad.step returns, got str 'a'",
    ),
    "object": (
        lambda: TokenStep(token_ids=[1], messages=[{"role": "user", "content": object()}]),
        "TypeError: expected plain values, lists and mappings from an environment, got object",
    ),
    "much": (
        lambda: TokenStep(token_ids=[1], messages=[{"role": "user", "content": "x" * 2**25}]),
        "ValueError: expected Bad to return at most 16777216 bytes from step, got 33554",
    ),
}
HARMLESS: dict[str, Callable[[], Any]] = {
    "fork": fork,
    "double-fork": double_fork,
    "both": os.fork,
    "thread": start_thread,
}


class Bad(TokenEnvironment):
    """Echoes for three turns, unless its row says that it is to end badly in the second."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        self.row, self.turn = row, 0
        return [row["sample"] % 7, seed % 7]

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.turn += 1
        sys.stdout.write(f"turn {self.turn}\n")
        if self.turn == 2 and self.row["end"] in ENDS:
            return ENDS[self.row["end"]][0]()
        if self.turn == 2 and self.row["end"] in HARMLESS:
            HARMLESS[self.row["end"]]()
        if self.turn == 3:
            return TokenStep(done=True, reward=self.row["sample"] + 0.5)
        return TokenStep(token_ids=[5, *token_ids])

    @override
    def close(self) -> None:
        """Nothing to close."""


class Speaks(Environment):
    """Speaks in messages, and draws from every global generator of its process."""

    @override
    def reset(self, row: Any, seed: int) -> Sequence[Any]:
        return [{"role": "user", "content": row["question"]}]

    @override
    def step(self, answer: Action) -> StepResult:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        if answer.turn:
            return StepResult(rewritten=({"role": "user", "content": answer.text},))
        return StepResult(messages=({"role": "user", "content": f"{answer.text} {drawn}"},), metrics={"drawn": FIGURE})


@pytest.fixture(scope="module", autouse=True)
def _marked() -> Iterator[None]:
    os.environ["MARK"] = MARK
    yield
    del os.environ["MARK"]
    assert nothing_is_left()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    factories = {"bad": Bad, "speaks": Speaks, "lambda": lambda: Bad()}
    made = WorkerPool(factories, workers=8, step_seconds=5.0, conversation_seconds=7.5)
    yield made
    made.close()
    assert nothing_is_left(), "what a pool started is gone when it is closed"


def draw(requests: Sequence[Request]) -> list[Completion]:
    """What is drawn depends on the prefix alone."""
    return [
        Completion(
            token_ids=(sum(request.prefix_ids) % 5, 9), logprobs=torch.zeros(2), finish=FinishReason.STOP, version=0
        )
        for request in requests
    ]


def run(pool: WorkerPool, ends: Sequence[str], name: str = "bad", **row: Any) -> list[Transcript]:
    openings: list[Opening] = []
    for sample, end in enumerate(ends):
        first = Request(prefix_ids=(1,), sample_id=sample, seed=sample, sampling=SAMPLING)
        budget = pool.budget()

        def make(budget: Any = budget) -> Any:
            return pool.open(name, budget)

        conversation = Conversation(make(), first, ConversationLimits(), again=make)
        openings.append(Opening(conversation, {"sample": sample, "end": end, **row}, 3))
    with pool.executor() as executor:
        return play(openings, draw, executor=executor, limit=pool.workers)


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_badly_fails_with_its_cause_and_its_log(pool: WorkerPool, end: str) -> None:
    (transcript,) = run(pool, [end])
    outcome = transcript.outcome
    assert transcript.finish == FinishReason.FAILED and outcome.failure is not None
    assert outcome.failure.startswith(ENDS[end][1]) and outcome.reward is None
    assert outcome.metrics["retries"] == 1 and outcome.metrics["failed"] == 1
    assert outcome.metrics["timeouts"] == {"hang": 2, "flood": 2}.get(end, 0), "one for each try"
    assert "turn 1\nturn 2\n" in outcome.log, "what it printed is kept"
    where = {"hang": "in sleep_for_ever", "flood": "in print_for_ever", "crash": "in string_at", "raise": "in <lambda>"}
    assert where.get(end, "") in outcome.log, "and where it was"
    assert len(outcome.log) < 2**17, "and not more than anybody can read"
    assert run(pool, ["well"])[0].outcome.reward == 0.5


def test_a_log_is_that_of_one_conversation(pool: WorkerPool) -> None:
    run(pool, ["well"] * 8)
    (transcript,) = run(pool, ["exit"])
    assert transcript.outcome.log == "turn 1\nturn 2\n"


def test_a_log_is_whole_however_late_the_guard_clears_the_one_before() -> None:
    slow = WorkerPool({"bad": Bad}, workers=1)
    environment: Any = slow.open("bad", slow.budget())
    _, guard, _ = slow.pids()
    os.kill(guard, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (guard, signal.SIGCONT)).start()
    environment.reset({"sample": 0, "end": "raise"}, 0)
    environment.step((1,), FinishReason.STOP)
    with pytest.raises(EnvironmentFailureError) as raised:
        environment.step((1,), FinishReason.STOP)
    slow.close()
    assert raised.value.failure.log.endswith("turn 1\nturn 2\n")


@pytest.mark.parametrize("end", HARMLESS)
def test_what_a_conversation_started_ends_with_it(pool: WorkerPool, end: str) -> None:
    (transcript,) = run(pool, [end])
    assert (transcript.finish, transcript.outcome.reward, transcript.outcome.failure) == (FinishReason.STOP, 0.5, None)
    assert nothing_is_left(*pool.pids())
    assert run(pool, ["well"])[0].outcome.reward == 0.5


@pytest.mark.parametrize("end", [*ENDS, *HARMLESS])
def test_one_in_twenty_changes_no_other_conversation_of_its_batch(pool: WorkerPool, end: str) -> None:
    number, bad = 80, {3, 23, 43, 63}
    clean = run(pool, ["well"] * number)
    transcripts = run(pool, [end if sample in bad else "well" for sample in range(number)])
    for sample, (transcript, expected) in enumerate(zip(transcripts, clean, strict=True)):
        if sample in bad and end in ENDS:
            assert transcript.finish == FinishReason.FAILED and transcript.outcome.reward is None
            assert len(transcript.row.turns) <= 2 and transcript.outcome.metrics["retries"] == 1
        else:
            assert (transcript.outcome.failure, transcript.row.response_ids) == (None, expected.row.response_ids)
            assert transcript.outcome.reward == sample + 0.5 and transcript.outcome.metrics["retries"] == 0
    assert nothing_is_left(*pool.pids())


def test_a_failure_that_passes_is_retried_from_the_beginning_with_the_same_seeds(
    pool: WorkerPool, tmp_path: Path
) -> None:
    class Passes(Bad):
        @override
        def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
            if self.turn == 1 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise OSError("for once")
            return super().step(token_ids, finish)

    other = WorkerPool({"passes": Passes}, workers=1)
    try:
        (transcript,), (clean,) = run(other, ["well"], "passes"), run(pool, ["well"])
    finally:
        other.close()
    assert (transcript.row.response_ids, transcript.finish) == (clean.row.response_ids, FinishReason.STOP)
    assert [turn.request for turn in transcript.row.turns] == [turn.request for turn in clean.row.turns]
    assert (transcript.outcome.reward, transcript.outcome.metrics["retries"]) == (0.5, 1)
    assert transcript.outcome.failure is None


def test_an_environment_in_messages_speaks_plainly_and_draws_by_its_own_seed(pool: WorkerPool) -> None:
    state = str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    def speak(seed: int) -> list[Any]:
        environment: Any = pool.open("speaks", pool.budget())
        said = [environment.reset({"question": "?"}, seed), environment.step(Action(text="!"))]
        assert environment.step(Action(text="!", turn=1)).rewritten == [{"role": "user", "content": "!"}]
        environment.close()
        return said

    said = speak(7)
    assert said == speak(7) and said[1] != speak(8)[1]
    assert said[0] == [{"role": "user", "content": "?"}] and said[1].metrics == {"drawn": 1.5}
    assert isinstance(pool.open("speaks", pool.budget()), Environment)
    assert state == str((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def test_lambdas_are_taken_and_what_cannot_be_sent_or_made_is_refused(pool: WorkerPool) -> None:
    assert run(pool, ["well"], "lambda")[0].outcome.reward == 0.5
    lock = threading.Lock()
    with pytest.raises(
        ValueError, match="expected a factory that can be sent to another process for environment x, got"
    ):
        WorkerPool({"x": lambda: lock}, workers=1)

    def breaks() -> Any:
        raise RuntimeError("no data")

    other = WorkerPool({"x": breaks}, workers=1)
    with pytest.raises(ValueError, match="environment x to be created in a worker process, got RuntimeError: no data"):
        other.describe("x")
    other.close()


def test_closing_ends_what_is_busy_and_the_pool_can_be_used_again(pool: WorkerPool) -> None:
    other = WorkerPool({"bad": Bad}, workers=2, step_seconds=600.0)
    transcripts: list[Transcript] = []
    thread = threading.Thread(target=lambda: transcripts.extend(run(other, ["hang"])))
    other.describe("bad")
    environment: Any = other.open("bad", other.budget())
    environment.reset({"sample": 0, "end": "well"}, 0)
    thread.start()
    end = time.monotonic() + 20
    while len(other.pids()) < 5 and time.monotonic() < end:  # the server, two guards, two workers
        time.sleep(0.05)
    time.sleep(0.3)
    begin, pids = time.monotonic(), other.pids()
    other.close()
    assert len(pids) == 5 and time.monotonic() - begin < 10, "nobody waits for ten minutes"
    with pytest.raises(EnvironmentFailureError, match="the process was ended by SIGKILL in step"):
        environment.step((1,), FinishReason.STOP)
    other.close()  # what the second try of the conversation in the thread began
    thread.join(30)
    other.close()
    assert transcripts[0].finish == FinishReason.FAILED and nothing_is_left(*pool.pids())


SCRIPT = """
import os, sys, time, cloudpickle
from lightning_rl.environments.workers import WorkerPool
class Hangs:
    def reset(self, row, seed):
        os.system("setsid sleep 1000 &")
        open(row["there"], "w").close()
        time.sleep(1000)
    def step(self, token_ids, finish): ...
    def close(self): ...
pool = WorkerPool({"hangs": Hangs}, workers=1)
pool.open("hangs", pool.budget()).reset({"there": sys.argv[1]}, 0)
"""


def test_a_trainer_that_is_killed_leaves_no_process(tmp_path: Path, pool: WorkerPool) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    trainer = subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(tmp_path / "there")])
    end = time.monotonic() + 100
    while not (tmp_path / "there").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert (tmp_path / "there").exists() and len(set(processes()) - set(pool.pids())) >= 4
    trainer.kill()
    trainer.wait()
    assert nothing_is_left(*pool.pids())


def test_a_trainer_that_is_gone_before_the_environments_are_loaded_is_no_error() -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-c", f"{BOOT}main({theirs.fileno()})", "environments", json.dumps(sys.path)]
    payload = pickle.dumps({"bad": cloudpickle.dumps(Bad)})
    server = subprocess.Popen(
        command, pass_fds=(theirs.fileno(),), stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    theirs.close()
    ours.close()
    assert server.communicate(payload, timeout=100) == (None, b"") and server.returncode == 0


FIT = """
import sys, time
from pathlib import Path
from kit.support import fit, tiny_module
from lightning_rl import PromptDataModule
from lightning_rl.environments import TokenEnvironment, TokenStep
class Echo(TokenEnvironment):
    def reset(self, row, seed):
        self.place = row["place"]
        return ()
    def step(self, token_ids, finish):
        if self.place == 6:
            Path(sys.path[0], "there").touch()
            time.sleep(1000)
        return TokenStep(done=True, reward=1.0)
    def close(self):
        pass
data = PromptDataModule([{"prompt": [2, 3], "place": place} for place in range(8)], 4, shuffle=False)
module = tiny_module(environment=Echo, environment_workers=2)
fit(module, data=data, default_root_dir=sys.argv[1], enable_checkpointing=True)
"""


def test_a_run_that_is_told_to_stop_while_an_environment_hangs_saves_and_leaves_no_process(
    tmp_path: Path, pool: WorkerPool
) -> None:
    (tmp_path / "run.py").write_text(FIT)
    kit = str(Path(__file__).parents[1])
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    path = os.pathsep.join([kit, os.environ.get("PYTHONPATH", "")])
    trainer = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not (tmp_path / "there").exists() and trainer.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    begin = time.monotonic()
    trainer.send_signal(signal.SIGTERM)
    _, said = trainer.communicate(timeout=60)
    assert time.monotonic() - begin < 40, said
    assert "an environment was busy when SIGTERM told the run to stop" in said
    assert list(tmp_path.rglob(INTERRUPTED)), said
    assert nothing_is_left(*pool.pids())
