"""Run folder: the data of a report: metrics, configuration, findings and rollouts.

============================  =====================================================================
``metrics.csv``               metrics of a CSVLogger
``hparams.yaml``              configuration of a CSVLogger
``report/metrics.jsonl``      metrics of :class:`~lightning_rl.reporting.RunReport`, and the error that ended the run
``report/run.json``           configuration of RunReport
``report/findings*.jsonl``    audit findings of RunReport, for each rank
``audit/findings-*.jsonl``     findings of the audit, for each rollout and rank
``rollout-*.json``            recordings
============================  =====================================================================
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

METRICS, RUN, FINDINGS = "metrics.jsonl", "run.json", "findings"
BEGIN = "begin"  # key of a line with the step or rollout from which later lines replace earlier ones
END = "end"  # key of a line with the step at which an error ended the run
STEP, EPOCH = "step", "epoch"
FINDING = ("check", "culprit", "expected", "observed", "cure", "severity")
UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError, csv.Error, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Error that ended a run.

    Attributes:
        step: Step of the error.
        error: Class of the error.
        message: Text of the error.
    """

    step: int
    error: str
    message: str


Rows = list[tuple[int, dict[str, float] | End | None]]  # steps with their metrics


@dataclass
class RunFiles:
    """Data of a run.

    Attributes:
        metrics: For each name, the values by step.
        configuration: Plain values; empty if there is no file.
        findings: Audit findings, each with the number of its rollout.
        rollouts: Files of each recorded rollout, by number.
        notes: Files that could not be read, with the reason.
        end: Error that ended the run, or None.
    """

    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    rollouts: dict[int, list[Path]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    end: End | None = None


def read_folder(folders: Sequence[Path]) -> RunFiles:
    """Return the data in the folders of one run, at any depth.

    Raises:
        FileNotFoundError: If a folder does not exist, or no metric or recording is found; names the files that could
            not be read.
        ValueError: If there are metrics of several runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"expected the folder of a run, got {folder}, which does not exist")
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
            f"{wanted}: pass the folder of the logger, and of RolloutRecorder if it is another folder"
        )
    return run


def _files(folders: Iterable[Path], pattern: str) -> list[Path]:
    files = {path.resolve(): path for folder in folders for path in folder.rglob(pattern) if path.is_file()}
    return sorted(files.values(), key=lambda path: (path.stat().st_mtime, str(path)))


def _read_metrics(run: RunFiles, folders: Sequence[Path]) -> None:
    kept = _files(folders, METRICS)
    tables = [] if kept else _files(folders, "metrics.csv")
    begun: dict[Path, int] = {}
    for path in kept or tables:
        rows: Rows = []
        with _noting(run, path):
            rows = _json_rows(path) if kept else _csv_rows(path)
        if not rows:
            continue
        first = min(step for step, _ in rows)
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


@contextmanager
def _noting(run: RunFiles, path: Path) -> Iterator[None]:
    """Note a file that cannot be read, with the reason, instead of an error."""
    try:
        yield
    except UNREADABLE as wrong:
        run.notes.append(f"{path}: {f'expected an entry {wrong}' if isinstance(wrong, KeyError) else wrong}")


def _forget(metrics: dict[str, dict[int, float]], step: int) -> None:
    """Drop the metrics from a step on, which the resumed run logs again."""
    for values in metrics.values():
        for late in [known for known in values if known >= step]:
            del values[late]


def _csv_rows(path: Path) -> Rows:
    """Return the rows of a table that have a step and a metric; raise ValueError without any."""
    rows: Rows = []
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(lines)
        if STEP not in (table.fieldnames or ()):
            raise ValueError(f"expected a table with a column {STEP}, got {_start(path)}")
        for row in table:
            if step := row.pop(STEP):
                rows.append((int(step), _finite(row)))
    if not any(values for _, values in rows):
        raise ValueError(f"expected a row with a step and a metric, got none in {len(rows)} rows")
    return rows


def _json_rows(path: Path) -> Rows:
    """Return the rows and the end of the run, and None for each step from which later rows replace earlier ones."""
    rows: Rows = []
    for row in _lines(path):
        kind = next((kind for kind in (STEP, BEGIN, END) if kind in row), STEP)
        step = int(row.pop(kind))
        if kind == END:
            rows.append((step, End(step=step, error=row["error"], message=row["message"])))
        else:
            rows.append((step, _finite(row) if kind == STEP else None))
    if not rows:
        raise ValueError(f"expected a row with a step and a metric, got {_start(path)}")
    return rows


def _start(path: Path) -> str:
    """Return the start of a text, for an error message."""
    text = path.read_text(encoding="utf-8")
    return repr(text[:40]) if text else "an empty file"


def _finite(row: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers of a row."""
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
    """Yield the objects in the lines of a file; the last line may be truncated, if the run was killed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise ValueError(f"expected JSON in line {number}, got {line[:40]!r}") from None
        if isinstance(value, dict):
            yield value


def _read_configuration(run: RunFiles, folders: Sequence[Path]) -> None:
    for path in [*_files(folders, "hparams.yaml"), *_files(folders, RUN)]:
        with _noting(run, path):
            text = path.read_text(encoding="utf-8")
            value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            if not isinstance(value, dict):
                raise ValueError(f"expected names with values, got {_start(path)}")
            run.configuration = _printable(value) or run.configuration


def _printable(value: Any) -> Any:
    """Return the value with non-finite numbers as text, since JSON has none."""
    if isinstance(value, dict):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_findings(run: RunFiles, folders: Sequence[Path]) -> None:
    listed: list[dict[str, Any]] = []
    for path in _files(folders, f"{FINDINGS}*.jsonl"):
        with _noting(run, path):
            kept: list[dict[str, Any]] = []
            for line in _lines(path):
                if BEGIN in line:
                    kept = [finding for finding in kept if finding["rollout"] < line[BEGIN]]
                else:
                    kept.append(_finding(line, line["rollout"]))
            listed += kept
    unique = {json.dumps(finding, sort_keys=True): finding for finding in listed}
    run.findings = sorted(unique.values(), key=lambda finding: finding["rollout"])


def _finding(values: Mapping[str, Any], rollout: Any) -> dict[str, Any]:
    numbers = {name: [int(number) for number in values.get(name, ())] for name in ("samples", "positions")}
    return {"rollout": int(rollout), **{name: str(values.get(name, "")) for name in FINDING}, **numbers}


def _find_recordings(run: RunFiles, folders: Sequence[Path]) -> None:
    newest: dict[str, Path] = {}
    for path in (path for path in _files(folders, "rollout-[0-9]*.json") if path.parent.name != "audit"):
        if path.with_suffix(".safetensors").is_file():
            newest[path.stem] = path
        else:
            run.notes.append(f"{path}: expected {path.stem}.safetensors beside it")
    for stem, path in sorted(newest.items()):
        run.rollouts.setdefault(int(stem.split("-")[1]), []).append(path)
