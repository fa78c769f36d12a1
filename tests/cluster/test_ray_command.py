"""``lightning-rl ray`` on nodes of a real Ray: ranks equal those of torchrun, though a rank or a node is lost."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kit import killed_run
from kit.agents import Agents
from kit.clusters import start_cluster
from kit.ray_command import RayCommand

pytest.importorskip("ray")
RANKS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with start_cluster((0, 1, 1)) as made:
        yield made


def weights(folder: Path) -> list[Any]:
    return [torch.load(folder / f"result-{rank}") for rank in range(RANKS)]


def check_equal(folder: Path, expected: Path) -> None:
    for result, other in zip(weights(folder), weights(expected), strict=True):
        assert result["steps"] == other["steps"] == 16 and result["states"] == other["states"]
        assert all(torch.equal(result["weights"][name], weight) for name, weight in other["weights"].items())


def start_run(folder: Path, kind: str) -> RayCommand:
    folder.mkdir()
    return RayCommand(folder, killed_run.__file__, "--nodes", "2", "--", folder, kind, "2", "1")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_equal_those_of_torchrun_though_one_is_killed(kind: str, tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "torchrun").mkdir()
    command = [killed_run.__file__, tmp_path / "torchrun", kind, "1", "1"]
    with Agents(tmp_path / "torchrun", command, nodes=1, devices=RANKS) as agents:
        agents.finish()
    ran = start_run(tmp_path / "ray", kind)
    ran.wait_for("step=5.ckpt")
    os.kill(int((tmp_path / "ray" / "process-1").read_text()), 9)
    assert ran.finish() == 0, ran.output()
    check_equal(tmp_path / "ray", tmp_path / "torchrun")


def test_a_node_that_is_lost_and_replaced_changes_no_weight(tmp_path: Path, cluster: Any) -> None:
    whole = start_run(tmp_path / "whole", "ddp")
    assert whole.finish() == 0, whole.output()
    ran = start_run(tmp_path / "ray", "ddp")
    ran.wait_for("step=5.ckpt")
    lost = [int((tmp_path / "ray" / f"process-{rank}").read_text()) for rank in range(RANKS)]
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    cluster.add_node(num_cpus=1)
    assert ran.finish() == 0, ran.output()
    assert not any(psutil.pid_exists(pid) for pid in lost)
    check_equal(tmp_path / "ray", tmp_path / "whole")


REWARDED = """
import sys
import torch
from pathlib import Path
from kit.support import fit, tiny_module, tiny_prompts, weights_of
from lightning_rl import RayWorkers, Rewards

def parity(completions, *, completion_ids, **columns):
    return [float(len(ids) % 2) for ids in completion_ids]

folder, workers = Path(sys.argv[1]), RayWorkers(1, cpus=0.5) if sys.argv[2] == "workers" else None
module = tiny_module(rewards=Rewards({"parity": parity}, workers=workers))
trainer = fit(module, data=tiny_prompts(8, 4), num_nodes=2, strategy="ddp")
torch.save(weights_of(module), folder / f"{sys.argv[2]}-{trainer.global_rank}")
"""


def test_ranks_with_workers_equal_ranks_without(tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "rewarded.py").write_text(REWARDED)
    room = cluster.add_node(num_cpus=1)
    found = []
    for kind in ("alone", "workers"):
        ran = RayCommand(tmp_path, "rewarded.py", "--nodes", "2", "--", tmp_path, kind)
        assert ran.finish() == 0, ran.output()
        found.append([torch.load(tmp_path / f"{kind}-{rank}") for rank in range(RANKS)])
    cluster.remove_node(room)
    for alone, rewarded in zip(*found, strict=True):
        assert all(torch.equal(rewarded[name], weight) for name, weight in alone.items())


GPUS = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(os.environ["CUDA_VISIBLE_DEVICES"] + " " + os.environ["LOCAL_RANK"])
"""


def test_each_group_of_a_node_has_its_own_gpus(tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "gpus.py").write_text(GPUS)
    node = cluster.add_node(num_cpus=4, num_gpus=4)
    ran = RayCommand(tmp_path, "gpus.py", "--nodes", "2", "--devices", "2", "--", tmp_path)
    assert ran.finish() == 0, ran.output()
    cluster.remove_node(node)
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [place for _, place in found] == ["0", "1", "0", "1"]
    assert found[0][0] == found[1][0] and found[2][0] == found[3][0]
    assert sorted([*found[0][0].split(","), *found[2][0].split(",")]) == ["0", "1", "2", "3"]


def test_a_recipe_that_fails_ends_the_command_with_its_error(tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "recipe.py").write_text("raise ValueError('wrong option')")
    ran = RayCommand(tmp_path, "recipe.py", "--max-restarts", "0")
    assert ran.finish() == 1
    assert "ValueError: wrong option" in ran.output() and "the ranks failed more than 0 times" in ran.output()


WRONG = {
    "no cluster": (["--address", "127.0.0.1:1"], "expected a Ray cluster at 127.0.0.1:1"),
    "too many GPUs": (["--accelerator", "gpu", "--devices", "8"], "expected nodes with 8 CPU and 8 GPU"),
    "too many CPUs": (["--nodes", "3"], "expected nodes with 1 CPU, 1 CPU, 1 CPU"),
    "servers without a model": (["--servers", "2"], "expected --servers and --serve together"),
    "a quote": (["--servers", "1", "--serve", "m 'n"], "expected --serve with arguments such as"),
    "a port": (["--servers", "1", "--serve", "m --port 1"], "expected --serve without --host and --port"),
    "an option of ours": (["--servers", "1", "--serve", "m -- --api-key k"], "expected no --api-key after --"),
    "an unknown option": (["--servers", "1", "--serve", "m --storrage f"], "unrecognized arguments: --storrage f"),
    "a client": (["--address", "ray://127.0.0.1:1"], "run on a node of the cluster"),
    "negative": (["--max-restarts", "-1"], "expected a whole number of at least 0, got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_is_refused_before_anything_starts(name: str, tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "recipe.py").write_text("open('started', 'w')")
    options, expected = WRONG[name]
    ran = RayCommand(tmp_path, "recipe.py", *options)
    assert ran.finish() in (1, 2) and expected in ran.output() and "Traceback" not in ran.output(), ran.output()
    assert not (tmp_path / "started").exists()


def test_a_node_without_the_package_is_named(tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.py").touch()
    (tmp_path / "broken" / "lightning_rl").mkdir(parents=True)
    (tmp_path / "broken" / "lightning_rl" / "__init__.py").write_text("raise ImportError('broken')")
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path / "broken")})
    try:
        ran = RayCommand(tmp_path, "recipe.py")
        assert ran.finish() == 1 and "has no lightning-rl (broken): install it there" in ran.output(), ran.output()
    finally:
        cluster.remove_node(node)
