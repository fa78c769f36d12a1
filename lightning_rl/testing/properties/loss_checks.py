"""Checks of the loss: the update stage repeated on a few rows, with a table of log-probabilities as policy."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.corrections import LossView
from lightning_rl.corrections.recorded import ReplayCorrections
from lightning_rl.corrections.rl_callback import CONTRIBUTIONS, POLICY_LOSS_FACTORS
from lightning_rl.losses import LOSSES, FunctionLoss, PolicyLoss
from lightning_rl.rollout import PROMPT
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm, prompt_mean, sequence_mean, token_mean
from lightning_rl.testing.properties.case import (
    AlgorithmCase,
    CorrectionMethod,
    TableStep,
    callback_of_one_method,
    pattern_of,
)
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import NO_ROWS, Skip, differences, gradient_of
from lightning_rl.testing.properties.formula_checks import uniform_view
from lightning_rl.testing.properties.row_changes import ROW_MASKS, counts_padding, repeats_itself
from lightning_rl.testing.properties.signal_checks import POISON_TEXT, poison
from lightning_rl.utils.finding import Finding

LOSS_TYPES = frozenset(map(type, LOSSES.values()))
MADE_UP = (
    lambda view: view.valid_tokens & (pattern_of(view) > -0.5),
    lambda view: view.valid_tokens & (pattern_of(view) < 0.5),
)
"""Masks that reject some tokens each."""
MASKS = tuple(name for name in POLICY_LOSS_FACTORS if CONTRIBUTIONS[name].combined_by == "and")


def step_changes(case: AlgorithmCase, other: TableStep) -> Iterator[Finding]:
    """Yield a finding if another step on the same rows has another loss or gradient."""
    ours = case.whole_step
    names = [
        name
        for name, part in ours.parts.items()
        if name != "loss/total" and not torch.allclose(part, other.parts[name], rtol=1e-4, atol=1e-7, equal_nan=True)
    ]
    places = list(differences(ours.gradient, other.gradient, case.rows.sample_ids))
    if names or places:
        yield Finding(
            culprit=_owner_of(case, names, len(ours.parts) - 1),
            observed=f"others in {', '.join(names) or 'the gradient'}",
            samples=places[0].samples if places else (),
            positions=places[0].positions if places else (),
        )


def _owner_of(case: AlgorithmCase, parts: list[str], all_parts: int) -> str:
    """Return the code that computes the differing parts of a loss, as a culprit."""
    loss, reduction = (case.names[part] for part in ("loss", "reduction"))
    if len(parts) > 1 and len(parts) == all_parts:
        return f"reduction {reduction}, or stage update"
    if parts and not parts[0].startswith("loss/"):
        return f"callback {parts[0].removesuffix('/loss')}.loss_term"
    if parts == ["loss/value"]:
        return "the value loss"
    weighing = [contribution.callback.name for contribution in case.contributions(*POLICY_LOSS_FACTORS)]
    return f"loss {loss}, or " + (f"callback {', '.join(weighing)}" if weighing else f"reduction {reduction}")


@check(
    expected="one loss and gradient for every partition into microbatches",
    cure="compute a token's loss from its own row, and denominators over the whole optimizer step",
)
def partition(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Loss and gradient do not depend on the partition into microbatches, padding microbatches included."""
    number = len(case.rows)
    if number < 2:
        yield Skip(f"only {number} checked rows train")
    else:
        uneven = [[0], list(range(number - 1, 1, -1)), [1], []]  # row 1 at an even place too
        yield from step_changes(case, case.table_step(partition=uneven))


