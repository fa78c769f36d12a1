"""Checks of the loss: the update stage is repeated on a few rows, with a table of log-probabilities for a policy."""

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.checks.signal import POISONS, poisoned
from lightning_rl.audit.evidence import Evidence, StepFound
from lightning_rl.audit.finding import Finding, differing
from lightning_rl.corrections import LossView, RLCallback
from lightning_rl.corrections.provided import Provided
from lightning_rl.signal.reductions import SequenceSumNorm, prompt_mean, sequence_mean, token_mean


def parts_that_differ(ours: StepFound, theirs: StepFound) -> list[str]:
    """Names of the parts of a loss that are not equal."""
    return [
        name
        for name, part in ours.parts.items()
        if name != "loss/total" and not torch.allclose(part, theirs.parts[name], rtol=1e-4, atol=1e-7, equal_nan=True)
    ]


def owner_of(evidence: Evidence, parts: list[str], all_parts: int) -> str:
    """Who computes the parts of a loss that differ."""
    if len(parts) > 1 and len(parts) == all_parts:
        return f"reduction {name_of(evidence.subject.reduction)}, or stage update"
    if parts and not parts[0].startswith("loss/"):
        return f"callback {parts[0].removesuffix('/loss')}.loss_term"
    if parts == ["loss/value"]:
        return "the value loss"
    weighing = [callback for callback, _ in weighing_callbacks(evidence)]
    for callback in weighing:
        own = [other for other in evidence.subject.contributions.callbacks if other is callback]
        if len(weighing) == 1 or own:
            return f"loss {evidence.subject.loss_name}, or callback " + ", ".join(w.name for w in weighing)
    return f"loss {evidence.subject.loss_name}, or reduction {name_of(evidence.subject.reduction)}"


def weighing_callbacks(evidence: Evidence) -> list[tuple[RLCallback, str]]:
    """Corrections that multiply the policy loss, with the method that does."""
    methods = ("sequence_mask", "token_mask", "token_weight")
    return [
        (callback, method) for method in methods for callback in evidence.subject.contributions.contributors(method)
    ]


@check("partition")
def partition(evidence: Evidence) -> list[Finding]:
    """Loss and gradient are the same for every cut into microbatches, with padding microbatches among them."""
    number = len(evidence.rows)
    if number < 2:
        return []
    ours = evidence.whole_step
    uneven = [[0], list(range(number - 1, 0, -1)), []]
    theirs = evidence.step(uneven)
    return _other_step(
        evidence, "partition", ours, theirs, expected="one loss and gradient for every cut into microbatches",
        cure="take denominators over the whole optimizer step, before the first backward",
    )  # fmt: skip


def _other_step(
    evidence: Evidence, name: str, ours: StepFound, theirs: StepFound, *, expected: str, cure: str
) -> list[Finding]:
    """A finding if two steps on the same rows have not the same loss and gradient."""
    parts = parts_that_differ(ours, theirs)
    samples, positions = differing(ours.gradient, theirs.gradient, evidence.rows.sample_ids)
    if not parts and not samples:
        return []
    return [
        Finding(
            check=name, culprit=owner_of(evidence, parts, len(ours.parts) - 1), samples=samples, cure=cure,
            positions=positions, expected=expected, observed=f"others in {', '.join(parts) or 'the gradient'}",
        )
    ]  # fmt: skip


@check("loss_padding_width")
def loss_padding_width(evidence: Evidence) -> list[Finding]:
    """More padding behind the responses changes neither loss nor gradient."""
    ours = evidence.whole_step
    theirs = evidence.step([list(range(len(evidence.rows)))], evidence.rows.fit_width(evidence.rows.width + 3))
    return _other_step(
        evidence, "loss_padding_width", ours, theirs, cure="count `valid_tokens`, never columns",
        expected="the same loss and gradient with three more positions of padding",
    )  # fmt: skip


