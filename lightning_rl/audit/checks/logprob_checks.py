"""Checks of what models say of tokens: against their own plain forward, against the engine, against each other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_rl.audit.audit_error import NO_ROWS, Skip
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.forwards import PlainForward
from lightning_rl.utils.finding import Finding

BEFORE = "stage score, the policy before the update"
UPDATE = "stage update, the policy's forward"
REFERENCE = "stage score, the reference"
FAR = 2.0  # a gradient is a difference of what tolerances in nats are for


@check(cure="index and temperature of every source of log-probabilities have to be the same")
def logprob_alignment(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Log-probabilities of the policy before the update, of the update itself and of the reference are those of the
    model's own plain forward, for the right token and at the temperature of the sampling.
    """
    rows, outputs = evidence.rows, evidence.outputs
    yield from _unknown(evidence)
    findings = [
        *_misalignments(evidence, "old_logprobs", rows.old_logprobs, "policy", BEFORE),
        *_misalignments(evidence, "ref_logprobs", rows.ref_logprobs, "reference", REFERENCE),
    ]
    yield from findings
    if not findings and outputs is not None:
        yield from _misalignments(evidence, "logprobs", outputs.logprobs, "policy", UPDATE)


def _unknown(evidence: Evidence) -> Iterator[Skip]:
    """Why there is nothing to compare with what the policy says."""
    if evidence.outputs is None or not len(evidence.rows):
        yield Skip(NO_ROWS if evidence.outputs is not None else "there is no policy")
    elif not evidence.plain:
        yield Skip("the policy is split over ranks, or a correction has its context around every forward")


def _misalignments(evidence: Evidence, name: str, field: Tensor | None, model: str, culprit: str) -> Iterator[Finding]:
    """The first row of a field that is not what a model's own forward says, with a guess at what went wrong."""
    facts = evidence.facts
    for plain in evidence.plain:
        if field is None or plain.of != model:
            continue
        valid, ours = _stretch(evidence, plain, field)
        error = _mean_gap(ours, plain.logprobs, valid)
        if error <= facts.tolerance:
            continue
        guesses = {
            ": they belong to the next position": torch.roll(plain.logprobs, -1),
            ": they belong to the position before": torch.roll(plain.logprobs, 1),
            ": they were taken at temperature 1": plain.at_one,
            ": they were divided by the temperature twice": plain.at_square,
        }
        near = [guess for guess, other in guesses.items() if _mean_gap(ours, other, valid) <= facts.tolerance]
        worst = torch.where(valid, (ours - plain.logprobs).abs(), 0.0).argmax()
        yield Finding(
            culprit=culprit,
            expected=f"{name} [t] = log p(response[t] given all before), temperature {facts.temperature}",
            observed=f"{error:.3g} nats apart on average" + "".join(near[:1]),
            samples=[int(evidence.rows.sample_ids[plain.row])],
            positions=[plain.begin + int(worst)],
        )
        return


