"""Checks of log-probabilities: against the model's own forward, against the engine, against each other."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_rl.audit.checks import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.rollout import Rollout

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}  # nats, mean over tokens; coarser types below
COARSE = 0.1
ROWS = 2


def tolerance_of(evidence: Evidence) -> float:
    """How far two ways to compute a log-probability may be apart, on average."""
    mixed = str(evidence.module.trainer.precision) not in ("32-true", "64-true")
    return COARSE if mixed else TOLERANCE.get(evidence.module.required_policy.model.dtype, COARSE)


def plain_logprobs(forward: Callable[..., Tensor], rows: Rollout, row: int, temperature: float) -> Tensor:
    """Log-probabilities of one whole response by a model's own forward, unpacked: the slow way, shape [L]."""
    prompt, response = int(rows.prompt_lengths[row]), int(rows.response_lengths[row])
    ids = torch.cat([rows.prompt_ids[row, :prompt], rows.response_ids[row, :response]])
    logits = forward(ids[None])[0, prompt - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


def compared(evidence: Evidence, name: str, forward: Callable[..., Tensor], culprit: str) -> list[Finding]:
    """A field of log-probabilities against a model's own forward; guesses what went wrong where they differ."""
    rows, temperature, bound = evidence.rows, evidence.module.temperature, tolerance_of(evidence)
    field = getattr(rows, name)
    if field is None or not len(rows):
        return []
    found = []
    with torch.no_grad(), evidence.module.trainer.precision_plugin.forward_context():
        for row in range(min(ROWS, len(rows))):
            length = int(rows.response_lengths[row])
            valid, ours = rows.valid_tokens[row, :length], field[row, :length].double()
            truth = plain_logprobs(forward, rows, row, temperature)
            error = float((ours - truth)[valid].abs().mean())
            if error <= bound:
                continue
            guesses = {
                "they belong to the next position": torch.roll(truth, -1),
                "they belong to the position before": torch.roll(truth, 1),
                "they were taken at temperature 1": plain_logprobs(forward, rows, row, 1.0),
                "they were divided by the temperature twice": plain_logprobs(forward, rows, row, temperature**2),
            }
            near = [what for what, other in guesses.items() if float((ours - other)[valid].abs().mean()) <= bound]
            observed = f"{error:.3g} nats apart on average" + (f": {near[0]}" if near else "")
            found.append(
                Finding(
                    check="logprob_alignment", culprit=culprit, observed=observed, samples=[int(rows.sample_ids[row])],
                    expected=f"{name} [t] = log p(response[t] given all before), temperature {temperature}",
                    cure="index and temperature of every source of log-probabilities have to be the same",
                )
            )  # fmt: skip
    return found[:1]


@check("logprob_alignment")
def logprob_alignment(evidence: Evidence) -> list[Finding]:
    """Log-probabilities of the policy before the update, of the update itself and of the reference are those of the
    model's own plain forward, for the right token and at the temperature of the sampling.
    """
    module = evidence.module
    if module.parallel.sharded or not len(evidence.rows):
        return []
    model = module.required_policy.model
    found = compared(evidence, "old_logprobs", _forward_of(model), "stage score, the policy before the update")
    reference = module.run.reference
    if reference is not None and reference.model is not model:
        found += compared(evidence, "ref_logprobs", _forward_of(reference.model), "stage score, the reference")
    updating = evidence.rows.replace(old_logprobs=evidence.outputs.logprobs)
    own = Evidence(evidence.module, updating, evidence.cycle, evidence.drawn)
    own.__dict__["rows"] = updating
    if not found:
        found = compared(own, "old_logprobs", _forward_of(model), "stage update, the policy's forward")
    return found


def _forward_of(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids, use_cache=False).logits


@check("weight_sync")
def weight_sync(evidence: Evidence) -> list[Finding]:
    """The engine's log-probabilities are those of the weights that the policy had when it drew: it moved with them, and
    it samples at the temperature that training assumes.
    """
    rows, module = evidence.rows, evidence.module
    if rows.rollout_logprobs is None or not len(rows):
        return []
    valid = rows.valid_tokens & (rows.policy_version == evidence.cycle)
    gap = (rows.rollout_logprobs - evidence.outputs.logprobs)[valid].double().abs()
    bound = tolerance_of(evidence)
    if not len(gap) or float(gap.mean()) <= bound:
        return []
    return [
        Finding(
            check="weight_sync", culprit=f"engine {type(module.engine).__name__}",
            expected=f"log-probabilities within {bound:.2g} nats of the policy's own",
            observed=f"{float(gap.mean()):.3g} nats apart on average: it holds other weights, or another temperature",
            samples=rows.sample_ids[:4].tolist(),
            cure="look at load_weights, the prefix cache and the temperature of the engine",
        )
    ]  # fmt: skip


@check("on_policy_identity")
def on_policy_identity(evidence: Evidence) -> list[Finding]:
    """Before the first step of a rollout nothing has moved: the ratio of current to old policy is 1 everywhere."""
    rows = evidence.rows
    if rows.old_logprobs is None or not len(rows):
        return []
    gap = torch.where(rows.valid_tokens, evidence.outputs.logprobs - rows.old_logprobs, 0.0).abs()
    bound = tolerance_of(evidence) / 10
    if float(gap.max()) <= bound:
        return []
    return [
        Finding(
            check="on_policy_identity", culprit="stage score, the policy before the update",
            expected="a ratio of 1 before the first optimizer step", observed=f"a log-ratio of {float(gap.max()):.3g}",
            samples=rows.sample_ids[gap.amax(-1) > bound][:4].tolist(),
            cure="the old pass needs the update's microbatches, precision, temperature and no dropout",
        )
    ]  # fmt: skip
