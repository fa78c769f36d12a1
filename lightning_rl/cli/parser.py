"""Argument parser of all commands. Imports no torch, so that help is fast."""

import argparse
from functools import partial
from pathlib import Path

RECIPE = "a script that calls Trainer.fit"
PASSED_ON = "Options after -- are passed to the recipe."


def command_line() -> argparse.ArgumentParser:
    """Return the parser; ``command`` names the module of :mod:`lightning_rl.cli` to run."""
    parser = argparse.ArgumentParser(
        prog="lightning-rl",
        description="Tools around runs of lightning_rl.",
        epilog="lightning-rl COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions of installed packages")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _consistency(commands)
    _doctor(commands)
    _export(commands)
    _from_trl(commands)
    _ray(commands)
    _replay(commands)
    _report(commands)
    _resume_check(commands)
    _serve(commands)
    return parser


def _count(text: str, least: int = 1) -> int:
    """Return a whole number of at least ``least``; argparse adds the name of the option to the error."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text}")
    return int(text)


def _consistency(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("consistency", help="compare the log-probabilities of engine and trainer")
    parser.add_argument("model", help="name, folder or module:function of a causal language model")
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="(default: %(default)s)"
    )
    parser.add_argument("--prompts", type=_count, default=8, help="number of random prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=_count, default=16, help="length of a response (default: %(default)s)")
    parser.epilog = "The exit code is 1 if a module differs by more than rounding."


def _doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="check a recipe for problems, without training")
    parser.add_argument("recipe", type=Path, help=RECIPE)
    parser.add_argument("--prompts", type=_count, default=8, help="number of prompts to sample (default: %(default)s)")
    limit = "timeout in seconds of a reward for all samples (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=60.0, help=limit)
    quick = "run only the checks that need no policy: versions, batches"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.epilog = PASSED_ON


def _export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("export", help="write the policy of a checkpoint as a Hugging Face folder")
    parser.add_argument("checkpoint", type=Path, help="checkpoint file of a Trainer")
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--policy", help="name, path or module:function of the policy, if it was built by code")
    parser.add_argument("--critic", help="name, path or module:function of a separate critic, if it was built by code")
    parser.add_argument("--tokenizer", help="name, path or module:function of the tokenizer, if none is saved")


def _from_trl(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("from-trl", help="write a recipe from a GRPOConfig of TRL")
    parser.add_argument("config", type=Path, help="script or notebook, which is parsed and never run; YAML; JSON")
    parser.add_argument("--output", type=Path, help="file to write the recipe to (default: print it)")
    parser.add_argument("--devices", type=_count, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--model", help="name or folder of the policy (default: that of the configuration)")
    reward = "a reward function, module.function, instead of those of the configuration; may be repeated"
    parser.add_argument("--reward", action="append", default=[], help=reward)
    parser.add_argument("--prompts", help="file or data set of prompts (default: that of the configuration)")
    ignored = "names of options to leave out"
    parser.add_argument("--ignore", action="extend", nargs="+", default=[], metavar="OPTION", help=ignored)


def _ray(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("ray", help="run a recipe on a Ray cluster, with its vLLM servers")
    parser.add_argument("recipe", type=Path, help=RECIPE)
    address = "address of the cluster (default: RAY_ADDRESS, the cluster of this machine, or a new one on it)"
    parser.add_argument("--address", help=address)
    nodes = "number of groups of ranks, num_nodes of the Trainer (default: %(default)s)"
    parser.add_argument("--nodes", type=_count, default=1, help=nodes)
    devices = "number of ranks of a group, devices of the Trainer (default: %(default)s)"
    parser.add_argument("--devices", type=_count, default=1, help=devices)
    kinds = "reserve a GPU for each rank (default: if the cluster has GPUs)"
    parser.add_argument("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help=kinds)
    restarts = "number of times that all ranks start again after one failed (default: %(default)s)"
    parser.add_argument("--max-restarts", type=partial(_count, least=0), default=3, help=restarts)
    parser.add_argument(
        "--servers", type=partial(_count, least=0), default=0, help="number of vLLM servers (default: %(default)s)"
    )
    served = "arguments of lightning-rl serve for each server, without --host and --port"
    parser.add_argument("--serve", default="", metavar="ARGUMENTS", help=served)
    parser.epilog = f"{PASSED_ON} The recipe gets its servers by VLLMServerEngine(launched_servers)."


def _replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("replay", help="recompute a recorded rollout and compare")
    parser.add_argument("recording", type=Path, help="either file of a recording")
    parser.add_argument("other", type=Path, nargs="?", help="second recording to compare with")
    parser.add_argument("--recipe", type=Path, help="script with the algorithm, to replace that of the recording")
    parser.add_argument("--checkpoint", type=Path, help="with --recipe: repeat the step that started from its weights")
    parser.add_argument("--against", type=Path, help="script with another algorithm to compare with")
    parser.epilog = "Options after -- are passed to the script."


def _report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("report", help="write an HTML report from the folder of a run")
    folders = "folders of the run, with metrics, recordings and evidence of the audit"
    parser.add_argument("run", type=Path, nargs="+", help=folders)
    parser.add_argument("--output", type=Path, help="file or folder to write to (default: the first folder of the run)")
    parser.add_argument("--title", default="", help="title of the report (default: last names of the first folder)")
    parser.add_argument("--recipe", type=Path, help="script with custom losses and corrections")
    embedded = "megabytes of rollouts in the file; others are separate files (default: %(default)s)"
    parser.add_argument("--embedded", type=float, default=24.0, help=embedded)
    parser.epilog = PASSED_ON


def _resume_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    described = "interrupt a recipe after every optimizer step, resume it, and compare"
    parser = commands.add_parser("resume-check", help=described)
    parser.add_argument("recipe", type=Path, help=RECIPE)
    parser.add_argument(
        "--steps", type=_count, default=8, help="optimizer steps of the full run (default: %(default)s)"
    )
    parser.add_argument("--first", type=_count, default=1, help="first step to interrupt after (default: %(default)s)")
    parser.epilog = PASSED_ON


def _serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="start a vLLM server that loads weights from a trainer")
    parser.add_argument("model", help="folder or name of a model, for configuration and tokenizer; no weights are read")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--dtype", help="dtype of the weights (default: that of the configuration)")
    storage = "folder for weights, the trainer's storage= (default: the system's temporary folder)"
    parser.add_argument("--storage", type=Path, help=storage)
    pictures = "serve the whole multimodal model, for prompts with pictures (default: its language model)"
    parser.add_argument("--pictures", action="store_true", help=pictures)
    parser.add_argument("--ssl-certfile", type=Path, help="certificate for https; with --ssl-keyfile")
    parser.add_argument("--ssl-keyfile", type=Path, help="private key of the certificate")
    parser.epilog = "Calls need the key in VLLM_API_KEY. Arguments after -- are passed to vLLM."
