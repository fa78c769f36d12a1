"""Score centering: the expected update under the engine's distribution is the covariance of advantage and score."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import VOCABULARY, an_algorithm, callback_of, fit, tiny_module, tiny_policy, view_of
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import (
    CISPO,
    GSPO,
    ClippedSurrogate,
    LossView,
    PolicyLoss,
    Reinforce,
    RLCallback,
    Rollout,
    SamplingParams,
    TransformersEngine,
    token_mean,
)
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import IcePop, OffPolicyIS, ScoreCentering, TruncatedIS
from lightning_rl.corrections import StepTrace
from lightning_rl.generation import FakeEngine, Request
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.recording import Recording, RolloutRecorder
from lightning_rl.recording.recompute import replay
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS
from lightning_rl.signal.masked import local_sum
from lightning_rl.update import accumulate_gradient

PREFIX, TEMPERATURE = [3, 5, 2], 0.7


def a_policy() -> PolicyModel:
    return PolicyModel(tiny_policy(dtype=torch.float64), None, temperature=TEMPERATURE, packed=True)


def engine_logprobs(policy: PolicyModel) -> Tensor:
    """Another distribution before every token than the policy's, [V]."""
    noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (logprobs_of(policy).detach() + 0.7 * noise).log_softmax(-1)


def logprobs_of(policy: PolicyModel) -> Tensor:
    """The policy's log-probabilities after the prefix, by the model's own forward, [V]."""
    return (policy.model(input_ids=torch.tensor([PREFIX])).logits[0, -1] / TEMPERATURE).log_softmax(-1)


def flat_gradient(policy: PolicyModel, loss: Tensor) -> Tensor:
    gradients = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def every_token(policy: PolicyModel, advantages: Tensor, k: int) -> Rollout:
    """One row for each token of the vocabulary after the prefix, with the engine's k likeliest tokens."""
    number, q = VOCABULARY, engine_logprobs(policy)
    rollout = Rollout.of_samples([PREFIX] * number, [[token] for token in range(number)], groups=[0] * number)
    top, ids = q.topk(k)
    extras = {TOP_IDS: ids.int().expand(number, 1, k), TOP_LOGPROBS: top.expand(number, 1, k)}
    return rollout.replace(advantages=advantages[:, None], token_extras=extras, rollout_logprobs=q[:, None])


def expected_update(
    policy: PolicyModel,
    advantages: Tensor,
    k: int = VOCABULARY,
    *,
    loss: PolicyLoss | None = None,
    callbacks: tuple[RLCallback, ...] = (ScoreCentering(None),),
    parts: int = 1,
) -> Tensor:
    """Sum over the vocabulary of the engine's probability times minus the gradient of a token, all parameters flat."""
    rollout = every_token(policy, VOCABULARY * engine_logprobs(policy).exp() * advantages, k)
    policy.zero_grad()
    rows = [list(range(part, VOCABULARY, parts)) for part in range(parts)]
    accumulate_gradient(
        rollout,
        plan_of_rows(rollout, [rows], packed=True).step(0),
        lambda microbatch: policy(microbatch.layout),
        an_algorithm(callbacks, loss=loss or Reinforce(), reduction=token_mean),
        backward=lambda loss: loss.backward(),
    )
    return -torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in policy.parameters()]
    )


def covariance(policy: PolicyModel, advantages: Tensor) -> Tensor:
    """Cov_q(A, grad log p), from plain autograd."""
    q, logprobs = engine_logprobs(policy).exp(), logprobs_of(policy)
    return flat_gradient(policy, (q * (advantages - (q * advantages).sum()) * logprobs).sum())


