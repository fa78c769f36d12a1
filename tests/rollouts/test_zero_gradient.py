"""Idle: a run that learns nothing says so and stops, with the reason, the figures and a checkpoint."""

import math
import random
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Talk
from kit.support import EOS, fit, parity_reward, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from torch.optim import AdamW

from lightning_rl import Conversations, PromptDataModule, RLCallback, RLLightningModule, warmup_then_linear
from lightning_rl.callbacks import DynamicSampling, EntropyBonus, NoEOSMask
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.corrections import Corrections
from lightning_rl.environments import EnvironmentReward
from lightning_rl.run.zero_gradient import IdleRunError, StopOnZeroGradient

FIGURES = {
    "rows": 4.0,
    "rewarded rows": 4.0,
    "trained tokens": 8.0,
    "tokens with an advantage": 0.0,
    "excluded rows": 0,
    "groups/sampled": 4.0,
    "groups/solved": 1.0,
    "groups/unsolved": 3.0,
}
MISSING = "ignore:.* groups are missing after"
IDLE = "ignore:rollout .* taught the policy nothing"


@pytest.fixture(autouse=True)
def _checkpoints_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def watching() -> StopOnZeroGradient:
    callback = StopOnZeroGradient(12)
    callback.figures = FIGURES
    return callback


