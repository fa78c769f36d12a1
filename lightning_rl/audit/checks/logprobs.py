"""Checks of what models say of tokens: against their own plain forward, against the engine, against each other."""

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.audit.recorded import PlainForward

BEFORE, UPDATE, REFERENCE = (
    "stage score, the policy before the update", "stage update, the policy's forward", "stage score, the reference"
)  # fmt: skip


@check("logprob_alignment")
def logprob_alignment(evidence: Evidence) -> list[Finding]:
    """Log-probabilities of the policy before the update, of the update itself and of the reference are those of the
    model's own plain forward, for the right token and at the temperature of the sampling.
    """
    rows = evidence.rows
    found = _compared(evidence, "old_logprobs", rows.old_logprobs, "policy", BEFORE)
    found += _compared(evidence, "ref_logprobs", rows.ref_logprobs, "reference", REFERENCE)
    if not found and evidence.outputs is not None:
        found = _compared(evidence, "logprobs", evidence.outputs.logprobs, "policy", UPDATE)
    return found


def _compared(evidence: Evidence, name: str, field: Tensor | None, of: str, culprit: str) -> list[Finding]:
    """A field of log-probabilities against a model's own forward; guesses what went wrong where they differ."""
    facts = evidence.subject.facts
    for plain in evidence.plain:
        if field is None or plain.of != of:
            continue
        valid, ours = _stretch(evidence, plain, field)
        error = _apart(ours, plain.logprobs, valid)
        if error <= facts.tolerance:
            continue
        guesses = {
            "they belong to the next position": torch.roll(plain.logprobs, -1),
            "they belong to the position before": torch.roll(plain.logprobs, 1),
            "they were taken at temperature 1": plain.at_one,
            "they were divided by the temperature twice": plain.at_square,
        }
        near = [what for what, other in guesses.items() if _apart(ours, other, valid) <= facts.tolerance]
        observed = f"{error:.3g} nats apart on average" + (f": {near[0]}" if near else "")
        return [
            Finding(
                check="logprob_alignment", culprit=culprit, observed=observed,
                samples=[int(evidence.rows.sample_ids[plain.row])], positions=_worst(ours, plain, valid),
                expected=f"{name} [t] = log p(response[t] given all before), temperature {facts.temperature}",
                cure="index and temperature of every source of log-probabilities have to be the same",
            )
        ]  # fmt: skip
    return []