LOSSES = {"reinforce": Reinforce(), "ppo": ClippedSurrogate(), "cispo": CISPO(), "gspo": GSPO()}
LOSSES |= {"gspo-per-token": GSPO(per_token=True)}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_constant_advantage_moves_nothing_on_average(loss: PolicyLoss, parts: int) -> None:
    policy, ones = a_policy(), torch.ones(VOCABULARY, dtype=torch.float64)
    drift = expected_update(policy, ones, loss=loss, callbacks=(), parts=parts)
    assert float(drift.norm()) > 0.1
    assert float(expected_update(policy, ones, loss=loss, parts=parts).abs().max()) < 1e-6


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_expected_update_is_the_covariance_of_advantage_and_score(loss: PolicyLoss) -> None:
    policy, advantages = a_policy(), torch.linspace(-1, 2, VOCABULARY, dtype=torch.float64).sin()
    expected = covariance(policy, advantages)
    assert float(expected.norm()) > 0.1
    assert_close(expected_update(policy, advantages, loss=loss), expected, rtol=0, atol=1e-6)
    plain = expected_update(policy, advantages, loss=loss, callbacks=())
    assert float((plain - expected).norm()) > 0.01


def test_masked_and_clipped_tokens_get_no_term() -> None:
    """The update of a token is its gradient without the expected score, times mask and clip."""
    policy, advantages = a_policy(), torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)
    kept = torch.arange(VOCABULARY) % 3 != 0
    mask = callback_of("mask", token_mask=lambda view: view.response_ids % 3 != 0)
    expected = covariance(policy, advantages * kept)
    assert_close(
        expected_update(policy, advantages, callbacks=(mask, ScoreCentering(None))), expected, rtol=0, atol=1e-6
    )
    view = view_of(
        [-1.0, -1.0, -1.0, -1.0], old_logprobs=[-1.0, -2.0, -2.0, 0.0], advantages=[1.0, 1.0, -1.0, 0.0],
        rollout_kl=[0.5] * 4, dtype=torch.float64,
    )  # fmt: skip
    view = view.replace(rollout_kl=view.require("rollout_kl").requires_grad_())
    found = an_algorithm([ScoreCentering()], loss=ClippedSurrogate(), reduction=token_mean).microbatch_loss(
        view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, local_sum)
    )
    of_logprobs, of_kl = torch.autograd.grad(found.total, [view.logprobs, view.require("rollout_kl")])
    assert_close(of_kl, of_logprobs)
    assert_close(of_kl, torch.tensor([[-1.0, 0.0, math.e, 0.0]], dtype=torch.float64) / 4)  # clipped at a ratio of e


def test_beside_an_importance_weight_it_would_bring_the_drift_back_with_the_other_sign() -> None:
    policy, ones = a_policy(), torch.ones(VOCABULARY, dtype=torch.float64)

    def ratio(view: LossView) -> Tensor:
        return (view.require("old_logprobs") - view.require("rollout_logprobs")).exp()

    weight, drift = callback_of("weight", token_weight=ratio), expected_update(policy, ones, callbacks=())
    assert float(expected_update(policy, ones, callbacks=(weight,)).abs().max()) < 1e-9
    both = expected_update(policy, ones, callbacks=(weight, ScoreCentering(None)))
    assert_close(both, -drift, rtol=0, atol=1e-9)


@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1])
def test_the_error_of_the_top_tokens_is_that_of_the_tail(k: int) -> None:
    """Exact if the engine's tail is proportional to the policy's; else off by the stated difference."""
    policy, ones = a_policy(), torch.ones(VOCABULARY, dtype=torch.float64)
    q, p = engine_logprobs(policy).exp(), logprobs_of(policy).detach().exp()
    top = q.topk(k).indices
    tail = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, top, value=False)
    off = torch.where(tail, q - (1 - q[top].sum()) * p / p[tail].sum(), 0.0)
    error = flat_gradient(policy, (off * logprobs_of(policy)).sum())
    assert_close(expected_update(policy, ones, k), error, atol=1e-9, rtol=0)
    total_variation = (q[tail] / q[tail].sum() - p[tail] / p[tail].sum()).abs().sum() / 2
    assert_close(off.abs().sum(), 2 * q[tail].sum() * total_variation)
    assert (k == VOCABULARY - 1) == (float(off.abs().sum()) < 1e-9)


def requests(**sampling: Any) -> list[Request]:
    shared = SamplingParams(**dict[str, Any](max_new_tokens=4, temperature=TEMPERATURE, eos_token_ids=()) | sampling)
    prompts = [(3, 5), (2,), (3, 5), (7, 2, 9)]
    return [Request(prefix_ids=ids, sample_id=place, seed=place, sampling=shared) for place, ids in enumerate(prompts)]


