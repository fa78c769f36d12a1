"""Workers on a Ray cluster: nodes that are lost, too small or unable, and what only several machines need."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import cloudpickle
import pytest
from kit.harnesses import fake, opened
from kit.marks import wait_for
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from typing_extensions import override

from lightning_rl import Conversations, RayWorkers, Rewards
from lightning_rl.environments import EnvironmentReward, PolicyEndpoint, Program, TokenEnvironment, TokenStep, converse
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.processes.errors import LOADING, CallError
from lightning_rl.processes.ray_pool import fleet_of, pool_of
from lightning_rl.rewards import CodeTests, Sandbox, SubprocessReward

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
WORKERS = RayWorkers(4, cpus=1.5)  # one on each node
NAME = "qwen2.5"


def die_with_node(marker: Path) -> None:
    """Hang on the node that is going to be lost; on others wait until it has begun."""
    if os.environ.get("DOOMED") == str(marker):
        marker.touch()
        time.sleep(1000)
    while not marker.exists():
        time.sleep(0.01)


def parity(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids) % 2) for ids in completion_ids]


class Echo(TokenEnvironment):
    """Rewards odd answers in the second turn."""

    marker: Path | None = None

    @override
    def reset(self, row: Any, seed: int) -> Any:
        self.turn = 0
        return [seed % 7]

    @override
    def step(self, token_ids: Any, finish: Any) -> TokenStep:
        self.turn += 1
        if self.turn == 1:
            return TokenStep(token_ids=[5, len(token_ids) % 7])
        if self.marker is not None:
            die_with_node(self.marker)
        return TokenStep(done=True, reward=float(len(token_ids) % 2))

    @override
    def close(self) -> None: ...


def module_with_rewards(marker: Path | None) -> Any:
    if marker is None:
        return tiny_module(rewards={"parity": parity})

    def parity_on_doomed_node(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        die_with_node(marker)
        return parity(prompts, completions, **columns)

    reward = SubprocessReward(parity_on_doomed_node, per_sample=True)
    return tiny_module(rewards=Rewards({"parity": reward}, workers=WORKERS))


def module_with_conversations(marker: Path | None) -> Any:
    def make() -> Echo:
        echo = Echo()
        echo.marker = marker
        return echo

    return tiny_module(
        rewards=[EnvironmentReward()], environment=Conversations(make, workers=0 if marker is None else WORKERS)
    )


@pytest.fixture
def doomed_node(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """Marker that workers of a node write, which is then lost."""
    marker = tmp_path / "marker"
    node, ended = cluster.add_node(num_cpus=2, env_vars={"DOOMED": str(marker)}), threading.Event()

    def lose() -> None:
        wait_for(lambda: marker.exists() or ended.is_set(), 500.0)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    yield marker
    ended.set()
    thread.join()
    assert marker.exists()


@pytest.mark.parametrize("make", [module_with_rewards, module_with_conversations])
def test_a_lost_node_changes_no_weight_and_is_reported_once(
    make: Callable[[Path | None], Any], doomed_node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(marker: Path | None) -> Any:
        module = make(marker)
        fit(module, data=tiny_prompts(12, 4))
        return weights_of(module)

    with caplog.at_level(logging.WARNING, "lightning_rl.processes.ray_pool"):
        found, expected = weights(doomed_node), weights(None)
    assert all((found[name] == weight).all() for name, weight in expected.items())
    (message,) = [record.getMessage() for record in caplog.records if "lost workers" in record.getMessage()]
    assert "tasks start over" in message and "0 tasks" not in message


def test_a_small_cluster_runs_all_tasks_and_uses_nodes_that_join(cluster: Any) -> None:
    def node(number: int) -> tuple[int, bool]:
        time.sleep(0.1)
        return number, "JOINED" in os.environ

    pool = pool_of(cloudpickle.dumps(node), RayWorkers(50))
    try:
        calls = [pool.submit(cloudpickle.dumps(((number,), {})), 60.0) for number in range(30)]
        assert [call.result() for call in calls] == [(number, False) for number in range(30)]
        joined = cluster.add_node(num_cpus=2, env_vars={"JOINED": "1"})

        def uses_node() -> bool:
            calls = [pool.submit(cloudpickle.dumps(((number,), {})), 60.0) for number in range(30)]
            return any(call.result()[1] for call in calls)

        assert wait_for(uses_node)
    finally:
        pool.close()
    cluster.remove_node(joined)


def test_a_cluster_without_room_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.processes.ray_pool.STARTUP_SECONDS", 1.0)
    pool = pool_of(cloudpickle.dumps(abs), RayWorkers(1, cpus=64))
    with pytest.raises(
        CallError, match=r"with 64 free CPUs on a node within 1 s, got nodes of 2, .* CPUs, .* free: pass"
    ) as caught:
        pool.submit(b"", 1.0).result()
    assert caught.value.kind == LOADING
    pool.close()


MIXED = """
import time
import cloudpickle
from lightning_rl import RayWorkers
from lightning_rl.processes.errors import CallError
from lightning_rl.processes.ray_pool import fleet_of, pool_of

def slowly(number):
    time.sleep(0.5)
    return abs(number)

tasks = [cloudpickle.dumps(((-number,), {})) for number in range(8)]
workers = RayWorkers(4, cpus=1.5)  # one on each node
pool = pool_of(cloudpickle.dumps(slowly), workers)
for refused in (False, True):
    while bool(fleet_of(workers).refused) < refused:
        assert [call.result() for call in [pool.submit(task, 60.0) for task in tasks]] == list(range(8))
    assert [call.result() for call in [pool.submit(task, 60.0) for task in tasks]] == list(range(8))
