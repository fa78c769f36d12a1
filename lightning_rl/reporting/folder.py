"""Folder: what the folder of a run holds that a report shows, read as data: metrics, configuration, findings, rollouts.

============================  =====================================================================
``metrics.csv``               of a CSVLogger
``hparams.yaml``              its configuration
``report/metrics.jsonl``      rows of metrics that :class:`~lightning_rl.reporting.RunReport` kept, and what ended it
``report/run.json``           the configuration that it kept
``report/findings*.jsonl``    findings of the audit that it kept, of each rank
``audit/rollout-*.pt``        evidence of the audit with its findings
``rollout-*.json``            recordings
============================  =====================================================================
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.archive import load_archive
from lightning_rl.recording import Recording

METRICS, RUN, FINDINGS = "metrics.jsonl", "run.json", "findings"
BEGIN = "begin"  # of a line that says from which step or rollout on lines are written anew
END = "end"  # of a line that says at which step an error ended the run
STEP, EPOCH = "step", "epoch"
FINDING = ("check", "culprit", "expected", "observed", "cure", "severity")
UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError, csv.Error, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The error that ended a run.

    Attributes:
        step: the one that it came in.
        error: its class.
        message: what it said.
    """

    step: int
    error: str
    message: str


Rows = list[tuple[int, dict[str, float] | End | None]]  # steps with their figures


