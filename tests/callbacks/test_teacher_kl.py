"""TeacherKL: the reverse KL to another model, whose log-probabilities it computes itself or is provided."""

from functools import partial
from typing import Any

import pytest
import torch
from kit.support import (
    callback_of,
    fit,
    ragged_rollout,
    recorder,
    rollout_of,
    run_step,
    tiny_module,
    tiny_policy,
    view_of,
    weights_of,
)
from torch import Tensor
from torch.testing import assert_close

from lightning_rl import GAE, Reinforce, RLCallback, Rollout
from lightning_rl.advantages import ReinforcePlusPlus
from lightning_rl.callbacks import ReferenceKL, TeacherKL
from lightning_rl.corrections import Corrections
from lightning_rl.policy import PolicyModel, make_plan
from lightning_rl.policy.packing import Layout
from lightning_rl.policy.teacher import Teacher
from lightning_rl.rollouts.estimate_signal import estimate_signal

OLD, TEACHER = [0.5, 0.7, 0.9], [0.4, 0.5, 0.6]
BUDGET = 40  # several microbatches for a rollout


def witness(*rows: list[float]) -> Rollout:
    """A row of reward 1 above its teacher, and rows of reward 0 that agree with theirs."""
    old, known = torch.tensor([OLD, *rows]), torch.tensor([TEACHER, *rows])
    plain = rollout_of([1.0] + [0.0] * len(rows), [[1] * 3] * len(old), old_logprobs=old)
    return plain.replace(token_extras={"teacher_logprobs": known})


def teacher_of(source: Any = tiny_policy, *, packed: bool = True, temperature: float = 1.0) -> Teacher:
    return Teacher(source, temperature=temperature, max_tokens_per_microbatch=lambda: BUDGET, packed=packed)


def scored_like_the_policy(rollout: Rollout, source: Any, *, packed: bool, temperature: float) -> Tensor:
    """Return the outputs of the policy for every valid token."""
    policy = PolicyModel(source(), None, temperature=temperature, packed=packed)
    found = torch.zeros(rollout.response_ids.shape)
    for microbatch in make_plan(rollout, minibatches=1, max_tokens_per_microbatch=BUDGET, packed=packed).microbatches():
        own = policy(microbatch.layout).logprobs.detach()
        found[microbatch.index, : own.shape[1]] = own
    return found


def fitted(*callbacks: RLCallback, precision: Any = "32-true", max_steps: int = 1, **options: Any) -> list[Rollout]:
    seen: list[Rollout] = []
    module = tiny_module(**{"temperature": 0.7, "max_tokens_per_microbatch": BUDGET, **options})
    fit(module, callbacks=[*callbacks, recorder(seen)("recorder")], precision=precision, max_steps=max_steps)
    return seen


def test_witness_as_a_reward() -> None:
    callback = TeacherKL(beta=0.05)
    assert_close(callback.token_reward(witness()), torch.tensor([[-0.005, -0.01, -0.015]]), atol=1e-6, rtol=0)
    found, _, stats = estimate_signal(witness(), GAE(whitened=False), Corrections([callback]))
    assert_close(found.require("advantages"), torch.tensor([[0.97, 0.975, 0.985]]), atol=1e-6, rtol=0)
    assert stats["kl/penalty"].value() == pytest.approx(0.01, abs=1e-6)


def test_a_row_that_agrees_with_its_teacher_lies_below_one_that_earns_a_reward() -> None:
    found, *_ = estimate_signal(witness([0.2] * 3), ReinforcePlusPlus(), Corrections([TeacherKL(beta=0.05)]))
    raw = torch.tensor([0.97, 0.975, 0.985, 0.0, 0.0, 0.0])
    whitened = (raw - raw.mean()) / raw.std()
    assert_close(found.require("advantages").flatten(), whitened, atol=1e-4, rtol=0)


