"""A recording from anywhere is data: whatever a file says, nothing is run, and a sentence says what is wrong."""

import json
import os
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
from lightning_rl.recording.serialize import Opaque, from_json

Header = dict[str, Any]
STEM = "rollout-000000"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recording that RolloutRecorder wrote."""
    folder = tmp_path_factory.mktemp("clean")
    callbacks = [OPSM(1e-3), ReferenceKL(0.1, as_loss=True), RolloutRecorder(folder)]
    fit(tiny_module(minibatches_per_rollout=2), callbacks=callbacks, data=tiny_prompts(4, 4))
    return folder


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    """A copy of it to be spoiled."""
    shutil.copytree(clean, tmp_path / "recorded")
    return tmp_path / "recorded"


def replayed(path: Path) -> None:
    """All that ``lightning-rl replay`` does with a recording."""
    recordings = Recording.of_all_ranks(path)
    replay(recordings, [recording.algorithm() for recording in recordings])


def rewritten(folder: Path, change: Callable[[Header], object]) -> Path:
    path = folder / f"{STEM}.json"
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))
    return path


def test_what_the_recorder_wrote_is_replayed(folder: Path) -> None:
    replayed(rewritten(folder, dict.copy))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module within reach that leaves a file behind when it is imported, called or made."""
    left = tmp_path / "left"
    code = [
        "from pathlib import Path",
        f"left = lambda *_, **__: Path({str(left)!r}).touch()",
        "left()",
        "class Loss:",
        "    prepares = False",
        "    def __setattr__(self, *_): left()",
        "    def __init__(self, *_, **__): left()",
    ]
    (tmp_path / "trap.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    return left


def named(name: str) -> Header:
    return {"$name": name}


def made(name: str, **state: Any) -> Header:
    return {"$object": name, "state": state}


GSPO = "lightning_rl.losses.gspo:GSPO"
FOREIGN: dict[str, Header] = {
    "an import": named("trap:left"),
    "a class": made("trap:Loss", clip=1),
    "a partial": {"$partial": named("trap:left"), "args": [], "keywords": {}},
    "a partial of a method": {
        "$partial": named("lightning_rl.recording.recompute:torch.load"),
        "args": [],
        "keywords": {},
    },
    "the shell": made("lightning_rl.losses.policy_loss:FunctionLoss", function=named("os:system")),
    "a shell that is bound": made(
        "lightning_rl.losses.policy_loss:FunctionLoss",
        function={"$partial": named("os:system"), "args": ["true"], "keywords": {}},
    ),
    "the importer": named("builtins:__import__"),
    "an unpickler": named("pickle:loads"),
    "through an attribute": named("lightning_rl.losses.gspo:GSPO.__init__.__globals__"),
    "through our imports": named("lightning_rl.audit.saved:torch.load"),
    "without a module": named("trap"),
    "with dots alone": named("trap.left"),
    "a path": named("../trap:left"),
    "no text": {"$name": ["trap", "left"]},
    "a class that is no text": {"$object": {"$name": "trap:left"}, "state": {}},
    "a class of ours that is no part": made("lightning_rl.recording.recorder:RolloutRecorder", folder="/"),
    "a worker's function": named("lightning_rl.rewards.process_worker:answer"),
}


@pytest.mark.parametrize("attack", FOREIGN)
def test_code_that_a_file_names_is_neither_imported_nor_called(attack: str, folder: Path, trap: Path) -> None:
    path = rewritten(folder, lambda header: header["algorithm"].update(loss=FOREIGN[attack]))
    with pytest.raises(ValueError, match=r"pass --recipe with the script that made the run"):
        replayed(path)
    assert not trap.exists()


@pytest.mark.parametrize("attack", FOREIGN)
@pytest.mark.parametrize("part", ["advantages", "reduction", "value_loss", "callbacks"])
def test_nor_in_another_place(part: str, attack: str, folder: Path, trap: Path) -> None:
    foreign = {"own": FOREIGN[attack]} if part == "callbacks" else FOREIGN[attack]
    path = rewritten(folder, lambda header: header["algorithm"].update({part: foreign}))
    with pytest.raises(ValueError, match=r"pass --recipe|expected a \w+ as"):
        replayed(path)
    assert not trap.exists()


def test_what_a_correction_keeps_for_other_stages_stays_a_name(folder: Path, trap: Path) -> None:
    state = {"teacher": named("trap:left"), "beta": 1.0, "as_loss": True}
    teacher = made("lightning_rl.callbacks.teacher_kl:TeacherKL", **state)
    path = rewritten(folder, lambda header: header["algorithm"]["callbacks"].update(teacher_kl=teacher))
    (found,) = [one for one in Recording.load(path).algorithm().corrections.callbacks if isinstance(one, TeacherKL)]
    assert isinstance(found.teacher, Opaque)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (made(GSPO, clip_low="0.1"), "expected clip_low"),
        (made(GSPO, clip_low={"$number": "nan"}), "expected clip_low"),
        (made(GSPO, __class__=1), "expected only fields of .*GSPO, got '__class__'"),
        (made(GSPO, prepare=named("os:system")), "expected only fields of .*GSPO, got 'prepare'"),
        (made("lightning_rl.signal.reductions:SequenceSumNorm", length="9"), "expected valid fields of .*SumNorm"),
        (made("lightning_rl.callbacks.opsm:OPSM", delta=-1), "expected delta > 0"),
        (made("lightning_rl.callbacks.opsm:OPSM", sequence_mask=named("trap:left")), "got 'sequence_mask'"),
        (made("lightning_rl.callbacks.opsm:OPSM", contributes=[]), "got 'contributes'"),
        (made("lightning_rl.losses.policy_loss:PolicyLoss"), "abstract"),
        ({"$object": GSPO, "state": []}, "expected a mapping of the fields of .*GSPO"),
        ({"$object": GSPO}, r"expected \$object state in a recording"),
        ({"$number": "1e5"}, r"expected \$number nan, inf or -inf"),
        ({"$number": "1", "$name": "os:system"}, "expected"),
        ({"$tuple": {"a": 1}}, r"expected \$tuple with a list"),
        ({"$partial": 3, "args": [], "keywords": {}}, r"expected \$partial of a function"),
    ],
)
def test_values_that_a_part_does_not_take_are_refused(description: Header, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(description)


def inside(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HEADERS: dict[str, tuple[Callable[[Header], object], str]] = {
    "another folder": (lambda h: h.update(rollout="../../../etc/passwd"), "rollout to be a whole number"),
    "a rank that is a path": (lambda h: h.update(rank="../x"), "rank to be a whole number"),
    "a billion ranks": (lambda h: h.update(ranks=10**9), "ranks <= 1.04858e"),
    "a rank beyond": (lambda h: h.update(rank=1), "rank <= 0"),
    "a billion threads": (lambda h: h.update(threads=10**9), "threads <= 4096"),
    "no thread": (lambda h: h.update(threads=0), "threads to be a whole number above 0"),
    "packing that is none": (lambda h: h["options"].update(packing=named("os:system")), "packing to be True or False"),
    "a row beyond": (lambda h: h["plan"][0].append([10**6]), "a plan that does not name each"),
    "a row twice": (lambda h: h["plan"][0].append(h["plan"][0][0]), "a plan that does not name each"),
    "a negative row": (lambda h: h["plan"][0].append([-1]), "row to be a whole number of at least 0"),
    "a row that is a text": (lambda h: h["plan"][0].append(["0"]), "row to be a whole number"),
    "no plan": (lambda h: h.update(plan=[]), "steps without a plan"),
    "steps without tensors": (lambda h: h.update(steps=h["steps"] * 9), "no log-probabilities of step 2"),
    "a scale that is none": (lambda h: h["steps"][0].update(scale={"$number": "nan"}), "expected scale"),
    "a part that is none": (lambda h: h["steps"][0]["parts"].update({"loss/total": "9"}), "a str as loss/total"),
    "a state with code": (lambda h: h.update(states={"opsm": {"delta": named("os:system")}}), "a state of 'opsm'"),
    "a state of a step": (lambda h: h["steps"][0].update(states={"opsm": {"x": made("trap:Loss")}}), "a state of"),
    "no entries": (lambda h: h.clear() or h.update(format=2), "no rollout"),
    "lists in lists": (lambda h: h.update(samples=inside(100)), "more than 64 deep"),
    "a list": (lambda h: h.update(algorithm=[]), "algorithm"),
    "an algorithm without a loss": (lambda h: h["algorithm"].pop("loss"), "loss"),
    "a part that is nothing": (
        lambda h: h["steps"][0]["parts"].update({"loss/total": None}),
        "a NoneType as loss/total",
    ),
    "a rollout beyond any": (lambda h: h.update(rollout=10**300), "rollout <= 9.0"),
    "a version that is none": (lambda h: h["versions"].update(torch=3), "a int instead of a name"),
}


@pytest.mark.parametrize("attack", HEADERS)
def test_a_header_that_nobody_wrote_is_refused(attack: str, folder: Path, trap: Path) -> None:
    change, message = HEADERS[attack]
    with pytest.raises(ValueError, match=message):
        replayed(rewritten(folder, change))
    assert not trap.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1]", "expected a recording of format 2, got 'a list'"),
        ("[" * 100_000, "too deeply nested lists"),
        ('{"format": 2, "scale": NaN}', "NaN, which is not JSON"),
        ('{"format": 2, "scale": -Infinity}', "-Infinity, which is not JSON"),
        ('{"format": 2, "scale": 1e999}', "the number 1e999, which is too large"),
        ('{"format": 2, "rollout": ' + "9" * 5000 + "}", "expected the JSON"),
        ('{"format": 2, "rollout": ' + "9" * 400 + "}", "expected the JSON .* the number 9{40}, which is too large"),
        ('{"format": 2, "rollout": 1, "rollout": 2}', "a duplicate name"),
        ("\x00\x01", "expected the JSON"),
    ],
)
def test_text_that_is_no_header_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / f"{STEM}.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Recording.load(folder / f"{STEM}.json")


