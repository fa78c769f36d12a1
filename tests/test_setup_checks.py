"""Checks at setup: each error says who, what, and what to do about it."""

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.run_checks import check, options_of, refuse
from kit.support import (
    a_trainer,
    an_algorithm,
    callback_of,
    fit,
    parity_reward,
    ragged_rollout,
    tiny_module,
    tiny_policy,
    tiny_tokenizer,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

from lightning_rl import (
    GAE,
    GRPO,
    GSPO,
    RLOO,
    ClippedSurrogate,
    Conversations,
    Critic,
    Evaluation,
    FakeEngine,
    FSDP2Strategy,
    ModelOptions,
    PolicyLoss,
    PromptDataModule,
    RawReward,
    Reinforce,
    RLCallback,
    RLLightningModule,
    SamplingParams,
    SequenceSumNorm,
    TransformersEngine,
    latest_checkpoint,
    token_mean,
    warmup_then_linear,
)
from lightning_rl.advantages import ESTIMATORS, Estimator, Normalized, ReMax
from lightning_rl.algorithm import Needs, needs
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DynamicSampling,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OverlongPenalty,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    ScoreCentering,
    TeacherKL,
    TruncatedIS,
)
from lightning_rl.corrections import Corrections
from lightning_rl.corrections.rl_callback import Ratio
from lightning_rl.distributed import Parallel
from lightning_rl.environments import Environment, EnvironmentReward
from lightning_rl.losses import resolve_loss
from lightning_rl.rewards import ChoiceMatch, ExactMatch, Length, NumberMatch, SubprocessReward
from lightning_rl.rollout import turn_numbers
from lightning_rl.run_checks import (
    check_estimator,
    check_extras,
    check_pipelining,
    check_ratios,
    check_reads,
    check_run,
    check_sizes,
)


def reads(*callbacks: RLCallback, **given: Any) -> Needs:
    """The check under settings in which nothing is missing."""
    settings: dict[str, Any] = {"minibatches_per_rollout": 4, **given}
    settings["advantages"] = settings.pop("estimator", "grpo")
    check(check_reads, *callbacks, **settings)
    algorithm = an_algorithm(callbacks, advantages=settings["advantages"])
    return needs(algorithm, steps_per_rollout=settings["minibatches_per_rollout"])


def reader(name: str = "reader", *, early: tuple[str, ...] = (), late: tuple[str, ...] = ()) -> RLCallback:
    callback = callback_of(name, observe=lambda _: None)
    callback.reads, callback.reads_at_loss = early, late
    return callback


@pytest.mark.parametrize("how", ["early", "late"])
@pytest.mark.parametrize("field", ["ref_logprob", "extra/teacher", "state"])
def test_reading_an_unknown_field_names_reader_field_and_the_known_ones(field: str, how: str) -> None:
    with pytest.raises(
        ValueError, match=rf'expected Reader to read a field of Rollout, got "{field}"; known: .*ref_logp'
    ):
        reads(reader(early=(field,)) if how == "early" else reader(late=(field,)))


def provider(*names: str, name: str = "provider") -> RLCallback:
    callback = callback_of(name, provide=lambda _: {})
    callback.provides = names
    return callback


def test_entries_of_dict_fields_may_be_read_if_somebody_provides_them_or_anything() -> None:
    reading = reader(early=("token_extras/teacher", "groups"))
    for providing in (provider("token_extras/teacher"), provider()):
        assert reads(reading, providing) == Needs(old_logprobs=True)
    recording = reader(late=("token_extras/routed_experts", "prompt_extras/routed_experts"))
    recording.records = ("routed_experts",)
    assert reads(recording, engine=TransformersEngine()) == Needs(old_logprobs=True)
    assert reads(reader(late=("extras/greedy_score",)), estimator="remax") == Needs(old_logprobs=True)