@check(
    expected="the same loss and gradient with three more positions of padding, and with longer prompts",
    cure="count `valid_tokens`, never columns or tokens of the prompt",
)
def loss_padding_width(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Additional padding after the responses does not change loss and gradient, nor do longer prompts without it."""
    if not len(case.rows):
        yield Skip(NO_ROWS)
    wider = case.rows.fit_width(case.rows.width + 3)
    findings = list(step_changes(case, case.table_step(wider)))
    yield from findings

    def longer(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        return torch.cat([tensor[:, :1], tensor], 1) if axis == PROMPT else tensor

    rows = case.rows.map(longer)
    bare = replace(case, algorithm=case.algorithm.replace(corrections=ReplayCorrections()))
    if not findings:
        yield from step_changes(bare, bare.table_step(rows.replace(prompt_lengths=rows.prompt_lengths + 1)))


@check(
    expected="the same with more padding behind responses",
    observed="something else",
    cure="average over `valid_tokens`, never over columns",
)
def counted_padding(case: AlgorithmCase) -> Iterator[Finding]:
    """Masks, weights and terms of corrections do not count padding in a mean, also near a threshold."""
    view, groups = case.view(), case.groups.sanitize()
    for contribution in case.contributions(*ROW_MASKS, *POLICY_LOSS_FACTORS, "loss_term"):
        rows = groups if contribution.method in ROW_MASKS else view
        if repeats_itself(contribution, rows) and (change := counts_padding(contribution, rows)) is not None:
            yield Finding(culprit=str(contribution), samples=change.rollout.sample_ids[:2].tolist())


@check(
    culprit="reduction {reduction}",
    expected="rejected tokens in the denominator, with a weight of 0",
    observed="weights of kept tokens that depend on rejected ones, or rejected tokens with a weight",
    cure="masks multiply the loss; only `exclude` and `keep_groups` change a denominator",
)
def denominators(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Weights of tokens follow the reduction's definition over all valid tokens, rejected ones too; none is below 0."""
    rows, reduction = case.rows, case.algorithm.reduction
    expected = _weights_by_definition(case, reduction)
    if expected is None:
        yield Skip(f"the reduction {case.names['reduction']} is not part of the library, so its definition is unknown")
        if _divides_by_longest(reduction):
            expected, observed = "weights that do not depend on the longest response", "weights that do"
            cure = "divide by a constant, a response's own length or the number of tokens, never by a maximum"
            yield Finding(expected=expected, observed=observed, cure=cure)
    else:
        weights = reduction(rows.valid_tokens, rows.trained, rows.groups, local_sum)
        yield from differences(weights, expected, rows.sample_ids)
    loss, names = case.algorithm.loss, case.names
    counting = FunctionLoss(lambda view: view.logprobs)  # its gradient is the weight of each token
    case, view = replace(case, algorithm=case.algorithm.replace(loss=counting)), case.view().sanitize()
    plain = case.table_step(corrections=ReplayCorrections()).gradient

    def wrong(culprit: str, *masks: Callable[[LossView], Tensor]) -> Iterator[Finding]:
        kept = [mask(view) for mask in masks]
        methods = ["sequence_mask" if one.dim() == 1 else "token_mask" for one in kept]
        only = [
            callback_of_one_method(method, mask, f"mask_{place}")
            for place, (method, mask) in enumerate(zip(methods, masks, strict=True))
        ]
        alone = case.table_step(corrections=ReplayCorrections(only)).gradient
        rejected = [~(one[:, None] if one.dim() == 1 else one) for one in kept]
        wanted = torch.where(torch.stack(torch.broadcast_tensors(*rejected, ~view.valid_tokens)).any(0), 0.0, plain)
        yield from differences(alone, wanted, view.sample_ids, culprit=culprit)

    findings = list(wrong("stage update, the combined masks of corrections", *MADE_UP))
    yield from findings
    for contribution in case.contributions(*MASKS) if not findings else ():
        yield from wrong(str(contribution), contribution)
    if not findings and case.contributions("token_mask") and _spreads(loss, uniform_view(case)):
        expected, observed = (
            "a loss of each token that has no gradient at other tokens, which masks do not reach",
            "one",
        )
        yield Finding(culprit=f"loss {names['loss']}", expected=expected, observed=observed)
    strong = uniform_view(case, spread=4.0)
    for contribution in case.contributions("token_weight"):
        weights = torch.where(strong.valid_tokens, contribution(strong).double(), 0.0)
        if _renormalizes(weights, strong.valid_tokens):
            observed = "weights of kept tokens that make up for those of 0"
            yield Finding(culprit=str(contribution), observed=observed)
        below = torch.where(view.valid_tokens, contribution(view), 0.0).clamp(max=0.0)
        if below.any():
            expected, observed = "weights of at least 0", f"{float(below.min()):.3g}, which unlearns good responses"
            cure = "bound the weight from below: clamp(min=0)"
            yield Finding(culprit=str(contribution), expected=expected, observed=observed, cure=cure)


def _divides_by_longest(reduction: Reduction) -> bool:
    """Return True if weights depend on the length of the longest response alone, in made-up groups of two responses."""

    def first_weights(*lengths: int) -> Tensor:
        valid = torch.arange(8) < torch.tensor((2, 3, *lengths))[:, None]
        groups = torch.arange(len(valid)) // 2
        return reduction(valid, torch.ones(len(valid), dtype=torch.bool), groups, local_sum)[:2]

    plain, shorter, longer = first_weights(4, 6), first_weights(3, 6), first_weights(4, 7)
    return bool(torch.equal(plain, shorter)) and not torch.equal(plain, longer)


def _spreads(loss: PolicyLoss, view: LossView) -> bool:
    """Return True if the loss of a token has a gradient at others; losses of the library document it."""
    if type(loss) in LOSS_TYPES or loss.prepares:
        return False
    for row in (view.valid_tokens.sum(-1) > 1).nonzero()[:2, 0].tolist():
        first, *others = view.valid_tokens[row].nonzero()[:, 0].tolist()
        if gradient_of(loss(view)[row, first], view.logprobs)[row, others].any():
            return True
    return False


def _renormalizes(weights: Tensor, valid: Tensor) -> bool:
    """Return True if some weights are 0 and all have a mean of 1, in each row or over all of them."""
    for ours, where in ((weights, valid), (weights.flatten()[None], valid.flatten()[None])):
        some = ((ours == 0) & where).any(-1) & (ours != 0).any(-1)
        means = ours.sum(-1) / where.sum(-1).clamp(min=1)
        if some.any() and bool(torch.isclose(means[some], torch.ones_like(means[some]), rtol=1e-4).all()):
            return True
    return False


def _weights_by_definition(case: AlgorithmCase, reduction: Reduction) -> Tensor | None:
    """Return the weights of a known reduction on this rank, in float64; None for others."""
    rows, valid = case.rows, case.rows.valid_tokens.double()
    trained = rows.trained.double().sum().clamp(min=1)
    if reduction is token_mean:
        return valid / valid.sum().clamp(min=1)
    if reduction is sequence_mean:
        return valid / valid.sum(-1, keepdim=True).clamp(min=1) / trained
    if isinstance(reduction, SequenceSumNorm):
        return valid / reduction.length / trained
    if reduction is prompt_mean:
        same = (rows.groups[:, None] == rows.groups[None]).double()
        return valid / (same @ valid.sum(-1)).clamp(min=1)[:, None] / (1 / same.sum(-1)).sum()
    return None


@check(
    expected=f"the same loss and gradient with {POISON_TEXT}",
    cure="select by valid_tokens before exp and before any sum",
)
def loss_masked_values(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Values at tokens that are not valid, such as NaN, reach neither the loss nor its gradient."""
    if not len(case.rows):
        yield Skip(NO_ROWS)
    yield from step_changes(case, case.table_step(poison(case.rows)))


@check(
    expected="one decision for all tokens of a response that is masked as a whole",
    observed="tokens of one response that are kept and rejected",
    cure="implement sequence_mask, which has no token axis, instead of token_mask",
)
def sequence_decisions(case: AlgorithmCase) -> Iterator[Finding]:
    """A mask that depends on the whole response is the same for all its tokens."""
    view = case.view().sanitize()
    position = torch.arange(view.width, device=view.groups.device)
    both_signs = torch.sin(1.0 + 2.0 * view.sample_ids[:, None] + 3.0 * position).to(view.logprobs.dtype)
    view = view.replace(advantages=torch.where(view.valid_tokens, both_signs, 0.0))
    for contribution in case.contributions("token_mask"):
        mask = contribution(view)
        split = (mask & view.valid_tokens).any(-1) & (~mask & view.valid_tokens).any(-1)
        places = [
            (row, token)
            for row in split.nonzero()[:2, 0].tolist()
            for token in view.valid_tokens[row].nonzero()[:4, 0].tolist()
        ]
        for row, token in places:
            if _moves_with_others(contribution, view, row, token):
                samples = [int(view.sample_ids[row])]
                yield Finding(culprit=str(contribution), samples=samples, positions=[token])
                return


def _moves_with_others(token_mask: CorrectionMethod, view: LossView, row: int, token: int) -> bool:
    """Return True if the mask of a token changes when only other tokens of its response change."""
    here = token_mask(view)[row, token]
    for shift in (3.0, -3.0):
        moved = torch.zeros_like(view.logprobs.detach())
        moved[row] = shift
        moved[row, token] = 0.0
        for name in ("logprobs", "old_logprobs"):
            field = getattr(view, name)
            if field is not None and token_mask(view.replace(**{name: field.detach() + moved}))[row, token] != here:
                return True
    return False
