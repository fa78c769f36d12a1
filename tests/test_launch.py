"""The launch files, with commands in the place of SLURM's and torchrun that write down how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

from lightning_rl.cli.parser import command_line

LAUNCH = Path(__file__).parents[1] / "launch"
SCONTROL = "printf 'node%s\\n' 0 1 2"
WRITE = 'printf "%s" "${SERVERS:-}" > "$CALLS/servers"; printf "%s\\n" "$(basename "$0") $*" >> "$CALLS/$$"; '
LAST = '[[ $* == *" serve "* ]] || until grep -qs " serve " "$CALLS"/[0-9]*; do sleep 0.02; done; '
RUN = 'printf "%s" "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-}" > "$CALLS/store"'


def call(tmp_path: Path, *command: str, **variables: str) -> tuple[int, list[str]]:
    """The exit code of a launch file, and the calls that it made."""
    commands, calls = tmp_path / "bin", tmp_path / "calls"
    for folder in (commands, calls):
        folder.mkdir()
    for name, body in {"scontrol": SCONTROL, "srun": LAST + WRITE, "torchrun": WRITE + RUN}.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o700)
    environment = {**os.environ, **variables, "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(calls)}
    done = subprocess.run(["bash", *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    return done.returncode, sorted(path.read_text().strip() for path in calls.glob("[0-9]*"))


def test_a_slurm_job_trains_on_its_first_nodes_and_serves_on_the_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    file = str(LAUNCH / "slurm.sbatch")
    options = {"SLURM_JOB_NODELIST": "node[0-2]", "TRAINERS": "2", "SHARED": str(shared), "GPUS": "2"}
    code, (serve, train) = call(tmp_path, file, "a-model", "train.py", "--steps", "3", **options)
    assert code == 0 and train == "srun --nodes 2 --ntasks 4 --nodelist node0,node1 python train.py --steps 3"
    assert serve.startswith("srun --nodes 1 --ntasks 2 --nodelist node2 --output ")
    assert (tmp_path / "calls" / "servers").read_text() == "http://node2:8000 http://node2:8001 "
    key = shared / "key"
    assert len(key.read_text().strip()) >= 43 and key.stat().st_mode & 0o077 == 0
    words = serve.partition(" serve a-model ")[2].split()
    parsed = command_line().parse_args(["serve", "a-model", *words, "--host", "node2", "--port", "8001"])
    assert (parsed.api_key_file, parsed.storage) == (key, shared / "weights")


@pytest.mark.parametrize("trainers", ["0", "3"])
def test_a_slurm_job_without_a_node_to_train_or_to_serve_is_refused(trainers: str, tmp_path: Path) -> None:
    options = {"SLURM_JOB_NODELIST": "node[0-2]", "TRAINERS": trainers, "SHARED": str(tmp_path / "shared")}
    assert call(tmp_path, str(LAUNCH / "slurm.sbatch"), "a-model", "train.py", **options) == (2, [])


def test_torchrun_is_given_the_nodes_and_may_start_again(tmp_path: Path) -> None:
    code, calls = call(tmp_path, str(LAUNCH / "torchrun.sh"), "node0", "2", "8", "train.py", "--steps", "3")
    assert code == 0 and calls == [
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node0:29500 --rdzv_id lightning-rl "
        "--max_restarts 3 train.py --steps 3"
    ]
    assert (tmp_path / "calls" / "store").read_text() == "1"


def test_torchrun_without_arguments_says_how_it_is_called(tmp_path: Path) -> None:
    assert call(tmp_path, str(LAUNCH / "torchrun.sh"), "node0") == (2, [])
