"""Saved evidence: all that a check looked at in one file of plain values, and the checks run again from it."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.checks import CHECKS, run_checks
from lightning_rl.audit.conversation_evidence import Told
from lightning_rl.audit.environment_drift import Move
from lightning_rl.audit.environment_repeats import Replay
from lightning_rl.audit.evidence import Evidence, recompute_step, repeatable
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.forwards import PlainForward
from lightning_rl.audit.prompt_watch import HeldOut, Repeats
from lightning_rl.audit.rates import Stepping
from lightning_rl.audit.reward_repeats import RewardReply
from lightning_rl.audit.sampling_statistics import Draw, Earlier
from lightning_rl.audit.step_evidence import StepEvidence
from lightning_rl.audit.turn_boundaries import Context, Seam
from lightning_rl.corrections import ParameterTrace, RLCallback
from lightning_rl.generation import Completion, Request, SamplingParams
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Outputs
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import FinishReason, Rollout
from lightning_rl.utils.finding import Finding

ROLLOUTS, OUTPUTS = ("rollout", "groups", "rows"), ("outputs", "reversed", "double_temperature")
SAMPLED = ("draws", "earlier", "replies", "moves", "replays", "seams", "contexts", "told")


def save(evidence: Evidence, findings: Sequence[Finding], path: Path) -> None:
    """Writes evidence and findings to a file that loads under ``weights_only=True``.

    It holds the whole rollout, the rows that were looked at with what the models said of them, what the engine and the
    reward functions returned, the optimizer step, the state of the corrections and the plain values of the run; neither
    weights nor code.
    """
    state: dict[str, Any] = {name: getattr(evidence, name).state() for name in ROLLOUTS}
    for name in OUTPUTS:
        outputs = getattr(evidence, name)
        state[name] = None if outputs is None else tuple(outputs)
    state |= {"words_logprob": evidence.words_logprob}
    state |= {"number": evidence.number, "step": None, "facts": asdict(evidence.facts)}
    state |= {"reference_weights": evidence.reference_weights, "token_gradients": evidence.token_gradients}
    state |= {"plain": [tuple(plain) for plain in evidence.plain]}
    state["batches"] = [
        [
            (
                _fields_of(request) | {"sampling": asdict(request.sampling)},
                _fields_of(completion) | {"finish": int(completion.finish)},
            )
            for request, completion in batch
        ]
        for batch in evidence.batches
    ]
    state["calls"] = [
        (call.name, [list(ids) for ids in call.completion_ids], list(call.values), call.seconds)
        for call in evidence.calls
    ]
    for name in SAMPLED:
        state[name] = [tuple(value) for value in getattr(evidence, name)]
    state |= {"stream_prompts": dict(evidence.stream_prompts), "reward_prompts": dict(evidence.reward_prompts)}
    state["held_out"] = None if evidence.held_out is None else tuple(evidence.held_out)
    state["repeats"] = None if evidence.repeats is None else tuple(evidence.repeats)
    state["numbers"] = [{name: dict(part) for name, part in numbers.items()} for numbers in evidence.numbers]
    state["rounds"] = [part.state() for part in evidence.rounds]
    state["states"] = _states_of(evidence.algorithm.corrections.callbacks)
    if (step := evidence.step) is not None:
        parameters = {name: vars(parameter) for name, parameter in step.parameters.items()}
        values = {"rows": step.rows.state(), "outputs": tuple(step.outputs), "parameters": parameters}
        values["stepping"] = asdict(step.stepping)
        state["step"] = _fields_of(step) | values
        del state["step"]["recomputed"]  # it is, with what is cured
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
    that is gone was cured by a change of theirs; what corrections knew, such as a coefficient that adapts, is that of
    the run, as far as ``state_dict`` holds it in plain values. Reward functions are not called again.

    Args:
        path: of the file that a finding names.
        module: as in the run; it need not have been fitted.
        callbacks: the corrections of the run.
        checks: names of those to run; by default those that found something.

    Raises:
        ValueError: if a check is unknown, where the message lists the known ones, or if the file is no evidence of an
            audit; whatever is in it, nothing of it is run.
    """
    try:
        state = torch.load(path, "cpu", weights_only=True)
        algorithm = repeatable(module.algorithm, callbacks)
        for callback in algorithm.corrections.callbacks:
            if callback.name in state["states"]:
                callback.load_state_dict(state["states"][callback.name])
        names = list(dict.fromkeys(finding["check"] for finding in state["findings"]) if checks is None else checks)
        evidence = _evidence(state, algorithm)
    except (TypeError, KeyError, AttributeError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as wrong:
        raise ValueError(
            f"expected evidence as SignalAudit saves it, got {path}: {type(wrong).__name__}: {wrong}"
        ) from wrong
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"expected checks out of {', '.join(CHECKS)}, got {unknown[0]!r}")
    if evidence.step is not None:
        evidence.step.recomputed = recompute_step(evidence, evidence.step)
    return run_checks([CHECKS[name] for name in names], evidence)


