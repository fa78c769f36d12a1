"""Formulas of losses, terms and weights, at ratios and advantages that a rollout may not contain."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import culprits, evidence_of
from kit.support import callback_of
from torch import Tensor
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, Stat
from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import EntropyBonus, IcePop, OffPolicyIS, ReferenceKL, RolloutKL, TruncatedIS
from lightning_rl.losses import CISPO, DPPO, GMPO, GSPO, LOSSES, ClippedSurrogate, PolicyLoss, ValueLoss, resolve_loss
from lightning_rl.signal.kl import k2, k3

FORMULAS = ("loss_formula", "loss_needs_advantages", "single_precision", "declared_ratio", "denominators")
VARIANTS: list[PolicyLoss] = [
    *LOSSES.values(),
    ClippedSurrogate(clip_low=0.1, clip_high=0.3, dual_clip=2.0),
    GSPO(anchor="rollout"),
    GSPO(per_token=True),
    CISPO(clip_low=0.2, clip_high=0.2),
    DPPO(divergence="kl", low=0.01, high=0.02),
    DPPO(cap=1.2),
    GMPO(clip_low=0.2, clip_high=0.3),
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