def test_witness_as_a_loss() -> None:
    view = view_of(OLD, advantages=[0.0] * 3).replace(token_extras={"teacher_logprobs": torch.tensor([TEACHER])})
    step = run_step(view, callbacks=[TeacherKL(beta=0.5, as_loss=True)], loss=Reinforce())
    gaps = torch.tensor([0.1, 0.2, 0.3])
    values = torch.exp(-gaps) - 1 + gaps
    assert step.metrics["teacher_kl/loss"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert step.metrics["teacher_kl/estimate"] == pytest.approx(float(values.mean()), abs=1e-6)
    assert step.metrics["teacher_kl/positive"] == 1.0 and "kl/ref" not in step.metrics
    assert_close(step.gradient, 0.5 * (1 - torch.exp(-gaps))[None] / 3, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, {"estimator": "k3"}, {"as_loss": True}, {"as_loss": True, "unbiased": True}])
def test_a_teacher_that_is_the_reference_is_reference_kl(options: dict[str, Any]) -> None:
    rollout = ragged_rollout().sanitize()
    rollout = rollout.replace(token_extras={"teacher_logprobs": rollout.require("ref_logprobs")})
    if "as_loss" not in options:
        ours, theirs = TeacherKL(None, 0.3, **options), ReferenceKL(0.3, **options)
        assert torch.equal(ours.token_reward(rollout), theirs.token_reward(rollout))
        return
    view = view_of(OLD, old_logprobs=[0.4, 0.7, 1.0], ref_logprobs=TEACHER)
    view = view.replace(token_extras={"teacher_logprobs": view.require("ref_logprobs")})
    steps = [run_step(view, callbacks=[kind(beta=0.3, **options)]) for kind in (TeacherKL, ReferenceKL)]
    assert torch.equal(steps[0].gradient, steps[1].gradient) and steps[0].gradient.any()


@pytest.mark.parametrize("packed", [True, False])
def test_a_teacher_scores_exactly_as_the_policy_does(packed: bool) -> None:
    rollout, source = ragged_rollout(), partial(tiny_policy, 3)
    found = teacher_of(source, packed=packed, temperature=0.7)(rollout)
    expected = scored_like_the_policy(rollout, source, packed=packed, temperature=0.7)
    assert torch.equal(found, expected) and expected[rollout.valid_tokens].all()
    assert not torch.allclose(found, teacher_of(source, packed=packed)(rollout)), "the temperature counts"


def test_only_valid_tokens_are_scored() -> None:
    rollout, teacher = ragged_rollout(), teacher_of()
    trained = torch.arange(12) % 4 != 1
    rollout = rollout.replace(trained=trained, valid_tokens=rollout.valid_tokens & trained[:, None])
    targets, score = [], teacher.scorer.logprobs

    def counting(layout: Layout) -> Tensor:
        targets.append(len(layout.targets))
        return score(layout)

    teacher.scorer.logprobs = counting
    found = teacher(rollout)
    assert sum(targets) == int(rollout.valid_tokens.sum()) and len(targets) > 1
    assert not found[~rollout.valid_tokens].any() and (found[rollout.valid_tokens] < 0).all()
    beyond = torch.arange(rollout.width) >= rollout.response_lengths[:, None]
    assert torch.equal(found, teacher(rollout.replace(response_ids=rollout.response_ids.masked_fill(beyond, 9))))


def test_a_teacher_has_no_gradient_and_is_no_part_of_the_module() -> None:
    callback, module = TeacherKL(partial(tiny_policy, 3), as_loss=True), tiny_module()
    fit(module, callbacks=[callback], max_steps=1)
    given = callback.provide(ragged_rollout())["token_extras/teacher_logprobs"]
    assert not given.requires_grad
    assert set(weights_of(module)) == {f"policy.model.{name}" for name, _ in tiny_policy().named_parameters()}


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_a_teacher_equal_to_the_policy_gives_no_penalty_at_the_first_step(precision: str) -> None:
    seen = fitted(TeacherKL(tiny_policy), advantages="reinforce_plus_plus", precision=precision, max_steps=2)
    gaps = [
        (rollout.require("old_logprobs") - rollout.token_extras["teacher_logprobs"])[rollout.valid_tokens]
        for rollout in seen
    ]
    assert not gaps[0].any() and gaps[1].any()


