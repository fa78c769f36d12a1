"""Checks of the gradients of a loss: present, in the right direction, with every term and every ratio once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.corrections import TOKEN_REWARDS, LossView, outputs_from
from lightning_rl.corrections.recorded import ReplayCorrections
from lightning_rl.rollout import TOP_LOGPROBS, FinishReason, Rollout
from lightning_rl.signal.masked import local_sum
from lightning_rl.testing.properties.case import AlgorithmCase, CorrectionMethod, callback_of_one_method, holds_logprobs
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import NO_ROWS, Skip, gradient_of, reads_parameters
from lightning_rl.testing.properties.formula_checks import uniform_view
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.trainer import is_own

LIBRARY = "lightning_rl.callbacks"
DRIFTS = (0.01, 0.1, 0.5, 2.0)  # nats; a distance may be flat where policies agree, or far away
KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda now, other: now - other,
    "abs": lambda now, other: (now - other).abs(),
    "k2": lambda now, other: (now - other).square() / 2,
    "k3": lambda now, other: torch.expm1(other - now) + now - other,
    "binary_kl": lambda now, other: (
        now.exp() * (now - other) + (1 - now.exp()) * ((1 - now.exp()) / (1 - other.exp())).log()
    ),
}
"""Estimators of a KL per token, in float64. Source: the table of :mod:`lightning_rl.signal.kl`."""
DEAD, MANY = 0.1, 4  # maximum share of other tokens without a gradient; tokens of a kind for it to apply


@check(observed="none, so it trains nothing", cure="compute it from view.logprobs without detach() or no_grad")
def gradient_liveness(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """Every loss term has a gradient at every trained token, also the last, and the value loss reaches the critic.

    The logged term is the differentiated one. A term that declares ``chooses_rows`` needs a gradient only in its rows.
    """
    if not len(case.rows):
        yield Skip(NO_ROWS)
        return
    for term in case.contributions("loss_term"):
        view = case.view(entropy_gradient=term.callback.trains_entropy).sanitize()
        if reads_parameters(raw := term(view).per_token):
            yield Skip(f"{term} reads parameters of a model itself")
            continue
        per_token = torch.where(view.valid_tokens, raw, 0.0)
        further = [output for spec, output in view.outputs() if spec.inputs]
        leaves = [view.entropy] if term.callback.trains_entropy else [view.logprobs, *further]
        gradient = torch.stack([gradient_of(per_token, leaf).abs() for leaf in leaves]).sum(0)
        trained = view.valid_tokens
        if term.callback.chooses_rows:
            trained = trained & (gradient != 0).any(-1, keepdim=True)
        for finding in _dead_places(gradient, view, trained, str(term), "a term with a gradient"):
            of_entropy = _follows_entropy(case, term)
            yield replace(finding, cure="set trains_entropy = True in its class" if of_entropy else "")
    yield from _dead_value_loss(case)
    loss, view = case.algorithm.loss, case.view(drift=0.0).sanitize()  # without clipping
    trained = view.valid_tokens & (view.require("advantages") != 0)
    if loss.prepares or not trained.any():
        yield Skip("the loss selects its tokens" if loss.prepares else "no checked row has an advantage")
        return
    gradient = torch.where(trained, gradient_of(loss(view), view.logprobs), 0.0)
    yield from _dead_places(gradient, view, trained, f"loss {case.names['loss']}", "a loss with a gradient")


def _follows_entropy(case: AlgorithmCase, loss_term: CorrectionMethod) -> bool:
    """Return True if a term that does not declare ``trains_entropy`` would have a gradient with it."""
    if loss_term.callback.trains_entropy:
        return False
    view = case.view(entropy_gradient=True).sanitize()
    return bool(gradient_of(torch.where(view.valid_tokens, loss_term(view).per_token, 0.0), view.entropy).any())


def _dead_places(gradient: Tensor, view: LossView, trained: Tensor, culprit: str, expected: str) -> Iterator[Finding]:
    """Yield a finding if a gradient is 0 everywhere, or at all tokens of a kind: first, last or end of a response."""
    dead = trained & (gradient == 0)
    if not dead.any():
        return
    if bool((dead == trained).all()):
        yield Finding(culprit=culprit, expected=expected)
        return
    first = trained & (trained.cumsum(-1) == 1)
    if bool((dead == trained & ~first).all()) and int(dead.sum()) >= MANY:
        yield Finding(culprit=culprit, expected=f"{expected} at every trained token", observed="one at the first alone")
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


def _dead_value_loss(case: AlgorithmCase) -> Iterator[Finding]:
    """Yield a finding if the value loss has no gradient although the critic misses its target."""
    view = case.view().sanitize()
    if view.current_values is None or view.values is None or view.returns is None:
        return
    leaf = view.current_values.detach().requires_grad_()
    wrong = view.valid_tokens & ((leaf.detach() - view.returns).abs() > 1e-3)
    gradient = gradient_of(case.algorithm.value_loss(leaf, view.values, view.returns), leaf)
    yield from _dead_places(gradient, view, wrong, "the value loss", "a value loss with a gradient")


@check(
    culprit="loss {loss}",
    expected="a gradient of the sign of minus the advantage at a ratio of 1",
    observed="the opposite sign, so it unlearns good responses",
    cure="minimize minus advantage times ratio",
)
def loss_direction(case: AlgorithmCase) -> Iterator[Finding]:
    """At a ratio of 1 the advantages of the policy loss push no token against their sign.

    A penalty within the loss, whose gradient is there without advantages too, may push in any direction.

    A loss term that follows the advantages, or the choice of a PositiveNLL, lowers no log-probabilities of good rows. A
    user's term does not lower those of every token of all rows where all policies agree.
    """
    view = case.prepare(case.view(case.on_policy, drift=0.0).sanitize())
    if not view.valid_tokens.any():
        return
    for term in case.contributions("loss_term"):
        if _unlearns(case, term):
            expected, observed = "a gradient that raises log-probabilities of good responses", "one that lowers them"
            cure = "subtract log-probabilities of good responses from the loss"
            yield Finding(culprit=str(term), expected=expected, observed=observed, cure=cure)
    valid, advantages = view.valid_tokens, view.require("advantages")
    without = case.prepare(view.replace(advantages=torch.zeros_like(advantages)))
    with_advantages, of_penalties = (
        gradient_of(torch.where(valid, case.algorithm.loss(one), 0.0), view.logprobs).double()
        for one in (view, without)
    )
    gradient = with_advantages - of_penalties.nan_to_num(0.0, 0.0, 0.0)
    agrees = (valid * advantages).sum(-1, keepdim=True) * advantages > 0  # a loss may use the whole row
    places = valid & agrees & (gradient * advantages.double().sign() > 1e-6)
    if places.any():
        yield Finding(
            samples=view.sample_ids[places.any(-1)][:4].tolist(), positions=places.any(0).nonzero()[:4, 0].tolist()
        )


@check(cure="add every term once, times its own coefficient")
def terms_add_up(case: AlgorithmCase) -> Iterator[Finding]:
    """The differentiated loss is the policy loss plus each term times its coefficient, once.

    The policy loss has every mask and weight once.
    """
    algorithm, rows = case.algorithm, case.rows
    if not len(rows):
        return
    step, view = case.whole_step, case.view(entropy_gradient=algorithm.trains_entropy).sanitize()
    coefs = {"loss/policy": 1.0}
    coefs |= {f"{term.callback.name}/loss": term(view).coef for term in case.contributions("loss_term")}
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
    loss, valid = (
        torch.where(view.valid_tokens, algorithm.loss(case.prepare(view)), 0.0).detach(),
        view.valid_tokens,
    )
    factor = torch.ones_like(loss)
    for one in case.contributions("sequence_mask", "token_mask", "token_weight"):
        part = one(view).to(loss.dtype)
        factor = factor * torch.where(valid, part[:, None] if part.dim() == 1 else part, 0.0)
    weights = algorithm.reduction(valid, view.trained, view.groups, local_sum)
    tokens = torch.where(factor != 0, loss, 0.0) * factor * weights
    ours, theirs = float(step.parts["loss/policy"]), float(tokens.sum())
    if abs(ours - theirs) > 1e-4 * max(float(tokens.abs().sum()), abs(ours)) + 1e-7:
        yield Finding(
            culprit="stage update, the masks and weights of the policy loss",
            expected=f"loss/policy = {theirs:.4g} with each mask and weight once",
            observed=f"{ours:.4g}",
            cure="multiply the loss of every token once by each mask and weight",
        )


@check(
    expected="a force towards the policy that it compares with",
    observed="one away from it",
    cure="add a positive coefficient times the distance to the loss, or subtract it from the reward",
)
def distances_pull_back(case: AlgorithmCase) -> Iterator[Finding]:
    """A distance, which is 0 if all policies agree, pulls the current policy back.

    As a loss its slope rises with the log-probability; as a reward it penalizes tokens that got likelier. A term of the
    entropy does not lower an entropy that is almost 0.
    """
    for contribution in case.contributions("loss_term", *TOKEN_REWARDS):
        is_term = contribution.method == "loss_term"
        if contribution.callback.trains_entropy:
            if is_term and _slope_of(case, contribution, "entropy", 0.01) > 0:
                expected, observed = "a slope that raises the entropy where it is almost 0", "one that lowers it"
                cure = "subtract a positive coefficient times the entropy from the loss"
                yield Finding(culprit=str(contribution), expected=expected, observed=observed, cure=cure)
            continue
        if is_term and any(_slope_of(case, contribution, name, 0.1) < 0 for name in outputs_from(TOP_LOGPROBS)):
            yield Finding(culprit=str(contribution))
            continue
        force = _slope if is_term else _reward
        flat = force(case, contribution, 0.0)
        if flat is None:
            continue
        if is_term and abs(flat) > 1e-4 and _is_distance(case, contribution):
            expected, observed = "no slope where all policies agree and the term is smallest", f"a slope of {flat:.3g}"
            cure = "compute every part of the term with its gradient, without detach()"
            yield Finding(culprit=str(contribution), expected=expected, observed=observed, cure=cure)
            continue
        for drift in DRIFTS:
            likelier, less_likely = force(case, contribution, drift), force(case, contribution, -drift)
            if likelier is None or less_likely is None:
                continue
            if likelier - less_likely < -1e-6 if is_term else likelier > 1e-6:
                observed = f"one away from it at a distance of {drift:g} nats"
                yield Finding(culprit=str(contribution), observed=observed)
                break


def _slope_of(case: AlgorithmCase, loss_term: CorrectionMethod, field: str, size: float) -> float:
    """Return the slope of a loss term by a field of the view that is small; 0 if it does not depend on it."""
    view = uniform_view(case)
    if getattr(view, field) is None:
        return 0.0
    leaf = torch.where(view.valid_tokens, size, 0.0).to(view.logprobs.dtype).requires_grad_()
    term = loss_term(view.replace(**{field: leaf}))
    return float(gradient_of(torch.where(view.valid_tokens, term.per_token, 0.0), leaf).sum()) * term.coef


def _unlearns(case: AlgorithmCase, loss_term: CorrectionMethod) -> bool:
    """Return True if a term lowers log-probabilities: of good responses most, or of every token of all responses."""
    nll = any(kind.__module__ == f"{LIBRARY}.positive_nll" for kind in type(loss_term.callback).__mro__)
    everywhere = True

    def slope(sign: float) -> float:
        nonlocal everywhere
        view = uniform_view(case, advantage=sign)
        if nll:
            weights = {name.removeprefix("extras/"): max(sign, 0.0) for name in loss_term.callback.provides}
            chosen = {name: view.logprobs.new_full((len(view),), weight) for name, weight in weights.items()}
            view = view.replace(extras={**view.extras, **chosen})
        term = loss_term(view)
        if term.follows_policy_loss:
            return 0.0
        gradient = term.coef * gradient_of(torch.where(view.valid_tokens, term.per_token, 0.0), view.logprobs)
        everywhere = everywhere and bool((gradient > 1e-6)[view.valid_tokens].all())
        return float(gradient.sum())

    good, bad = slope(1.0), slope(-1.0)
    return good > 1e-6 and (good > 1.01 * bad or (everywhere and not is_own(loss_term.callback)))


@check(cure="compute the term at every valid token, from log-probabilities alone; masks are for the policy loss")
def terms_keep_tokens(case: AlgorithmCase) -> Iterator[Finding]:
    """Loss terms train all valid tokens: also those without an advantage, and those that are clipped or masked.

    A term may choose rows if it declares ``chooses_rows``, and takes masks if it sets ``masked``.
    """
    if not case.rows.valid_tokens.any():
        return
    plain = uniform_view(case)
    apart = plain.replace(
        **{
            name: getattr(plain, name) - 0.3 * plain.valid_tokens
            for name in ("rollout_logprobs", "ref_logprobs")
            if getattr(plain, name) is not None
        }
    )
    old = plain.require("old_logprobs")
    others = {
        "without an advantage": apart.replace(advantages=0 * old),
        "clipped at a ratio of 1.65": apart.replace(old_logprobs=old - 0.5 * plain.valid_tokens),
        "clipped at a ratio of 0.61": apart.replace(
            old_logprobs=old + 0.5 * plain.valid_tokens, advantages=-apart.require("advantages")
        ),
    }
    for term in case.contributions("loss_term"):
        alive = _trained_tokens(term, apart)
        for where, view in others.items() if not term.callback.chooses_rows else ():
            if alive.any() and not (_trained_tokens(term, view) & alive).any():
                yield Finding(culprit=str(term), expected="a term with a gradient", observed=f"none at tokens {where}")
                break
    mask = callback_of_one_method("token_mask", lambda view: torch.zeros_like(view.valid_tokens))
    masked = case.table_step(corrections=ReplayCorrections([*case.algorithm.corrections.callbacks, mask]))
    for term in case.contributions("loss_term"):
        name, result = f"{term.callback.name}/loss", term(case.view().sanitize())
        ours, whole = masked.parts.get(name), case.whole_step.parts.get(name)
        takes_masks = result.masked or result.follows_policy_loss
        of_library = any(kind.__module__.startswith(LIBRARY) for kind in type(term.callback).__mro__[:-1])
        if result.masked and of_library:
            expected, observed = "a term over all valid tokens, as its class documents", "one that takes masks"
            yield Finding(culprit=str(term), expected=expected, observed=observed)
        elif not takes_masks and ours is not None and whole is not None and not torch.isclose(ours, whole, rtol=1e-4):
            expected, observed = f"{name} = {float(whole):.4g} if a mask rejects every token", f"{float(ours):.4g}"
            yield Finding(culprit="stage update, the masks of loss terms", expected=expected, observed=observed)


def _trained_tokens(loss_term: CorrectionMethod, view: LossView) -> Tensor:
    """Return the tokens at which a term has a gradient, [b, T] bool."""
    view = view.replace(
        entropy=torch.where(view.valid_tokens, view.entropy.detach(), 0.0).requires_grad_(),
        **view.further_leaves(),
    )
    per_token = torch.where(view.valid_tokens, loss_term(view).per_token, 0.0)
    leaves = [view.logprobs, view.entropy, *(output for spec, output in view.outputs() if spec.inputs)]
    return torch.stack([gradient_of(per_token, leaf).abs() for leaf in leaves]).sum(0) != 0


@check(cure="log the values that the term trains, or name the estimator in the metric, such as kl_k2")
def term_figures(case: AlgorithmCase) -> Iterator[Finding | Skip]:
    """A correction that logs an estimate of a KL logs that of its loss term or reward, unless the name says which.

    Estimates count up to a constant factor, such as a coefficient.
    """
    if not case.rows.valid_tokens.any():
        return
    for on_policy in (True, False):  # terms may have the ratio to the old policy as a factor, or compare with it
        views = _views_of_rows(case, on_policy=on_policy)
        estimates = _estimates(views)
        for one in case.contributions("loss_term", *TOKEN_REWARDS):
            if "metrics" not in one.callback.contributes:
                continue
            trained = [_mean(view, one.tensors(view)[one.method]) for view in views]
            own = {pair for pair, estimate in estimates if _are_proportional(trained, estimate)}
            logged = [one.callback.metrics(view) for view in views] if own else [{}]
            for name in logged[0]:
                figures = [stats[name].value() for stats in logged]
                pairs = [pair for pair, estimate in estimates if _are_proportional(figures, estimate)]
                if pairs and own.isdisjoint(pairs) and not any(_says_which(name, pair, own) for pair in pairs):
                    yield Finding(
                        culprit=f"callback {one.callback.name}.metrics",
                        expected=f"{name} = {' or '.join(map(_in_words, sorted(own)))}, which {one.method} trains",
                        observed=_in_words(pairs[0]),
                    )
                    return


def _says_which(name: str, pair: tuple[str, str], own: set[tuple[str, str]]) -> bool:
    """Return True if the name of a metric says where its estimator or policy is not that of the term."""
    kind, policy = pair
    return kind in name or (kind in {each for each, _ in own} and policy in name.rpartition("/")[2].split("_"))


def _in_words(pair: tuple[str, str]) -> str:
    kind, policy = pair
    return f"{kind} to {policy}"


def _views_of_rows(case: AlgorithmCase, *, on_policy: bool) -> list[LossView]:
    """Return views of single rows in which policies differ, except for the old one if ``on_policy``."""
    views = list[LossView]()
    for spread in (0.5, 1.0, 2.0):
        view = uniform_view(case, spread=spread)
        now = view.logprobs.detach()
        view = view.replace(logprobs=now, old_logprobs=now if on_policy else view.old_logprobs)
        views += [view.select(row[None]) for row in view.valid_tokens.any(-1).nonzero()[:, 0]]
    return views


def _estimates(views: list[LossView]) -> list[tuple[tuple[str, str], list[float]]]:
    """Return the mean of each estimator of :data:`KL` in each row, for every policy that a row holds."""

    def policies(view: LossView) -> dict[str, Tensor]:
        known = {"rollout": view.rollout_logprobs, "ref": view.ref_logprobs, "old": view.old_logprobs}
        extras = {name: one for name, one in view.token_extras.items() if holds_logprobs(one, view)}
        return {name: one for name, one in (known | extras).items() if one is not None}

    return [
        ((kind, policy), [_mean(view, kl(view.logprobs, policies(view)[policy])) for view in views])
        for policy in policies(views[0])
        for kind, kl in KL.items()
    ]


def _mean(view: LossView, per_token: Tensor) -> float:
    return float(per_token.detach()[view.valid_tokens].double().mean())


def _are_proportional(ours: list[float], theirs: list[float]) -> bool:
    one, other = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    if len(one) != len(other) or not one.any() or not other.any():
        return False
    factor = (one * other).sum() / other.square().sum()
    return bool(factor != 0) and bool(((one - factor * other).abs() <= 1e-5 * one.abs().max()).all())


def _agreement(case: AlgorithmCase) -> Rollout:
    """Return :attr:`AlgorithmCase.rows` with the same log-probabilities for every policy, so low that they may rise."""
    now, rows = case.logprobs.detach() - max(DRIFTS), case.on_policy
    same = {name: now if holds_logprobs(tensor, rows) else tensor for name, tensor in rows.token_extras.items()}
    fields = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    known = {name: now for name in fields if getattr(rows, name) is not None}
    return rows.replace(token_extras=same, **known)


def _is_distance(case: AlgorithmCase, loss_term: CorrectionMethod) -> bool:
    """Return True if a term is positive at every token on both sides of the agreement of all policies."""
    view = case.view(_agreement(case), drift=0.0).sanitize()
    now, valid = case.logprobs.detach() - max(DRIFTS), view.valid_tokens
    moved = [view.replace(logprobs=torch.where(valid, now + drift, 0.0)) for drift in (-0.5, 0.5)]
    return all(bool((loss_term(one).per_token.detach()[valid] > 0).all()) for one in moved)


def _slope(case: AlgorithmCase, loss_term: CorrectionMethod, drift: float) -> float | None:
    """Return the mean slope of a loss term after all log-probabilities rose; None if it is no distance."""
    view = case.view(_agreement(case), drift=0.0).sanitize()
    leaf = (case.logprobs.detach() - max(DRIFTS) + drift).requires_grad_()
    term = loss_term(view.replace(logprobs=torch.where(view.valid_tokens, leaf, 0.0)))
    per_token = torch.where(view.valid_tokens, term.per_token, 0.0)
    if not per_token.requires_grad or (drift == 0.0 and float(per_token.detach().abs().sum()) > 1e-6):
        return None
    return float(gradient_of(per_token, leaf).sum()) * (1.0 if term.coef >= 0 else -1.0)


def _reward(case: AlgorithmCase, token_reward: CorrectionMethod, drift: float) -> float | None:
    """Return the sum of token rewards if the old policy was likelier; None if it is no distance."""
    rows = _agreement(case).sanitize()
    if rows.old_logprobs is None:
        return None
    old = torch.where(rows.valid_tokens, rows.old_logprobs + drift, 0.0)
    total = float(torch.where(rows.valid_tokens, token_reward(rows.replace(old_logprobs=old)), 0.0).sum())
    return None if drift == 0.0 and abs(total) > 1e-6 else total
