"""Run report: it changes nothing of a run, holds its numbers, goes on after an interrupt, and is written by itself."""

import gzip
import json
import math
import struct
from base64 import b64decode
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.conversations import Echo
from kit.support import fit, tiny_module, tiny_prompts, tiny_tokenizer, weights_of
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import RLCallback
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import OPSM, NoEOSMask
from lightning_rl.cli.main import main
from lightning_rl.environments import EnvironmentReward
from lightning_rl.recording import Recording, RolloutRecorder
from lightning_rl.reporting import RunReport, write_report
from lightning_rl.reporting.attribution import attribute
from lightning_rl.reporting.pages import page_of
from lightning_rl.reporting.run_files import End, read_folder
from lightning_rl.rewards import RewardError, SubprocessReward
from lightning_rl.utils.finding import Finding

OPTIONS: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2, "optimizer": partial(AdamW, lr=0.05)}
KINDS = {"f4": np.float32, "f8": np.float64, "i4": np.int32, "i2": np.int16, "u1": np.uint8}


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a page, read by the letter of its description."""
    data = gzip.decompress(block)
    (length,) = struct.unpack("<I", data[:4])
    header = json.loads(data[4 : 4 + length])
    assert (4 + length) % 8 == 0
    arrays = {
        name: np.frombuffer(data, KINDS[kind], size, 4 + length + offset)
        for name, (kind, offset, size) in header["arrays"].items()
    }
    return header, arrays


def index_of(report: Path) -> dict[str, Any]:
    text = report.read_text().split('id="index">')[1].split("</script>")[0]
    return json.loads(gzip.decompress(b64decode(text)))


def reported(folder: Path, *callbacks: Callback, rollouts: int = 3, **options: Any) -> Path:
    """A short run with a report of every rollout; returns the report."""
    module = tiny_module(tokenizer=tiny_tokenizer(), **{**OPTIONS, **options})
    logger = CSVLogger(folder, name="", version="")
    fit(module, callbacks=[RunReport(1), *callbacks], data=tiny_prompts(4 * rollouts, 4), logger=logger)
    return folder / "report" / "report.html"


def test_a_report_changes_nothing_of_a_run(tmp_path: Path) -> None:
    modules = [tiny_module(**OPTIONS) for _ in range(2)]
    fit(modules[0], callbacks=[OPSM(1e-3)], data=tiny_prompts(8, 4))
    fit(modules[1], callbacks=[RunReport(1), OPSM(1e-3)], data=tiny_prompts(8, 4), default_root_dir=tmp_path)
    one, other = map(weights_of, modules)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert index_of(tmp_path / "report" / "report.html")["metrics"]["reward/task"]  # also without a logger


def test_the_command_writes_to_a_file_or_into_a_folder(tmp_path: Path) -> None:
    reported(tmp_path, rollouts=1)
    other = tmp_path / "other"
    other.mkdir()
    for output, written in ((other, other / "report.html"), (other / "my.html", other / "my.html")):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(tmp_path), "--output", str(output)])
        assert not ended.value.code and index_of(written)["metrics"]["reward/task"]


def test_every_metric_of_the_report_is_the_loggers(tmp_path: Path) -> None:
    report = reported(tmp_path, SignalLedger())
    logged = read_folder([tmp_path]).metrics
    (tmp_path / "report" / "metrics.jsonl").unlink()
    table = read_folder([tmp_path]).metrics
    assert len(table) > 40 and {name: dict(values) for name, values in logged.items()} == table
    shown = index_of(report)
    assert {name: dict(zip(*columns, strict=True)) for name, columns in shown["metrics"].items()} == {
        name: dict(sorted(values.items())) for name, values in table.items()
    }
    assert shown["glossary"].keys() == table.keys()
    assert shown["configuration"]["data"]["prompts"]["fingerprint"] and shown["configuration"]["versions"]["torch"]


def test_every_number_of_a_page_is_the_recorders(tmp_path: Path) -> None:
    reported(tmp_path, NoEOSMask(), OPSM(1e-3), rollouts=1)
    recording = Recording.load(tmp_path / "report" / "rollout-000000.json")
    rollout = recording.rollout
    header, arrays = unpack(page_of([recording]))
    inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
    for name in ("rollout_logprobs", "old_logprobs", "advantages"):
        assert np.array_equal(arrays[name], getattr(rollout, name)[inside].numpy()), name
    for number in range(2):
        for name in ("logprobs", "entropy", "gradient"):
            tensor = recording.tensors[f"pass/{number}/{name}"]
            assert np.array_equal(arrays[f"{number}/{name}"], tensor[inside].numpy()), name
    assert np.array_equal(np.array(header["ids"])[arrays["response"]], rollout.response_ids[inside].numpy())
    assert np.array_equal(arrays["valid"], rollout.valid_tokens[inside].numpy())
    assert np.array_equal(arrays["version"], rollout.policy_version[inside].numpy())
    for row, sample in enumerate(header["samples"]):
        assert sample["id"] == int(rollout.sample_ids[row]) and sample["tokens"] == int(rollout.response_lengths[row])
        assert sample["reward"] == (float(rollout.rewards[row]) if rollout.rewarded[row] else None)
        assert sample["rewards"] == {name: float(values[row]) for name, values in rollout.rewards_by_function.items()}
        assert sample["text"] == recording.header["samples"][row]["prompt"]
    words = tiny_tokenizer().convert_ids_to_tokens(header["ids"])
    assert header["texts"] == words
    assert [step["norm"] for step in header["steps"]] == [step["grad_norm"] for step in recording.header["steps"]]


def test_the_tokens_of_a_page_average_to_the_metrics(tmp_path: Path) -> None:
    reported(tmp_path, rollouts=1)
    metrics = read_folder([tmp_path]).metrics
    header, arrays = unpack(page_of([Recording.load(tmp_path / "report" / "rollout-000000.json")]))
    minibatch = np.repeat(
        [sample["minibatch"] for sample in header["samples"]], [s["tokens"] for s in header["samples"]]
    )
    for number, step in enumerate(header["steps"]):
        here = (minibatch == number % 2) & (arrays["valid"] == 1)
        trainer = arrays[f"{number // 2}/logprobs"].astype(float)
        gap = (trainer - arrays["rollout_logprobs"])[here]
        assert math.isclose(
            np.mean(np.exp(gap) - 1 - gap), metrics["kl/rollout"][step["step_index"]], rel_tol=1e-5, abs_tol=1e-12
        )
        entropy = arrays[f"{number // 2}/entropy"].astype(float)[here]
        assert math.isclose(entropy.mean(), metrics["policy/entropy"][step["step_index"]], rel_tol=1e-6)


def test_who_took_each_token_is_what_the_ledger_counts(tmp_path: Path) -> None:
    ledger = SignalLedger()
    reported(tmp_path, ledger, NoEOSMask(), OPSM(1e-3), rollouts=2, epochs_per_rollout=1)
    metrics = read_folder([tmp_path]).metrics
    stages_met = set[str]()
    for number in range(2):
        recording = Recording.load(tmp_path / "report" / f"rollout-{number:06d}.json")
        (attribution,) = attribute([recording])
        assert attribution.reason == ""
        rollout, (taken,) = recording.rollout, attribution.taken
        total = int(rollout.action_mask.sum())
        assert metrics["ledger/tokens/sampled"][2 * number + 1] == total
        before = {"zero_advantage", "no_eos_mask.reward_mask", "no_eos_mask.exclude", "unscored", "aborted"}
        for place, stage in enumerate(attribution.stages[1:], 1):
            stages_met.add(stage)
            count = int(((taken == place) & rollout.action_mask).sum())
            if stage in before:
                assert math.isclose(count / total, metrics[f"ledger/tokens/{stage}"][2 * number + 1], rel_tol=1e-9)
        steps = [2 * number, 2 * number + 1]  # shares of the update: each row is that of one minibatch
        valid = [rollout.valid_tokens[[r for m in step for r in m]].sum() for step in recording.header["plan"]]
        for stage in set(attribution.stages[1:]) - before - {"environment"}:
            mean = sum(
                float(count) * metrics[f"ledger/tokens/{stage}"][step] for count, step in zip(valid, steps, strict=True)
            )
            count = int(((taken == attribution.number(stage)) & rollout.action_mask).sum())
            assert math.isclose(count / total, mean / float(sum(valid)), rel_tol=1e-6, abs_tol=1e-9), stage
    assert {"zero_advantage", "opsm.sequence_mask"} <= stages_met


def own_loss(view: Any) -> torch.Tensor:
    """User loss with a clip, which no recording can restore."""
    gap = view.logprobs - view.old_logprobs
    return torch.where(gap.abs() < 0.1, -gap.exp() * view.advantages, gap.detach() * 0)


def test_a_loss_of_ones_own_leaves_unknown_what_has_no_gradient(tmp_path: Path) -> None:
    reported(tmp_path, rollouts=1, loss=own_loss, epochs_per_rollout=1)
    recording = Recording.load(tmp_path / "report" / "rollout-000000.json")
    (attribution,) = attribute([recording])
    assert "own_loss" in attribution.reason
    lost = recording.rollout.valid_tokens & (recording.tensors["pass/0/gradient"] == 0)
    unknown = attribution.taken[0] == attribution.number("not known")
    idle = attribution.taken[0] == attribution.number("zero_advantage")
    assert lost.any() and torch.equal(unknown | idle, lost)


def test_what_an_environment_says_is_told_apart(tmp_path: Path) -> None:
    talking = {"environment": Echo, "rewards": EnvironmentReward(), "max_turns": 3, "tokenizer": None}
    module = tiny_module(**{**OPTIONS, **talking})
    fit(module, callbacks=[RunReport(1)], data=tiny_prompts(4, 4), default_root_dir=tmp_path)
    recording = Recording.load(tmp_path / "report" / "rollout-000000.json")
    header, arrays = unpack(page_of([recording]))
    said = arrays["0/taken"] == header["stages"].index("environment")
    assert said.any() and np.array_equal(said, arrays["action"] == 0) and not arrays["valid"][said].any()
    assert {1, 2} <= set(arrays["turn"][~said].tolist()) and header["texts"][0] is None


def test_two_ranks_are_one_page(tmp_path: Path) -> None:
    reported(tmp_path, rollouts=1)
    recording = Recording.load(tmp_path / "report" / "rollout-000000.json")
    twins = [
        Recording(header={**recording.header, "rank": rank, "ranks": 2}, tensors=recording.tensors) for rank in (0, 1)
    ]
    header, arrays = unpack(page_of(twins[:1]))
    assert header["missing_ranks"] == 1 and header["reason"] == ""
    both, joined = unpack(page_of(twins))
    assert [sample["rank"] for sample in both["samples"]] == [0] * 16 + [1] * 16
    assert len(joined["advantages"]) == 2 * len(arrays["advantages"]) and both["missing_ranks"] == 0


class Fails(Callback):
    """Ends a run in the rollout of a number."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.rollout == self.rollout and batch.step == 3:
            raise RuntimeError("the power went")


