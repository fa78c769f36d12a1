"""Corrections: combined in the order of the names, checked one by one, refused by name."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.support import callback_of, ragged_rollout, run_step, view_of_rollout
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import LossTerm, LossView, RLCallback, Rollout, Stat
from lightning_rl.callbacks import OPSM
from lightning_rl.corrections import CONTRIBUTIONS, Corrections

AT_LOSS = {"sequence_mask", "token_mask", "token_weight", "loss_term", "metrics"}
NO_ROLLOUT = {"observe_generated", "observe_step", "choose_rows"}  # see requests with completions, a trace, a number
METHODS = [method for method in CONTRIBUTIONS if method != "forward_context" and method not in NO_ROLLOUT]
METHODS.remove("replace_reward")  # of one callback alone


def view() -> LossView:
    rollout = ragged_rollout()
    draw = torch.Generator().manual_seed(5)
    clean = rollout.map(
        lambda tensor, _axis, _pad: tensor.nan_to_num() if tensor.is_floating_point() else tensor.clone()
    )
    return view_of_rollout(clean, torch.randn(rollout.response_ids.shape, generator=draw).requires_grad_())


def seen_by(method: str) -> Rollout:
    return view() if method in AT_LOSS else ragged_rollout().map(lambda tensor, _axis, _pad: tensor.clone())


def call(corrections: Corrections, method: str, seen: Any) -> Any:
    """The combined form of one contribution method."""
    combined = {"sequence_mask": "policy_factor", "token_mask": "policy_factor", "token_weight": "policy_factor"}
    name = combined.get(method, {"loss_term": "loss_terms"}.get(method, method))
    return getattr(corrections, name)(seen, *([[]] if method == "observe_rewards" else []))


def right(method: str, name: str, seed: int = 0) -> Callable[[Any], Any]:
    """A contribution of the right shape and type, different for each seed."""

    def body(seen: Any) -> Any:
        draw = torch.Generator().manual_seed(seed)
        rows, tokens = torch.rand(len(seen), generator=draw), torch.rand(seen.response_ids.shape, generator=draw)
        return {
            "reward_mask": rows > 0.3,
            "reward_bonus": rows,
            "keep_groups": seen.groups != seed,
            "exclude": rows > 0.7,
            "provide": {f"extras/{name}": rows},
            "token_reward": tokens,
            "sequence_mask": rows > 0.3,
            "token_mask": tokens > 0.3,
            "token_weight": tokens + 0.5,
            "loss_term": LossTerm(per_token=tokens * 1.0, coef=0.1 * seed),
            "rollout_metrics": {f"{name}/figure": Stat.of(rows)},
            "metrics": {f"{name}/figure": Stat.of(rows)},
            "observe": None,
            "observe_rewards": None,
        }[method]

    return body


def flat(found: Any) -> list[Any]:
    """Every tensor and plain value of a combined contribution, for bitwise comparison."""
    if isinstance(found, Tensor):
        return found.nan_to_num(nan=7.5).tolist() if found.is_floating_point() else found.tolist()
    if isinstance(found, Rollout):
        return [(name, flat(tensor)) for name, tensor in found.tensors()]
    if isinstance(found, Stat):
        return flat(found.moments)
    if isinstance(found, LossTerm):
        return [flat(found.per_token), found.coef]
    if isinstance(found, dict):
        return [(name, flat(value)) for name, value in sorted(found.items())]
    return [flat(part) for part in found] if isinstance(found, (tuple, list)) else [found]


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_list_never_matters_bit_for_bit(method: str) -> None:
    names = ["delta", "alpha", "charlie", "bravo"]
    callbacks = [callback_of(name, **{method: right(method, name, seed)}) for seed, name in enumerate(names, 1)]
    seen = seen_by(method)
    results = [flat(call(Corrections(order), method, seen)) for order in itertools.permutations(callbacks)]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("method", "fold"),
    [
        ("reward_mask", torch.logical_and),
        ("keep_groups", torch.logical_and),
        ("exclude", torch.logical_or),
        ("reward_bonus", torch.add),
        ("token_reward", torch.add),
        ("token_mask", torch.logical_and),
        ("token_weight", torch.mul),
    ],
)
def test_two_callbacks_combine_as_documented(method: str, fold: Callable[[Tensor, Tensor], Tensor]) -> None:
    bodies = [right(method, "alpha", 1), right(method, "bravo", 2)]
    callbacks = [callback_of(name, **{method: body}) for name, body in zip(["alpha", "bravo"], bodies, strict=True)]
    seen = seen_by(method)
    found = call(Corrections(callbacks), method, seen)
    combined = found[0] if isinstance(found, tuple) else found
    expected = fold(bodies[0](seen), bodies[1](seen))
    assert_close(combined, expected.to(combined.dtype))
    assert expected.float().std() > 0


def test_one_callback_alone_replaces_the_reward() -> None:
    rollout = ragged_rollout()
    replaced, added = torch.rand(len(rollout)), torch.rand(len(rollout))
    callbacks = [callback_of("a", reward_bonus=lambda _: added), callback_of("b", replace_reward=lambda _: replaced)]
    expected = torch.where(rollout.rewarded, replaced, 0.0) + added
    assert_close(Corrections(callbacks).scores(rollout), expected)
    with pytest.raises(ValueError, match='callback that replaces the reward, got "B", "C": remove one'):
        Corrections([*callbacks, callback_of("c", replace_reward=lambda _: replaced)])


def test_nobody_contributes_nothing() -> None:
    none, rollout = Corrections(), ragged_rollout()
    assert none.reward_mask(rollout).all() and none.keep_groups(rollout).all() and not none.exclude(rollout)[0].any()
    assert none.replace_reward(rollout) is None and none.reward_bonus(rollout) is None
    assert none.token_reward(rollout) == (None, {})
    assert none.policy_factor(view()) == (None, {}) and none.loss_terms(view()) == []
    assert none.metrics(view()) == none.rollout_metrics(rollout) == {}
    assert all(none.contributors(method) == () for method in CONTRIBUTIONS)


WRONG: list[tuple[str, Callable[[Rollout], Any], str]] = [
    ("reward_mask", lambda seen: seen.rewards, r"a bool tensor \[12\], got float32 \[12\]"),
    ("reward_mask", lambda seen: seen.valid_tokens, r"a bool tensor \[12\], got bool \[12, 7\]"),
    ("reward_bonus", lambda seen: seen.rewarded, r"a float tensor \[12\], got bool \[12\]"),
    ("reward_bonus", lambda seen: seen.rewards[:1], r"a float tensor \[12\], got float32 \[1\]"),
    ("keep_groups", lambda seen: seen.groups, r"a bool tensor \[12\], got int64 \[12\]"),
    ("exclude", lambda seen: seen.rewarded[:, None], r"a bool tensor \[12\], got bool \[12, 1\]"),
    ("token_reward", lambda seen: seen.rewards, r"a float tensor \[12, 7\], got float32 \[12\]"),
    ("token_reward", lambda seen: seen.response_ids, r"a float tensor \[12, 7\], got int64 \[12, 7\]"),
    ("sequence_mask", lambda seen: seen.valid_tokens, r"a bool tensor \[12\], got bool \[12, 7\]"),
    ("token_mask", lambda seen: seen.trained, r"a bool tensor \[12, 7\], got bool \[12\]"),
    ("token_mask", lambda seen: seen.valid_tokens.float(), r"a bool tensor \[12, 7\], got float32 \[12, 7\]"),
    ("token_weight", lambda seen: seen.valid_tokens, r"a float tensor \[12, 7\], got bool \[12, 7\]"),
    ("token_weight", lambda seen: seen.rewards[:, None], r"a float tensor \[12, 7\], got float32 \[12, 1\]"),
    ("loss_term", lambda seen: LossTerm(per_token=seen.rewards, coef=1.0), r"a float tensor \[12, 7\], got float32"),
]


@pytest.mark.parametrize(("method", "body", "message"), WRONG)
def test_a_wrong_shape_or_type_is_refused_with_method_and_callback(
    method: str, body: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"expected {method} of sloppy to return {message}"):
        call(Corrections([callback_of("sloppy", **{method: body})]), method, seen_by(method))


@pytest.mark.parametrize("coef", [float("nan"), float("inf"), "x"])
def test_a_coefficient_that_is_no_finite_number_is_refused(coef: Any) -> None:
    term = callback_of("sloppy", loss_term=lambda seen: LossTerm(per_token=seen.logprobs, coef=coef))
    with pytest.raises(ValueError, match="expected coef in loss_term of sloppy to be a number"):
        call(Corrections([term]), "loss_term", seen_by("loss_term"))


def test_a_weight_with_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="token_weight of leaky without gradient, got one: detach it"):
        Corrections([callback_of("leaky", token_weight=lambda seen: seen.logprobs.exp())]).policy_factor(view())


def test_bonuses_and_provided_tensors_are_detached() -> None:
    def tracked(seen: Rollout) -> Tensor:
        return seen.rewards.clone().requires_grad_()

    corrections = Corrections(
        [callback_of("a", reward_bonus=tracked, provide=lambda seen: {"extras/x": tracked(seen)})]
    )
    bonus = corrections.reward_bonus(ragged_rollout())
    assert bonus is not None and not bonus.requires_grad
    assert not corrections.provide(ragged_rollout()).extras["x"].requires_grad


@pytest.mark.parametrize(
    ("name", "shape"), [("row", (12,)), ("extras/", (12,)), ("extras/row", (11,)), ("token_extras/row", (12, 6))]
)
def test_a_provided_tensor_without_field_or_of_another_shape_names_the_callback(
    name: str, shape: tuple[int, ...]
) -> None:
    provider = callback_of("alpha", provide=lambda _: {name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=rf'expected provide of alpha .* got "{name}" \[{shape[0]}'):
        Corrections([provider]).provide(ragged_rollout())


def test_a_contribution_that_is_no_tensor_names_method_and_callback() -> None:
    forgetful = callback_of("forgetful", reward_bonus=lambda _: None)
    with pytest.raises(TypeError, match="expected reward_bonus of forgetful to return a tensor, got NoneType"):
        Corrections([forgetful]).reward_bonus(ragged_rollout())


def test_a_name_under_which_the_core_logs_is_refused() -> None:
    with pytest.raises(ValueError, match='expected a name that the core does not log under, got "policy"'):
        Corrections([callback_of("policy")])


def test_masks_log_what_they_reject_of_the_population_before_rejection() -> None:
    seen = view().replace(trained=torch.arange(12) > 1)
    first = callback_of("first", sequence_mask=lambda seen: seen.groups != 1)
    second = callback_of("second", token_mask=lambda _: torch.arange(7).expand(12, 7) > 2)
    weight = callback_of("weight", token_weight=lambda seen: torch.where(seen.valid_tokens, 2.0, torch.nan))
    factor, stats = Corrections([weight, second, first]).policy_factor(seen)
    assert float(stats["first/rejected"].value()) == pytest.approx(3 / 10)
    counted = seen.valid_tokens[:, :3].sum() / seen.valid_tokens.sum()
    assert float(stats["second/rejected_tokens"].value()) == pytest.approx(float(counted))
    assert float(stats["weight/weight_mean"].value()) == 2 and float(stats["weight/ess"].value()) == 1
    assert factor is not None
    kept = seen.valid_tokens & (seen.groups != 1)[:, None] & (torch.arange(7) > 2)
    assert torch.equal(factor[seen.valid_tokens], kept[seen.valid_tokens] * 2.0)


def test_names_must_be_there_and_unique() -> None:
    with pytest.raises(ValueError, match="expected RLCallback to set the class attribute `name`"):
        Corrections([RLCallback()])
    with pytest.raises(
        ValueError, match=r'expected unique names, got "opsm" twice: use .with_name\("another"\) on one'
    ):
        Corrections([OPSM(), OPSM(0.5)])
    assert [c.name for c in Corrections([OPSM(), OPSM(0.5).with_name("a")]).callbacks] == ["a", "opsm"]


def test_a_named_twin_logs_under_its_own_name() -> None:
    logged = run_step(view(), callbacks=[OPSM(0.5), OPSM(0.1).with_name("opsm_tight")]).metrics
    assert {"opsm/drift", "opsm/rejected", "opsm_tight/drift", "opsm_tight/rejected"} <= set(logged)


@pytest.mark.parametrize("method", ["metrics", "rollout_metrics"])
def test_a_metric_under_a_foreign_name_is_refused(method: str) -> None:
    thief = callback_of("thief", **{method: lambda _: {"reward/task": Stat.single(1.0)}})
    with pytest.raises(ValueError, match='expected thief to log under "thief/", got reward/task'):
        call(Corrections([thief]), method, seen_by(method))


def test_provided_tensors_are_a_disjoint_union() -> None:
    rollout = ragged_rollout().replace(extras={"there": torch.zeros(12)})
    alpha = callback_of("alpha", provide=lambda seen: {"extras/row": seen.rewards, "extras/wide": torch.zeros(12, 7)})
    per_token = {"token_extras/teacher": torch.zeros(12, 7), "token_extras/routes": torch.zeros(12, 7, 2)}
    bravo = callback_of("bravo", provide=lambda _: per_token)
    found = Corrections([bravo, alpha]).provide(rollout)
    assert set(found.extras) == {"there", "row", "wide"} and set(found.token_extras) == {"teacher", "routes"}
    assert set(rollout.extras) == {"there"} and not rollout.token_extras
    for taken in ("row", "there"):
        again = callback_of("zulu", provide=lambda seen, taken=taken: {f"extras/{taken}": seen.rewards})
        with pytest.raises(
            ValueError, match=f'expected "extras/{taken}" from one callback, got a second one from zulu'
        ):
            Corrections([alpha, again]).provide(rollout)


def test_contexts_are_nested_in_the_order_of_the_names_and_all_left() -> None:
    seen: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        seen.append(f"+{name}")
        try:
            yield
        finally:
            seen.append(f"-{name}")

    callbacks = [callback_of(name, forward_context=lambda _, name=name: context(name)) for name in ("b", "a")]
    with Corrections(callbacks).forward_context(ragged_rollout()):
        seen.append("forward")
    assert seen == ["+a", "+b", "forward", "-b", "-a"]


@pytest.mark.parametrize(
    ("method", "name", "metrics"),
    [
        ("exclude", "excluded", "rollout_metrics"),
        ("sequence_mask", "rejected", "metrics"),
        ("token_mask", "rejected_tokens", "metrics"),
        ("token_weight", "ess", "metrics"),
        ("loss_term", "loss", "metrics"),
    ],
)
def test_a_metric_under_a_name_that_the_core_logs_is_refused(method: str, name: str, metrics: str) -> None:
    def measure(seen: Rollout) -> dict[str, Stat]:
        return {f"mine/{name}": Stat.of(seen.rewards)}

    callback = callback_of("mine", **{method: right(method, "mine"), metrics: measure})
    with pytest.raises(
        ValueError, match=f'mine to log names in {metrics} that the core does not log for it, got "mine/{name}"'
    ):
        call(Corrections([callback]), metrics, seen_by(metrics))


def test_who_only_looks_is_shown_a_rollout_before_who_follows_it() -> None:
    order = list[str]()
    follows = callback_of("a", observe=lambda _: order.append("a"), reward_bonus=lambda seen: torch.zeros(len(seen)))
    looks = callback_of("b", observe=lambda _: order.append("b"))
    Corrections([follows, looks]).observe(seen_by("observe"))
    assert order == ["b", "a"]
