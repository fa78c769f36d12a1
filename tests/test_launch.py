"""The launch files: stand-ins for SLURM and torchrun write down how they were called, parsers read the rest."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lightning_rl.cli.parser import command_line

LAUNCH = Path(__file__).parents[1] / "launch"
SCONTROL = "printf 'node%s\\n' 0 1 2"
WRITE = 'printf "%s" "${SERVERS:-}" > "$CALLS/servers"; printf "%s" "${VLLM_API_KEY:-}" > "$CALLS/key"; '
WRITE += 'printf "%s\\n" "$(basename "$0") $*" >> "$CALLS/$$"; '
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
    assert code == 0 and train == "srun --nodes 2 --ntasks 4 --nodelist node0,node1 python3 train.py --steps 3"
    assert serve.startswith("srun --nodes 1 --ntasks 2 --nodelist node2 --output ")
    assert (tmp_path / "calls" / "servers").read_text() == "http://node2:8000 http://node2:8001 "
    assert len((tmp_path / "calls" / "key").read_text()) >= 43
    words = serve.partition(" serve a-model ")[2].split()
    parsed = command_line().parse_args(["serve", "a-model", *words, "--host", "node2", "--port", "8001"])
    assert parsed.storage == shared / "weights"


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


@pytest.mark.parametrize(("address", "first"), [("10.0.0.1", 1), ("10.0.0.2", 0)])
def test_torchrun_is_told_where_a_node_is_whose_name_leads_elsewhere(address: str, first: int, tmp_path: Path) -> None:
    words = [str(LAUNCH / "torchrun.sh"), "10.0.0.1", "2", "8", "train.py"]
    code, (called,) = call(tmp_path, *words, LOCAL_ADDR=address)
    assert code == 0 and called.endswith(f" --local_addr {address} --rdzv_conf is_host={first} train.py")


def test_torchrun_without_arguments_says_how_it_is_called(tmp_path: Path) -> None:
    assert call(tmp_path, str(LAUNCH / "torchrun.sh"), "node0") == (2, [])


MACHINE = {"IMAGE": "an/image:1", "MODEL": "a-model", "SHARED": "/data/run7", "VLLM_API_KEY": "a-key"}


def compose() -> dict[str, Any]:
    """The services of the compose file, with the variables that it asks for."""
    text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: MACHINE[found[1]], (LAUNCH / "compose.yaml").read_text())
    return yaml.safe_load(text)


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of the file for Kubernetes, by kind and name."""
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def container(document: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command of a pod's only container, and its variables."""
    (described,) = document["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value", "a-pod") for variable in described["env"]}
    words = [*described["command"], *described["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in words], values


def test_compose_starts_two_servers_by_our_command_line_and_a_trainer_that_is_told_of_them() -> None:
    services = compose()["services"]
    urls = []
    for name in ("server-0", "server-1"):
        program, *words = shlex.split(services[name]["command"])
        parsed = command_line().parse_args(words)
        assert program == "lightning-rl" and (parsed.command, parsed.model) == ("serve", "a-model")
        assert parsed.storage == Path("/shared/weights")
        assert services[name]["environment"]["VLLM_API_KEY"] == "a-key"
        urls.append(f"http://{name}:{parsed.port}")
        assert parsed.host == name, "a server is found under its name"
    trainer = services["trainer"]
    assert trainer["environment"]["SERVERS"].split() == urls
    assert trainer["environment"]["VLLM_API_KEY"] == "a-key"
    assert trainer["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    program, *words = shlex.split(trainer["command"])
    parsed = get_args_parser().parse_args(words)
    assert program == "torchrun" and (parsed.training_script, parsed.max_restarts) == ("/shared/train.py", 3)
    reserved = [service["deploy"]["resources"]["reservations"] for service in services.values() if "deploy" in service]
    assert len({entry["devices"][0]["device_ids"][0] for entry in reserved}) == 3, "none shares its GPU"


def test_compose_is_what_its_own_validator_takes() -> None:
    if docker := shutil.which("docker-compose"):
        command = [docker, "-f", str(LAUNCH / "compose.yaml"), "config", "--quiet"]
        subprocess.run(command, env={**os.environ, **MACHINE}, check=True, timeout=60)
        return
    specification = pytest.importorskip("compose_spec")
    read = specification.PyCompose.from_yaml(yaml.safe_dump(compose()))
    assert set(read.service_names()) == compose()["services"].keys()


def test_kubernetes_starts_servers_by_our_command_line_and_a_trainer_that_is_told_of_them() -> None:
    found = manifests()
    servers, trainer = found["StatefulSet", "server"], found["Job", "trainer"]
    (program, *words), variables = container(servers)
    cut = words.index("--")
    parsed, theirs = command_line().parse_args(words[:cut]), words[cut + 1 :]
    assert program == "lightning-rl" and (parsed.command, parsed.model) == ("serve", "MODEL")
    assert parsed.host == f"{variables['POD']}.{servers['spec']['serviceName']}" and theirs == [
        "--tensor-parallel-size=8"
    ]
    assert ("Service", servers["spec"]["serviceName"]) in found
    (program, *words), variables = container(trainer)
    names = [f"server-{number}.servers" for number in range(servers["spec"]["replicas"])]
    assert variables["SERVERS"].split() == [f"http://{name}:{parsed.port}" for name in names]
    parsed = get_args_parser().parse_args(words)
    spec = trainer["spec"]
    assert program == "torchrun" and parsed.nnodes == str(spec["completions"]) == str(spec["parallelism"])
    host, _, port = parsed.rdzv_endpoint.partition(":")
    assert host == f"trainer-0.{spec['template']['spec']['subdomain']}"
    assert found["Service", "trainer"]["spec"]["ports"][0]["port"] == int(port)
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and variables["GLOO_SOCKET_IFNAME"]


def test_every_manifest_is_what_the_schemas_of_kubernetes_take() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in manifests().values():
        validator.validate(document, validator.latest_version(), strict=True)


def test_ray_places_ranks_and_servers_by_our_command_line_on_the_nodes_that_it_asks_for() -> None:
    job = yaml.safe_load((LAUNCH / "ray.yaml").read_text())["spec"]
    program, *words = shlex.split(job["entrypoint"])
    parsed = command_line().parse_args(words)
    assert program == "lightning-rl" and (parsed.command, parsed.recipe) == ("ray", Path("/shared/train.py"))
    serve = shlex.split(parsed.serve)
    served = command_line().parse_args(["serve", *serve[: serve.index("--")]])
    assert served.model == "MODEL" and served.storage == Path("/shared/weights")
    assert serve[serve.index("--") + 1 :] == ["--tensor-parallel-size", "8"]
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (node,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] == parsed.nodes + parsed.servers
    assert node["resources"]["limits"]["nvidia.com/gpu"] == parsed.devices == 8
