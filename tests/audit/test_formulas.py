"""Formulas of losses, terms and weights, at ratios and advantages that a rollout may not contain."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor
from typing_extensions import override

import lightning_rl.evaluation.tally
from lightning_rl import LossTerm, LossView, RLCallback, Stat
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.callbacks import EntropyBonus, IcePop, OffPolicyIS, PositiveNLL, ReferenceKL, RolloutKL, TruncatedIS
from lightning_rl.evaluation.estimators import pass_at_k
from lightning_rl.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    LOSSES,
    ClippedSurrogate,
    PolicyLoss,
    ValueLoss,
    resolve_loss,
)
from lightning_rl.signal.kl import KL_ESTIMATORS, Clamped, k2, k3
from lightning_rl.signal.reductions import prompt_mean, token_mean

FORMULAS = ("loss_formula", "loss_needs_advantages", "single_precision", "declared_ratio", "denominators")
VARIANTS: list[PolicyLoss] = [
    *LOSSES.values(),
    ClippedSurrogate(clip_low=0.1, clip_high=0.3, dual_clip=2.0),
    GSPO(anchor="rollout"),
    GSPO(per_token=True),
    CISPO(clip_low=0.2, clip_high=0.2),
    DPPO(divergence="kl", low=0.01, high=0.02),
    DPPO(cap=1.2),
    GMPO(clip_low=0.05, clip_high=0.5),
    DRO(beta=5.0),
]


def evidence(loss: Any = None, *callbacks: RLCallback, value_loss: ValueLoss | None = None) -> Evidence:
    """Return evidence of rows with every policy, with the given loss or value loss."""
    plain = evidence_of(*callbacks)
    nothing = torch.zeros_like(plain.rows.require("old_logprobs"))
    rows = plain.rows.replace(
        rollout_logprobs=nothing - 1.0, ref_logprobs=nothing - 1.2, values=nothing, returns=nothing
    )
    algorithm = plain.algorithm.replace(
        loss=resolve_loss(loss or ClippedSurrogate()), value_loss=value_loss or ValueLoss()
    )
    return replace(plain, algorithm=algorithm, rollout=rows, groups=rows, rows=rows)


@pytest.mark.parametrize("loss", VARIANTS, ids=repr)
def test_losses_of_the_library_follow_their_formulas(loss: PolicyLoss) -> None:
    assert [culprit for name in FORMULAS for culprit in culprits(name, evidence(loss, IcePop()))] == []


def ratio(view: LossView, other: str = "old_logprobs") -> Tensor:
    return (view.logprobs - view.require(other)).exp()


def advantages(view: LossView) -> Tensor:
    return view.require("advantages")


class Swapped(ClippedSurrogate):
    """Loss with its bounds swapped."""

    @override
    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        other = ClippedSurrogate(clip_low=self.clip_high, clip_high=self.clip_low)
        return other.surrogate(ratio, advantages)


class Scaled(ClippedSurrogate):
    """Half a loss."""

    @override
    def __call__(self, view: LossView) -> Tensor:
        return 0.5 * super().__call__(view)


class ToReference(ClippedSurrogate):
    """Ratio to the reference."""

    @override
    def importance(self, view: LossView) -> Tensor:
        return ratio(view, "ref_logprobs")


@pytest.mark.parametrize(
    ("check", "loss", "wrong"),
    [
        ("loss_formula", lambda view: -ratio(view).clamp(0.8, 1.2) * advantages(view), True),
        ("loss_formula", lambda view: -torch.where(ratio(view) < 0.8, 0.0, ratio(view)) * advantages(view), True),
        ("loss_formula", lambda view: -ratio(view) * advantages(view), False),
        ("loss_formula", lambda view: -ratio(view) * advantages(view).clamp(min=0), True),
        ("loss_formula", lambda view: -ratio(view) * advantages(view).clamp(max=0), True),
        ("loss_formula", Swapped(clip_low=0.2, clip_high=0.3), True),
        ("loss_formula", Scaled(), False),
        ("loss_needs_advantages", lambda view: -ratio(view) * (advantages(view) - 0.1 * view.logprobs), True),
        ("loss_needs_advantages", lambda view: k3(view.logprobs, view.require("ref_logprobs")), False),
        ("declared_ratio", ToReference(), True),
        ("declared_ratio", lambda view: -ratio(view, "ref_logprobs") * advantages(view), True),
        ("declared_ratio", lambda view: -ratio(view, "rollout_logprobs") * advantages(view), False),
        ("single_precision", lambda view: -ratio(view).bfloat16().double() * advantages(view), True),
        ("single_precision", lambda view: -ratio(view).float().double() * advantages(view), False),
        (
            "denominators",
            lambda view: (-ratio(view) * advantages(view)).mean(-1, keepdim=True) + 0 * view.logprobs,
            True,
        ),
    ],
)
def test_a_wrong_loss_is_named(check: str, loss: Any, wrong: bool) -> None:
    found = culprits(check, evidence(loss, IcePop()))
    assert bool(found) is wrong and all(culprit.startswith("loss ") for culprit in found), found


class Unclipped(ValueLoss):
    """Value loss without the clip."""

    @override
    def __call__(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return self._error(values, returns)


@pytest.mark.parametrize(
    ("value_loss", "wrong"),
    [(ValueLoss(), False), (ValueLoss(clip=None), False), (ValueLoss(huber=0.3), False), (Unclipped(), True)],
)
def test_the_value_loss_stops_beyond_its_clip(value_loss: ValueLoss, wrong: bool) -> None:
    assert bool(culprits("value_loss_formula", evidence(value_loss=value_loss))) is wrong


def term(
    name: str, per_token: Callable[[LossView], Tensor], logged: Callable[[LossView], Tensor] | None = None, **more: Any
) -> RLCallback:
    """Return a loss term of a user, with a metric."""
    methods: dict[str, Any] = {"loss_term": lambda view: LossTerm(per_token=per_token(view), coef=0.1, **more)}
    if logged is not None:
        methods["metrics"] = lambda view: {f"{name}/kl": Stat.of(logged(view), view.valid_tokens)}
    return callback_of(name, **methods)


def kl(view: LossView) -> Tensor:
    return k3(view.logprobs, view.require("ref_logprobs"))


def half(view: LossView) -> Tensor:
    """Return a weight rounded to bfloat16."""
    return ratio(view).detach().bfloat16().double()


class Masked(ReferenceKL):
    """KL that takes masks."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), masked=True)