def equal(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def never_ends() -> Any:
    model = tiny_policy()
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0.0  # never the largest logit
    return model


def run(
    *callbacks: RLCallback, folder: Path | None = None, ckpt_path: Path | None = None, epochs: int = 20, **options: Any
) -> RLLightningModule:
    module = tiny_module(**{"rewards": equal, "patience": 12, **options})
    data = tiny_prompts(8, 4)
    fit(
        module, data=data, callbacks=callbacks, default_root_dir=folder, max_epochs=epochs, max_steps=30,
        ckpt_path=ckpt_path,
    )  # fmt: skip
    return module


@pytest.mark.filterwarnings(MISSING)
def test_dynamic_sampling_with_equal_rewards_ends_the_run(tmp_path: Path) -> None:
    message = (
        r"24 groups in a row had no gradient \(patience=24\): every group was filtered by DynamicSampling, "
        r".*\(last rollout: rows 0, .*groups/sampled 8, groups/filtered 8, groups/solved 8, groups/unsolved 0"
    )
    ending = pytest.raises(IdleRunError, match=message)
    with pytest.warns(UserWarning, match="rollout 0 taught the policy nothing: every group"), ending:
        run(DynamicSampling(max_rounds=2), folder=tmp_path, patience=24)
    saved = torch.load(tmp_path / INTERRUPTED, weights_only=True)
    assert saved["global_step"] == 0 and saved["callbacks"]["StopOnZeroGradient"]["count"] == 24


def test_truncated_responses_without_a_trained_token_end_the_run() -> None:
    ending = pytest.raises(
        IdleRunError, match=r"NoEOSMask .* Raise max_new_tokens, since most responses were truncated"
    )
    with pytest.warns(UserWarning, match="rollout 0 taught"), ending:
        run(NoEOSMask("drop_tokens"), rewards=parity_reward, max_new_tokens=2, temperature=1e-4, policy=never_ends)


def test_advantages_that_are_all_zero_end_the_run_though_steps_are_made(tmp_path: Path) -> None:
    ending = pytest.raises(IdleRunError, match=r"every advantage is zero, because .* groups/zero_variance 1")
    with pytest.warns(UserWarning, match="rollout 1 taught"), ending:
        run(folder=tmp_path, minibatches_per_rollout=2)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 6


@pytest.mark.parametrize(
    ("prompt", "call"),
    [
        ([2, 3], r"exact\(completion='[a-n ]*' \(str\), answer=4 \(int\)\) = 0"),
        (
            [{"role": "user", "content": "a"}],
            r"exact\(completion=\[\{'role': 'assistant', .* \(list\), answer=4 \(int\)\) = 0",
        ),
    ],
)
def test_the_message_shows_a_call_of_a_reward_that_is_one_constant(prompt: Any, call: str) -> None:
    def exact(completions: Any, answer: Any, **_: Any) -> list[float]:
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    data = PromptDataModule([{"prompt": prompt, "answer": 4, "other": "x"}] * 8, 4)
    module = tiny_module(rewards={"exact": exact, "varied": (parity_reward, 0.0)}, tokenizer=tokenizer, patience=12)
    told = pytest.warns(UserWarning, match=f"taught the policy nothing: every advantage is zero.*{call}")
    with told, pytest.raises(IdleRunError, match=f"Test the rewards on a right answer, since all calls .*{call}"):
        fit(module, data=data, max_epochs=20, max_steps=30)


def test_conversations_that_all_failed_are_the_reason_that_is_named() -> None:
    class Broken(Talk):
        def reset(self, row: Any, seed: int) -> Any:
            raise KeyError(row, seed)

    broken = Conversations(Broken, max_failure_rate=None)
    ending = pytest.raises(IdleRunError, match=r"every conversation failed: fix what the log names first")
    with warnings.catch_warnings(), ending:
        warnings.simplefilter("ignore", UserWarning)
        run(rewards=EnvironmentReward(), environment=broken)


def test_rows_without_a_reward_are_the_reason_that_is_named() -> None:
    def nothing(prompts: Any, completions: Any, **_: Any) -> list[None]:
        return [None] * len(prompts)

    ending = pytest.raises(IdleRunError, match=r"no row has a reward.*rewarded rows 0, trained tokens [1-9]")
    with warnings.catch_warnings(), ending:
        warnings.simplefilter("ignore", UserWarning)
        run(rewards=nothing)


def test_a_gradient_of_anything_else_counts_as_learning() -> None:
    assert run(EntropyBonus(0.1), epochs=3).trainer.global_step == 6


@pytest.mark.filterwarnings(IDLE)
def test_a_rollout_that_learns_ends_the_row_and_none_never_stops() -> None:
    calls: list[int] = []

    def third(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        calls.append(1)
        return parity_reward(prompts, completions, completion_ids=completion_ids) if len(calls) % 3 == 0 else [0.0] * 16

    assert run(rewards=third, epochs=5).trainer.global_step == 10
    assert run(patience=None, epochs=3).trainer.global_step == 6


@pytest.mark.filterwarnings(IDLE)
def test_a_resumed_run_keeps_the_count_and_has_one_rollout_to_show(tmp_path: Path) -> None:
    def resume(reward: Any) -> RLLightningModule:
        changes = {"folder": tmp_path, "ckpt_path": tmp_path / INTERRUPTED, "allow_config_changes": ["rewards"]}
        return run(rewards=reward, epochs=3, **changes)

    with pytest.raises(IdleRunError):
        run(folder=tmp_path)
    assert resume(parity_reward).trainer.global_step == 6
    with pytest.raises(IdleRunError, match="16 groups in a row"):
        resume(equal)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 4, "one more than the first time"


def test_the_count_is_part_of_a_checkpoint_in_the_middle_of_a_rollout() -> None:
    idle, again = watching(), StopOnZeroGradient()
    idle.count = 4
    idle.note(torch.tensor(0.5), [0.1])
    again.load_state_dict(idle.state_dict())
    assert (again.count, again.learning, again.figures) == (4, True, FIGURES)


def ends(callback: StopOnZeroGradient, rollouts: list[dict[str, float]], rate: float = 1e-6) -> str | None:
    """The message with which rollouts end a run; None if they do not."""
    for number, figures in enumerate(rollouts):
        callback.figures = figures
        callback.note(torch.tensor(figures["tokens with an advantage"]), [1e-6, rate])
        callback.end_rollout(number, Corrections())
        try:
            callback.check()
        except IdleRunError as error:
            return str(error)
    return None


@pytest.mark.filterwarnings(IDLE)
@pytest.mark.parametrize(("groups", "samples"), [(4, 8), (1, 8), (4, 4)])
def test_rare_successes_do_not_end_a_run(groups: int, samples: int) -> None:
    coin, solved_sometimes = random.Random(0), 1 - 0.99**samples - 0.01**samples
    for _ in range(200):
        taught = [sum(coin.random() < solved_sometimes for _ in range(groups)) for _ in range(100)]
        figures = [{**FIGURES, "groups/sampled": groups, "tokens with an advantage": 8.0 * n} for n in taught]
        assert ends(StopOnZeroGradient(), figures) is None


@pytest.mark.parametrize("groups", [1, 5, 64, 1000])
def test_a_run_is_warned_a_rollout_before_it_ends(groups: int) -> None:
    callback = StopOnZeroGradient()
    with pytest.warns(UserWarning, match="taught the policy nothing") as told:
        assert ends(callback, [{**FIGURES, "groups/sampled": groups}] * 400) is not None
    assert len(told) == 1 and "the run ends after 256 groups in a row" in str(told[0].message)
    at = int(str(told[0].message).split()[1])
    assert at < callback.count / groups - 1, "a rollout between the warning and the end"


@pytest.mark.filterwarnings(IDLE)
@pytest.mark.parametrize(
    ("solved", "unsolved", "advice", "useless"),
    [
        (0, 4, "easier prompts, .*partial credit, a larger group_size or temperature", "harder"),
        (4, 0, "harder prompts", "easier"),
        (1, 3, "easier or harder prompts", "unsolved prompts"),
    ],
)
def test_the_advice_can_help(solved: int, unsolved: int, advice: str, useless: str) -> None:
    figures = {**FIGURES, "groups/solved": solved, "groups/unsolved": unsolved}
    message = ends(StopOnZeroGradient(8), [figures] * 3)
    assert message and re.search(advice, message) and not re.search(useless, message), message
    assert f"{solved / 4:.0%} of the groups solved, {unsolved / 4:.0%} unsolved" in message


@pytest.mark.filterwarnings(IDLE)
@pytest.mark.parametrize(("rate", "named"), [(1.0, True), (0.1, True), (1e-2, False), (1e-6, False)])
def test_a_high_learning_rate_is_the_first_cause(rate: float, named: bool) -> None:
    message = ends(StopOnZeroGradient(8), [FIGURES] * 3, rate)
    first = f"(patience=8): a learning rate of {rate:g} has likely destroyed the policy: lower lr of optimizer="
    assert message and (first in message) is named is ("destroyed" in message) and "every advantage is zero" in message


def test_a_norm_that_is_not_finite_is_no_sign_of_idleness() -> None:
    idle = watching()
    for norm in (0.0, math.nan):
        idle.note(torch.tensor(norm), [0.1])
    idle.end_rollout(0, Corrections())
    assert idle.count == 0


@pytest.mark.parametrize(
    ("steps", "idles"),
    [
        ([[0.0], [0.0]], True),
        ([[0.0], [0.1]], False),
        ([[0.0, 0.1], [0.0, 0.1]], False),  # the critic learns before the policy
        ([[0.0, 0.0]], True),
    ],
)
def test_a_rollout_without_a_learning_rate_is_idle(steps: list[list[float]], idles: bool) -> None:
    idle = watching()
    for rates in steps:
        idle.note(torch.tensor(0.5), rates)
    resumed = StopOnZeroGradient(8)
    resumed.load_state_dict(idle.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.end_rollout(0, Corrections())
    assert resumed.count == 4 * idles
    assert [("learning rate was 0 in every parameter group" in str(one.message)) for one in caught] == [True] * idles


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"optimizer": partial(AdamW, lr=0.0)}, 3),
        ({"optimizer": partial(AdamW, lr=1e-3), "lr_scheduler": warmup_then_linear(1, 4)}, 7),
    ],
)
@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_a_run_whose_learning_rate_is_zero_ends(options: dict[str, Any], steps: int, tmp_path: Path) -> None:
    message = r"12 groups in a row had no learning rate \(patience=12\): .*\(last rollout: rows 16, "
    ending = pytest.raises(IdleRunError, match=message)
    with pytest.warns(UserWarning, match="taught the policy nothing: the learning rate was 0"), ending:
        run(folder=tmp_path, rewards=parity_reward, **options)
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == steps