def test_bytes_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / f"{STEM}.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="expected the JSON of a recording"):
        Recording.load(folder / f"{STEM}.json")


def header_of(shape: list[int], offsets: list[int]) -> bytes:
    entry = {"rollout/response_ids": {"dtype": "I64", "shape": shape, "data_offsets": offsets}}
    text = json.dumps(entry).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little"),
        (10**9).to_bytes(8, "little") + b"{}",
        header_of([2**40, 2**20], [0, 8]) + bytes(8),
        header_of([2**62, 8], [0, 8]) + bytes(8),
        header_of([1], [0, 2**60]),
        header_of([1], [-8, 0]) + bytes(8),
        header_of([1], [0, 8]),
        b"\x80\x04\x95" + bytes(40),
    ],
    ids=["empty", "long header", "short file", "huge", "overflowing", "far", "negative", "cut", "pickle"],
)
def test_tensors_that_claim_what_is_not_there_are_refused(content: bytes, folder: Path) -> None:
    (folder / f"{STEM}.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="expected the tensors of a recording"):
        Recording.load(folder / f"{STEM}.json")


def changed_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = folder / f"{STEM}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "none": lambda t: t.clear(),
    "no ids": lambda t: t.pop("rollout/response_ids"),
    "one axis": lambda t: t.update({"rollout/response_ids": torch.zeros(4, dtype=torch.int64)}),
    "no mask": lambda t: t.pop("sampled/scored"),
    "fewer rows in a pass": lambda t: t.update({"pass/0/logprobs": t["pass/0/logprobs"][:1].clone()}),
    "whole numbers in a pass": lambda t: t.update({"pass/0/entropy": t["pass/0/entropy"].long()}),
    "a pass that was not made": lambda t: t.update({"pass/7/logprobs": t["pass/0/logprobs"].clone()}),
    "a name with a way up": lambda t: t.update({"pass/../../logprobs": t["pass/0/logprobs"].clone()}),
    "a field that nobody has": lambda t: t.update({"rollout/__class__": t["rollout/rewards"].clone()}),
    "another number of rewards": lambda t: t.update({"rollout/rewards": torch.zeros(1)}),
    "nothing of the entropy": lambda t: t.pop("pass/0/entropy"),
    "a scalar for prompts": lambda t: t.update({"rollout/prompt_ids": torch.tensor(1)}),
    "a mask of floats": lambda t: t.update({"rollout/action_mask": t["rollout/action_mask"].double()}),
    "whole numbers for rewards": lambda t: t.update({"rollout/rewards": t["rollout/rewards"].long()}),
    "floats for groups": lambda t: t.update({"rollout/groups": t["rollout/groups"].bfloat16()}),
    "8 bits for log-probabilities": lambda t: t.update(
        {"pass/0/logprobs": t["pass/0/logprobs"].to(torch.float8_e4m3fn)}
    ),
    "complex numbers": lambda t: t.update({"rollout/old_logprobs": t["rollout/old_logprobs"].to(torch.complex64)}),
    "no mask of scores": lambda t: t.update({"sampled/scored": t["sampled/scored"].long()}),
    "a response longer than all": lambda t: t["rollout/response_lengths"].fill_(2**62),
    "a prompt without a token": lambda t: t["rollout/prompt_lengths"].fill_(0),
    "a negative token": lambda t: t["rollout/response_ids"].fill_(-5),
    "a reason that is none": lambda t: t["rollout/finish"].fill_(9),
    "two rewards of a row": lambda t: t.update({"rollout/task_rewards/x": torch.zeros(16, 2)}),
    "another kind of tensor": lambda t: t.update({"own/x": torch.zeros(16)}),
    "a field that is no mapping": lambda t: t.update({"rollout/rewards/x": torch.zeros(16)}),
}