def surrogate_without_clip(view: LossView) -> Tensor:
    return torch.where((ratio(view) - 1).abs() < 0.2, kl(view), 0.0)


@pytest.mark.parametrize(
    ("check", "callback", "wrong"),
    [
        ("terms_keep_tokens", ReferenceKL(as_loss=True), False),
        ("terms_keep_tokens", ReferenceKL(as_loss=True, unbiased=True), False),
        ("terms_keep_tokens", RolloutKL(), False),
        ("terms_keep_tokens", EntropyBonus(), False),
        ("terms_keep_tokens", Masked(as_loss=True), True),
        ("terms_keep_tokens", term("own", kl, masked=True), False),
        ("terms_keep_tokens", term("own", surrogate_without_clip), True),
        ("terms_keep_tokens", term("own", lambda view: kl(view) * (advantages(view) != 0)), True),
        ("term_figures", ReferenceKL(as_loss=True, estimator="k2"), False),
        ("term_figures", term("own", kl, kl), False),
        ("term_figures", term("own", kl, lambda view: k2(view.logprobs, view.require("ref_logprobs")).detach()), True),
        ("single_precision", TruncatedIS(), False),
        ("single_precision", TruncatedIS("sequence"), False),
        ("single_precision", OffPolicyIS(), False),
        (
            "single_precision",
            callback_of("half", token_weight=half),
            True,
        ),
    ],
)
def test_a_wrong_term_or_weight_is_named(check: str, callback: RLCallback, wrong: bool) -> None:
    found = culprits(check, evidence(None, callback))
    assert bool(found) is wrong and all(culprit.startswith(f"callback {callback.name}.") for culprit in found), found


def against(name: str, estimator: Callable[[Tensor, Tensor], Tensor], other: str = "ref_logprobs") -> RLCallback:
    """Return a term of the distance to another policy."""
    return term(name, lambda view: estimator(view.logprobs, view.require(other)))


def near(one: Tensor, other: Tensor) -> Tensor:
    """Return where two policies are less than 0.3 nats apart."""
    return (one - other).abs() < 0.3