def _stretch(evidence: Evidence, plain: PlainForward, field: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens of a plain forward are valid, and what a field says of them, [N] each."""
    places = slice(plain.begin, plain.begin + len(plain.logprobs))
    return evidence.rows.valid_tokens[plain.row, places], field[plain.row, places].double()


def _apart(ours: Tensor, theirs: Tensor, valid: Tensor) -> float:
    return float((ours - theirs)[valid].abs().mean()) if valid.any() else 0.0


def _worst(ours: Tensor, plain: PlainForward, valid: Tensor) -> list[int]:
    gap = torch.where(valid, (ours - plain.logprobs).abs(), 0.0)
    return [plain.begin + int(gap.argmax())]


@check("entropy")
def entropy(evidence: Evidence) -> list[Finding]:
    """The entropy that is logged and trained is that of the model's own plain forward, before each token and at the
    temperature of the sampling.
    """
    if evidence.outputs is None:
        return []
    for plain in evidence.plain:
        if plain.of != "policy":
            continue
        valid, ours = _stretch(evidence, plain, evidence.outputs.entropy)
        error = _apart(ours, plain.entropy, valid)
        if error > evidence.subject.facts.tolerance:
            return [
                Finding(
                    check="entropy", culprit=UPDATE, expected="-sum p log p over the whole vocabulary",
                    observed=f"values {error:.3g} nats apart on average", positions=[plain.begin],
                    samples=[int(evidence.rows.sample_ids[plain.row])],
                    cure="take entropy and log-probability from the same logits, divided by the temperature once",
                )
            ]  # fmt: skip
    return []


@check("weight_sync")
def weight_sync(evidence: Evidence) -> list[Finding]:
    """The engine's log-probabilities are those of the weights that the policy had when it drew: it moved with them, and
    it samples at the temperature that training assumes.
    """
    rows, facts = evidence.rows, evidence.subject.facts
    if rows.rollout_logprobs is None or evidence.outputs is None:
        return []
    fresh = rows.valid_tokens & (rows.policy_version == evidence.cycle)
    gap = torch.where(fresh, (rows.rollout_logprobs - evidence.outputs.logprobs).double().abs(), 0.0)
    per_row = gap.sum(-1) / fresh.sum(-1).clamp(min=1)
    mean = float(gap.sum() / fresh.sum().clamp(min=1))
    if mean <= facts.tolerance and not bool((per_row > 5 * facts.tolerance).any()):
        return []
    worst = int(per_row.argmax())
    return [
        Finding(
            check="weight_sync", culprit=f"engine {facts.engine}",
            expected=f"log-probabilities within {facts.tolerance:.2g} nats of the policy's own",
            observed=f"{mean:.3g} nats apart on average, {float(per_row[worst]):.3g} in one row: it holds other "
            "weights, a stale cache, or another temperature",
            samples=[int(rows.sample_ids[worst])], positions=[int(gap[worst].argmax())],
            cure="look at load_weights, the prefix cache and the temperature of the engine",
        )
    ]  # fmt: skip


@check("on_policy_identity")
def on_policy_identity(evidence: Evidence) -> list[Finding]:
    """Before the first step of a rollout nothing has moved: the ratio of current to old policy is 1 everywhere, and the
    critic says what it said.
    """
    rows, seen, found = evidence.rows, evidence.outputs, []
    if seen is None:
        return []
    bound = evidence.subject.facts.tolerance / 10
    pairs = {"ratio": (rows.old_logprobs, seen.logprobs), "value": (rows.values, seen.values)}
    for what, (before, now) in pairs.items():
        if before is None or now is None:
            continue
        gap = torch.where(rows.valid_tokens, now - before, 0.0).abs()
        if gap.numel() and float(gap.max()) > bound * (1.0 if what == "ratio" else 1.0 + float(before.abs().max())):
            worst = gap.amax(-1) > bound
            expected = "a ratio of 1" if what == "ratio" else "the same values of the critic"
            found.append(
                Finding(
                    check="on_policy_identity", culprit=BEFORE, expected=f"{expected} before the first optimizer step",
                    observed=f"a {'log-ratio' if what == 'ratio' else 'difference'} of {float(gap.max()):.3g}",
                    samples=rows.sample_ids[worst][:4].tolist(), positions=[int(gap.amax(0).argmax())],
                    cure="the old pass needs the update's microbatches, precision, temperature and no dropout",
                )
            )  # fmt: skip
    return found


@check("reference_stays")
def reference_stays(evidence: Evidence) -> list[Finding]:
    """The reference is frozen: its weights are what they were at an earlier audit, to the last bit."""
    if len(evidence.remembered) != 2 or torch.equal(*evidence.remembered):
        return []
    then, now = evidence.remembered
    return [
        Finding(
            check="reference_stays", culprit="the reference, whose weights moved", observed="others",
            expected=f"the same weights, of which {len(then)} were remembered" if len(then) == len(now) else "as many",
            cure="build it as a copy of its own, which no optimizer holds and no sync writes to",
        )
    ]  # fmt: skip


@check("values_ignore_temperature")
def values_ignore_temperature(evidence: Evidence) -> list[Finding]:
    """The critic's values do not move with the temperature, by which logits are divided and values are not."""
    if evidence.outputs is None or evidence.outputs.values is None or evidence.hotter is None:
        return []
    rows, ours, theirs = evidence.rows, evidence.outputs.values, evidence.hotter.values
    gap = torch.where(rows.valid_tokens, ours - (ours if theirs is None else theirs), 0.0).abs()
    if not gap.numel() or float(gap.max()) <= evidence.subject.facts.tolerance / 10 * (1 + float(ours.abs().max())):
        return []
    return [
        Finding(
            check="values_ignore_temperature", culprit="stage score and update, the value head",
            expected="one value at every temperature", observed=f"values {float(gap.max()):.3g} apart",
            samples=rows.sample_ids[gap.amax(-1) > 0][:4].tolist(), positions=[int(gap.amax(0).argmax())],
            cure="divide logits by the temperature, and nothing else",
        )
    ]  # fmt: skip


@check("packing")
def packing(evidence: Evidence) -> list[Finding]:
    """A row has the same log-probabilities whichever rows it is packed with, and padded instead of packed."""
    if evidence.outputs is None or evidence.apart is None:
        return []
    rows, ours, theirs = evidence.rows, evidence.outputs.logprobs, evidence.apart.logprobs
    gap = torch.where(rows.valid_tokens, (ours - theirs).double(), 0.0).abs()
    per_row = gap.sum(-1) / rows.valid_tokens.sum(-1).clamp(min=1)
    wrong = per_row > evidence.subject.facts.tolerance
    if not wrong.any():
        return []
    return [
        Finding(
            check="packing", culprit=UPDATE, samples=rows.sample_ids[wrong][:4].tolist(),
            expected="the same log-probabilities in every microbatch", positions=[int(gap.amax(0).argmax())],
            observed=f"{float(per_row.max()):.3g} nats apart on average of a row",
            cure="keep the sequences of a microbatch apart: boundaries and positions begin anew with each",
        )
    ]  # fmt: skip
