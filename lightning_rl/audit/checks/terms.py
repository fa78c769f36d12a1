"""Checks of what a loss teaches: gradients that live, in the right direction, every term and every ratio once."""

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import Rollout


@check("gradient_liveness")
def gradient_liveness(evidence: Evidence) -> list[Finding]:
    """Every term of the loss reaches the policy: it has a gradient, and the logged term is what was differentiated."""
    found = []
    for callback in evidence.subject.contributions.contributors("loss_term"):
        view = evidence.view(entropy_gradient=callback.trains_entropy).sanitize()
        leaf = view.entropy if callback.trains_entropy else view.logprobs
        per_token = callback.loss_term(view).per_token
        if len(view) and not _alive(torch.where(view.valid_tokens, per_token, 0.0), leaf):
            found.append((f"callback {callback.name}.loss_term", "a term with a gradient"))
    view, prepares = evidence.view(drift=0.0).sanitize(), evidence.subject.loss.prepares  # where no clip holds it back
    if (
        not prepares
        and bool((view.required("advantages") != 0).any())
        and not _alive(evidence.subject.loss(view), view.logprobs)
    ):
        found.append((f"loss {evidence.subject.loss_name}", "a loss with a gradient"))
    return [
        Finding(
            check="gradient_liveness", culprit=culprit, expected=expected, observed="none: it trains nothing",
            cure="compute it from view.logprobs without detach() or no_grad", samples=view.sample_ids[:2].tolist(),
        )
        for culprit, expected in found
    ]  # fmt: skip


def _alive(per_token: Tensor, leaf: Tensor) -> bool:
    if not per_token.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf, allow_unused=True)
    return gradient is not None and bool((gradient != 0).any())


@check("loss_direction")
def loss_direction(evidence: Evidence) -> list[Finding]:
    """Before anything has moved, a likelier token with a good advantage never makes the policy loss larger, nor one
    with a bad advantage smaller.
    """
    view = evidence.prepared(evidence.view(evidence.on_policy, drift=0.0).sanitize())
    if not len(view):
        return []
    per_token = torch.where(view.valid_tokens, evidence.subject.loss(view), 0.0)
    if not per_token.requires_grad:
        return []  # gradient_liveness says so
    (gradient,) = torch.autograd.grad(per_token.sum(), view.logprobs, allow_unused=True, materialize_grads=True)
    advantages = view.required("advantages")
    own = (view.valid_tokens * advantages).sum(-1, keepdim=True) * advantages > 0  # a loss may act on the whole row
    places = view.valid_tokens & own & (gradient.double() * advantages.double().sign() > 1e-6)
    if not places.any():
        return []
    return [
        Finding(
            check="loss_direction", culprit=f"loss {evidence.subject.loss_name}",
            expected="a gradient of the sign of minus the advantage at a ratio of 1",
            observed="the opposite sign: it unlearns what is good", positions=places.any(0).nonzero()[:4, 0].tolist(),
            samples=view.sample_ids[places.any(-1)][:4].tolist(), cure="minimise minus advantage times ratio",
        )
    ]  # fmt: skip


@check("terms_add_up")
def terms_add_up(evidence: Evidence) -> list[Finding]:
    """The loss that is differentiated is the policy loss plus each term times its coefficient: none is left out, none
    counts twice.
    """
    subject, rows = evidence.subject, evidence.rows
    if not len(rows):
        return []
    objective, step = subject.objective(), evidence.whole_step
    view = evidence.view(entropy_gradient=objective.entropy_gradient).sanitize()
    terms = subject.contributions.contributors("loss_term")
    coefs = {f"{callback.name}/loss": callback.loss_term(view).coef for callback in terms}
    coefs |= {"loss/policy": 1.0} | ({"loss/entropy": subject.entropy_coef} if subject.entropy_coef else {})
    coefs |= {"loss/value": subject.value_coef} if evidence.has_critic and rows.returns is not None else {}
    missing = sorted(coefs.keys() - step.parts.keys())
    total = sum(coef * float(step.parts[name]) for name, coef in coefs.items() if name in step.parts)
    gap = max(abs(total - step.total), abs(total - float(step.parts["loss/total"])))
    if not missing and gap <= 1e-5 * max(1.0, abs(total)):
        return []
    return [
        Finding(
            check="terms_add_up", culprit=f"objective, {missing[0] if missing else 'the sum of its terms'}",
            expected=f"the sum of {', '.join(sorted(coefs))}, each times its coefficient",
            samples=rows.sample_ids[:2].tolist(),
            observed=f"a sum without {missing[0]}" if missing else f"a sum that is {gap:.3g} away",
            cure="add every term once, times its own coefficient",
        )
    ]  # fmt: skip