pool.close()
try:
    pool_of(cloudpickle.dumps(abs), RayWorkers(1, cpus=3)).submit(tasks[0], 1.0).result()
except CallError as error:
    print(error.kind, error)
"""


def test_a_node_without_the_package_runs_no_worker_and_is_named(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "lightning_rl").mkdir()
    (tmp_path / "lightning_rl" / "__init__.py").write_text("raise ImportError('broken')")
    node = cluster.add_node(num_cpus=3, env_vars={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "elsewhere").mkdir()  # Ray adds the working directory of the trainer to the paths of workers
    ran = subprocess.run(
        [sys.executable, "-c", MIXED], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True
    )
    cluster.remove_node(node)
    assert ran.stderr.count("got none (broken) at ") == 2, "once for each kind of workers"
    assert ran.stdout.startswith(LOADING)
    assert "versions of lightning-rl: none (broken) at " in ran.stdout and " there, pass fewer cpus=" in ran.stdout


SCRIPT = """
import sys
from lightning_rl import RayWorkers, Rewards
from lightning_rl.rewards import SubprocessReward
def ones(completions, **columns):
    return [1.0] * len(completions)
reward = SubprocessReward(ones)
assert reward(["q"], ["a"]) == [1.0] and "ray" not in sys.modules
reward.close()
Rewards(ones, workers=RayWorkers(2)).check_workers()
"""


def test_no_cluster_at_the_address_is_an_error_before_the_run_which_else_imports_no_ray() -> None:
    pytest.importorskip("ray")
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: expected a Ray cluster at 127.0.0.1:1, got " in ran.stderr, ran.stderr


EXIT = """
import cloudpickle
from lightning_rl import RayWorkers
from lightning_rl.processes.ray_pool import fleet_of, pool_of
pool = pool_of(cloudpickle.dumps(abs), RayWorkers(1))
assert pool.submit(cloudpickle.dumps(((-1,), {})), 60.0).result() == 1
"""


def test_a_pool_that_is_open_at_the_exit_reports_no_loss(cluster: Any) -> None:
    ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, check=True)
    assert "lost workers" not in ran.stderr


def test_the_handler_of_signals_stays(cluster: Any) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    pool = pool_of(cloudpickle.dumps(abs), RayWorkers(1))
    assert pool.submit(cloudpickle.dumps(((-1,), {})), 60.0).result() == 1
    assert signal.getsignal(signal.SIGTERM) == handler
    pool.close()


def calls_elsewhere(row: Any, model: PolicyEndpoint) -> float:
    """Return 1 if the policy answers at an address that other machines reach."""
    body = json.dumps({"model": model.model, "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {model.key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{model.url}/v1/chat/completions", body, headers)) as answer:
        return float("127.0.0.1" not in model.url and bool(json.load(answer)["choices"]))


@pytest.mark.parametrize(
    ("workers", "programs"),
    [pytest.param(RayWorkers(2), 2, id="at-once"), pytest.param(RayWorkers(6, cpus=1.5), 6, id="room-for-three")],
)
def test_programs_on_nodes_call_the_policy_and_delay_no_round_while_they_wait_for_a_worker(
    workers: RayWorkers, programs: int, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rl.generation.engine.LINGER", 1000.0)
    pool = WorkerPool({"environment": Program(calls_elsewhere)}, workers=workers)
    try:
        rows = [{"prompt": str(number)} for number in range(programs)]
        conversations = opened(NAME, Program(calls_elsewhere), rows, workers=pool)
        assert [one.environment_reward for one in converse(conversations, fake(NAME))] == [1.0] * programs
    finally:
        pool.close()


def test_plain_functions_and_subprocess_rewards_run_on_workers(cluster: Any) -> None:
    def here(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(os.getpid())] * len(completions)

    async def asks(completions: Any, **_: Any) -> list[float]:
        return [float(os.getpid())] * len(completions)

    rewards = Rewards([here, asks, CodeTests()], workers=RayWorkers(2))
    limited = Rewards(SubprocessReward(here, seconds=3, memory=2**30, per_sample=True), workers=RayWorkers(2)).by_name
    assert [type(one).__name__ for one in rewards.by_name.values()] == ["SubprocessReward", "function", "CodeTests"]
    (one,) = [one for one in limited.values() if isinstance(one, SubprocessReward)]
    assert (one.processes, one.seconds, one.memory, one.per_sample) == (RayWorkers(2), 3, 2**30, True)
    calls = rewards(["q"], ["a"], completion_ids=[[1]], columns={"tests": [[]]})
    assert calls[0].values != [float(os.getpid())] == calls[1].values
    rewards.close()


def test_programs_run_in_sandboxes_on_workers(cluster: Any) -> None:
    rewards = [
        CodeTests(sandbox=Sandbox(seconds=2.0, workers=workers), parallel=2) for workers in (None, RayWorkers(2))
    ]
    texts = [
        "```python\nprint(int(input()) * 2)\n```",
        "```python\nprint(5)\n```",
        "```python\nwhile True: pass\n```",
        "no",
    ]
    tests = [[{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]] * 4
    here, there = [reward(["q"] * 4, texts, tests=tests) for reward in rewards]
    assert here == there == [1.0, 0.0, 0.0, 0.0]
    assert fleet_of(RayWorkers(2)).live
    Rewards(parity).close()  # as those of a function that uses a sandbox
    assert not fleet_of(RayWorkers(2)).live
