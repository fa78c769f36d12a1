"""Recording of a rollout with findings, and the checks of an algorithm that run again on it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.live import LiveRun
from lightning_rl.corrections import OUTPUTS, RLCallback
from lightning_rl.policy import Outputs
from lightning_rl.recording import Recording
from lightning_rl.recording.recompute import load_states
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties import PROPERTIES
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import run_checks
from lightning_rl.testing.properties.copies import repeatable
from lightning_rl.testing.properties.subsample import some_groups, some_rows
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.terminal import dump_visible

BEFORE = "pass/0/"
"""Prefix of the policy's outputs on the checked rows, before the first update."""


def save(live: LiveRun, evidence: Evidence, findings: Sequence[Finding], folder: Path, suffix: str) -> Path:
    """Save a recording without optimizer steps, and all findings of its rollout for the report beside it.

    Returns:
        Path of the recording.
    """
    draft, rollout = live.draft(evidence.number), evidence.rollout.to("cpu")
    rewarded = dict.fromkeys(rollout.sample_ids.tolist(), False)
    for part in evidence.rounds:
        rewarded |= zip(part.sample_ids.tolist(), part.rewarded.tolist(), strict=True)
    draft.rollout, draft.scored, draft.plan = rollout, rewarded, [[list(range(len(rollout)))]]
    places = _places(evidence.rows.to("cpu"), rollout)
    for name, output in () if evidence.outputs is None else evidence.outputs._asdict().items():
        if output is not None:
            table = torch.zeros(rollout.response_ids.shape, dtype=output.dtype)
            table[places, : output.shape[1]] = output.detach().cpu()
            draft.tensors[BEFORE + name] = table
    path = draft.recording().save(folder)
    lines = [dump_visible({"rollout": evidence.number, **asdict(finding)}) + "\n" for finding in findings]
    name = f"findings-{evidence.number}{suffix}.jsonl"
    write_atomically(folder / name, lambda part: part.write_text("".join(lines), encoding="utf-8"))
    return path


def recheck(
    path: Path | str,
    algorithm: Algorithm,
    callbacks: Sequence[RLCallback] = (),
    checks: Sequence[str] = tuple(PROPERTIES),
) -> list[Finding]:
    """Run checks of an algorithm again on a rollout with findings, without model, engine or Trainer.

    Estimator, loss, reduction and corrections are those of ``algorithm`` and ``callbacks``, so a finding disappears
    once they are fixed. Corrections get the state that they had in the run.

    Args:
        path: File that a finding names.
        algorithm: ``module.algorithm`` of a module as in the run.
        callbacks: Corrections of the run.
        checks: Names of the checks to run, out of :data:`~lightning_rl.testing.properties.PROPERTIES`.

    Raises:
        ValueError: If a check is unknown, with a list of the known ones, or if the file is no recording.
        FileNotFoundError: If a file does not exist.
    """
    if unknown := [name for name in checks if name not in PROPERTIES]:
        raise ValueError(f"expected checks out of {', '.join(PROPERTIES)}, got {unknown[0]!r}")
    recording = Recording.load(path)
    rollout, repeated = recording.rollout, repeatable(algorithm, callbacks)
    load_states(repeated, recording.header["states"])
    groups = some_groups(rollout, recording.header["rollout"])
    rows = some_rows(groups, recording.header["rollout"])
    places, names = _places(rows, rollout), ("logprobs", "entropy", *(spec.output for spec in OUTPUTS))
    outputs = {
        name: recording.tensors[BEFORE + name][places, : rows.width]
        for name in names
        if BEFORE + name in recording.tensors
    }
    case = AlgorithmCase(
        algorithm=repeated,
        rollout=rollout,
        groups=groups,
        rows=rows,
        outputs=Outputs(**outputs) if "logprobs" in outputs else None,
    )
    return run_checks([PROPERTIES[name] for name in checks], case)


def _places(rows: Rollout, rollout: Rollout) -> torch.Tensor:
    """Return the indices of rows in a rollout, [b]."""
    return (rows.sample_ids[:, None] == rollout.sample_ids).int().argmax(-1)