@check("ratio_counts_once")
def ratio_counts_once(evidence: Evidence) -> list[Finding]:
    """Near a ratio of 1, loss times weights carries the current policy's probability at most once."""
    view, step = evidence.view(drift=0.0).sanitize(), 0.01
    if evidence.subject.loss.prepares or not len(view):
        return []
    moved = view.replace(logprobs=(view.logprobs.detach() + step).requires_grad_())
    valid = view.valid_tokens & (view.required("advantages") != 0)
    if not valid.any():
        return []
    found = []
    base = _exponent(evidence.subject.loss(view), evidence.subject.loss(moved), valid, step)
    for callback in evidence.subject.contributions.contributors("token_weight"):
        own = _exponent(callback.token_weight(view), callback.token_weight(moved), valid, step)
        if own > 0.5 and base > 0.5:
            found.append(
                Finding(
                    check="ratio_counts_once", culprit=f"callback {callback.name}.token_weight",
                    expected="a weight without the current policy, because the loss carries its ratio already",
                    observed=f"powers {base:.2f} in the loss and {own:.2f} in the weight",
                    cure="weigh with old/rollout (TruncatedIS), or use a loss without a ratio (reinforce)",
                    samples=view.sample_ids[:2].tolist(),
                )
            )  # fmt: skip
    return found


def _exponent(ours: Tensor, theirs: Tensor, valid: Tensor, step: float) -> float:
    """How fast something grows with the current log-probability: the power of the current probability in it."""
    safe = valid & (ours.abs() > 1e-12) & (theirs.abs() > 1e-12)
    if not safe.any():
        return 0.0
    growth = (theirs.detach()[safe].abs().double().log() - ours.detach()[safe].abs().double().log()) / step
    return float(growth.median())


@check("distances_pull_back")
def distances_pull_back(evidence: Evidence) -> list[Finding]:
    """What is 0 where all policies agree, a distance, draws the current policy back and not away: as a loss its slope
    rises with the log-probability, as a reward it punishes tokens that got likelier.
    """
    found, apart = [], 0.5
    for callback, method in evidence.subject.contributors("loss_term", "token_reward"):
        if callback.trains_entropy:
            continue
        force = _slope if method == "loss_term" else _reward
        at_rest, likelier, less_likely = (force(evidence, callback, drift) for drift in (0.0, apart, -apart))
        if at_rest is None or likelier is None or less_likely is None:
            continue
        wrong = likelier - less_likely < -1e-6 if method == "loss_term" else likelier > 1e-6
        if wrong:
            found.append(f"callback {callback.name}.{method}")
    return [
        Finding(
            check="distances_pull_back", culprit=culprit, expected="a force towards the policy it compares with",
            observed="one away from it", samples=evidence.rows.sample_ids[:2].tolist(),
            cure="add a positive coefficient times the distance to the loss, or subtract it from the reward",
        )
        for culprit in found
    ]  # fmt: skip


def _agreeing(evidence: Evidence) -> Rollout:
    """:attr:`Evidence.rows` as if every policy said the same of them."""
    now, rows = evidence.logprobs.detach(), evidence.on_policy
    known = {name: now for name in ("ref_logprobs",) if rows.ref_logprobs is not None}
    same = {
        name: now if one.shape == now.shape and one.is_floating_point() else one
        for name, one in rows.token_extras.items()
    }
    return rows.replace(**known, token_extras=same)


def _slope(evidence: Evidence, callback: RLCallback, drift: float) -> float | None:
    """The mean slope of a loss term once all log-probabilities rose; None if it is no distance."""
    view = evidence.view(_agreeing(evidence), drift=0.0).sanitize()
    leaf = (view.logprobs.detach() + drift).requires_grad_()
    term = callback.loss_term(view.replace(logprobs=torch.where(view.valid_tokens, leaf, 0.0)))
    per_token = torch.where(view.valid_tokens, term.per_token, 0.0)
    if not per_token.requires_grad or (drift == 0.0 and float(per_token.detach().abs().sum()) > 1e-6):
        return None
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf, allow_unused=True, materialize_grads=True)
    return float(gradient.sum()) * (1.0 if term.coef >= 0 else -1.0)


def _reward(evidence: Evidence, callback: RLCallback, drift: float) -> float | None:
    """The sum of token rewards where the policy before the update was likelier; None if it is no distance."""
    rows = _agreeing(evidence).sanitize()
    if rows.old_logprobs is None:
        return None
    old = torch.where(rows.valid_tokens, rows.old_logprobs + drift, 0.0)
    given = float(torch.where(rows.valid_tokens, callback.token_reward(rows.replace(old_logprobs=old)), 0.0).sum())
    return None if drift == 0.0 and abs(given) > 1e-6 else given