@pytest.mark.parametrize("field", ["token_extras/teacher", "extras/difficulty", "extras/greedy_score"])
@pytest.mark.parametrize("how", ["early", "late"])
def test_reading_an_entry_that_nobody_provides_names_reader_entry_and_cure(field: str, how: str) -> None:
    reading = reader(early=(field,)) if how == "early" else reader(late=(field,))
    with pytest.raises(ValueError, match=f'Reader reads "{field}", but nothing provides it: add a callback whose'):
        reads(reading, provider("extras/other"))


@pytest.mark.parametrize("field", ["token_extras/routed_experts", "token_extras/top_ids"])
def test_an_entry_that_the_engine_is_not_asked_to_record_names_what_to_add(field: str) -> None:
    name = field.partition("/")[2]
    with pytest.raises(ValueError, match=rf'nothing provides it: add `records = \("{name}",\)` to Reader, because'):
        reads(reader(late=(field,)), engine=TransformersEngine())


@pytest.mark.parametrize("how", ["early", "late"])
def test_segments_are_refused_without_an_environment(how: str) -> None:
    reading = reader(early=("segments",)) if how == "early" else reader(late=("segments",))
    with pytest.raises(ValueError, match=r'Reader reads "segments", .* no environment: pass environment='):
        reads(reading)
    with pytest.raises(ValueError, match=r"expected segments, got None: pass environment="):
        turn_numbers(ragged_rollout().replace(segments=None))


def test_the_likeliest_tokens_are_recorded_with_their_log_probabilities() -> None:
    lone, both = reader(), reader()
    lone.records, both.records = ("top_logprobs",), ("top_ids", "top_logprobs")
    check(check_extras, both, engine=TransformersEngine())
    message = r'expected records = \("top_ids", "top_logprobs"\) of Reader, got "top_logprobs" alone: name both'
    with pytest.raises(ValueError, match=message):
        check(check_extras, lone, engine=TransformersEngine())


def test_two_who_provide_the_same_entry_are_refused_at_setup() -> None:
    with pytest.raises(ValueError, match='expected one provider of "extras/x", got B too: rename its tensor'):
        reads(provider("extras/x", name="a"), provider("extras/x", name="b"))


@pytest.mark.parametrize(
    ("method", "field", "exists"),
    [
        ("reward_mask", "old_logprobs", False),
        ("exclude", "ref_logprobs", False),
        ("token_reward", "ref_logprobs", True),
        ("token_reward", "advantages", False),
        ("reward_bonus", "advantages", False),
        ("keep_groups", "returns", False),
        ("rollout_metrics", "advantages", True),
        ("observe", "returns", True),
    ],
)
def test_a_field_that_is_read_before_it_exists_is_refused_with_the_stage(method: str, field: str, exists: bool) -> None:
    callback = callback_of("early", **{method: lambda seen: seen})
    callback.reads = (field,)
    if exists:
        reads(callback, estimator=GAE(), critic="shared")
        return
    with pytest.raises(ValueError, match=f'Early reads "{field}" in {method}, before {field} exist: read it'):
        reads(callback, estimator=GAE(), critic="shared")


def test_a_provide_that_returns_something_else_than_it_says_is_refused() -> None:
    callback = callback_of("liar", provide=lambda seen: {"extras/y": seen.rewards})
    callback.provides = ("extras/x",)
    with pytest.raises(
        ValueError, match=r"provide of liar to return the tensors of its `provides`, \['extras/x'\], got"
    ):
        Corrections([callback]).provide(ragged_rollout())


@pytest.mark.parametrize("given", [{"estimator": GAE()}, {}], ids=["estimator", "callback"])
def test_reading_values_without_a_critic_names_reader_and_setting(given: dict[str, Any]) -> None:
    callbacks = [] if given else [reader(late=("values",))]
    who = "GAE" if given else "Reader"
    with pytest.raises(ValueError, match=f'{who} reads "values", but there is no critic: pass critic= to the module'):
        reads(*callbacks, **given)
    assert reads(*callbacks, critic="shared", **given).old_logprobs


