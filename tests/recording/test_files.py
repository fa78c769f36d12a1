"""Files of recordings: no code runs from them, and a message names what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts
from safetensors.torch import load_file, save_file

from lightning_rl.callbacks import OPSM, ReferenceKL, TeacherKL
from lightning_rl.cli.main import main
from lightning_rl.recording import Recording, RolloutRecorder, replay
from lightning_rl.recording.recorded_algorithm import Opaque

Header = dict[str, Any]
STEM = "rollout-000000"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a recording."""
    folder = tmp_path_factory.mktemp("clean")
    callbacks = [OPSM(1e-3).with_name("own"), ReferenceKL(0.1, as_loss=True), RolloutRecorder(folder)]
    fit(tiny_module(minibatches_per_rollout=2), callbacks=callbacks, data=tiny_prompts(4, 4))
    return folder


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    """Copy of the folder."""
    shutil.copytree(clean, tmp_path / "recorded")
    return tmp_path / "recorded"


def replayed(path: Path) -> None:
    recordings = Recording.of_all_ranks(path)
    replay(recordings, [recording.algorithm() for recording in recordings])


def rewritten(folder: Path, change: Callable[[Header], object]) -> Path:
    path = folder / f"{STEM}.json"
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))
    return path


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that an importable module creates when it is imported, called or instantiated."""
    left = tmp_path / "left"
    code = [
        "from pathlib import Path",
        f"left = lambda *_, **__: Path({str(left)!r}).touch()",
        "left()",
        "class Loss:",
        "    def __init__(self, *_, **__): left()",
    ]
    (tmp_path / "trap.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    return left


def made(name: str, **options: Any) -> Header:
    return {"class_path": name, "init_args": options}


FOREIGN: dict[str, Header] = {
    "function": {"name": "trap.left"},
    "class": made("trap.Loss", clip=1),
    "partial": {"partial": "trap.left", "args": [], "keywords": {}},
    "bound function": made("lightning_rl.losses.policy_loss.FunctionLoss", function={"name": "os.system"}),
    "attribute": {"name": "lightning_rl.losses.gspo.GSPO.__init__.__globals__"},
    "class of the library": made("lightning_rl.recording.recorder.RolloutRecorder", folder="/"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("part", ["loss", "advantages", "reduction", "value_loss", "callbacks"])
def test_code_that_a_file_names_is_not_imported_or_called(part: str, foreign: str, folder: Path, trap: Path) -> None:
    value = {"own": FOREIGN[foreign]} if part == "callbacks" else FOREIGN[foreign]
    path = rewritten(folder, lambda header: header["algorithm"].update({part: value}))
    with pytest.raises(ValueError, match=r"pass --recipe|expected a RLCallback as callbacks\.own"):
        replayed(path)
    assert not trap.exists()


def test_options_that_a_replay_does_not_use_may_be_user_code(folder: Path, trap: Path) -> None:
    teacher = made("lightning_rl.callbacks.teacher_kl.TeacherKL", teacher={"name": "trap.left"}, beta=1.0, as_loss=True)
    path = rewritten(folder, lambda header: header["algorithm"]["callbacks"].update(teacher_kl=teacher))
    (found,) = [one for one in Recording.load(path).algorithm().corrections.callbacks if isinstance(one, TeacherKL)]
    assert isinstance(found.teacher, Opaque) and not trap.exists()
    with pytest.raises(ValueError, match=r"got trap\.left, .* pass --recipe"):
        found.teacher()


def test_callbacks_keep_their_names(folder: Path) -> None:
    callbacks = Recording.load(folder / f"{STEM}.json").algorithm().corrections.callbacks
    assert [callback.name for callback in callbacks] == ["own", "reference_kl"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the JSON of a recording in .*, got an invalid file: Expecting value"),
        ("[1]", "expected a recording of format 3, got 'a list'"),
        ('{"format": 2}', "expected a recording of format 3, got 2"),
        ('{"format": 3}', "expected a recording of RolloutRecorder, got .* without algorithm"),
        ("[" * 100_000, "expected the JSON"),
        (b"\xff\xfe{", "expected the JSON"),
    ],
)
def test_a_file_without_a_header_is_refused(text: str | bytes, message: str, folder: Path) -> None:
    (folder / f"{STEM}.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        Recording.load(folder / f"{STEM}.safetensors")


@pytest.mark.parametrize("name", ["rollout", "rank", "ranks", "threads"])
def test_a_number_that_is_no_integer_is_named_with_the_file(name: str, folder: Path) -> None:
    path = rewritten(folder, lambda header: header.update({name: float("inf")}))
    with pytest.raises(SystemExit, match=rf"expected {name} to be an integer, got inf in .*{STEM}\.json"):
        main(["replay", str(path)])


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "none": (lambda t: t.clear(), "expected the tensors of a recording"),
    "no ids": (lambda t: t.pop("rollout/response_ids"), "expected the tensors of a recording"),
    "no mask": (lambda t: t.pop("sampled/scored"), "got no sampled/scored"),
    "fewer rows": (
        lambda t: t.update({"pass/0/logprobs": t["pass/0/logprobs"][:1].clone()}),
        "'pass/0/logprobs' of other",
    ),
    "unknown field": (lambda t: t.update({"rollout/__class__": t["rollout/rewards"].clone()}), "expected the tensors"),
}


SEGMENTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]], str]] = {
    "no counts": (lambda values, _: {"values": values}, "segments/counts, got none"),
    "no values": (lambda _, counts: {"counts": counts}, "segments/values, got none"),
    "float counts": (lambda values, counts: {"values": values, "counts": counts.float()}, "segments/counts of int64"),
    "float values": (lambda values, counts: {"values": values.float(), "counts": counts}, "segments/values of .*int64"),
    "a negative count": (
        lambda values, counts: {"values": values, "counts": torch.tensor([-1, 3, *counts[2:].tolist()])},
        "segments/counts of int64, at least 0",
    ),
}


@pytest.mark.parametrize("change", SEGMENTS)
def test_segments_that_do_not_fit_are_refused_with_file_and_key(change: str, folder: Path) -> None:
    path, (spoiled, message) = folder / f"{STEM}.safetensors", SEGMENTS[change]
    tensors = load_file(path)
    rows = len(tensors["rollout/response_ids"])
    parts = spoiled(torch.tensor([[0, -1, 1]] * rows), torch.ones(rows, dtype=torch.int64))
    save_file(tensors | {f"rollout/segments/{name}": part for name, part in parts.items()}, path)
    with pytest.raises(ValueError, match=f"{STEM}.safetensors, got an invalid file: expected {message}"):
        Recording.load(path)


@pytest.mark.parametrize("change", TENSORS)
def test_tensors_that_do_not_fit_are_refused(change: str, folder: Path) -> None:
    path, (spoil, message) = folder / f"{STEM}.safetensors", TENSORS[change]
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        Recording.load(path)


@pytest.mark.parametrize("content", [b"", (2**63).to_bytes(8, "little"), b"\x80\x04\x95" + bytes(40)])
def test_a_file_without_tensors_is_refused(content: bytes, folder: Path) -> None:
    (folder / f"{STEM}.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="expected the tensors of a recording"):
        Recording.load(folder / f"{STEM}.json")


def refusal(path: Path) -> str:
    """Return the message with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path)])
    return str(ended.value.code)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_the_command_names_a_missing_file(suffix: str, folder: Path) -> None:
    (folder / f"{STEM}{suffix}").unlink()
    for given in (".json", ".safetensors"):
        assert refusal(folder / f"{STEM}{given}").startswith(f"expected {folder / STEM}{suffix}, got no such file")


def test_the_command_refuses_log_probabilities_that_are_not_finite(folder: Path) -> None:
    path = folder / f"{STEM}.safetensors"
    tensors = load_file(path)
    tensors["pass/0/logprobs"].fill_(torch.nan)
    save_file(tensors, path)
    assert refusal(path).startswith("expected finite outputs of the policy, got log-probability nan at row")


def test_the_command_prints_no_control_sequence_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(rewritten(folder, lambda header: header.update(device="cpu\x1b]0;owned\x07")))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "cpu\\x1b]0;owned\\x07" in printed
    path = rewritten(folder, lambda header: header["algorithm"].update(loss={"name": "x.\x1b[2Jy"}))
    assert "got x.\\x1b[2Jy as loss" in refusal(path)
