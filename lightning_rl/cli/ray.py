"""ray: runs a recipe on a Ray cluster, its ranks by Ray Train and its vLLM servers as actors."""

import argparse
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from lightning_rl.cli.parser import command_line
from lightning_rl.cli.serve import KEY, check_options
from lightning_rl.processes.ray_connection import connect_to_ray

SUCH_AS = '--servers 2 --serve "MODEL --storage FOLDER -- --tensor-parallel-size 2"'


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code; raise SystemExit with the reason if that is impossible."""
    try:
        from ray.train import TrainingFailedError

        from lightning_rl.cluster.nodes import ClusterError, check_nodes, check_resources, has_gpus
        from lightning_rl.cluster.ranks import Ranks
        from lightning_rl.cluster.servers import Servers
    except ImportError as error:
        raise SystemExit(f"expected ray to be installed, got {error}: pip install 'lightning-rl[ray]'") from error
    words = server_arguments(arguments.serve)
    if bool(words) != bool(arguments.servers):
        raise SystemExit(f"expected --servers and --serve together, such as {SUCH_AS}")
    namespace, folder = f"lightning-rl-{secrets.token_hex(4)}", Path.cwd()
    variables = {KEY: os.environ.get(KEY) or secrets.token_urlsafe(32)}
    try:
        variables["RAY_ADDRESS"] = connect_to_ray(arguments.address, namespace=namespace, logging_level="WARNING")
        gpus = arguments.accelerator == "gpu" or (arguments.accelerator == "auto" and has_gpus())
        servers = Servers(
            number=arguments.servers, arguments=words, gpus=gpus, namespace=namespace, variables=variables
        )
        ranks = Ranks(
            command=[str(arguments.recipe), *options],
            nodes=arguments.nodes,
            devices=arguments.devices,
            gpus=gpus,
            folder=folder,
            variables=variables,
        )
        check_resources([ranks.resources] * ranks.nodes + [servers.resources] * servers.number)
        check_nodes([folder, folder / arguments.recipe])
        with servers.running() as found:
            variables |= found
            ranks.run(arguments.max_restarts)
    except (ClusterError, ValueError) as error:
        raise SystemExit(str(error)) from error
    except TrainingFailedError as error:
        cause = str(error).strip().rpartition("\n")[2]
        raise SystemExit(f"the ranks failed more than {arguments.max_restarts} times: {cause}") from error
    return 0


def server_arguments(text: str) -> Sequence[str]:
    """Return the arguments of ``lightning-rl serve`` as words; raise SystemExit if it would refuse them."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SystemExit(f"expected --serve with arguments such as {SUCH_AS}, got {text!r}: {error}") from error
    cut = words.index("--") if "--" in words else len(words)
    if any(word.startswith(("--host", "--port")) for word in words[:cut]):
        raise SystemExit(
            "expected --serve without --host and --port, which are those of the server's node: remove them"
        )
    if words:
        command_line().parse_args(["serve", *words[:cut]])
        try:
            check_options(words[cut + 1 :])
        except ValueError as error:
            raise SystemExit(str(error)) from error
    return words