@pytest.mark.parametrize("make", [RolloutKL, OffPolicyIS, lambda: OPSM(against="rollout")])
def test_an_engine_that_gives_no_log_probabilities_is_an_error_where_somebody_reads_them(
    make: Callable[[], RLCallback],
) -> None:
    name, silent = type(make()).__name__, FakeEngine(lambda _: [], returns_logprobs=False)
    message = (
        f'{name} reads "rollout_logprobs", but FakeEngine gives none: use an engine that returns log-probabilities'
    )
    with pytest.raises(ValueError, match=message):
        reads(make(), engine=silent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reads(make())
        reads(NoEOSMask(), engine=silent)
        reads(engine=silent)


@pytest.mark.parametrize(
    ("callbacks", "steps", "old", "ref"),
    [
        pytest.param([], 1, False, False, id="one-step-needs-no-old-pass"),
        pytest.param([], 2, True, False, id="several-steps-need-one"),
        pytest.param([ReferenceKL(as_loss=True)], 1, False, True, id="reference-at-loss"),
        pytest.param([reader(early=("old_logprobs",))], 1, True, False, id="old-read-once-per-rollout"),
        pytest.param([reader(late=("ref_logprobs",))], 1, False, True, id="reference-read-late"),
    ],
)
def test_passes_run_only_where_somebody_reads_them(
    callbacks: list[RLCallback], steps: int, old: bool, ref: bool
) -> None:
    assert reads(*callbacks, minibatches_per_rollout=steps) == Needs(old_logprobs=old, ref_logprobs=ref)


def test_a_reference_penalty_in_the_reward_needs_the_old_pass_even_with_one_step() -> None:
    found = reads(ReferenceKL(), minibatches_per_rollout=1, estimator=GAE(), critic="shared")
    assert found.old_logprobs and found.ref_logprobs


def test_a_correction_that_can_never_act_warns_and_names_the_other_setting() -> None:
    with pytest.warns(UserWarning, match=r'OPSM has no effect: use OPSM\(against="rollout"\), or take more steps'):
        reads(OPSM(), minibatches_per_rollout=1)
    with pytest.warns(
        UserWarning, match=r"Reader has no effect, or take more steps \(minibatches_per_rollout=, epochs_per_rollout=\)"
    ):
        reads(reader(late=("old_logprobs",)), minibatches_per_rollout=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reads(OPSM(), minibatches_per_rollout=2)
        reads(ReferenceKL(as_loss=True, unbiased=True), minibatches_per_rollout=1)  # its ratio of 1 has a gradient
        reads(OPSM(against="rollout"), minibatches_per_rollout=1)


def weigher(name: str, ratio: Ratio | None, alternative: str | None = None) -> RLCallback:
    callback = callback_of(name, token_weight=lambda view: view.advantages)
    callback.ratio, callback.alternative = ratio, alternative
    return callback


def test_counting_the_current_policy_twice_names_both_and_the_alternative() -> None:
    message = (
        "OffPolicyIS carries the ratio current/rollout and loss=ClippedSurrogate current/old, so the current policy "
        "would count twice as numerator: use TruncatedIS, whose ratio is old/rollout instead"
    )
    with pytest.raises(ValueError, match=message):
        check(check_ratios, OffPolicyIS(), loss=ClippedSurrogate())


@pytest.mark.parametrize(
    ("ratios", "side"),
    [
        ([("current", "rollout"), ("current", "old")], "current policy .* twice as numerator: leave one of them out$"),
        (
            [("current", "rollout"), ("old", "rollout")],
            "rollout policy .* twice as denominator: leave one of them out$",
        ),
        ([("old", "rollout"), ("old", "rollout")], "old policy .* twice as numerator: leave one of them out$"),
    ],
)
def test_weights_may_not_count_a_policy_twice_among_themselves(ratios: list[Ratio], side: str) -> None:
    callbacks = [weigher(f"weight{number}", ratio) for number, ratio in enumerate(ratios)]
    with pytest.raises(ValueError, match=f"Weight1 carries the ratio .* and Weight0 .*{side}"):
        check(check_ratios, *callbacks, loss=Reinforce())


def test_legal_chains_pass() -> None:
    check(check_ratios, OffPolicyIS(), loss=Reinforce())
    check(check_ratios, weigher("truncated", ("old", "rollout")), loss=ClippedSurrogate())
    check(check_ratios, weigher("plain", None), weigher("other", None), loss=ClippedSurrogate())
    check(check_ratios, OffPolicyIS(), loss=resolve_loss(lambda view: -view.logprobs))
    check(check_ratios, OPSM(), RolloutKL(), NoEOSMask(), ReferenceKL(as_loss=True), loss=ClippedSurrogate())


@pytest.mark.parametrize("penalty", [ReferenceKL, AdaptiveKL, TeacherKL])
@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
def test_token_rewards_under_a_scalar_estimator_name_both_and_the_fix(estimator: Any, penalty: Any) -> None:
    name = penalty.__name__
    with pytest.raises(
        ValueError, match=rf"{name} returns a reward .* advantages={estimator.name} .*{name}\(as_loss=True\)"
    ):
        check(check_estimator, penalty(), advantages=estimator, critic=None)
    check(check_estimator, penalty(as_loss=True), advantages=estimator, critic=None)
    check(check_estimator, penalty(), advantages=GAE(), critic="shared")
    own = callback_of("own", token_reward=lambda rollout: rollout.values)
    with pytest.raises(ValueError, match=r"Own returns .* per row: use a per-token estimator such as GAE"):
        check(check_estimator, own, advantages=estimator, critic=None)


COMPARING = [*(ESTIMATORS[name] for name in ("grpo", "dr_grpo", "rloo", "maxrl", "opo")), Normalized()]
COMPARING += [ESTIMATORS["reinforce_plus_plus_baseline"], GRPO(unbiased=False)]
COMPARING += [Normalized(mean="none", std="group"), Normalized(mean="group", std="none")]


@pytest.mark.parametrize("estimator", COMPARING, ids=lambda estimator: estimator.name)
def test_comparing_the_samples_of_a_prompt_takes_more_than_one(estimator: Estimator) -> None:
    written = [f'"{name}"' for name, known in ESTIMATORS.items() if known is estimator] or [estimator.name]
    with pytest.raises(ValueError, match=f"advantages={written[0]} compares .* use group_size=2 or more, or an"):
        check(check_estimator, advantages=estimator, critic=None, group_size=1)
    check(check_estimator, advantages=estimator, critic=None, group_size=2)


@pytest.mark.parametrize(
    "estimator",
    [RawReward(), ReMax(), ESTIMATORS["reinforce_plus_plus"], Normalized(mean="batch", std="batch"), GAE()],
    ids=lambda estimator: estimator.name,
)
def test_one_sample_of_each_prompt_is_enough_for_the_others(estimator: Estimator) -> None:
    check(check_estimator, advantages=estimator, critic="shared" if "values" in estimator.reads else None, group_size=1)


def test_a_bonus_that_compares_rows_and_a_greedy_baseline_exclude_each_other() -> None:
    with pytest.raises(
        ValueError, match=r"advantages=ReMax .* greedy answer, which RewardNormalization .* use one without the other"
    ):
        check(check_estimator, RewardNormalization(), advantages=ReMax(), critic=None)
    check(check_estimator, OverlongPenalty(9, 4), advantages=ReMax(), critic=None)
    check(check_estimator, RewardNormalization(), advantages=RawReward(), critic=None)


def test_a_critic_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="critic= has no effect, because advantages=GRPO reads no values: use GAE"):
        check(check_estimator, advantages=GRPO(), critic="shared")
    check(check_estimator, advantages=GAE(), critic="shared")


@pytest.mark.parametrize(
    ("prompts", "minibatches", "ranks", "fits"), [(8, 2, 2, True), (8, 3, 1, False), (8, 2, 3, False)]
)
def test_rollouts_that_do_not_split_evenly_are_refused(prompts: int, minibatches: int, ranks: int, fits: bool) -> None:
    if fits:
        refuse(check_sizes(prompts, minibatches, ranks))
        return
    message = f"minibatches_per_rollout x ranks, got {prompts} for {minibatches} x {ranks}: prompts_per_rollout=6 or "
    with pytest.raises(ValueError, match=message):
        refuse(check_sizes(prompts, minibatches, ranks))


@pytest.mark.parametrize("correction", [DynamicSampling(), RewardNormalization("group", "none")])
def test_corrections_that_compare_groups_refuse_groups_of_one(correction: RLCallback) -> None:
    with pytest.raises(ValueError, match=r"compares the samples of a prompt, which group_size=1 does not have: use"):
        check(check_estimator, correction, advantages=RawReward(), critic=None, group_size=1)
    check(check_estimator, correction, advantages=RawReward(), critic=None, group_size=2)
    check(check_estimator, RewardNormalization(), advantages=RawReward(), critic=None, group_size=1)


def pipelining(*callbacks: RLCallback, loss: Any = None, max_staleness: int = 1, **engine: Any) -> None:
    """The check with an engine of some capabilities."""
    generating = FakeEngine(lambda _: [])
    generating.capabilities = replace(generating.capabilities, **engine)
    check(check_pipelining, *callbacks, loss=loss, engine=generating, max_staleness=max_staleness)


@pytest.mark.parametrize(
    ("engine", "number", "message"),
    [
        (
            {"generates_ahead": False, "sleeps": True},
            1,
            r"generates while the policy trains, .*: use VLLMServerEngine on other GPUs, or max_staleness=0",
        ),
        ({"sleeps": True}, 1, r"an engine that stays awake .*: use FakeEngine\(sleeps=False\), or max_staleness=0"),
        (
            {"collective": True},
            1,
            r"one engine per rank, .*: use FakeEngine\(tensor_parallel_size=1\), or max_stal",
        ),
        ({}, 2, "expected max_staleness=1 with FakeEngine, got 2: it cannot receive weights while it .* use 1, or an"),
    ],
    ids=["waits", "sleeps", "is-shared", "cannot-sync-meanwhile"],
)
def test_an_engine_that_cannot_generate_ahead_is_refused_with_the_fix(
    engine: dict[str, Any], number: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pipelining(TruncatedIS(), max_staleness=number, **engine)
    pipelining(max_staleness=0, **engine)
    pipelining(TruncatedIS(), max_staleness=2, syncs_while_generating=True)


@pytest.mark.parametrize(
    ("callbacks", "loss", "cure"),
    [
        ([], ClippedSurrogate(), "TruncatedIS"),
        ([OPSM()], ClippedSurrogate(), "TruncatedIS"),
        ([RolloutKL()], Reinforce(), "OffPolicyIS"),
    ],
)
def test_samples_of_earlier_weights_without_a_correction_warn_and_name_one(
    callbacks: list[RLCallback], loss: Any, cure: str
) -> None:
    with pytest.warns(
        UserWarning, match=rf"max_staleness=1 .* nothing corrects for it: add {cure}\(\) to the callback"
    ):
        pipelining(*callbacks, loss=loss)


@pytest.mark.parametrize("correction", [TruncatedIS(), IcePop(), OPSM(against="rollout"), ScoreCentering()])
def test_a_weight_mask_or_centering_against_the_engine_corrects_for_earlier_weights(correction: RLCallback) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipelining(correction)
        pipelining(OffPolicyIS(), loss=Reinforce())
        pipelining(max_staleness=0)


def test_all_problems_of_a_run_are_reported_at_once() -> None:
    corrections = Corrections([OffPolicyIS(), ReferenceKL(), reader(early=("extra",))])
    with pytest.raises(ValueError, match=r"^5 problems:") as refused:
        check_run(
            options_of(critic="shared", group_size=1),
            corrections,
            Parallel(SingleDeviceStrategy()),
            prompts_per_rollout=None,
        )
    starts = ["OffPolicyIS carries", "ReferenceKL returns", 'advantages="grpo"', "critic= has", "expected Reader"]
    lines = str(refused.value).splitlines()[1:]
    assert [line.startswith(f"* {start}") for line, start in zip(lines, starts, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("base", "near", "misspelled"),
    [
        (RLCallback, "sequence_mask", "sequence_masks"),
        (RLCallback, "on_train_start", "on_train_starts"),
        (RLCallback, "after_step", "after_steps"),
        (Estimator, "per_row", None),
        (PolicyLoss, "metrics", "metric"),
        (PolicyLoss, "prepare", "prepares_"),
        (GRPO, "per_row", "per_rows"),
        (Environment, "reset", "resets"),
        (Environment, "step", "steps"),
        (RLLightningModule, "on_train_batch_end", "on_train_batch_ends"),
        (RLLightningModule, "on_fit_start", "on_fit_starts"),
        (RLLightningModule, "on_train_batch_end", "on_train_step_end"),
        (RLLightningModule, "configure_optimizers", "configure_optimizer"),
        (PromptDataModule, "on_exception", "on_exceptions"),
    ],
)
def test_a_misspelled_method_is_refused_where_the_class_is_defined(
    base: type, near: str, misspelled: str | None
) -> None:
    helper = {"helper_of_mine": lambda _: None, "scaled": staticmethod(len), f"_{near}s": lambda _: None}
    type("Mine", (base,), {"name": "mine", **helper})
    if misspelled is not None:
        with pytest.raises(ValueError, match=f"expected Mine to define {near}, got {misspelled}, which nothing calls"):
            type("Mine", (base,), {"name": "mine", misspelled: lambda _: None})


def test_a_misspelled_hook_of_a_plain_callback_is_refused_at_setup() -> None:
    helpers = dict.fromkeys(("train_starts", "on_train", "on_reward", "_on_fit_start"), lambda _: None)
    kinds = [type("Mine", (Callback,), hooks) for hooks in (helpers, helpers | {"on_train_batch_ends": lambda _: None})]
    fit(tiny_module(), callbacks=[kinds[0]()], max_steps=1)
    with pytest.raises(ValueError, match="expected Mine to define on_train_batch_end, got on_train_batch_ends"):
        fit(tiny_module(), callbacks=[kinds[1]()])


PLACED: dict[str, Sequence[Any]] = {
    "loss": (GSPO(), GSPO),
    "advantages": (GRPO(), GRPO),
    "rewards": (NumberMatch(), NumberMatch, EnvironmentReward()),
    "engine": (TransformersEngine(), TransformersEngine),
    "sampling": (SamplingParams(), SamplingParams),
    "model": (ModelOptions(),),
    "critic": (Critic("shared"),),
    "reduction": (token_mean, SequenceSumNorm(8)),
    "environment": (Environment, Conversations(Environment)),
    "evaluation": (Evaluation("gsm8k", ["1 + 1 ="]),),
    "optimizer": (SGD, partial(SGD, lr=1e-6), SGD([torch.zeros(1)])),
    "lr_scheduler": (LinearLR, warmup_then_linear(1, 2), warmup_then_linear),
    "tokenizer": (tiny_tokenizer(),),
    "callbacks": (NoEOSMask, NoEOSMask(), ModelCheckpoint()),
    "logger": (CSVLogger("runs"),),
    "strategy": (FSDP2Strategy(),),
    "datamodule": (PromptDataModule(["a"], 1),),
}
OF_TRAINER = {"callbacks": " of Trainer", "logger": " of Trainer", "strategy": " of Trainer"}
PLACE = {name: f"{name}={OF_TRAINER.get(name, ' of RLLightningModule')}" for name in PLACED}
PLACE["datamodule"] = "datamodule= of Trainer.fit"


@pytest.mark.parametrize("place", PLACED)
def test_an_object_in_the_place_of_another_is_refused_with_its_argument(place: str) -> None:
    options: dict[str, Any] = {"policy": tiny_policy, "rewards": parity_reward}
    arguments = [name for name in inspect.signature(RLLightningModule).parameters if name != place]
    for part in PLACED[place]:
        message = f"expected another object as {{}}, got .*: pass it as {re.escape(PLACE[place])}$"
        for name in arguments:
            with pytest.raises(ValueError, match=message.format(f"{name}= of RLLightningModule")):
                RLLightningModule(**options | {name: [part] if name in ("rewards", "evaluation") else part})
        if place != "callbacks" and not hasattr(part, "state_dict"):  # of which the Trainer itself reads the state
            with pytest.raises(ValueError, match=message.format("callbacks= of Trainer")):
                fit(tiny_module(), callbacks=[part])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (object(), "object: remove it"),
        ("NoEOSMask", r"'NoEOSMask': pass an object, such as NoEOSMask\(\)"),
        (
            type("Timer", (), {"__module__": "pytorch_lightning.callbacks.timer"})(),
            "Timer of pytorch_lightning: import from lightning.pytorch",
        ),
    ],
    ids=["object", "name", "other-package"],
)
def test_what_is_no_callback_is_refused_with_the_cure(other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"expected callbacks to be callbacks of Lightning, got {message}$"):
        fit(tiny_module(), callbacks=[other])


@pytest.mark.parametrize(
    ("option", "name", "place"),
    [("loss", "grpo", "advantages"), ("advantages", "ppo", "loss"), ("reduction", "gspo", "loss")],
)
def test_a_name_of_another_argument_is_refused_with_that_argument(option: str, name: str, place: str) -> None:
    with pytest.raises(ValueError, match=f'another name for {option}=, got "{name}": pass it as {place}="{name}"'):
        tiny_module(**{option: name})


@pytest.mark.parametrize(
    ("option", "function", "message"),
    [
        (
            "loss",
            lambda logprobs, old: logprobs - old,
            r"loss to be a function of \(view\), got <lambda>\(logprobs, old\)",
        ),
        (
            "advantages",
            lambda scores: scores,
            r"a function of \(scores, groups, rewarded\), got <lambda>\(scores\): too many",
        ),
        (
            "reduction",
            len,
            r"reduction to be a function of \(valid_tokens, trained, groups, global_sum\), got len\(obj, /\)",
        ),
        ("optimizer", lambda: None, r"optimizer to be a function of \(groups\), got <lambda>\(\): too many positional"),
        (
            "lr_scheduler",
            CosineAnnealingLR,
            "'T_max'; bind it, as in functools.partial\\(CosineAnnealingLR, T_max=...\\)",
        ),
    ],
    ids=["loss", "advantages", "reduction", "optimizer", "lr_scheduler"],
)
def test_a_function_of_other_arguments_is_refused_at_construction(option: str, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_module(**{option: function})


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("csv", r"a logger such as CSVLogger\(folder\), got a str: pass an object, True"),
        ([CSVLogger], "got the class CSVLogger: call it"),
        (NoEOSMask(), "got NoEOSMask: pass it as callbacks= of Trainer"),
    ],
    ids=["name", "class", "callback"],
)
def test_what_is_no_logger_is_refused_with_the_cure(logger: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tiny_module(), logger=logger)