class Saves(Callback):
    """Saves a checkpoint when a rollout of a number is over."""

    def __init__(self, path: Path, rollout: int) -> None:
        self.path, self.rollout = path, rollout

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.rollout == self.rollout and batch.step == 3:
            trainer.save_checkpoint(self.path)


def test_a_run_that_goes_on_drops_what_it_makes_again(tmp_path: Path) -> None:
    again = partial(fit, data=tiny_prompts(16, 4), default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="the power went"):
        again(tiny_module(**OPTIONS), callbacks=[RunReport(1), Saves(tmp_path / "saved.ckpt", 1), Fails(2)])
    before = read_folder([tmp_path])
    assert set(before.rollouts) == {0, 1, 2} and max(before.metrics["rollout"]) == 11
    end = {"step": 11, "error": "RuntimeError", "message": "the power went"}
    assert before.end == End(**end) and index_of(tmp_path / "report" / "report.html")["end"] == end
    with (tmp_path / "report" / "findings.jsonl").open("a") as lines:
        lines.write('{"rollout": 1, "check": "seeds"}\n{"rollout": 2, "check": "masks"}\n')
    again(tiny_module(**OPTIONS), callbacks=[RunReport(1)], ckpt_path=tmp_path / "saved.ckpt")
    after = read_folder([tmp_path])
    assert set(after.rollouts) == {0, 1, 2, 3} and sorted(after.metrics["rollout"]) == list(range(16))
    assert [finding["check"] for finding in after.findings] == ["seeds"]
    assert after.end is None and index_of(tmp_path / "report" / "report.html")["end"] is None
    fit(tiny_module(**OPTIONS), callbacks=[RunReport(1)], data=tiny_prompts(4, 4), default_root_dir=tmp_path)
    again = read_folder([tmp_path])
    assert set(again.rollouts) == {0} and sorted(again.metrics["rollout"]) == list(range(4)) and not again.findings


