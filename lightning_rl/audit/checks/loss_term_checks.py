"""Checks of the gradients of a loss: present, in the right direction, with every term and every ratio once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_rl.audit.audit_error import NO_ROWS, Skip, gradient_of
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Contribution, Evidence
from lightning_rl.corrections import TOKEN_REWARDS, LossView
from lightning_rl.rollout import FinishReason, Rollout
from lightning_rl.utils.finding import Finding

DEAD, MANY = 0.1, 4  # maximum share of other tokens without a gradient; tokens of a kind for it to apply


@check(observed="none, so it trains nothing", cure="compute it from view.logprobs without detach() or no_grad")
def gradient_liveness(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Every loss term has a gradient at every trained token, also the last, and the value loss reaches the critic.

    The logged term is the differentiated one. A term that declares ``chooses_rows`` needs a gradient only in its rows.
    """
    if not len(evidence.rows):
        yield Skip(NO_ROWS)
        return
    for term in evidence.contributions("loss_term"):
        view = evidence.view(entropy_gradient=term.callback.trains_entropy).sanitize()
        per_token, leaves = torch.where(view.valid_tokens, term(view).per_token, 0.0), [view.logprobs, view.rollout_kl]
        leaves = [view.entropy] if term.callback.trains_entropy else [leaf for leaf in leaves if leaf is not None]
        gradient = torch.stack([gradient_of(per_token, leaf).abs() for leaf in leaves]).sum(0)
        trained = view.valid_tokens
        if term.callback.chooses_rows:
            trained = trained & (gradient != 0).any(-1, keepdim=True)
        yield from _dead_places(gradient, view, trained, str(term), "a term with a gradient")
    yield from _dead_value_loss(evidence)
    loss, view = evidence.algorithm.loss, evidence.view(drift=0.0).sanitize()  # without clipping
    trained = view.valid_tokens & (view.require("advantages") != 0)
    if loss.prepares or not trained.any():
        yield Skip("the loss selects its tokens" if loss.prepares else "no checked row has an advantage")
        return
    gradient = torch.where(trained, gradient_of(loss(view), view.logprobs), 0.0)
    yield from _dead_places(gradient, view, trained, f"loss {evidence.names['loss']}", "a loss with a gradient")


def _dead_places(gradient: Tensor, view: LossView, trained: Tensor, culprit: str, expected: str) -> Iterator[Finding]:
    """Yield a finding if a gradient is 0 everywhere, or at all tokens of a kind: first, last or end of a response."""
    dead = trained & (gradient == 0)
    if not dead.any():
        return
    if bool((dead == trained).all()):
        yield Finding(culprit=culprit, expected=expected)
        return
    for kind, tokens in _kinds(trained, view).items():
        others, number = trained & ~tokens, int(tokens.sum())
        few = DEAD if number >= MANY else 0.0
        if number > 1 and others.any() and bool(dead[tokens].all()) and float(dead[others].double().mean()) <= few:
            yield Finding(
                culprit=culprit,
                expected=f"{expected} at every trained token",
                observed=f"none at {kind}",
                samples=view.sample_ids[tokens.any(-1)][:4].tolist(),
                positions=tokens.any(0).nonzero()[:4, 0].tolist(),
            )
            return


def _kinds(trained: Tensor, view: LossView) -> dict[str, Tensor]:
    """Return groups of tokens that tend to be left out together, [b, T] each."""
    order = trained.cumsum(-1)
    first, last = trained & (order == 1), trained & (order == order[:, -1:])
    stopped = (view.finish == FinishReason.STOP)[:, None]
    return {"the end of responses that stopped": last & stopped, "the last token": last, "the first token": first}