@pytest.mark.parametrize(
    ("callback", "wrong"),
    [
        (against("own", lambda p, q: -k3(p, q)), True),
        (against("own", lambda p, q: torch.where(near(p, q), -k3(p, q), k3(p, q))), True),
        (against("own", lambda p, q: torch.where(near(p, q), -k2(p, q), k2(p, q)), "rollout_logprobs"), True),
        (against("own", lambda p, q: -k2(p, q).clamp(max=0.02)), True),
        (against("own", lambda p, q: -((p - q).abs() - 1).relu()), True),
        (against("own", lambda p, q: k2(p, q).clamp(max=0.02)), False),
        (against("own", lambda p, q: ((p - q).abs() - 1).relu()), False),
        (against("own", lambda p, q: torch.expm1(q - p).detach() + p - q), True),
        (against("own", lambda p, q: torch.cosh(p - q) - 1 + (p - q) - (p - q).detach()), True),
        (against("own", lambda p, q: torch.cosh(p - q) - 1), False),
        (against("own", lambda p, q: (p - q).abs()), False),
        (term("own", lambda view: -view.require("rollout_kl")), True),
        (term("own", lambda view: view.require("rollout_kl")), False),
        (callback_of("own", token_reward=lambda rows: k2(rows.old_logprobs, rows.ref_logprobs)), True),
        (
            callback_of(
                "own",
                token_reward=lambda rows: (
                    torch.where(near(rows.old_logprobs, rows.ref_logprobs), 1.0, -1.0)
                    * k2(rows.old_logprobs, rows.ref_logprobs)
                ),
            ),
            True,
        ),
        *[(ReferenceKL(0.1, estimator=name), False) for name in KL_ESTIMATORS],
        *[(ReferenceKL(0.1, estimator=name, as_loss=True), False) for name in ("k2", "k3")],
        *[(ReferenceKL(0.1, estimator=name, as_loss=True, unbiased=True), False) for name in ("k1", "k3")],
        (ReferenceKL(0.1, estimator=Clamped(k3), as_loss=True), False),
        (RolloutKL(0.1, estimator="k3"), False),
    ],
)
@pytest.mark.filterwarnings("ignore:.* as a loss:UserWarning")
def test_a_distance_whose_sign_is_turned_is_named_where_it_is_not_flat(callback: RLCallback, wrong: bool) -> None:
    found = culprits("distances_pull_back", evidence(None, callback))
    assert bool(found) is wrong and all(culprit.startswith("callback own.") for culprit in found)


def log_ratio(one: Tensor, other: Tensor) -> Tensor:
    return one - other


