"""Every command and every option has a help text, which comes at once, and every command has a module."""

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightning_rl.cli.main import MODULES, main
from lightning_rl.cli.parser import command_line

ROOT = Path(__file__).resolve().parents[2]


def commands() -> dict[str, argparse.ArgumentParser]:
    (parsers,) = [action for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return dict(parsers.choices)


def test_every_command_has_a_module_that_runs_it() -> None:
    assert commands().keys() == MODULES.keys()
    assert all(callable(import_module(module).run) for module in MODULES.values())


@pytest.mark.parametrize("command", MODULES)
def test_every_option_has_a_help_text(command: str) -> None:
    assert [action.dest for action in commands()[command]._actions if not action.help] == []  # noqa: SLF001


def test_the_help_names_the_variable_of_the_key() -> None:
    assert "VLLM_API_KEY" in commands()["serve"].format_help()


def test_no_command_is_an_error_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "expected a command out of consistency, doctor, export" in capsys.readouterr().err


def test_the_versions_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "lightning_rl", "torch", "lightning", "transformers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", [["-m", "lightning_rl"], ["-m", "lightning_rl", "doctor"], ["recipes/quickstart.py"]],
    ids=["lightning-rl", "lightning-rl doctor", "quickstart"],
)  # fmt: skip
def test_help_comes_without_torch(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # names every import on stderr
    asked = [sys.executable, *command, "--help"]
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout.startswith("usage: ") and {"argparse"} <= imported
    assert imported & {"torch", "transformers", "lightning", "lightning_rl.module"} == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume-check", "a.py", "--steps", "0"], "argument --steps: expected a whole number of at least 1, got 0"),
        (["resume-check", "a.py", "--first", "x"], "argument --first: expected a whole number of at least 1, got x"),
        (["doctor", "a.py", "--prompts", "-1"], "argument --prompts: expected a whole number of at least 1, got -1"),
        (["resume-check", __file__, "--steps", "2", "--first", "2"], "expected --first below --steps=2, got 2"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_option(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert message in f"{capsys.readouterr().err}{ended.value.code}"
