"""Fits over conversations: what the policy drew trains, and nothing moves with microbatches, order or a resume."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from kit.conversations import Echo, Forgetful, leak_mask, talking_module
from kit.support import fit, recorder, tiny_model, tiny_policy, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_rl import Evaluation, FinishReason, PromptDataModule, RLLightningModule, Rollout
from lightning_rl.advantages import ReinforcePlusPlus
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import NoEOSMask, ReferenceKL, RouterReplay, TruncatedIS
from lightning_rl.environments import EnvironmentReward, TokenStep
from lightning_rl.environments.outcome import DEFAULT
from lightning_rl.environments.run_environments import RowCheck
from lightning_rl.generation import Completion, Request, TransformersEngine
from lightning_rl.policy.sampling_mask import holds
from lightning_rl.rewards.correctness import solve_counts
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, TURN_REWARDS, turn_numbers
from lightning_rl.rollouts import collector

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Found 1 environment:UserWarning",
)


def data(number: int = 16, per_rollout: int = 4) -> PromptDataModule:
    rows = [{"prompt": [2 + place % 11, 3 + place % 7, 4][: 1 + place % 3], "place": place} for place in range(number)]
    return PromptDataModule(rows, per_rollout, shuffle=False, validation=[[13, 2], [14]])


def rollouts_of(module: RLLightningModule, *, callbacks: Sequence[Any] = (), **options: Any) -> list[Rollout]:
    seen: list[Rollout] = []
    fit(module, data=data(), callbacks=[recorder(seen)("seen"), *callbacks], **options)
    return seen


def test_what_the_environment_says_is_read_and_never_trained() -> None:
    for rollout in rollouts_of(
        talking_module(minibatches_per_rollout=2), callbacks=[SignalAudit(every_n_rollouts=1, mode="raise")]
    ):
        turns, actions = turn_numbers(rollout), rollout.action_mask
        inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
        assert torch.equal(actions, turns > 0) and (inside & ~actions).any()
        assert torch.equal(rollout.valid_tokens, actions & rollout.trained[:, None])
        assert (rollout.policy_version[~actions] == -1).all() and not rollout.require("rollout_logprobs")[
            ~actions
        ].any()
        assert torch.allclose(rollout.token_extras[TURN_REWARDS].sum(-1), rollout.rewards)
        assert (rollout.sampled_lengths <= 9).all() and (turns.amax(-1) <= 4).all()
        assert torch.isclose(
            rollout.require("old_logprobs")[actions], rollout.require("rollout_logprobs")[actions]
        ).all()


class Graded(Echo):
    """Gives something for every answer."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        said = super().step(token_ids, finish)
        return replace(said, reward=(said.reward or 0.0) + 0.1 * token_ids[0])


def test_a_turn_earns_what_it_and_the_later_ones_were_given() -> None:
    options = {"advantages": ReinforcePlusPlus(turn_rewards=True), "minibatches_per_rollout": 2, "environment": Graded}
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    for rollout in rollouts_of(talking_module(**options), callbacks=[audit]):
        turns, valid = turn_numbers(rollout), rollout.valid_tokens
        earned = rollout.token_extras[TURN_REWARDS].double()
        given = torch.stack([(earned * (turns == number)).sum(-1) for number in range(1, 5)], -1)
        to_go = given.flip(-1).cumsum(-1).flip(-1).gather(1, (turns.clamp(min=1) - 1).long())[valid]
        assert (given[:, 0] != 0).any() and (given[:, 1:] != 0).any()
        trained = rollout.require("advantages").double()[valid]
        line = torch.stack([to_go, torch.ones_like(to_go)], -1)
        fitted = line @ torch.linalg.lstsq(line, trained[:, None]).solution
        torch.testing.assert_close(trained, fitted[:, 0], atol=1e-4, rtol=0)


def test_every_end_of_a_conversation_is_there() -> None:
    ends = torch.cat([rollout.finish for rollout in rollouts_of(talking_module(max_turns=2))]).unique().tolist()
    assert ends == [FinishReason.STOP, FinishReason.TURNS]
    ends = torch.cat([rollout.finish for rollout in rollouts_of(talking_module(max_new_tokens=4))]).unique().tolist()
    assert FinishReason.LENGTH in ends