@check("denominators")
def denominators(evidence: Evidence) -> list[Finding]:
    """Weights of tokens are those of the reduction's definition over all valid tokens, rejected ones included."""
    rows, reduction = evidence.rows, evidence.subject.reduction
    valid, trained = rows.valid_tokens.double(), rows.trained.double()
    own = reduction(rows.valid_tokens, rows.trained, rows.groups, lambda values: values).double()
    expected: Tensor | None = None
    if reduction is token_mean:
        expected = valid / valid.sum().clamp(min=1)
    elif reduction is sequence_mean:
        expected = valid / valid.sum(-1, keepdim=True).clamp(min=1) / trained.sum().clamp(min=1)
    elif isinstance(reduction, SequenceSumNorm):
        expected = valid / reduction.length / trained.sum().clamp(min=1)
    elif reduction is prompt_mean:
        same = (rows.groups[:, None] == rows.groups[None]).double()
        prompts = (1 / same.sum(-1)).sum()
        expected = valid / (same @ valid.sum(-1)).clamp(min=1)[:, None] / prompts
    found = []
    if expected is not None:
        samples, positions = differing(own, expected, rows.sample_ids)
        if samples:
            found.append((f"reduction {name_of(reduction)}", samples, positions))
    found += _rejections_that_shrink(evidence)
    return [
        Finding(
            check="denominators", culprit=culprit, expected="a rejected token to stay in the denominator",
            observed="weights of kept tokens that depend on what is rejected", samples=samples, positions=positions,
            cure="masks multiply the loss; only `exclude` and `keep_groups` change a denominator",
        )
        for culprit, samples, positions in found
    ]  # fmt: skip


def _rejections_that_shrink(evidence: Evidence) -> list[tuple[str, list[int], list[int]]]:
    found = []
    view = evidence.view()
    plain = evidence.step([list(range(len(evidence.rows)))], contributions=Provided())
    for callback, method in weighing_callbacks(evidence):
        if method == "token_weight":
            continue
        mask = getattr(callback, method)(view.sanitize())
        kept = (mask[:, None].expand_as(view.valid_tokens) if mask.dim() == 1 else mask) & view.valid_tokens
        alone = evidence.step([list(range(len(evidence.rows)))], contributions=_only(callback, method))
        samples, positions = differing(
            torch.where(kept, plain.gradient, 0.0), torch.where(kept, alone.gradient, 0.0), view.sample_ids
        )
        if samples:
            found.append((f"callback {callback.name}.{method}", samples, positions))
    return found


def _only(callback: RLCallback, method: str) -> Provided:
    methods = {method: lambda _self, seen: getattr(callback, method)(seen)}
    return Provided([type("Only", (RLCallback,), {"name": callback.name, **methods})()])


@check("loss_masked_values")
def loss_masked_values(evidence: Evidence) -> list[Finding]:
    """What stands at a token that is not valid, NaN and infinity too, reaches neither the loss nor its gradient."""
    theirs = evidence.step([list(range(len(evidence.rows)))], poisoned(evidence.rows))
    return _other_step(
        evidence, "loss_masked_values", evidence.whole_step, theirs,
        expected=f"the same loss and gradient with {POISONS}",
        cure="select by valid_tokens before exp and before any sum",
    )  # fmt: skip


@check("sequence_decisions")
def sequence_decisions(evidence: Evidence) -> list[Finding]:
    """A mask that depends on the whole response decides the same for all of its tokens."""
    view = evidence.view().sanitize()
    position = torch.arange(view.width, device=view.groups.device)
    both_signs = torch.sin(1.0 + 2.0 * view.sample_ids[:, None] + 3.0 * position).to(view.logprobs.dtype)
    view = view.replace(advantages=torch.where(view.valid_tokens, both_signs, 0.0))
    for callback in evidence.subject.contributions.contributors("token_mask"):
        mask = callback.token_mask(view)
        split = (mask & view.valid_tokens).any(-1) & (~mask & view.valid_tokens).any(-1)
        for row in split.nonzero()[:2, 0].tolist():
            for token in view.valid_tokens[row].nonzero()[:4, 0].tolist():
                if _moves_with_others(callback, view, row, token):
                    return [
                        Finding(
                            check="sequence_decisions", culprit=f"callback {callback.name}.token_mask",
                            expected="one decision for all tokens of a response that is judged as a whole",
                            observed="tokens of one response that are kept and rejected",
                            samples=[int(view.sample_ids[row])], positions=[token],
                            cure="implement sequence_mask, which has no token axis, instead of token_mask",
                        )
                    ]  # fmt: skip
    return []


def _moves_with_others(callback: RLCallback, view: LossView, row: int, token: int) -> bool:
    """Whether the decision about a token changes when only the other tokens of its response do."""
    here = bool(callback.token_mask(view)[row, token])
    for shift in (3.0, -3.0):
        moved = torch.zeros_like(view.logprobs.detach())
        moved[row] = shift
        moved[row, token] = 0.0
        changed = view.replace(logprobs=view.logprobs.detach() + moved)
        if view.old_logprobs is not None and bool(callback.token_mask(changed)[row, token]) == here:
            changed = view.replace(old_logprobs=view.old_logprobs + moved)
        if bool(callback.token_mask(changed)[row, token]) != here:
            return True
    return False


def name_of(function: object) -> str:
    """How findings call a reduction."""
    return getattr(function, "__name__", type(function).__name__)