@pytest.mark.parametrize("other", ["ref_logprobs", "old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("factor", [1.0, 0.1])
@pytest.mark.parametrize("as_reward", [False, True])
def test_an_estimate_of_a_kl_other_than_the_trained_one_is_named(other: str, factor: float, as_reward: bool) -> None:
    def pair(view: Any, current: str) -> tuple[Tensor, Tensor]:
        return getattr(view, current), view.require(other)

    for trained, logged, name, wrong in (
        (k3, log_ratio, "kl", True),
        (log_ratio, k3, "kl", True),
        (k3, k2, "kl", True),
        (k3, log_ratio, "kl_k1", False),
        (k3, k3, "kl", False),
        (log_ratio, log_ratio, "kl", False),
        (k3, lambda p, q: (p > q).double(), "kl", False),
    ):
        now = "old_logprobs" if as_reward and other != "old_logprobs" else "logprobs"
        methods: dict[str, Any] = {
            "metrics": lambda view, logged=logged, name=name, now=now: {
                f"own/{name}": Stat.of(logged(*pair(view, now)).detach(), view.valid_tokens)
            }
        }
        if as_reward and other != "old_logprobs":
            methods["token_reward"] = lambda rows, trained=trained: -factor * trained(*pair(rows, "old_logprobs"))
        else:
            methods["loss_term"] = lambda view, trained=trained: LossTerm(
                per_token=factor * trained(*pair(view, "logprobs")), coef=0.1
            )
        found = culprits("term_figures", evidence(None, callback_of("own", **methods)))
        assert found == (["callback own.metrics"] if wrong else []), (trained, logged, name)


@pytest.mark.parametrize(
    ("trained", "logged", "name", "wrong"),
    [
        ("old_logprobs", "ref_logprobs", "kl", True),
        ("ref_logprobs", "rollout_logprobs", "kl", True),
        ("ref_logprobs", "rollout_logprobs", "kl_rollout", False),
        ("ref_logprobs", "ref_logprobs", "kl", False),
    ],
)
def test_an_estimate_of_a_kl_to_another_policy_is_named(trained: str, logged: str, name: str, wrong: bool) -> None:
    def of_policy(view: LossView, policy: str) -> Tensor:
        return k3(view.logprobs, view.require(policy))

    one = term("own", lambda view: of_policy(view, trained))
    measured = callback_of(
        "own",
        loss_term=one.loss_term,
        metrics=lambda view: {
            f"own/{name}": Stat.of(k3(view.logprobs, view.require(logged)).detach(), view.valid_tokens)
        },
    )
    assert culprits("term_figures", evidence(None, measured)) == (["callback own.metrics"] if wrong else [])


def test_a_term_that_lowers_an_entropy_of_almost_0_is_named() -> None:
    wrong = term("own", lambda view: view.entropy)
    wrong.trains_entropy = True
    assert culprits("distances_pull_back", evidence(None, wrong)) == ["callback own.loss_term"]
    assert culprits("distances_pull_back", evidence(None, EntropyBonus())) == []


def test_weights_that_make_up_for_masked_ones_are_named() -> None:
    def renormalize(view: LossView) -> Tensor:
        kept = (view.require("rollout_logprobs") > -1.5) & view.valid_tokens
        return kept.to(view.logprobs.dtype) * (view.valid_tokens.sum(-1) / kept.sum(-1).clamp(min=1))[:, None]

    wrong = callback_of("renormalize", token_weight=renormalize)
    assert culprits("denominators", evidence(None, wrong)) == ["callback renormalize.token_weight"]
    assert culprits("denominators", evidence(None, TruncatedIS())) == []


def test_importance_weights_that_collapse_as_a_whole_are_named() -> None:
    small = callback_of("small", token_weight=lambda view: 0.01 * torch.ones_like(view.logprobs).detach())
    assert culprits("weights_keep_samples", evidence(None, small)) == []  # not an importance weight
    small.ratio = ("old", "rollout")
    assert culprits("weights_keep_samples", evidence(None, small)) == ["callback small.token_weight"]


class Unlearns(PositiveNLL):
    """NLL with the wrong sign."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return dataclasses.replace(super().loss_term(view), per_token=-super().loss_term(view).per_token)


@pytest.mark.parametrize(
    ("callback", "wrong"),
    [
        (PositiveNLL(), False),
        (Unlearns(), True),
        (term("own", lambda view: -view.logprobs * (advantages(view) > 0)), False),
        (term("own", lambda view: view.logprobs * (advantages(view) > 0)), True),
        (term("own", lambda view: view.logprobs * (advantages(view) < 0)), False),
        (term("own", lambda view: view.logprobs), True),  # no bonus for entropy: its gradient is 0 in expectation
        (term("own", lambda view: view.logprobs.detach() * view.logprobs), False),
        (term("own", kl), False),
    ],
)
def test_a_term_that_lowers_good_responses_is_named(callback: RLCallback, wrong: bool) -> None:
    found = culprits("loss_direction", evidence(None, callback))
    assert found == ([f"callback {callback.name}.loss_term"] if wrong else [])


@pytest.mark.parametrize("place", ["first", "all"])
def test_a_term_of_the_first_token_alone_is_named(place: str) -> None:
    def first(view: LossView) -> Tensor:
        return -view.logprobs * (view.valid_tokens.cumsum(-1) == 1)

    callback = term("own", first if place == "first" else lambda view: -view.logprobs)
    found = culprits("gradient_liveness", evidence(None, callback))
    assert found == (["callback own.loss_term"] if place == "first" else [])


@pytest.mark.parametrize(
    ("estimate", "wrong"), [(None, []), (lambda n, c, k: 1 - (1 - c / n) ** k, ["pass@2 of evaluation exam"])]
)
def test_a_biased_estimate_of_pass_at_k_is_named(estimate: Any, wrong: list[str]) -> None:
    facts = RunFacts(evaluations=(("exam", 4, (1, 2)),))
    with patch.object(lightning_rl.evaluation.tally, "pass_at_k", estimate or pass_at_k):
        assert culprits("evaluation_figures", replace(evidence(), facts=facts)) == wrong


def by_longest(valid: Tensor, trained: Tensor, groups: Tensor, global_sum: Any) -> Tensor:
    return valid.double() / valid.sum(-1).max() / trained.sum()


def by_square_root(valid: Tensor, trained: Tensor, groups: Tensor, global_sum: Any) -> Tensor:
    return valid / valid.sum(-1, keepdim=True).clamp(min=1).double().sqrt() / trained.sum()


@pytest.mark.parametrize(
    ("reduction", "wrong"), [(by_longest, True), (by_square_root, False), (prompt_mean, False), (token_mean, False)]
)
def test_a_reduction_that_divides_by_the_longest_response_is_named(reduction: Any, wrong: bool) -> None:
    plain = evidence()
    found = culprits("denominators", replace(plain, algorithm=plain.algorithm.replace(reduction=reduction)))
    assert found == (["reduction by_longest"] if wrong else [])