@pytest.mark.parametrize("attack", TENSORS)
def test_tensors_that_do_not_fit_are_refused(attack: str, folder: Path) -> None:
    path = changed_tensors(folder, TENSORS[attack])
    with pytest.raises(ValueError, match=r"^expected (the tensors of a recording|a tensor '\S+') in \S+, got [^\n]+$"):
        replayed(path)


def test_log_probabilities_that_are_none_end_the_command_in_one_sentence(folder: Path) -> None:
    path = changed_tensors(folder, lambda t: t["pass/0/logprobs"].fill_(torch.nan))
    assert_refused(path, "expected finite outputs of the policy, got log-probability nan at row")


def assert_refused(path: Path, message: str) -> None:
    """The command ends with this sentence, and so with exit code 1."""
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path)])
    assert isinstance(ended.value.code, str) and ended.value.code.startswith(message)
    assert "\n" not in ended.value.code


@pytest.mark.parametrize("missing", [".json", ".safetensors"])
@pytest.mark.parametrize("given", [".json", ".safetensors"])
def test_half_a_recording_ends_the_command_in_one_sentence(given: str, missing: str, folder: Path) -> None:
    (folder / f"{STEM}{missing}").unlink()
    message = (
        f"expected {folder / STEM}{missing}, got no such file: a recording is a .json and a .safetensors of one name"
    )
    assert_refused(folder / f"{STEM}{given}", message)