@pytest.mark.parametrize(
    ("scheduler", "flags", "lengths"),
    [
        (warmup_then_linear(1, 2), {}, (2, 4)),
        (warmup_then_linear(1, 4), {}, None),
        (warmup_then_linear(1, 2), {"max_steps": 2}, None),
        (warmup_then_linear(1, 2), {"limit_train_batches": 3}, (2, 3)),
        (warmup_then_linear(1, 5), {"max_epochs": 2}, (5, 8)),
        (partial(CosineAnnealingLR, T_max=2), {}, (2, 4)),
        (partial(OneCycleLR, max_lr=1e-3, total_steps=3), {}, (3, 4)),
        (partial(LinearLR, total_iters=2), {}, None),
        (partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=2), {}, None),
    ],
)
def test_a_schedule_that_is_shorter_than_the_fit_gives_a_warning_with_both_lengths(
    scheduler: Any, flags: dict[str, Any], lengths: tuple[int, int] | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ValueError):  # OneCycleLR raises at its end
            fit(tiny_module(lr_scheduler=scheduler), **flags)
    texts = [str(one.message) for one in caught if "schedule of lr_scheduler=" in str(one.message)]
    assert len(texts) == (lengths is not None)
    if lengths is not None:
        assert f"ends after {lengths[0]} optimizer steps" in texts[0] and f"fit has {lengths[1]}" in texts[0]


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"got SGD with none of the \d+ trainable ones.*pass all groups"):
        fit(tiny_module(optimizer=lambda _: SGD(other.parameters(), lr=1e-3)))