@pytest.mark.filterwarnings("ignore:.*conversations failed with their environment")
def test_a_failed_conversation_costs_its_own_row_and_no_other() -> None:
    (sound, *_), (broken, *_) = (rollouts_of(talking_module(breaks_at=at)) for at in (None, 2))
    failed = broken.failed
    assert failed.any() and not failed.all()
    assert not broken.trained[failed].any() and not broken.rewarded[failed].any()
    assert not broken.require("advantages")[failed].any()
    others = torch.isin(broken.groups, broken.groups[failed]).logical_not()
    assert others.any()
    for name in ("response_ids", "rewards", "advantages"):
        ours, theirs = (getattr(rollout.fit_width(sound.width), name)[others] for rollout in (broken, sound))
        assert torch.equal(ours, theirs)


def test_microbatches_and_padding_move_nothing() -> None:
    always = {"policy": partial(tiny_policy, dtype=torch.float64), "environment": Forgetful}
    found = []
    for options in ({}, {"max_tokens_per_microbatch": 24}, {"max_tokens_per_microbatch": 24, "packing": False}):
        module = talking_module(**always, minibatches_per_rollout=2, **options)
        fit(module, data=data(), callbacks=[NoEOSMask(), ReferenceKL(0.1, as_loss=True)])
        found.append(weights_of(module))
    first, *others = found
    assert all(torch.allclose(first[name], one[name], atol=1e-9, rtol=0) for one in others for name in first)


@pytest.mark.parametrize(
    "steps", [(1, 4), pytest.param(range(1, 9), marks=pytest.mark.nightly)], ids=["some steps", "every step"]
)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resume_is_bitwise_with_conversations_in_flight(
    tmp_path: Path, max_staleness: int, steps: Sequence[int]
) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> RLLightningModule:
        module = talking_module(environment=Forgetful, minibatches_per_rollout=2, max_staleness=max_staleness)
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "ckpt_path": ckpt_path}
        fit(module, data=data(), callbacks=[saving, NoEOSMask(), TruncatedIS()], default_root_dir=folder, **options)
        return module

    whole = weights_of(run(tmp_path / "whole"))
    assert len(list((tmp_path / "whole").glob("step=*.ckpt"))) == 8
    for step in steps:
        resumed = weights_of(run(tmp_path / f"from-{step}", tmp_path / "whole" / f"step={step}.ckpt"))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 6},
        {"policy": partial(tiny_model, "qwen3_moe", dtype=torch.float32), "top_p": 0.9},
    ],
    ids=["filtered tokens", "filtered tokens and experts"],
)
def test_engine_and_trainer_agree_over_six_turns(options: dict[str, Any]) -> None:
    callbacks: list[Any] = [RouterReplay()] if "policy" in options else []
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    limits = {"max_turns": 6, "max_new_tokens": 14, "environment": Talkative, "minibatches_per_rollout": 2}
    seen = rollouts_of(talking_module(**limits, **options), callbacks=[*callbacks, audit])
    assert len(seen) == 4 and max(int(turn_numbers(rollout).max()) for rollout in seen) == 6
    for rollout in seen:
        actions = rollout.action_mask
        inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
        assert (inside & ~actions).any()
        differences = rollout.require("rollout_logprobs") - rollout.require("old_logprobs")
        assert float(differences[actions].abs().max()) <= 1e-5
        if ROUTES in rollout.token_extras:
            assert rollout.token_extras[ROUTES][actions][:-1].any() and rollout.prompt_extras[ROUTES].any()
        if SAMPLING_MASK in rollout.token_extras:
            assert holds(rollout.token_extras[SAMPLING_MASK], rollout.response_ids)[actions].all()
    assert (SAMPLING_MASK in seen[0].token_extras) == bool({"top_k", "top_p"} & options.keys())
    assert (ROUTES in seen[0].token_extras) == ("policy" in options)


