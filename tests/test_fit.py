"""``Trainer.fit``: order of callbacks, toggling, on-policy identity, skipped steps, errors."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import EOS, differing, fit, parity_reward, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import (
    FakeEngine,
    LossView,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    Stat,
    warmup_then_linear,
)
from lightning_rl.callbacks import (
    OPSM,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    SequenceRatioMask,
)
from lightning_rl.update import StepGradient


class Watch(RLCallback):
    """Keeps every finished rollout and every view."""

    name = "watch"

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.views: list[LossView] = []

    @override
    def observe(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        self.views.append(view)
        return {"watch/rows": Stat.of(view.trained)}


def trained(callbacks: Sequence[Any], **options: Any) -> RLLightningModule:
    module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, **options)
    fit(module, callbacks=callbacks)
    return module


def all_corrections() -> list[RLCallback]:
    return [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]


def test_the_order_never_matters_with_weights_and_masks_on_a_loss_without_a_ratio() -> None:
    def corrections() -> list[RLCallback]:
        masks = [IcePop(0.9, 1.1), SequenceRatioMask("geometric", 0.9, 1.1), OutlierMask(0.5), OPSM(1e-3)]
        return [OffPolicyIS(), *masks, OverlongPenalty(8, 4), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]

    expected = trained(corrections(), loss="reinforce")
    assert not differing(trained(corrections()[4::-1] + corrections()[5:], loss="reinforce"), expected)


def test_a_reference_added_in_a_second_fit_is_still_the_policy_before_its_first_step() -> None:
    module, data = tiny_module(), tiny_prompts()
    fit(module, data=data, max_steps=2)
    fit(module, data=data, callbacks=[ReferenceKL(0.1, as_loss=True)], max_steps=1)
    fresh, reference = tiny_policy().state_dict(), module.models.reference
    assert reference is not None
    assert all(torch.equal(weight, fresh[name]) for name, weight in reference.model.state_dict().items())
    assert not any("reference" in name for name in module.state_dict())


def test_every_correction_acts() -> None:
    together = trained(all_corrections())
    for place in range(4):
        assert differing(together, trained([each for n, each in enumerate(all_corrections()) if n != place])), place


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_the_first_step_of_a_rollout_has_ratio_one_and_no_kl_to_old(precision: str) -> None:
    watch = Watch()
    module = tiny_module(temperature=0.7, minibatches_per_rollout=1, epochs_per_rollout=4)
    fit(module, callbacks=[watch, ReferenceKL(0.0, as_loss=True)], precision=precision, max_steps=8)
    per_step = len(watch.views) // 8
    for number, view in enumerate(watch.views):
        gap = (view.logprobs.detach() - view.require("old_logprobs"))[view.valid_tokens]
        first_of_rollout = (number // per_step) % 4 == 0
        assert bool((gap == 0).all()) is first_of_rollout
        distance = (view.logprobs.detach() - view.require("ref_logprobs"))[view.valid_tokens]
        assert bool((distance == 0).all()) is (number < per_step)


def test_the_engines_log_probabilities_are_the_trainers() -> None:
    watch = Watch()
    module = tiny_module(temperature=0.7, epochs_per_rollout=2, max_new_tokens=16)
    fit(module, callbacks=[watch])
    for rollout in watch.rollouts:
        gap = (rollout.require("rollout_logprobs") - rollout.require("old_logprobs"))[rollout.valid_tokens]
        assert float(gap.abs().max()) < 1e-5


@pytest.mark.nightly
def test_the_token_budget_changes_nothing_but_rounding() -> None:
    # AdamW would make whole steps of the rounding of a gradient of 0
    exact: Any = {"policy": partial(tiny_policy, dtype=torch.float64), "optimizer": partial(SGD, lr=0.05)}
    large, small = (trained(all_corrections(), max_tokens_per_microbatch=budget, **exact) for budget in (4096, 12))
    first, second = weights_of(large), weights_of(small)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-9
    moves = [first[f"policy.model.{name}"] - weight.detach() for name, weight in tiny_policy().named_parameters()]
    assert max(float(move.abs().max()) for move in moves) > 1e-3


def test_engine_log_probabilities_are_recorded_wherever_the_engine_gives_them() -> None:
    for returns_logprobs in (True, False):
        watch = Watch()
        engine = FakeEngine(lambda request: [5, 1][request.sample_id % 2 :], returns_logprobs=returns_logprobs)
        fit(tiny_module(engine=engine), callbacks=[watch])
        assert all((rollout.rollout_logprobs is not None) is returns_logprobs for rollout in watch.rollouts)


def test_off_policy_weights_train_on_a_loss_without_a_ratio() -> None:
    module = tiny_module(loss="reinforce", epochs_per_rollout=2)
    fit(module, callbacks=[OffPolicyIS()])
    plain = tiny_module(loss="reinforce", epochs_per_rollout=2)
    fit(plain)
    assert differing(module, plain)


@pytest.mark.filterwarnings("ignore:rollout 0 taught the policy nothing")
def test_an_optimizer_step_without_a_valid_token_is_skipped_and_counted() -> None:
    module = tiny_module(engine=FakeEngine(lambda request: [5] * request.sampling.max_new_tokens), epochs_per_rollout=2)
    trainer = fit(module, callbacks=[NoEOSMask("drop_tokens")])
    assert trainer.global_step == 0
    assert module.run.progress.skipped == 8
    fresh = tiny_policy().state_dict()
    assert all(torch.equal(weight, fresh[name]) for name, weight in module.policy.model.state_dict().items())  # pyrefly: ignore[missing-attribute]


class Explodes(RLCallback):
    """Gives infinite weights for some steps."""

    name = "explodes"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @override
    def token_weight(self, view: LossView) -> torch.Tensor:
        self.steps -= 1
        return torch.full_like(view.entropy, torch.inf if self.steps >= 0 else 1.0)


def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_the_weights() -> None:
    module = tiny_module(
        engine=FakeEngine(lambda request: [5, request.sample_id % 2 + 5, EOS][request.sample_id % 2 :])
    )
    trainer = fit(module, callbacks=[Explodes(steps=2)], max_epochs=1)
    assert trainer.global_step == 2
    assert module.run.progress.skipped == 2
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


def test_a_step_with_a_gradient_that_is_not_finite_logs_no_loss() -> None:
    gradient = StepGradient(parts={"loss/total": torch.tensor(2.0, dtype=torch.float64)})
    measured = gradient.metrics(2, norm=torch.tensor(1.0), optim__lr=0.1)
    assert [measured[name].value() for name in ("loss/total", "optim/grad_norm")] == [4.0, 1.0]
    skipped = gradient.metrics(2, norm=torch.tensor(torch.inf), optim__lr=0.1)
    assert {name for name, stat in skipped.items() if stat.value() == stat.value()} == {"optim/lr"}


class Rates(RLCallback):
    """Keeps the learning rate that each step was made with, and the one that was logged."""

    name = "rates"

    def __init__(self) -> None:
        self.used: list[float] = []
        self.logged: list[float] = []

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.logged.append(pl_module.run.metrics.values()["optim/lr"])


def test_the_logged_learning_rate_is_that_of_the_step() -> None:
    rates = Rates()
    fit(tiny_module(lr_scheduler=warmup_then_linear(2, 10)), callbacks=[rates], max_epochs=2)
    assert len(set(rates.used)) > 2
    assert rates.logged == pytest.approx(rates.used)


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run() -> None:
    module = tiny_module(engine=FakeEngine(lambda request: [5, 5, EOS][request.sample_id % 2 :]))
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row"):
        fit(module, callbacks=[Explodes(steps=3)])


def failing_reward(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    raise RuntimeError("verifier crashed")


def nan_reward(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [float("nan") if place % 2 else 1.0 for place in range(len(prompts))]


@pytest.mark.filterwarnings("ignore:rows get no reward:UserWarning")
@pytest.mark.parametrize("reward", [failing_reward, nan_reward])
def test_a_reward_that_fails_takes_its_rows_out_and_nothing_becomes_nan(reward: Any, tmp_path: Path) -> None:
    watch = Watch()
    module = tiny_module(rewards=reward, epochs_per_rollout=2, max_reward_failure_rate=None)
    fit(module, callbacks=[watch], default_root_dir=tmp_path)
    for rollout in watch.rollouts:
        assert torch.isfinite(rollout.require("advantages")).all()
        assert not rollout.require("advantages")[~rollout.rewarded].any()
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


@pytest.mark.filterwarnings("ignore:rollout 0 taught the policy nothing")
@pytest.mark.parametrize("action", ["zero_reward", "drop_tokens"])
def test_a_rollout_of_truncated_rows_is_harmless(action: Any) -> None:
    module = tiny_module(engine=FakeEngine(lambda request: [5] * request.sampling.max_new_tokens), epochs_per_rollout=2)
    fit(module, callbacks=[NoEOSMask(action), ReferenceKL(0.1, as_loss=True)])
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


def test_a_tokenizer_and_model_without_eos_are_refused_by_name_of_the_option() -> None:
    module = tiny_module(policy=lambda: tiny_policy(eos_token_id=None))
    with pytest.raises(ValueError, match="neither model nor tokenizer has an EOS: pass eos_token_ids="):
        fit(module)


def test_eos_ids_can_be_given_where_nobody_has_one() -> None:
    module = tiny_module(policy=lambda: tiny_policy(eos_token_id=None), eos_token_ids=[3, 4])
    assert fit(module).global_step == 4


def test_dropout_is_refused_by_the_name_of_its_config_attribute() -> None:
    with pytest.raises(ValueError, match=r"config.attention_dropout=0.1: set it to 0"):
        fit(tiny_module(policy=lambda: tiny_policy(attention_dropout=0.1)))


def test_ppo_with_a_critic_trains_both() -> None:
    module = tiny_module(advantages="gae", critic="shared", group_size=1, minibatches_per_rollout=2)
    fit(module, callbacks=[ReferenceKL(0.05)])
    head = module.policy.value_head  # pyrefly: ignore[missing-attribute]
    assert head is not None and head.weight.any()


def test_a_separate_critic_leaves_the_policy_backbone_alone() -> None:
    module = tiny_module(advantages="gae", critic=lambda: tiny_policy(1), group_size=1)
    fit(module)
    critic = module.policy.critic  # pyrefly: ignore[missing-attribute]
    before, after = tiny_policy(1).model.state_dict(), critic.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_second_fit_begins_with_a_new_rollout_of_new_prompts() -> None:
    watch, module, data = Watch(), tiny_module(epochs_per_rollout=3), tiny_prompts()
    fit(module, callbacks=[watch], data=data, max_steps=4)
    fit(module, callbacks=[watch], data=data, max_steps=3)
    ids = [int(place) for rollout in watch.rollouts for place in rollout.sample_ids]
    assert len(watch.rollouts) == 3
    assert len(set(ids)) == len(ids)


def test_what_others_draw_changes_nothing() -> None:
    class Draws(RLCallback):
        name = "draws"

        @override
        def on_train_batch_start(self, *arguments: Any, **keywords: Any) -> None:
            torch.rand(3)

    assert not differing(trained([Draws()]), trained([]))


def test_rewards_see_text_ids_and_columns() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, columns))
        return parity_reward(prompts, completions, completion_ids=completion_ids)

    rows = [{"prompt": [2 + place % 3, 4], "answer": place} for place in range(16)]
    fit(tiny_module(rewards=reward), data=PromptDataModule(rows, 4), max_steps=1)
    prompts, completions, completion_ids, columns = seen[0]
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["answer"]) == 16
    assert all(rows[answer]["prompt"] == prompt for prompt, answer in zip(prompts, columns["answer"], strict=True))