@pytest.mark.nightly
def test_a_teacher_pulls_the_policy_towards_itself() -> None:
    gaps = []
    for beta in (0.0, 1.0):
        nothing: dict[str, Any] = {"rewards": lambda prompts, *_, **__: [0.0] * len(prompts), "patience": None}
        module = tiny_module(advantages="reinforce", **nothing)
        seen: list[Rollout] = []
        teacher = TeacherKL(partial(tiny_policy, 3), beta, as_loss=True, estimator="k2")
        fit(module, callbacks=[teacher, recorder(seen)("recorder")], max_epochs=4)
        last = seen[-1]
        trained = module.policy
        assert trained is not None
        old = scored_like_the_policy(last, lambda own=trained: own.model, packed=True, temperature=1.0)
        gaps.append(float((old - last.token_extras["teacher_logprobs"])[last.valid_tokens].square().mean()))
    assert gaps[1] < 0.5 * gaps[0]


def test_another_callback_may_provide_the_log_probabilities() -> None:
    def asked(rollout: Rollout) -> dict[str, Tensor]:
        return {"token_extras/teacher_logprobs": torch.full(rollout.response_ids.shape, -0.5)}

    server = callback_of("server", provide=asked)
    for as_loss, advantages, critic in ((True, "grpo", None), (False, "gae", "shared")):
        seen = fitted(
            server, TeacherKL(as_loss=as_loss), advantages=advantages, critic=critic, epochs_per_rollout=2, max_steps=2
        )
        assert (seen[0].token_extras["teacher_logprobs"][seen[0].valid_tokens] == -0.5).all()


@pytest.mark.parametrize("options", [{"as_loss": True}, {"advantages": "reinforce_plus_plus"}])
def test_without_a_teacher_and_a_provider_setup_says_what_to_do(options: dict[str, Any]) -> None:
    callback = TeacherKL(as_loss=options.pop("as_loss", False))
    with pytest.raises(ValueError, match="got neither: pass teacher=, or add a callback"):
        fitted(callback, rewards=lambda **_: pytest.fail("nothing may be drawn"), **options)


def test_a_provider_of_something_else_is_found_out_at_the_first_rollout() -> None:
    other = callback_of("other", provide=lambda rollout: {"extras/other": torch.zeros(len(rollout))})
    with pytest.raises(ValueError, match='"token_extras/teacher_logprobs" for TeacherKL, got none: pass teacher= or'):
        fitted(other, TeacherKL(as_loss=True))


def test_two_sources_of_log_probabilities_are_refused() -> None:
    server = callback_of("a_server", provide=lambda r: {"token_extras/teacher_logprobs": torch.zeros_like(r.values)})
    rollout = rollout_of([0.0], [[1]])
    twice = TeacherKL(tiny_policy, as_loss=True)
    fit(tiny_module(), callbacks=[twice], max_steps=1)
    with pytest.raises(
        ValueError, match='"token_extras/teacher_logprobs" from one callback, got a second one from teacher_kl'
    ):
        Corrections([server, twice]).provide(rollout)


def test_a_teacher_that_no_fit_has_built_says_so() -> None:
    with pytest.raises(RuntimeError, match="inside of a fit, got none: pass it to Trainer"):
        TeacherKL(tiny_policy).provide(ragged_rollout())


def test_a_teacher_with_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.attention_dropout=0\.1"):
        fitted(TeacherKL(partial(tiny_policy, attention_dropout=0.1), as_loss=True))


def test_contributes_according_to_its_form_and_source() -> None:
    assert TeacherKL().contributes == {"token_reward", "metrics"}
    assert TeacherKL(as_loss=True).contributes == {"loss_term", "metrics"}
    assert TeacherKL(tiny_policy).contributes == {"token_reward", "metrics", "provide"}
    assert (TeacherKL().reads, TeacherKL(as_loss=True).reads) == (("old_logprobs",), ())


@pytest.mark.parametrize("size", [8, 24])
def test_a_teacher_with_another_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"policy's vocabulary of 16 tokens, got {size}"):
        fit(tiny_module(), callbacks=[TeacherKL(lambda: tiny_policy(vocab_size=size), as_loss=True)])