def _evidence(state: Mapping[str, Any], algorithm: Algorithm) -> Evidence:
    facts = {**state["facts"], **{name: tuple(state["facts"][name]) for name in ("eos_ids", "environments")}}
    rollouts: dict[str, Any] = {name: Rollout.from_state(state[name]) for name in ROLLOUTS}
    outputs: dict[str, Any] = {name: None if state[name] is None else Outputs(*state[name]) for name in OUTPUTS}
    return Evidence(
        algorithm=algorithm,
        facts=RunFacts(**facts),
        number=state["number"],
        **rollouts,
        **outputs,
        batches=[[_sample(*sample) for sample in batch] for batch in state["batches"]],
        calls=[RewardCall(*call) for call in state["calls"]],
        draws=[Draw(*draw) for draw in state["draws"]],
        earlier=[Earlier(*earlier) for earlier in state["earlier"]],
        moves=[Move(*move) for move in state["moves"]],
        stream_prompts=state["stream_prompts"],
        reward_prompts=state["reward_prompts"],
        numbers=state["numbers"],
        rounds=[Rollout.from_state(part) for part in state["rounds"]],
        repeats=None if state["repeats"] is None else Repeats(*state["repeats"]),
        held_out=None if state["held_out"] is None else HeldOut(*state["held_out"]),
        replies=[RewardReply(*reply) for reply in state["replies"]],
        replays=[Replay(*replay) for replay in state["replays"]],
        words_logprob=state["words_logprob"],
        seams=[Seam(*seam) for seam in state["seams"]],
        contexts=[Context(*context) for context in state["contexts"]],
        told=[Told(*told) for told in state["told"]],
        plain=[PlainForward(*plain) for plain in state["plain"]],
        reference_weights=tuple(state["reference_weights"]),
        token_gradients=tuple(state["token_gradients"]),
        step=None if state["step"] is None else _step(state["step"]),
        edits=[Finding(**edit) for edit in state["edits"]],
    )


def _states_of(callbacks: Sequence[RLCallback]) -> dict[str, Any]:
    """What corrections know, by name, of those that say it in plain values."""
    states = dict[str, Any]()
    for callback in callbacks:
        stream, state = io.BytesIO(), _on_cpu(callback.state_dict())
        try:
            torch.save(state, stream)
            stream.seek(0)
            torch.load(stream, weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError):
            continue
        states |= {callback.name: state} if state else {}
    return states


def _sample(asked: Mapping[str, Any], returned: Mapping[str, Any]) -> tuple[Request, Completion]:
    request = Request(**{**asked, "sampling": SamplingParams(**asked["sampling"])})
    return request, Completion(**{**returned, "finish": FinishReason(returned["finish"])})


def _fields_of(value: Any) -> dict[str, Any]:
    return {spec.name: getattr(value, spec.name) for spec in fields(value)}


def _step(state: Mapping[str, Any]) -> StepEvidence:
    parameters = {name: ParameterTrace(**parameter) for name, parameter in state["parameters"].items()}
    rows, outputs = Rollout.from_state(state["rows"]), Outputs(*state["outputs"])
    stepping = Stepping(**state["stepping"])
    return StepEvidence(**{**state, "rows": rows, "outputs": outputs, "parameters": parameters, "stepping": stepping})


def _on_cpu(value: Any) -> Any:
    """A structure of plain values with every tensor on the CPU, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value
