"""Checks of log-probabilities and values: against a plain forward, the engine and each other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_rl.audit.checks.draw_checks import has_other_rows
from lightning_rl.audit.evidence import Evidence
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import MIXED_UP, NO_ROWS, Skip
from lightning_rl.utils.finding import Finding

NO_POLICY = "there is no policy, or a callback's forward_context cannot be repeated"

BEFORE = "stage score, the policy before the update"
UPDATE = "stage update, the policy's forward"
TRAINER = "stages score and update, the policy's forward on several rows, as its forward on one has the engine's values"
BY_ROW = "read each row with its own tokens, positions and pictures, independent of the rows beside it"
ENGINE = "check load_weights, the prefix cache and the temperature of the engine"
PICTURES_TOO = f"{ENGINE}, and the number and order of pictures that it reads"
OTHER_ROWS = "rows are not those of their requests (prompt_source)"
REFERENCE = "stage score, the reference"
FAINT = 0.01  # a change that is none, relative to another one
FAR = 2.0  # a gradient is a difference of values with a tolerance in nats


@check(cure="use the same index, temperature and logits for every source of log-probabilities and entropies")
def logprob_alignment(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Log-probabilities of old policy, current policy and reference equal those of the model's plain forward.

    They belong to the right token, at the sampling temperature; so does the entropy, over the whole vocabulary.
    """
    rows, outputs = evidence.rows, evidence.outputs
    if outputs is None or not len(rows):
        yield Skip(NO_ROWS if outputs is not None else NO_POLICY)
    elif not evidence.plain:
        yield Skip(
            "the policy is sharded, a correction wraps forwards in a context, or rewritten contexts have pictures"
        )
    findings = [
        *_misalignments(evidence, "old_logprobs", rows.old_logprobs, "policy", BEFORE),
        *_misalignments(evidence, "ref_logprobs", rows.ref_logprobs, "reference", REFERENCE),
    ]
    if not findings and outputs is not None:
        findings = [*_misalignments(evidence, "logprobs", outputs.logprobs, "policy", UPDATE)]
    if not findings and outputs is not None:
        findings = [*_misalignments(evidence, "entropy", outputs.entropy, "policy", UPDATE)]
    yield from findings


def _misalignments(
    evidence: Evidence, name: str, field: Tensor | None, model: str, culprit: str, tolerance: float | None = None
) -> Iterator[Finding]:
    """Yield a finding for the first row that differs from the plain forward, by default by the run's tolerance."""
    for plain in evidence.plain:
        if field is None or plain.of != model:
            continue
        truth, what = plain.logprobs, "log p(response[t] given all before)"
        if name == "entropy":
            truth, what = plain.entropy, "-sum p log p over the whole vocabulary"
        valid = evidence.rows.valid_tokens[plain.row, plain.columns]
        gaps = torch.where(valid, (field[plain.row, plain.columns].double() - truth).abs(), 0.0)
        error = float(gaps.sum() / valid.sum().clamp(min=1))
        if error > (tolerance or evidence.facts.tolerance):
            yield Finding(
                culprit=culprit,
                expected=f"{name} [t] = {what}, temperature {evidence.facts.temperature}",
                observed=f"{error:.3g} nats apart on average",
                samples=[int(evidence.rows.sample_ids[plain.row])],
                positions=[int(plain.columns[gaps.argmax()])],
            )
            return