class Talkative(Echo):
    """Never ends a conversation."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        said = super().step(token_ids, finish)
        return TokenStep(token_ids=(token_ids[0], 2 + self.turn), reward=said.reward)


@pytest.mark.parametrize("leaks", [False, True])
def test_the_log_probability_of_environments_tokens_is_logged_with_any_mask(
    leaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = collector.lay_out
    if leaks:
        monkeypatch.setattr(collector, "lay_out", lambda *rows, **options: leak_mask(lay_out(*rows, **options)))
    seen, module, policy = list[Rollout](), talking_module(), tiny_policy()
    fit(module, data=data(), callbacks=[recorder(seen)("seen")], max_steps=1)
    logprobs: list[float] = []
    for row in range(0, 16, 4):  # the first of each group
        prompt = seen[0].prompt_ids[row, : seen[0].prompt_lengths[row]]
        ids = torch.cat([prompt, seen[0].response_ids[row, : seen[0].response_lengths[row]]])
        scores = policy(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        turns = turn_numbers(seen[0])[row, : seen[0].response_lengths[row]]
        logprobs += scores[len(prompt) - 1 :][turns == 0].tolist()
    assert seen[0].groups[::4].unique().numel() == 4 and len(logprobs) > 4
    assert module.run.metrics.values()["env/logprob"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-5)


@pytest.mark.nightly
def test_processes_that_answer_in_any_order_train_the_same() -> None:
    modules = (
        talking_module(minibatches_per_rollout=2),
        talking_module(minibatches_per_rollout=2, environment_workers=3),
    )
    firsts, seconds = map(rollouts_of, modules)
    one, other = map(weights_of, modules)
    assert len(firsts) == len(seconds) == 4
    for first, second in zip(firsts, seconds, strict=True):
        known = dict(second.tensors())
        differing = {name for name, tensor in first.tensors() if not torch.equal(tensor, known[name])}
        assert differing <= {"rollout_logprobs"}, "three at a time share other batches, which shows in last bits"
        assert float((first.require("rollout_logprobs") - known["rollout_logprobs"]).abs().max()) < 5e-6
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_evaluation_and_complete_hold_conversations_too() -> None:
    asked: list[int] = []

    def count(prompts: Any, completions: Any, *, completion_ids: Any, environment_reward: Any, **_: Any) -> list[float]:
        asked.extend(map(len, completion_ids))
        return [float(reward) for reward in environment_reward]

    module = talking_module(rewards=count)
    trainer = fit(module, data=data())
    asked.clear()
    (figures,) = trainer.validate(module, data(), verbose=False)
    assert asked and max(asked) <= 3, "a reward sees the last answer alone"
    assert 0 <= figures["val/reward/count"] <= 4


def test_rewards_are_told_what_was_said_and_what_the_environment_gave() -> None:
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> list[float]:
        seen.append((completion_ids, columns))
        return [1.0] * len(prompts)

    module = talking_module(rewards=look)
    fit(module, data=data(), max_steps=1, num_sanity_val_steps=0)
    ids, columns = seen[0]
    assert set(columns) >= {"place", "conversation", "environment_reward"}
    assert all(len(row) <= 3 for row in ids)


def ignoring(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [float(row % 2) for row in range(len(prompts))]


@pytest.mark.parametrize("environment", [Echo, {DEFAULT: Echo}, {"one": Echo, "two": Echo}])
def test_rewards_of_an_environment_that_no_function_reads_are_warned_of_once(environment: Any) -> None:
    rows = [{"prompt": [2 + place], "environment": "one"} for place in range(8)]
    with pytest.warns(UserWarning, match="rollout 0: the environment gave rewards") as caught:
        fit(talking_module(rewards=ignoring, environment=environment), data=PromptDataModule(rows, 4))
    texts = [str(one.message) for one in caught if "no reward function reads" in str(one.message)]
    assert len(texts) == 1 and "rewards=[EnvironmentReward(), ...]" in texts[0]


@pytest.mark.parametrize("further", [{}, {"environment": (EnvironmentReward(), 0.0)}])
def test_rewards_are_warned_of_only_if_an_environment_gave_them_and_nothing_reads_them(further: Any) -> None:
    module = talking_module(rewards={"own": ignoring, **further}, environment=Echo if further else Rewardless)
    with warnings.catch_warnings(record=True) as caught:
        fit(module, data=PromptDataModule([{"prompt": [2 + place]} for place in range(8)], 4))
    assert not [one for one in caught if "no reward function reads" in str(one.message)]


@pytest.mark.parametrize(("nothing", "counted"), [(0.0, 16), (None, 0)])
def test_a_conversation_that_ends_without_a_reward_counts_as_0_unless_nothing_is_none(
    nothing: float | None, counted: int
) -> None:
    module = talking_module(rewards={"given": EnvironmentReward(nothing)}, environment=Rewardless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of rows and validations without a reward
        (rollout, *_) = rollouts_of(module)
    assert int(rollout.rewarded.sum()) == counted and not rollout.rewards.any()
    assert solve_counts(rollout) == (0, 4 if counted else 0)


def test_one_environment_for_each_row_by_a_column() -> None:
    rows = [{"prompt": [2 + place], "environment": "quiet" if place % 2 else "echo"} for place in range(8)]
    module = talking_module(environment={"echo": Echo, "quiet": Quiet})
    seen: list[Rollout] = []
    fit(module, data=PromptDataModule(rows, 4, shuffle=False), callbacks=[recorder(seen)("seen")])
    turns = turn_numbers(seen[0]).amax(-1).reshape(4, -1)
    assert (turns[1::2] == 1).all() and (turns[::2] > 1).any()


class Unasked(TransformersEngine):
    """Is asked for nothing, because the run is refused before."""

    @override
    def generate(self, requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
        raise RuntimeError(f"expected a run that is refused, got {len(requests)} requests")


@pytest.mark.parametrize(
    ("where", "columns", "message"),
    [
        (
            "training",
            {"environment": "loud"},
            r"column 'environment' of prompt 5 to name one of \['echo', 'quiet'\], got",
        ),
        ("training", {"environment": None}, r"to name one of \['echo', 'quiet'\], got None"),
        ("validation", {"environment": ["echo"]}, r"of validation prompt 5 to name one of .*, got \['echo'\]"),
        (
            "evaluation",
            {"place": 1},
            r"a column 'environment' in prompt 5 that names one of .* got \['place'\]: add it",
        ),
        ("stream", {"environment_reward": 1.0}, "without a column 'environment_reward', .* got one in prompt 5 of the"),
    ],
)
def test_a_row_that_fits_no_environment_is_refused_before_anything_is_generated(
    where: str, columns: dict[str, Any], message: str
) -> None:
    rows = [{"prompt": [2 + place], "environment": "quiet"} for place in range(8)]
    wrong = [*rows[:5], {"prompt": [7], **columns}, *rows[6:]]
    module = talking_module(
        environment={"echo": Echo, "quiet": Quiet},
        engine=Unasked(),
        evaluation=[Evaluation("late", wrong)] if where == "evaluation" else [],
    )
    sources: dict[str, Any] = {"training": wrong, "stream": IterableDataset.from_generator(lambda: iter(wrong))}
    with pytest.raises(ValueError, match=message):
        fit(
            module,
            data=PromptDataModule(
                sources.get(where, rows),
                4,
                validation=wrong if where == "validation" else None,
                epoch_length=2 if where == "stream" else None,
            ),
        )


def test_a_single_environment_with_a_name_is_held_against_the_column_too() -> None:
    rows = [{"prompt": [2 + place], "environment": "quiet" if place == 2 else "echo"} for place in range(8)]
    with pytest.raises(ValueError, match=r"column 'environment' of prompt 2 to name one of \['echo'\], got 'quiet'"):
        fit(talking_module(environment={"echo": Echo}, engine=Unasked()), data=PromptDataModule(rows, 4))
    check = RowCheck(("echo",))
    assert (check({}, "row"), check({"environment": "echo"}, "row")) == ("echo", "echo")
    assert RowCheck((DEFAULT,))({"environment": "quiet"}, "row") == DEFAULT


class Rewardless(Echo):
    """Ends after the first answer, without a reward."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        return TokenStep(done=True)


class Quiet(Echo):
    """Ends after the first answer."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        return TokenStep(done=True, reward=float(len(token_ids)))