def test_an_error_in_the_first_step_is_in_the_report(tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> list[float]:
        raise ConnectionError("the <b>grader</b> is gone")

    with pytest.raises(RewardError), pytest.warns(UserWarning, match="rows get no reward"):
        fit(
            tiny_module(**{**OPTIONS, "rewards": broken}),
            callbacks=[RunReport(1)],
            data=tiny_prompts(4, 4),
            default_root_dir=tmp_path,
        )
    end = index_of(tmp_path / "report" / "report.html")["end"]
    assert end["error"] == "RewardError" and end["step"] == 0 and "the <b>grader</b> is gone" in end["message"]


@pytest.mark.parametrize("alone", [False, True])
def test_no_secret_in_the_error_of_a_reward_is_written(alone: bool, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> list[float]:
        api_key = "sesame-1"
        raise ConnectionError(f"https://u:{api_key}@h/?api_key={api_key} hf_token: {api_key} Bearer {api_key}")

    rewards = {"broken": SubprocessReward(broken) if alone else broken}
    with (
        pytest.raises(RewardError) as raised,
        pytest.warns(UserWarning, match=r"https://\*\*\*@h/\?api_key=") as warned,
    ):
        fit(
            tiny_module(**{**OPTIONS, "rewards": rewards}),
            callbacks=[RunReport(1)],
            data=tiny_prompts(4, 4),
            default_root_dir=tmp_path,
        )
    texts = [str(raised.value), *(str(warning.message) for warning in warned)]
    texts += [path.read_text(errors="ignore") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 3 and not [text for text in texts if "sesame-1" in text]


def test_the_newest_recordings_are_kept(tmp_path: Path) -> None:
    module = tiny_module(**OPTIONS)
    fit(module, callbacks=[RunReport(1, keep=2)], data=tiny_prompts(16, 4), default_root_dir=tmp_path)
    assert set(read_folder([tmp_path]).rollouts) == {2, 3}
    assert [line["rollout"] for line in index_of(tmp_path / "report" / "report.html")["rollouts"]] == [2, 3]


class Suspicious(SignalAudit):
    """An audit that finds something in every rollout."""

    @override
    def observe(self, rollout: Any) -> None:
        self.findings.append(Finding(check="seeds", culprit="engine", samples=[3], positions=[1], observed="equal"))


def test_findings_of_the_audit_are_in_the_report(tmp_path: Path) -> None:
    report = reported(tmp_path, Suspicious(1), rollouts=2)
    assert [(each["rollout"], each["samples"]) for each in index_of(report)["findings"]] == [(0, [3]), (1, [3])]


def test_evidence_of_an_audit_is_found(tmp_path: Path) -> None:
    class Scaling(RLCallback):
        """Makes every gradient three times as large."""

        name = "scaling"

        @override
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(3.0)

    with pytest.warns(UserWarning, match="the audit of rollout 0 found"):
        fit(
            tiny_module(),
            callbacks=[SignalAudit(1), RolloutRecorder(tmp_path / "recorded"), Scaling()],
            data=tiny_prompts(4, 4),
            default_root_dir=tmp_path,
        )
    run = read_folder([tmp_path])
    assert {finding["rollout"] for finding in run.findings} == {0} and any(f["culprit"] for f in run.findings)


def test_rollouts_that_do_not_fit_lie_beside_the_report(tmp_path: Path) -> None:
    reported(tmp_path, rollouts=3)
    write_report([tmp_path], tmp_path / "r.html", embedded=0)
    assert sorted(path.name for path in (tmp_path / "r-rollouts").iterdir()) == ["0.js", "1.js", "2.js"]
    assert [line["file"] for line in index_of(tmp_path / "r.html")["rollouts"]] == [
        f"r-rollouts/{n}.js" for n in range(3)
    ]
    size = len((tmp_path / "r-rollouts" / "2.js").read_text())
    write_report([tmp_path], tmp_path / "s.html", embedded=size)
    assert [line["file"] is None for line in index_of(tmp_path / "s.html")["rollouts"]] == [False, False, True]


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    recorder = RolloutRecorder(tmp_path / "recorded")
    fit(tiny_module(**OPTIONS), callbacks=[recorder, SignalLedger()], data=tiny_prompts(8, 4), logger=logger)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--title", "</title><script>"])
    assert ended.value.code == 0 and "2 rollouts" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text()
    assert "<title>&lt;/title&gt;&lt;script&gt;</title>" in text
    (tmp_path / "recorded" / "rollout-000001.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 1 and "could not be read" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected the folder of a run"):
        main(["report", str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"expected metrics\.csv"):
        main(["report", str(tmp_path / "empty")])


UNUSABLE = {
    "binary": (b"\x89PNG\xff\x00\xfe", "can't decode byte 0x89"),
    "empty": (b"", "got an empty file"),
    "another table": (b"name,reward\na,1.0\n", "expected a table with a column step, got 'name,reward"),
    "no figure": (b"step,reward/task\n0,abc\n1,nan\n", "expected a row with a step and a metric, got none in 2 rows"),
    "no row": (b"step,reward/task\n", "expected a row with a step and a metric, got none in 0 rows"),
    "an endless cell": (b'step,reward/task\n0,"' + b"1" * 200_000, "field larger than field limit"),
}


@pytest.mark.parametrize(("content", "wrong"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_table_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, wrong: str) -> None:
    table = tmp_path / "metrics.csv"
    table.write_bytes(content)
    with pytest.raises(SystemExit, match="got none that can be read") as ended:
        main(["report", str(tmp_path)])
    assert f"{table}: " in str(ended.value.code) and wrong in str(ended.value.code)


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("metrics.jsonl", b"", "got an empty file"),
        ("metrics.jsonl", b'{"reward/task": 1.0}\n', "expected an entry 'step'"),
        ("metrics.jsonl", b'no\n{"step": 1}\n', "expected JSON in line 1, got 'no'"),
        pytest.param("metrics.jsonl", b"[" * 10**5 + b"\n{}", "expected JSON in line 1, got '[[[[", id="deep"),
        ("metrics.jsonl", b"no", "expected a row with a step and a metric, got 'no'"),
        ("hparams.yaml", b"text", "expected names with values, got 'text'"),
        ("run.json", b"\xff", "can't decode byte 0xff"),
        ("findings.jsonl", b'{"check": "seeds"}\n', "expected an entry 'rollout'"),
        ("rollout-000003.json", b"{}", "expected rollout-000003.safetensors beside it"),
    ],
)
def test_each_file_that_cannot_be_read_is_named_in_the_report(
    tmp_path: Path, name: str, content: bytes, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/task": 1.0}\n')
    broken = tmp_path / "later" / name
    broken.parent.mkdir()
    broken.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    (note,) = index_of(tmp_path / "report.html")["notes"]
    assert str(broken) in note and wrong in note and ended.value.code == 1
    assert f"could not be read: {note}" in capsys.readouterr().out


def test_folders_of_several_runs_are_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,reward/task\n0,1.0\n1,2.0\n")
    with pytest.raises(ValueError, match="expected the metrics of one run"):
        read_folder([tmp_path])
    (tmp_path / "other" / "metrics.csv").write_text("step,reward/task\n1,3.0\n2,4.0\n")  # it went on
    assert read_folder([tmp_path / "one", tmp_path / "other"]).metrics == {"reward/task": {0: 1.0, 1: 3.0, 2: 4.0}}


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("lightning_rl.reporting.run_report.write_report", refuse)
    with pytest.warns(UserWarning, match="expected to write the report .* no space left on device; the run continues"):
        fit(tiny_module(**OPTIONS), callbacks=[RunReport(1)], data=tiny_prompts(4, 4), default_root_dir=tmp_path)


def test_a_number_below_one_is_refused() -> None:
    assert RunReport(2, keep=None, folder="here").folder == Path("here")
    with pytest.raises(ValueError, match="expected every_n_rollouts to be a whole number above 0, got 0"):
        RunReport(0)
