"""RouterReplay: whose experts in which forwards, with which gradient, and what it is good for."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.routed import check_that_it_falls, many_experts, mismatch
from kit.support import (
    an_algorithm,
    callback_of,
    fit,
    ragged_rollout,
    recorder,
    tiny_model,
    tiny_module,
    tiny_policy,
    tiny_prompts,
    weights_of,
)
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import ClipCov, FakeEngine, Reinforce, RLCallback, Rollout, TransformersEngine, token_mean
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import DynamicSampling, ReferenceKL, RouterReplay
from lightning_rl.generation import Completion, Request
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import build_policy
from lightning_rl.policy.expert_routes import ExpertReplay, MicrobatchRoutes, expert_weights, record_routes, routers_of
from lightning_rl.policy.packing import pack
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.policy.sequences import join_sequences
from lightning_rl.rollout import ROUTES
from lightning_rl.update import accumulate_gradient

EXPERTS, ROUTERS, TOP = 6, 2, 2
moe = partial(tiny_model, "qwen3_moe", num_experts=EXPERTS)
WHOLE = [list(range(12))]


def random_routes(*shape: int, seed: int) -> Tensor:
    """Different experts for each token and router, [*shape, R, k]."""
    scores = torch.rand(*shape, ROUTERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (scores.topk(TOP).indices + 1).to(torch.int16)


def routed_rollout(seed: int = 0) -> Rollout:
    """Ragged rows with routes that no router would choose."""
    rollout = ragged_rollout(seed=seed, dtype=torch.float64)
    return rollout.replace(
        token_extras={ROUTES: random_routes(12, 7, seed=seed)}, prompt_extras={ROUTES: random_routes(12, 4, seed=9)}
    )


def a_policy(*, packed: bool = True, checkpointing: Checkpointing | None = None, **options: Any) -> PolicyModel:
    return build_policy(partial(moe, **options), None, temperature=0.7, packed=packed, checkpointing=checkpointing)


def replaying(policy: PolicyModel) -> RLCallback:
    """Call the hooks of the start of a fit."""
    return callback_of("replaying", forward_context=ExpertReplay(policy.model).replay)


def step_of(
    rollout: Rollout, cut: Sequence[Sequence[int]] = WHOLE, *, replay: bool = True, loss: Any = None, **options: Any
) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step over microbatches of the given rows; none is one of padding."""
    policy = a_policy(**options)
    callbacks = [replaying(policy)] if replay else []
    plan = plan_of_rows(rollout, [[list(rows) for rows in cut]], packed=options.get("packed", True))
    found = accumulate_gradient(
        rollout,
        plan.step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm(callbacks, loss=loss or Reinforce(), reduction=token_mean),
        backward=lambda total: total.backward(),
    )
    gradient = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return float(found.parts["loss/total"]), torch.cat(gradient)


def logprobs_of(policy: PolicyModel, rollout: Rollout, callback: RLCallback | None = None) -> Tensor:
    with nullcontext() if callback is None else callback.forward_context(rollout):
        return policy(pack(rollout)).logprobs