@check(
    culprit="stage update, the policy's forward under a gradient",
    expected="the gradient of the model's plain forward, from every token",
    cure="detach nothing between the model and its log-probabilities, and round nothing there",
)
def token_gradients(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Every token contributes to the gradient of the update's forward, also the last one.

    The gradient of log-probabilities at both ends of responses with respect to a few small parameters, and to the
    embeddings, equals that of the model's plain forward.
    """
    if len(evidence.token_gradients) < 3:
        yield Skip("no small parameter trains, the checked rows are long, or there is no plain forward")
        return
    tolerance, parts = evidence.facts.tolerance, iter(evidence.token_gradients)
    for of, ours, plain, scores in zip(("", " of the embeddings"), parts, parts, parts, strict=False):
        away, size = float((ours - plain).norm()), float(plain.norm())
        if away > tolerance * (
            FAR * size + float(scores.norm()) / 10
        ):  # little of the score's gradient remains at near-certain tokens
            yield Finding(observed=f"a gradient{of} that differs by {away / size if size else 1.0:.3g} of its norm")
            return


@check(culprit="engine {engine}", cure=ENGINE)
def weight_sync(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The engine's log-probabilities are those of the policy's weights at the draw and at the same temperature."""
    rows, tolerance = evidence.rows, evidence.facts.engine_tolerance
    if evidence.swapped_samples:
        yield Skip(MIXED_UP)
        return
    if rows.rollout_logprobs is None or evidence.outputs is None:
        yield Skip("the engine returns no log-probabilities" if evidence.outputs is not None else NO_POLICY)
        return
    fresh = rows.valid_tokens & (rows.policy_version == evidence.number)
    if not fresh.any():
        yield Skip("no checked token comes from this rollout's weights")
    gap = torch.where(fresh, (rows.rollout_logprobs - evidence.outputs.logprobs).double().abs(), 0.0)
    per_row = gap.sum(-1) / fresh.sum(-1).clamp(min=1)
    mean = float(gap.sum() / fresh.sum().clamp(min=1))
    if mean > tolerance or bool((per_row > 5 * tolerance).any()):
        if has_other_rows(evidence):
            yield Skip(OTHER_ROWS)
            return
        pictures = bool(rows.prompt_items or rows.response_items)
        worst, read = int(per_row.argmax()), "pictures that it reads otherwise, " * pictures
        why = f": other weights, a stale cache, {read}or another temperature"
        pairs = ("logprobs", evidence.outputs.logprobs), ("rollout_logprobs", rows.rollout_logprobs)
        ours, theirs = (any(_misalignments(evidence, *pair, "policy", TRAINER, tolerance)) for pair in pairs)
        of_trainer = ours and not theirs
        yield Finding(
            culprit=TRAINER if of_trainer else "",
            cure=BY_ROW if of_trainer else PICTURES_TOO * pictures,
            expected=f"log-probabilities within {tolerance:.2g} nats of the policy's",
            observed=f"{mean:.3g} nats apart on average, {float(per_row[worst]):.3g} in one row"
            + why * (not of_trainer),
            samples=[int(rows.sample_ids[worst])],
            positions=[int(gap[worst].argmax())],
        )
        return
    yield from _other_old_logprobs(evidence, tolerance)


def _other_old_logprobs(evidence: Evidence, tolerance: float) -> Iterator[Finding | Skip]:
    """Yield a finding for rows, among all of the rollout, whose old log-probabilities are not the engine's."""
    rows = evidence.rollout
    if rows.old_logprobs is None or rows.rollout_logprobs is None:
        return
    fresh = rows.valid_tokens & (rows.policy_version == evidence.number)
    gap = torch.where(fresh, (rows.rollout_logprobs - rows.old_logprobs).double().abs(), 0.0)
    per_row = gap.sum(-1) / fresh.sum(-1).clamp(min=1)
    wrong = per_row > 5 * tolerance
    if bool(wrong.any()) and has_other_rows(evidence):
        yield Skip(OTHER_ROWS)
    elif bool(wrong.any()):
        yield Finding(
            culprit=f"{BEFORE}, the rows of its microbatches",
            expected="old log-probabilities of the rows that were sampled, as those of a few rows are",
            observed=f"{float(per_row.max()):.3g} nats apart on average in {int(wrong.sum())} of {len(rows)} rows",
            cure="score each row with its own tokens and pictures",
            samples=rows.sample_ids[wrong][:4].tolist(),
            positions=[int(gap[per_row.argmax()].argmax())],
        )


@check(
    culprit="the reference, whose weights moved",
    cure="build it as a separate copy that no optimizer holds and no sync writes to",
    of_rows=False,
)
def reference_stays(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The reference gives fixed tokens the log-probabilities that the initial policy gave them.

    A few of its weights are bitwise those of an earlier audit. If ``reference=`` is passed or the run was resumed, the
    log-probabilities are compared with those of the reference at the first audit.
    """
    if not evidence.reference_scores:
        yield Skip("there is no reference")
        return
    (then, now), tolerance = evidence.reference_scores, evidence.facts.tolerance
    if len(evidence.reference_weights) == 2 and not torch.equal(*evidence.reference_weights):
        before, after = map(len, evidence.reference_weights)
        expected = f"the same weights, {before} of which were recorded" if before == after else "as many"
        yield Finding(culprit=evidence.reference_mover, expected=expected)
    elif not float((now - then).abs().mean()) <= tolerance:
        yield Finding(
            culprit=evidence.reference_mover or "the reference, whose log-probabilities moved",
            expected="log-probabilities of fixed tokens that are those of the initial policy in every audit",
            observed=f"{float((now - then).abs().mean()):.3g} nats apart on average",
        )


@check(
    culprit="stage score and update, the value head",
    expected="one value at every temperature",
    cure="divide only logits by the temperature",
)
def values_ignore_temperature(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The critic's values do not depend on the temperature, which divides only logits."""
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
    culprit="stage score and update, the value head",
    cure="read the value of a token from the hidden state that predicts it",
)
def value_positions(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The value of a token depends on the tokens before it, up to the last one, and not on the token itself."""
    moves = evidence.value_moves
    if moves is None or moves.shape[1] < 3 or not bool(moves.any()):
        yield Skip("there is no critic" if moves is None else "the critic is constant, or no checked row has 3 tokens")
        return
    own, following, later = moves[:, 0].sum(), moves[:, 1].sum(), moves[:, 2:].amax(-1).sum()
    if own > FAINT * following:
        expected, observed = "values that do not depend on their own token", "values that do"
        yield Finding(expected=expected, observed=f"{observed}, such as those of a later position")
    elif following < FAINT * later:
        expected, observed = "values that depend on the token before", "values that do not"
        yield Finding(expected=expected, observed=f"{observed}, such as those of an earlier position")
