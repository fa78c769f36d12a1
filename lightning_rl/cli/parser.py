"""The command line as a whole: every command with its options. Imports no torch, so that help comes at once."""

import argparse
from pathlib import Path

RECIPE = "a script that calls Trainer.fit"
PASSED_ON = "What stands after -- is passed on to the recipe."


def command_line() -> argparse.ArgumentParser:
    """The parser; ``command`` says which module of :mod:`lightning_rl.cli` runs."""
    parser = argparse.ArgumentParser(
        prog="lightning-rl",
        description="Tools around runs of lightning_rl.",
        epilog="lightning-rl COMMAND --help explains the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="show which versions are installed")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _doctor(commands)
    _export(commands)
    _from_trl(commands)
    _replay(commands)
    _report(commands)
    _resume_check(commands)
    _serve(commands)
    return parser


def _doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="look for what would go wrong in a recipe, without training")
    parser.add_argument("recipe", type=Path, help=RECIPE)
    parser.add_argument("--prompts", type=int, default=8, help="prompts to sample answers to (default: %(default)s)")
    limit = "seconds that a reward may take for all of them (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=60.0, help=limit)
    quick = "look at what needs no policy alone: versions, batches, template"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.epilog = PASSED_ON


def _export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("export", help="write the policy of a checkpoint as a Hugging Face folder")
    parser.add_argument("checkpoint", type=Path, help="a file that a Trainer saved")
    parser.add_argument("folder", type=Path, help="where to")
    parser.add_argument("--policy", help="what it is built from, if that was code: a name, a path, module:function")
    parser.add_argument("--critic", help="the same for a critic of its own")
    parser.add_argument("--tokenizer", help="name or path, if the checkpoint names none")


def _from_trl(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("from-trl", help="write a recipe from a GRPOConfig of TRL")
    parser.add_argument("config", type=Path, help="a script with a GRPOConfig, which is read and never run; YAML; JSON")
    parser.add_argument("--output", type=Path, help="file of the recipe (default: print it)")
    parser.add_argument("--devices", type=int, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--model", help="name or folder of the policy, if the configuration has none")
    reward = "a reward function, module.function, if the configuration has none; may be repeated"
    parser.add_argument("--reward", action="append", default=[], help=reward)
    parser.add_argument("--prompts", help="file or data set of prompts, if the configuration has none")


def _replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("replay", help="compute a recorded rollout again and compare")
    parser.add_argument("recording", type=Path, help="either file of a recording")
    parser.add_argument("other", type=Path, nargs="?", help="another recording, to compare with")
    parser.add_argument("--recipe", type=Path, help="take the algorithm from a script, not from the recording")
    parser.add_argument("--checkpoint", type=Path, help="with --recipe: repeat the step that began with its weights")
    parser.add_argument("--against", type=Path, help="a script with another algorithm, to compare with")
    parser.epilog = "What stands after -- is passed on to the script."


def _report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("report", help="write what the folder of a run holds as one HTML file")
    folders = "folder of the run: metrics, recordings, evidence of the audit; several if they lie apart"
    parser.add_argument("run", type=Path, nargs="+", help=folders)
    parser.add_argument("--output", type=Path, help="the file, or its folder (default: the first folder of the run)")
    parser.add_argument("--title", default="", help="of the report (default: the last names of the first folder)")
    parser.add_argument("--recipe", type=Path, help="take losses and corrections of your own from a script")
    embedded = "megabytes of rollouts in the file itself; others lie beside it (default: %(default)s)"
    parser.add_argument("--embedded", type=float, default=24.0, help=embedded)
    parser.epilog = PASSED_ON


def _resume_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    described = "interrupt a recipe after every optimizer step, resume it, and compare"
    parser = commands.add_parser("resume-check", help=described)
    parser.add_argument("recipe", type=Path, help=RECIPE)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the whole run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="first step to interrupt after (default: %(default)s)")
    parser.epilog = PASSED_ON


def _serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("serve", help="start a vLLM server that takes its weights from a trainer")
    parser.add_argument("model", help="folder or name of a model: configuration and tokenizer, weights are not read")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default: %(default)s)")
    parser.add_argument("--dtype", help="of the weights; by default as in the configuration")
    storage = "folder that the trainer writes weights to, its storage= (default: that for temporary files)"
    parser.add_argument("--storage", type=Path, help=storage)
    parser.add_argument("--api-key-file", type=Path, help="file with the key that every call has to bring")
    parser.add_argument("--ssl-certfile", type=Path, help="certificate, for https; with --ssl-keyfile")
    parser.add_argument("--ssl-keyfile", type=Path, help="its private key")
    parser.epilog = (
        "The key is that of --api-key-file, or of VLLM_API_KEY, or of a file in ~/.config/lightning-rl that is made if "
        "there is none. What stands after -- is for vLLM."
    )