class Misrouting(TransformersEngine):
    """Says that other experts were taken than it took."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        found = super().generate_batch(requests, logprobs=logprobs)
        for completion in found:
            for extras in (completion.token_extras, completion.prompt_extras):
                extras[ROUTES].copy_(random_routes(len(extras[ROUTES]), seed=3))
        return found


@pytest.mark.parametrize("normalised", [True, False])
def test_routers_take_the_given_experts_with_weights_of_their_own(normalised: bool) -> None:
    policy, rollout = a_policy(norm_topk_prob=normalised), routed_rollout().select(torch.tensor([0]))
    callback, seen = replaying(policy), []
    for router in routers_of(policy.model).values():
        router.register_forward_hook(lambda _module, _given, output: seen.append(output))
    logprobs_of(policy, rollout, callback)
    prompt, response = int(rollout.prompt_lengths), int(rollout.response_lengths)
    for number, (logits, weights, experts) in enumerate(seen):
        asked, said = rollout.prompt_extras[ROUTES][0, :prompt], rollout.token_extras[ROUTES][0, : response - 1]
        taken = torch.cat([asked, said])[:, number].long() - 1
        assert torch.equal(experts, taken)
        chances = logits.float().softmax(-1).gather(1, taken)
        expected = chances / chances.sum(-1, keepdim=True) if normalised else chances
        torch.testing.assert_close(weights, expected.to(weights.dtype))
    assert len(seen) == ROUTERS


@pytest.mark.parametrize(
    ("packed", "checkpointing", "cut"),
    [
        pytest.param(True, "full", [range(4), range(4, 12)], id="packed, checkpointed"),
        pytest.param(True, "selective", [range(4), range(4, 12)], id="packed, selectively"),
        pytest.param(False, None, [[11, 2, 5], [], [0, 1, 3, 4, 10, 9, 8, 7, 6]], id="padded, kept"),
    ],
)
def test_no_layout_changes_what_is_replayed(
    packed: bool, checkpointing: Checkpointing | None, cut: list[list[int]]
) -> None:
    rollout = routed_rollout()
    expected, plain = step_of(rollout), step_of(rollout, replay=False)
    found = step_of(rollout, cut, packed=packed, checkpointing=checkpointing)
    torch.testing.assert_close(found, expected)
    assert abs(found[0] - plain[0]) > 1e-4 and not torch.allclose(found[1], plain[1])


def test_routes_follow_their_rows() -> None:
    rollout, order = routed_rollout(), torch.randperm(12, generator=torch.Generator().manual_seed(4))
    moved = step_of(rollout.select(order), [range(5), range(5, 12)])
    torch.testing.assert_close(moved, step_of(rollout))


def test_a_prepass_of_the_loss_takes_the_same_routes() -> None:
    rollout, loss = routed_rollout(), ClipCov(fraction=0.2, cov_low=-9.0, cov_high=9.0)
    whole = step_of(rollout, loss=loss)
    torch.testing.assert_close(step_of(rollout, [range(7), range(7, 12), []], loss=loss), whole)
    assert abs(whole[0] - step_of(rollout, replay=False, loss=loss)[0]) > 1e-6


def test_the_router_keeps_its_gradient_and_the_experts_left_out_have_none() -> None:
    policy, rollout = a_policy(), routed_rollout()
    only = torch.tensor([1, 3], dtype=torch.int16).expand(12, 7, ROUTERS, TOP)
    rollout = rollout.replace(token_extras={ROUTES: only}, prompt_extras={ROUTES: only[:, :4]})
    logprobs_of(policy, rollout, replaying(policy)).sum().backward()
    for name, parameter in policy.model.named_parameters():
        if "gate_up_proj" in name:
            assert parameter.grad is not None
            assert parameter.grad.flatten(1).any(-1).tolist() == [expert in (0, 2) for expert in range(EXPERTS)]
        if "mlp.gate.weight" in name:
            assert parameter.grad is not None and parameter.grad.any()


def test_a_forward_leaves_nothing_behind_for_the_next() -> None:
    policy, rollout = a_policy(), routed_rollout()
    plain, callback = logprobs_of(policy, rollout), replaying(policy)
    with torch.no_grad():
        replayed = logprobs_of(policy, rollout, callback)
    assert not torch.equal(replayed, plain)
    assert torch.equal(logprobs_of(policy, rollout), plain)
    other = routed_rollout(seed=1)
    alone = logprobs_of(policy, other, callback)
    padding = logprobs_of(policy, rollout.padding_rows(2), callback)
    assert not padding.any()
    assert torch.equal(logprobs_of(policy, other, callback), alone)
    with pytest.raises(KeyError), callback.forward_context(rollout):
        raise KeyError("a forward that fails")
    assert torch.equal(logprobs_of(policy, rollout), plain)


def test_without_its_hooks_the_policy_is_as_before() -> None:
    policy, rollout = a_policy(), routed_rollout()
    plain, replay = logprobs_of(policy, rollout), ExpertReplay(policy.model)
    replay.remove()
    with pytest.raises(RuntimeError, match="took them 0 times"), replay.replay(rollout):
        assert torch.equal(policy(pack(rollout)).logprobs, plain)


def test_it_works_within_a_fit_alone() -> None:
    callback = RouterReplay()
    fit(tiny_module(policy=moe), callbacks=[callback], max_steps=1)
    with pytest.raises(RuntimeError, match="inside of a fit, got none"):
        callback.forward_context(routed_rollout())


@pytest.mark.parametrize("times", [0, 2])
def test_routes_are_taken_exactly_once(times: int) -> None:
    policy, rollout = a_policy(), routed_rollout().select(torch.tensor([2, 3]))
    callback = replaying(policy)
    message = rf"the router of layers\.0 to take .* once, but it took them {times} times, for samples 2, 3"
    with pytest.raises(RuntimeError, match=message), callback.forward_context(rollout):
        _ = [policy(pack(rollout)) for _ in range(times)]


def test_a_missing_route_names_layer_and_row() -> None:
    policy, rollout = a_policy(), routed_rollout()
    routes = rollout.token_extras[ROUTES].clone()
    routes[3, 0, 1] = 0  # the second router, for the first token of a response of several
    assert int(rollout.response_lengths[3]) > 1
    place = int(rollout.prompt_lengths[3])
    message = rf"got none at layers\.1 for token {place} of row 3 \(sample 3\)"
    with pytest.raises(ValueError, match=message):
        logprobs_of(policy, rollout.replace(token_extras={ROUTES: routes}), replaying(policy))
    with pytest.raises(ValueError, match="an engine records them"):
        logprobs_of(policy, rollout.replace(token_extras={}), replaying(policy))


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        pytest.param(torch.ones(12, 7, 3, TOP, dtype=torch.int16), "expected routes .* for 2 routers", id="routers"),
        pytest.param(torch.ones(12, 7, ROUTERS, 3, dtype=torch.int16), r"got \[\d+, 3\]", id="experts-per-token"),
        pytest.param(torch.full((12, 7, ROUTERS, TOP), 7, dtype=torch.int16), "6 experts at layers.0", id="unknown"),
    ],
)
def test_routes_of_another_model_are_refused(routes: Tensor, message: str) -> None:
    policy, rollout = a_policy(), routed_rollout()
    rollout = rollout.replace(token_extras={ROUTES: routes}, prompt_extras={ROUTES: routes[:, :4]})
    with pytest.raises(ValueError, match=message):
        logprobs_of(policy, rollout, replaying(policy))


def test_a_router_that_weighs_otherwise_is_refused() -> None:
    policy = a_policy(norm_topk_prob=False)
    policy.model.config.norm_topk_prob = True  # says what its routers do not do
    with pytest.raises(ValueError, match="does not know the routers of Qwen3MoeForCausalLM"):
        logprobs_of(policy, routed_rollout(), replaying(policy))


def test_weights_are_those_of_the_model_bit_for_bit() -> None:
    model = moe()
    for router in routers_of(model).values():
        logits, weights, experts = router(torch.randn(50, 32, dtype=torch.float64))
        assert torch.equal(expert_weights(logits, experts, normalized=False).to(weights.dtype), weights)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_engine_records_what_one_forward_of_the_whole_would_choose(family: str) -> None:
    model = tiny_model(family, num_experts=EXPERTS, num_experts_per_tok=TOP)
    engine = TransformersEngine(max_rows=5)
    engine.select_extras(frozenset((ROUTES,)))
    launch(engine, model)
    engine.load_weights([], 0)
    prompts = [(2, 3, 4, 5), (6,), (2, 3, 4, 5), (7, 8)] * 3
    requests = [request_of(ids, n, n, max_new_tokens=1 + n % 7, eos_token_ids=[1]) for n, ids in enumerate(prompts)]
    completions = engine.generate(requests)
    assert len({len(completion.token_ids) for completion in completions}) > 3
    for request, completion in zip(requests, completions, strict=True):
        with record_routes(model) as taken, torch.no_grad():
            model(input_ids=torch.tensor([[*request.prefix_ids, *completion.token_ids[:-1]]]))
            routes = taken()
        found = torch.cat([completion.prompt_extras[ROUTES], completion.token_extras[ROUTES]])
        assert torch.equal(found[:-1], routes) and not found[-1].any()


def test_a_run_replays_the_engine_in_all_passes_but_the_reference() -> None:
    for engine, same in ((TransformersEngine(), True), (Misrouting(), False)):
        seen: list[Rollout] = []
        module = tiny_module(policy=moe, engine=engine, minibatches_per_rollout=2)
        fit(module, callbacks=[RouterReplay(), ReferenceKL(0.1, as_loss=True), recorder(seen)("seen")])
        first = seen[0].sanitize()
        old, ref, drawn = (first.require(f"{name}_logprobs") for name in ("old", "ref", "rollout"))
        assert torch.equal(old, ref) == same
        assert (float((drawn - old).abs().max()) < 1e-6) == same
        assert float((drawn - ref).abs().max()) < 1e-6


def test_routes_stay_with_their_samples_through_refills() -> None:
    seen: list[Rollout] = []

    def odd_sum(prompts: Any, completions: Any, *, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    module = tiny_module(policy=moe, rewards=odd_sum, optimizer=partial(SGD, lr=0.0), patience=None, group_size=2)
    fit(module, callbacks=[RouterReplay(), DynamicSampling(), recorder(seen)("seen")], data=tiny_prompts(24, 4))
    assert any(len(rollout) and int(rollout.groups.max() - rollout.groups.min()) > 3 for rollout in seen), "no refill"
    model = module.required_policy.model
    for rollout in seen:
        with record_routes(model) as taken, torch.no_grad():
            model.base_model(input_ids=pack(rollout, packed=False).input_ids)
            expected = taken()
        carried = MicrobatchRoutes.of(rollout, ["layers.0", "layers.1"])
        inside = join_sequences(rollout, rollout.prompt_ids, rollout.response_ids)[1]
        assert torch.equal(carried.padded[inside], expected[inside.flatten()])


def test_its_own_routes_change_nothing_bit_for_bit() -> None:
    plain, replayed = (tiny_module(policy=moe) for _ in range(2))
    fit(plain, max_steps=1)  # before the policy has moved, engine and trainer choose alike
    fit(replayed, callbacks=[RouterReplay()], max_steps=1)
    assert plain.options.engine.extras == frozenset() != replayed.options.engine.extras
    first, second = weights_of(plain), weights_of(replayed)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_audit_goes_along_with_it() -> None:
    audit = SignalAudit()
    fit(tiny_module(policy=moe, minibatches_per_rollout=2), callbacks=[RouterReplay(), audit])
    assert audit.findings == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"policy": tiny_policy}, "a mixture of experts, got Qwen2ForCausalLM", id="dense"),
        pytest.param(
            {"engine": FakeEngine(lambda _: [2])}, "RouterReplay needs .* FakeEngine does not record", id="engine"
        ),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_is_drawn(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(**{"policy": moe, **options}), callbacks=[RouterReplay()])


@pytest.mark.nightly
def test_in_bfloat16_the_mismatch_falls() -> None:
    policy = partial(many_experts, torch.bfloat16)
    check_that_it_falls(mismatch(policy), mismatch(policy, [RouterReplay()]))


@pytest.mark.nightly
def test_in_float32_it_is_at_the_level_of_a_dense_model() -> None:
    on = mismatch(partial(many_experts, torch.float32), [RouterReplay()])
    dense = mismatch(partial(many_experts, torch.float32, "qwen3"))
    assert float(on.mean()) < 2 * float(dense.mean()) < 1e-4
    assert float(on.max()) < 1e-3