@dataclass
class RunFiles:
    """What there is of a run.

    Attributes:
        metrics: for each name its values by step.
        configuration: plain values; empty if nobody wrote it.
        findings: of the audit, each with the number of its rollout.
        rollouts: files of each recorded rollout, by its number.
        notes: what could not be read, and why.
        end: the error that ended the run; None if it goes on, ended well, or nobody wrote it.
    """

    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    rollouts: dict[int, list[Path]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    end: End | None = None


def read_folder(folders: Sequence[Path]) -> RunFiles:
    """Everything that the folders of one run hold, at any depth.

    Raises:
        FileNotFoundError: if a folder is not there, or there is neither a metric nor a recording in any; it names the
            files that could not be read.
        ValueError: if there are metrics of several runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"expected the folder of a run, got {folder}, which is none")
    run = RunFiles()
    _read_metrics(run, folders)
    _read_configuration(run, folders)
    _read_findings(run, folders)
    _find_recordings(run, folders)
    if not run.metrics and not run.rollouts and run.end is None:
        names = ", ".join(map(str, folders))
        wanted = f"expected metrics.csv, {METRICS} or recordings in {names}, got none"
        if run.notes:
            raise FileNotFoundError("\n".join([f"{wanted} that can be read:", *run.notes]))
        raise FileNotFoundError(
            f"{wanted}: pass the folder of the logger, and of RolloutRecorder if that is another one"
        )
    return run


def load_rollout(paths: Sequence[Path]) -> list[Recording]:
    """The recordings of a rollout, of all ranks that there are, in the order of their ranks.

    Raises:
        ValueError: naming the file that is no recording.
    """
    return sorted((Recording.load(path) for path in paths), key=lambda recording: recording.header["rank"])


def _files(folders: Iterable[Path], pattern: str) -> list[Path]:
    files = {path.resolve(): path for folder in folders for path in folder.rglob(pattern) if path.is_file()}
    return sorted(files.values(), key=lambda path: (path.stat().st_mtime, str(path)))


def _read_metrics(run: RunFiles, folders: Sequence[Path]) -> None:
    kept = _files(folders, METRICS)
    tables = [] if kept else _files(folders, "metrics.csv")
    begun: dict[Path, int] = {}
    for path in kept or tables:
        try:
            rows = _json_rows(path) if kept else _csv_rows(path)
        except UNREADABLE as wrong:
            run.notes.append(_note(path, wrong))
            continue
        first = min((step for step, _ in rows), default=0)
        if same := [str(other) for other, step in begun.items() if step >= first]:
            raise ValueError(
                f"expected the metrics of one run, got {same[0]} and {path}: pass the folder of one of them"
            )
        begun[path] = first
        _forget(run.metrics, first)
        for step, values in rows:
            if values is None:
                _forget(run.metrics, step)
                run.end = None
            elif isinstance(values, End):
                run.end = values
            else:
                for name, value in values.items():
                    run.metrics.setdefault(name, {})[step] = value


def _note(path: Path, wrong: Exception) -> str:
    """Which file could not be read, and why."""
    return f"{path}: expected an entry {wrong}" if isinstance(wrong, KeyError) else f"{path}: {wrong}"


def _forget(metrics: dict[str, dict[int, float]], step: int) -> None:
    """Drops what a run had logged from a step on, which it goes through once more."""
    for values in metrics.values():
        for late in [known for known in values if known >= step]:
            del values[late]


def _csv_rows(path: Path) -> Rows:
    """The rows of a table that hold a step and a figure.

    Raises:
        ValueError: if there are none, or a step is no number.
    """
    rows: Rows = []
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        if STEP not in (table.fieldnames or ()):
            raise ValueError(f"expected a table with a column {STEP}, got {_start(path)}")
        for row in table:
            if step := row.pop(STEP):
                rows.append((_whole(step, f"in line {table.line_num}"), _finite(row)))
    if not any(values for _, values in rows):
        raise ValueError(f"expected a row with a step and a figure, got none in {len(rows)} rows")
    return rows


def _json_rows(path: Path) -> Rows:
    """The rows that were kept, how the run ended, and None with each step from which on they are written anew.

    Raises:
        ValueError: if there is none of them, or a step is no number.
    """
    rows: Rows = []
    for number, row in enumerate(_lines(path), 1):
        kind = next((kind for kind in (STEP, BEGIN, END) if kind in row), STEP)
        step = _whole(row.pop(kind, None), f"in line {number}")
        if kind == END:
            end = End(step=step, error=str(row.get("error", "")), message=str(row.get("message", "")))
            rows.append((step, end))
        else:
            rows.append((step, _finite(row) if kind == STEP else None))
    if not rows:
        raise ValueError(f"expected a row with a step and a figure, got {_start(path)}")
    return rows


def _whole(step: Any, where: str) -> int:
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"expected a whole number as step {where}, got {step!r}") from None


def _start(path: Path) -> str:
    """How a text begins, to say that it is none of ours."""
    text = path.read_text(encoding="utf-8")
    return repr(text[:40]) if text else "an empty file"


def _finite(row: Mapping[Any, Any]) -> dict[str, float]:
    """The figures of a row; a cell that holds none is left out."""
    figures = {}
    for name, cell in row.items():
        try:
            value = float(cell)
        except (TypeError, ValueError):
            continue
        if isinstance(name, str) and name != EPOCH and math.isfinite(value):
            figures[name] = value
    return figures


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file; the last line may be cut, where a run was killed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise ValueError(f"expected JSON in line {number}, got {line[:40]!r}") from None
        if isinstance(value, dict):
            yield value


def _read_configuration(run: RunFiles, folders: Sequence[Path]) -> None:
    for path in [*_files(folders, "hparams.yaml"), *_files(folders, RUN)]:
        try:
            text = path.read_text(encoding="utf-8")
            value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except UNREADABLE as wrong:
            run.notes.append(_note(path, wrong))
            continue
        if not isinstance(value, dict):
            run.notes.append(f"{path}: expected names with values, got {_start(path)}")
        elif value:
            run.configuration = _printable(value)


def _printable(value: Any) -> Any:
    """The same with a text in the place of every number that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_findings(run: RunFiles, folders: Sequence[Path]) -> None:
    listed: list[dict[str, Any]] = []
    for path in _files(folders, f"{FINDINGS}*.jsonl"):
        try:
            kept: list[dict[str, Any]] = []
            for line in _lines(path):
                if BEGIN in line:
                    kept = [finding for finding in kept if finding["rollout"] < line[BEGIN]]
                else:
                    kept.append(_finding(line, line["rollout"]))
            listed += kept
        except UNREADABLE as wrong:
            run.notes.append(_note(path, wrong))
    for path in _files(folders, "rollout-*.pt"):
        try:
            state = load_archive(path, mmap=True)
            listed += [_finding(finding, state["number"]) for finding in state["findings"]]
        except UNREADABLE as wrong:
            run.notes.append(_note(path, wrong))
    unique = {json.dumps(finding, sort_keys=True): finding for finding in listed}
    run.findings = sorted(unique.values(), key=lambda finding: finding["rollout"])


def _finding(values: Mapping[str, Any], rollout: Any) -> dict[str, Any]:
    numbers = {name: [int(number) for number in values.get(name, ())] for name in ("samples", "positions")}
    return {"rollout": int(rollout), **{name: str(values.get(name, "")) for name in FINDING}, **numbers}


def _find_recordings(run: RunFiles, folders: Sequence[Path]) -> None:
    newest: dict[str, Path] = {}
    for path in _files(folders, "rollout-*.json"):
        if not path.stem.removeprefix("rollout-").partition("-")[0].isdecimal():
            continue
        if path.with_suffix(".safetensors").is_file():
            newest[path.stem] = path
        else:
            run.notes.append(f"{path}: expected {path.stem}.safetensors beside it")
    for stem, path in sorted(newest.items()):
        number = stem.removeprefix("rollout-").partition("-")[0]
        run.rollouts.setdefault(int(number), []).append(path)