def test_an_optimizer_of_some_parameters_gives_a_warning_with_their_number() -> None:
    with pytest.warns(UserWarning, match=r"(\d+) of (?!\1)\d+ trainable parameters are in no group of the optimizer"):
        trainer = fit(tiny_module(optimizer=lambda groups: SGD(groups[0]["params"][:1], lr=1e-3)))
    assert trainer.global_step


@pytest.mark.parametrize(("versions", "refused"), [((0, 0), True), ((0, 1), False)])
def test_two_loggers_with_one_folder_are_refused(versions: Sequence[int], refused: bool, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, version=version) for version in versions]
    cause = pytest.raises(
        ValueError, match=r"expected a folder for each CSVLogger, got .*version_0 for 2 of them: pass"
    )
    with cause if refused else nullcontext():
        fit(tiny_module(), logger=loggers, max_steps=1)


def by_answer(prompts: Any, completions: Any, *, answer: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in answer]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (by_answer, r'needs "answer": .*columns=\{"answer": "answers"\}'),
        (ExactMatch(), r'column \'answer\' for ExactMatch.*name another column with answer="answers"'),
        (ChoiceMatch(answer="answers", choices="choice"), "column 'choice' for ChoiceMatch"),
        (Length(target="longest"), "column 'longest' for Length"),
        (SubprocessReward(ExactMatch()), r'name another column with answer="answers"'),
    ],
    ids=["signature", "option", "second-option", "length", "subprocess"],
)
@pytest.mark.parametrize("where", ["train", "validation", "evaluation"])
def test_a_column_of_a_reward_that_no_row_has_is_refused_before_generation(
    where: str, reward: Any, message: str
) -> None:
    rows = [{"prompt": [2], "answers": "a"}, {"prompt": [3]}]
    never = FakeEngine(lambda _: pytest.fail("generated"))
    options: dict[str, Any] = {"engine": never, "tokenizer": tiny_tokenizer()}
    if where == "evaluation":
        options |= {"evaluation": Evaluation("e", rows, rewards=reward)}
    module = tiny_module(**options, **({} if where == "evaluation" else {"rewards": reward}))
    data = PromptDataModule(rows, 2, validation=rows if where == "validation" else None)
    place = {"train": "^expected", "validation": "^validation=: expected", "evaluation": "^evaluation e: expected"}
    with pytest.raises((TypeError, ValueError), match=rf"{place[where]} .*{message}"):
        a_trainer().validate(module, data) if where == "validation" else fit(module, data=data)


@pytest.mark.parametrize(
    ("name", "options", "cure"),
    [
        ("{epoch}-{val/reward:.2f}", {}, "'epoch={epoch}-reward={val/reward:.2f}' with auto_insert_metric_name=False"),
        ("epoch={epoch}-reward={val/reward:.2f}", {"auto_insert_metric_name": False}, None),
        ("{epoch}-{step}", {}, None),
        (None, {"monitor": "reward/task", "mode": "max"}, None),
        ("a/b", {"auto_insert_metric_name": False}, "in which a slash makes one"),
    ],
)
def test_a_name_of_a_checkpoint_that_makes_folders_is_refused(
    name: str | None, options: dict[str, Any], cure: str | None, tmp_path: Path
) -> None:
    def run() -> None:
        saving = ModelCheckpoint(tmp_path, filename=name, **options)
        fit(tiny_module(), callbacks=[saving], enable_checkpointing=True, max_steps=1)

    if cure is None:
        run()
        assert latest_checkpoint(tmp_path) is not None
        return
    with pytest.raises(ValueError, match=re.escape(cure)):
        run()