@pytest.mark.parametrize("name", ["", "recorded", "x" * 300, "recorded/rollout-000000.json/x", "a\0b"])
def test_a_path_that_is_no_recording_ends_the_command_in_one_sentence(name: str, folder: Path) -> None:
    assert_refused(folder.parent / name, "embedded null" if "\0" in name else "expected ")


@pytest.mark.parametrize("attack", HEADERS)
def test_a_header_that_nobody_wrote_ends_the_command_in_one_sentence(attack: str, folder: Path) -> None:
    assert_refused(rewritten(folder, HEADERS[attack][0]), "expected ")


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    (folder / f"{STEM}.json").rename(secret)
    (folder / f"{STEM}.json").symlink_to(secret)
    with pytest.raises(ValueError, match="a link out of its folder"):
        Recording.load(folder / f"{STEM}.json")


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / f"{STEM}.json").unlink()
    os.mkfifo(folder / f"{STEM}.json")
    with pytest.raises(ValueError, match="which is not a file"):
        Recording.load(folder / f"{STEM}.json")


def test_the_command_prints_no_control_sequence_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rewritten(folder, lambda header: header.update(device="cpu\x1b]0;owned\x07"))
    with pytest.raises(SystemExit):
        main(["replay", str(path)])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "cpu\\x1b]0;owned\\x07" in printed


def test_nor_in_what_it_refuses(folder: Path) -> None:
    path = rewritten(folder, lambda header: header["algorithm"].update(loss=named("x:\x1b[2Jy")))
    with pytest.raises(SystemExit, match=r"got x:\\x1b\[2Jy as loss") as ended:
        main(["replay", str(path)])
    assert "\x1b" not in str(ended.value)