def _stretch(evidence: Evidence, plain: PlainForward, field: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens of a plain forward are valid, and what a field says of them, [N] each."""
    places = slice(plain.begin, plain.begin + len(plain.logprobs))
    return evidence.rows.valid_tokens[plain.row, places], field[plain.row, places].double()


def _mean_gap(ours: Tensor, theirs: Tensor, valid: Tensor) -> float:
    return float((ours - theirs)[valid].abs().mean()) if valid.any() else 0.0


@check(
    culprit=UPDATE,
    expected="-sum p log p over the whole vocabulary",
    cure="take entropy and log-probability from the same logits, divided by the temperature once",
)
def entropy(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The entropy that is logged and trained is that of the model's own plain forward, before each token and at the
    temperature of the sampling.
    """
    yield from _unknown(evidence)
    for plain in evidence.plain:
        if evidence.outputs is None or plain.of != "policy":
            continue
        valid, ours = _stretch(evidence, plain, evidence.outputs.entropy)
        error = _mean_gap(ours, plain.entropy, valid)
        if error > evidence.facts.tolerance:
            yield Finding(
                observed=f"values {error:.3g} nats apart on average",
                samples=[int(evidence.rows.sample_ids[plain.row])],
                positions=[plain.begin],
            )
            return


@check(
    culprit="stage update, the policy's forward under a gradient",
    expected="the gradient of the model's own plain forward, from every token",
    cure="detach nothing between the model and its log-probabilities, and round nothing there",
)
def token_gradients(evidence: Evidence) -> Iterator[Finding | Skip]:
    """A gradient of the update's own forward comes from every token, the last one included: with respect to a few small
    parameters that of the log-probabilities at both ends of responses is the one of the model's own plain forward.
    """
    if len(evidence.token_gradients) < 3:
        yield Skip("nothing small trains, the rows that were looked at are long, or nobody forwards plainly")
        return
    (ours, plain, scores), tolerance = evidence.token_gradients, evidence.facts.tolerance
    away, size = float((ours - plain).norm()), float(plain.norm())
    if away > tolerance * (FAR * size + float(scores.norm()) / 10):  # of a sure token little is left of its score's
        yield Finding(observed=f"another one, {away / size if size else 1.0:.3g} of its size away")


@check(culprit="engine {engine}", cure="look at load_weights, the prefix cache and the temperature of the engine")
def weight_sync(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The engine's log-probabilities are those of the weights that the policy had when it drew: it moved with them, and
    it samples at the temperature that training assumes.
    """
    rows, tolerance = evidence.rows, evidence.facts.tolerance
    if rows.rollout_logprobs is None or evidence.outputs is None:
        yield Skip("the engine returns no log-probabilities" if evidence.outputs is not None else "there is no policy")
        return
    fresh = rows.valid_tokens & (rows.policy_version == evidence.number)
    if not fresh.any():
        yield Skip("no token that was looked at comes from this rollout's weights")
    gap = torch.where(fresh, (rows.rollout_logprobs - evidence.outputs.logprobs).double().abs(), 0.0)
    per_row = gap.sum(-1) / fresh.sum(-1).clamp(min=1)
    mean = float(gap.sum() / fresh.sum().clamp(min=1))
    if mean > tolerance or bool((per_row > 5 * tolerance).any()):
        worst = int(per_row.argmax())
        yield Finding(
            expected=f"log-probabilities within {tolerance:.2g} nats of the policy's own",
            observed=f"{mean:.3g} nats apart on average, {float(per_row[worst]):.3g} in one row: it holds other "
            "weights, a stale cache, or another temperature",
            samples=[int(rows.sample_ids[worst])],
            positions=[int(gap[worst].argmax())],
        )


@check(culprit=BEFORE, cure="the old pass needs the update's microbatches, precision, temperature and no dropout")
def on_policy_identity(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Before the first step of a rollout nothing has moved: the ratio of current to old policy is 1 everywhere, and the
    critic says what it said.
    """
    rows, outputs, bound = evidence.rows, evidence.outputs, evidence.facts.tolerance / 10
    if not len(rows):
        yield Skip(NO_ROWS)
        return
    if outputs is None or (rows.old_logprobs is None and rows.values is None):
        yield Skip("there is no policy" if outputs is None else "nobody reads an old policy, so none is scored")
        return
    pairs = [
        ("a ratio of 1", "a log-ratio", rows.old_logprobs, outputs.logprobs),
        ("the same values of the critic", "a difference", rows.values, outputs.values),
    ]
    for expected, observed, before, now in pairs:
        if before is None or now is None or not before.numel():
            continue
        gap, scale = torch.where(rows.valid_tokens, now - before, 0.0).abs(), 1.0
        if now is outputs.values:
            scale += float(before.abs().max())
        if gap.numel() and float(gap.max()) > bound * scale:
            yield Finding(
                expected=f"{expected} before the first optimizer step",
                observed=f"{observed} of {float(gap.max()):.3g}",
                samples=rows.sample_ids[gap.amax(-1) > bound][:4].tolist(),
                positions=[int(gap.amax(0).argmax())],
            )


@check(
    culprit="the reference, whose weights moved",
    cure="build it as a copy of its own, which no optimizer holds and no sync writes to",
    of_rows=False,
)
def reference_stays(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The reference is frozen: its weights are what they were at an earlier audit, to the last bit."""
    if not sum(map(len, evidence.reference_weights)):
        yield Skip("there is no reference with weights of its own")
    if len(evidence.reference_weights) == 2 and not torch.equal(*evidence.reference_weights):
        then, now = map(len, evidence.reference_weights)
        yield Finding(expected=f"the same weights, of which {then} were remembered" if then == now else "as many")


@check(
    culprit="stage score and update, the value head",
    expected="one value at every temperature",
    cure="divide logits by the temperature, and nothing else",
)
def values_ignore_temperature(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The critic's values do not move with the temperature, by which logits are divided and values are not."""
    if evidence.outputs is None or evidence.outputs.values is None or evidence.double_temperature is None:
        yield Skip("there is no critic")
        return
    rows, values, others = evidence.rows, evidence.outputs.values, evidence.double_temperature.values
    gap = torch.where(rows.valid_tokens, values - (values if others is None else others), 0.0).abs()
    if gap.numel() and float(gap.max()) > evidence.facts.tolerance / 10 * (1 + float(values.abs().max())):
        yield Finding(
            observed=f"values {float(gap.max()):.3g} apart",
            samples=rows.sample_ids[gap.amax(-1) > 0][:4].tolist(),
            positions=[int(gap.amax(0).argmax())],
        )


@check(
    culprit=UPDATE,
    expected="the same log-probabilities in every microbatch",
    cure="keep the sequences of a microbatch apart: boundaries and positions begin anew with each",
)
def packing(evidence: Evidence) -> Iterator[Finding | Skip]:
    """A row has the same log-probabilities whichever rows it is packed with, and padded instead of packed."""
    if evidence.outputs is None or evidence.reversed is None:
        if not evidence.plain:  # else logprob_alignment has compared with rows that are alone
            yield Skip(NO_ROWS)
        return
    rows, ours, theirs = evidence.rows, evidence.outputs.logprobs, evidence.reversed.logprobs
    gap = torch.where(rows.valid_tokens, ours.double() - theirs.double(), 0.0).abs()
    per_row = gap.sum(-1) / rows.valid_tokens.sum(-1).clamp(min=1)
    wrong = per_row > evidence.facts.tolerance
    if wrong.any():
        yield Finding(
            observed=f"{float(per_row.max()):.3g} nats apart on average of a row",
            samples=rows.sample_ids[wrong][:4].tolist(),
            positions=[int(gap.amax(0).argmax())],
        )
