"""Saved evidence: all that a check looked at in one file of plain values, and the checks run again from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from lightning_rl.audit.checks.registry import CHECKS
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.audit.recompute import redone
from lightning_rl.audit.recorded import PlainForward, RewardCall
from lightning_rl.audit.run_checks import looked
from lightning_rl.audit.subject import Facts, Subject
from lightning_rl.audit.trace import LiveStep, ParameterStep
from lightning_rl.corrections import RLCallback
from lightning_rl.generation import Completion, Request, Sampling
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Outputs
from lightning_rl.rollout import Finish, Rollout

ROLLOUTS, OUTPUTS = ("rollout", "groups", "rows"), ("outputs", "apart", "hotter")


def save(evidence: Evidence, findings: Sequence[Finding], path: Path) -> None:
    """Writes evidence and findings to a file that loads under ``weights_only=True``.

    It holds the whole rollout, the rows that were looked at with what the models said of them, what the engine and the
    reward functions returned, the optimizer step, and the plain values of the run; neither weights nor code.
    """
    state: dict[str, Any] = {name: getattr(evidence, name).to("cpu").state() for name in ROLLOUTS}
    state |= {name: _tuple_of(getattr(evidence, name)) for name in OUTPUTS}
    state |= {"cycle": evidence.cycle, "facts": asdict(evidence.subject.facts), "remembered": evidence.remembered}
    state["batches"] = [[_drawn_state(*pair) for pair in batch] for batch in evidence.batches]
    state["calls"] = [
        (c.name, [list(ids) for ids in c.completion_ids], list(c.values), c.seconds) for c in evidence.calls
    ]
    state["plain"] = [tuple(plain) for plain in evidence.plain]
    state["live"] = None if evidence.live is None else _live_state(evidence.live)
    state["edits"] = [asdict(finding) for finding in evidence.edits]
    state["findings"] = [asdict(finding) for finding in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(_on_cpu(state), path)


def recheck(
    path: Path | str,
    module: RLLightningModule,
    callbacks: Sequence[RLCallback] = (),
    checks: Sequence[str] | None = None,
) -> list[Finding]:
    """Runs the checks of a saved file again, without the run: no model, no engine, no Trainer.

    What a check repeats (estimator, loss, reduction, corrections) is that of ``module`` and ``callbacks``, so a finding
    that is gone was cured by a change of theirs. Reward functions are not called again.

    Args:
        path: of the file that a finding names.
        module: as in the run; it need not have been fitted.
        callbacks: the corrections of the run.
        checks: names of those to run; by default those that found something.

    Raises:
        ValueError: if a check is unknown; the message lists the known ones.
    """
    state = torch.load(path, weights_only=True)
    names = list(dict.fromkeys(one["check"] for one in state["findings"])) if checks is None else list(checks)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
    facts = Facts(**{**state["facts"], "eos_ids": tuple(state["facts"]["eos_ids"])})
    evidence = _evidence(state, Subject.of(module, callbacks, facts))
    if evidence.live is not None:
        evidence.live.expected, evidence.live.parts = redone(evidence, evidence.live)
    return looked([CHECKS[name] for name in names], evidence)


def _evidence(state: Mapping[str, Any], subject: Subject) -> Evidence:
    known: dict[str, Any] = {name: Rollout.from_state(state[name]) for name in ROLLOUTS}
    known |= {name: None if state[name] is None else Outputs(*state[name]) for name in OUTPUTS}
    return Evidence(
        subject=subject, **known, cycle=state["cycle"], remembered=tuple(state["remembered"]),
        batches=[[_drawn(*pair) for pair in batch] for batch in state["batches"]],
        calls=[RewardCall(*call) for call in state["calls"]], plain=[PlainForward(*one) for one in state["plain"]],
        live=None if state["live"] is None else _live(state["live"]),
        edits=[Finding(**one) for one in state["edits"]],
    )  # fmt: skip


def _drawn_state(request: Request, completion: Completion) -> tuple[dict[str, Any], dict[str, Any]]:
    asked = {spec.name: getattr(request, spec.name) for spec in fields(request)}
    given = {spec.name: getattr(completion, spec.name) for spec in fields(completion)}
    return {**asked, "sampling": asdict(request.sampling)}, {**given, "finish": int(completion.finish)}


def _drawn(asked: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Request, Completion]:
    request = Request(**{**asked, "sampling": Sampling(**asked["sampling"])})
    return request, Completion(**{**given, "finish": Finish(given["finish"])})


def _live_state(step: LiveStep) -> dict[str, Any]:
    known = {spec.name: getattr(step, spec.name) for spec in fields(step) if spec.name not in ("expected", "parts")}
    parameters = {name: vars(parameter) for name, parameter in step.parameters.items()}
    return {**known, "rows": step.rows.to("cpu").state(), "outputs": tuple(step.outputs), "parameters": parameters}


def _live(state: Mapping[str, Any]) -> LiveStep:
    parameters = {name: ParameterStep(**own) for name, own in state["parameters"].items()}
    rows, outputs = Rollout.from_state(state["rows"]), Outputs(*state["outputs"])
    return LiveStep(**{**state, "rows": rows, "outputs": outputs, "parameters": parameters})


def _tuple_of(outputs: Outputs | None) -> tuple[Any, ...] | None:
    return None if outputs is None else tuple(outputs)


def _on_cpu(value: Any) -> Any:
    """A structure of plain values with every tensor on the CPU, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _on_cpu(own) for key, own in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value
