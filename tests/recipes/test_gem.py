"""Environments of gem, by name: suffixes are read, generators stay, and a policy trains on a game under the audit."""

import logging
import random
from functools import partial

import pytest
import torch
from adapters.gem import GemEnvironment
from kit.chatter import chatting_module, games, generator_states
from kit.support import fit, recorder

from lightning_rl import FinishReason, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.environments import Action, EnvironmentReward
from lightning_rl.rollout import turn_numbers

pytest.importorskip("gem")
GUESS = "game:GuessTheNumber-v0-easy"


def test_a_game_is_played_from_its_instructions_to_its_end() -> None:
    handlers, before = list(logging.getLogger().handlers), generator_states()
    game = GemEnvironment(GUESS, {"min_number": 1, "max_number": 9, "max_turns": 3})
    (opening,) = game.reset({"prompt": "play"}, 3)
    secret = random.Random(3).randint(1, 9)  # gem seeds Python's generator and draws once
    assert opening["content"].startswith("You are playing Guess The Number.\n")
    assert "between 1 and 9 (inclusive) within 3 turns" in opening["content"]
    assert opening["content"].endswith("\nEnter your next guess.")
    step = game.step(Action(text=f"\\boxed{{{secret + 1}}}"))
    hint = f"At turn 1, you guessed {secret + 1}, and the target number is lower than {secret + 1}."
    assert step.messages == [{"role": "user", "content": f"{hint}\nEnter your next guess."}] and step.reward == 0.0
    step = game.step(Action(text=f"I say \\boxed{{{secret}}}"))
    assert (step.done, step.reward) == (True, 1.0)
    game.close()
    assert generator_states() == before and logging.getLogger().handlers == handlers


def test_a_seed_decides_the_game() -> None:
    def questions(seed: int) -> str:
        (opening,) = GemEnvironment("game:Sudoku-v0-easy").reset({"prompt": "play"}, seed)
        return opening["content"]

    assert questions(1) == questions(1) != questions(2)


def test_a_wrong_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="expected env_id to be a name that gem knows, got 'guessthe': write 'game:Guess"
    ):
        GemEnvironment("guessthe")
    with pytest.raises(ValueError, match="expected options to map names of options to values, got 3"):
        GemEnvironment(GUESS, 3)  # pyrefly: ignore[bad-argument-type]


def test_a_policy_trains_on_a_game_under_the_audit() -> None:
    rollouts: list[Rollout] = []
    module = chatting_module(
        [f"\\boxed{{{number}}}" for number in range(1, 10)],
        environment=partial(GemEnvironment, GUESS, {"max_number": 5, "max_turns": 4}),
        rewards=EnvironmentReward(),
        max_new_tokens=200,
    )
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    trainer = fit(module, data=games(), callbacks=[recorder(rollouts)("seen"), audit])
    assert trainer.global_step == len(rollouts) == 2
    assert torch.cat([turn_numbers(rollout).amax(-1) for rollout in rollouts]).max() >= 3
    assert torch.cat([rollout.rewards for rollout in rollouts]).unique().numel() > 1
    assert FinishReason.FAILED not in torch.cat([rollout.finish for rollout in rollouts]).tolist()