@pytest.mark.parametrize(("k", "number"), [(3, 3), (None, VOCABULARY), (99, VOCABULARY)])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}])
def test_the_engine_records_the_distribution_that_it_samples_from(k: int | None, number: int, filters: Any) -> None:
    model, engine = tiny_policy(dtype=torch.float64), TransformersEngine()
    engine.select_extras(frozenset((TOP_IDS, TOP_LOGPROBS)))
    engine.top_logprobs = k
    engine.start(model, None, device=torch.device("cpu"), dtype=torch.float64)
    engine.load_weights([], 0)
    for request, completion in zip(
        requests(**filters), engine.generate(requests(**filters), logprobs=True), strict=True
    ):
        ids = torch.tensor([[*request.prefix_ids, *completion.token_ids]])
        with torch.no_grad():
            scores = (model(input_ids=ids).logits[0, len(request.prefix_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        if filters:
            scores = scores.masked_fill(scores < scores.topk(2).values[:, 1:], -math.inf).log_softmax(-1)
        top, found = completion.token_extras[TOP_IDS].long(), completion.token_extras[TOP_LOGPROBS]
        assert top.shape == found.shape == (len(completion.token_ids), number)
        ordered = found.sort(descending=True).values if k is None else found  # all tokens are in the order of ids
        assert_close(ordered, scores.topk(number).values)
        assert_close(scores.gather(1, top), found)


class Rounded(TransformersEngine):
    """Decodes with a copy of the policy of other weights."""

    @override
    def start(self, model: Any, tokenizer: Any, **options: Any) -> None:
        super().start(copy.deepcopy(model), tokenizer, **options)

    @override
    def load_stream(self, weights: Any, version: int) -> None:
        super().load_stream(((name, weight + 0.3 * weight.sin()) for name, weight in weights), version)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}])
def test_a_fit_centers_the_scores_of_its_engine(filters: Any) -> None:
    """With the policy's weights there is nothing to center."""
    for engine, least, most in ((TransformersEngine(), -1e-6, 1e-6), (Rounded(canary=None), 1e-3, 1.0)):
        traces = list[StepTrace]()
        noted = callback_of("noted", observe_step=traces.append)
        fit(tiny_module(engine=engine, **filters), callbacks=[ScoreCentering(4), noted])
        views = [microbatch.view for trace in traces for microbatch in trace.microbatches]
        drift = float(torch.cat([view.require("rollout_kl")[view.valid_tokens] for view in views]).mean())
        assert least < drift < most


def test_a_recorded_rollout_has_its_gradient_again(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    fit(
        tiny_module(engine=Rounded(canary=None)),
        callbacks=[ScoreCentering(4), recorder, SignalAudit(1, "raise", deliberate=("weight_sync",))],
    )
    recording = Recording.load(recorder.written[0])
    (again,) = replay([recording], [recording.algorithm()])
    assert torch.equal(again.gradients[0], recording.tensors["pass/0/gradient"])
    assert (
        float(again.parts[0]["score_centering/loss"]) == recording.header["steps"][0]["parts"]["score_centering/loss"]
    )


def test_it_is_refused_beside_importance_weights_and_with_an_engine_that_records_nothing() -> None:
    for weight in (TruncatedIS(), OffPolicyIS()):
        with pytest.raises(ValueError, match=f"expected ScoreCentering instead of {type(weight).__name__}, got both"):
            fit(tiny_module(loss="reinforce"), callbacks=[ScoreCentering(), weight])
    with pytest.raises(ValueError, match="a loss without a ratio to the rollout policy beside ScoreCentering, got"):
        fit(tiny_module(loss=GSPO(anchor="rollout"), reduction="sequence_mean"), callbacks=[ScoreCentering()])
    with pytest.raises(ValueError, match='ScoreCentering needs "top_ids" of every token, which FakeEngine does not'):
        fit(tiny_module(engine=FakeEngine(lambda _: [2])), callbacks=[ScoreCentering()])
    fit(tiny_module(), callbacks=[ScoreCentering(), IcePop()])