def _dead_value_loss(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the value loss has no gradient although the critic misses its target."""
    view = evidence.view().sanitize()
    if view.current_values is None or view.values is None or view.returns is None:
        return
    leaf = view.current_values.detach().requires_grad_()
    wrong = view.valid_tokens & ((leaf.detach() - view.returns).abs() > 1e-3)
    gradient = gradient_of(evidence.algorithm.value_loss(leaf, view.values, view.returns), leaf)
    yield from _dead_places(gradient, view, wrong, "the value loss", "a value loss with a gradient")


@check(
    culprit="loss {loss}",
    expected="a gradient of the sign of minus the advantage at a ratio of 1",
    observed="the opposite sign, so it unlearns good responses",
    cure="minimize minus advantage times ratio",
)
def loss_direction(evidence: Evidence) -> Iterator[Finding]:
    """At a ratio of 1 the policy loss pushes no token against the sign of its advantage."""
    view = evidence.prepare(evidence.view(evidence.on_policy, drift=0.0).sanitize())
    if not len(view):
        return
    valid, advantages = view.valid_tokens, view.require("advantages")
    per_token = torch.where(valid, evidence.algorithm.loss(view), 0.0)
    gradient = gradient_of(per_token, view.logprobs).double()
    agrees = (valid * advantages).sum(-1, keepdim=True) * advantages > 0  # a loss may use the whole row
    places = valid & agrees & (gradient * advantages.double().sign() > 1e-6)
    if places.any():
        yield Finding(
            samples=view.sample_ids[places.any(-1)][:4].tolist(), positions=places.any(0).nonzero()[:4, 0].tolist()
        )


@check(cure="add every term once, times its own coefficient")
def terms_add_up(evidence: Evidence) -> Iterator[Finding]:
    """The differentiated loss is the policy loss plus each term times its coefficient, once."""
    algorithm, rows = evidence.algorithm, evidence.rows
    if not len(rows):
        return
    step, view = evidence.whole_step, evidence.view(entropy_gradient=algorithm.trains_entropy).sanitize()
    coefs = {"loss/policy": 1.0}
    coefs |= {f"{term.callback.name}/loss": term(view).coef for term in evidence.contributions("loss_term")}
    if rows.values is not None and rows.returns is not None:
        coefs["loss/value"] = algorithm.value_loss.coef
    missing = sorted(coefs.keys() - step.parts.keys())
    total = sum(coef * float(step.parts[name]) for name, coef in coefs.items() if name in step.parts)
    gap = max(abs(total - step.total), abs(total - float(step.parts["loss/total"])))
    if missing or gap > 1e-5 * max(1.0, abs(total)):
        yield Finding(
            culprit=f"objective, {missing[0] if missing else 'the sum of its terms'}",
            expected=f"the sum of {', '.join(sorted(coefs))}, each times its coefficient",
            observed=f"a sum without {missing[0]}" if missing else f"a sum that is {gap:.3g} away",
        )


@check(
    expected="a force towards the policy that it compares with",
    observed="one away from it",
    cure="add a positive coefficient times the distance to the loss, or subtract it from the reward",
)
def distances_pull_back(evidence: Evidence) -> Iterator[Finding]:
    """A distance, which is 0 if all policies agree, pulls the current policy back.

    As a loss its slope rises with the log-probability; as a reward it penalizes tokens that got likelier.
    """
    for contribution in evidence.contributions("loss_term", *TOKEN_REWARDS):
        if contribution.callback.trains_entropy:
            continue
        force = _slope if contribution.method == "loss_term" else _reward
        at_rest, likelier, less_likely = (force(evidence, contribution, drift) for drift in (0.0, 0.5, -0.5))
        if at_rest is None or likelier is None or less_likely is None:
            continue
        if likelier - less_likely < -1e-6 if force is _slope else likelier > 1e-6:
            yield Finding(culprit=str(contribution))


def _agreement(evidence: Evidence) -> Rollout:
    """Return :attr:`Evidence.rows` with the same log-probabilities for every policy."""
    now, rows = evidence.logprobs.detach(), evidence.on_policy
    same = {
        name: now if tensor.shape == now.shape and tensor.is_floating_point() else tensor
        for name, tensor in rows.token_extras.items()
    }
    return rows.replace(ref_logprobs=None if rows.ref_logprobs is None else now, token_extras=same)


def _slope(evidence: Evidence, loss_term: Contribution, drift: float) -> float | None:
    """Return the mean slope of a loss term after all log-probabilities rose; None if it is no distance."""
    view = evidence.view(_agreement(evidence), drift=0.0).sanitize()
    leaf = (view.logprobs.detach() + drift).requires_grad_()
    term = loss_term(view.replace(logprobs=torch.where(view.valid_tokens, leaf, 0.0)))
    per_token = torch.where(view.valid_tokens, term.per_token, 0.0)
    if not per_token.requires_grad or (drift == 0.0 and float(per_token.detach().abs().sum()) > 1e-6):
        return None
    return float(gradient_of(per_token, leaf).sum()) * (1.0 if term.coef >= 0 else -1.0)


def _reward(evidence: Evidence, token_reward: Contribution, drift: float) -> float | None:
    """Return the sum of token rewards if the old policy was likelier; None if it is no distance."""
    rows = _agreement(evidence).sanitize()
    if rows.old_logprobs is None:
        return None
    old = torch.where(rows.valid_tokens, rows.old_logprobs + drift, 0.0)
    total = float(torch.where(rows.valid_tokens, token_reward(rows.replace(old_logprobs=old)), 0.0).sum())
    return None if drift == 0.0 and abs(total) > 1e-6 else total
