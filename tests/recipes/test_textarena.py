"""Games of textarena, by name: news alone are read, several players are refused, a policy trains under the audit."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from adapters.textarena import TextArenaEnvironment
from kit.chatter import chatting_module, games, generator_states
from kit.support import fit, recorder

from lightning_rl import FinishReason, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.environments import Action, EnvironmentReward
from lightning_rl.rollout import turn_numbers

pytest.importorskip("textarena")
GUESS = "GuessTheNumber-v0"
SINGLE = ["2048-v0", "Bandit-v0", "Blackjack-v0", "FrozenLake-v0-random", GUESS, "Mastermind-v0", "Sudoku-v0"]


def play(name: str, seed: int, answers: list[str]) -> list[Any]:
    game = TextArenaEnvironment(name)
    said: list[Any] = [game.reset({"prompt": "play"}, seed)]
    for text in answers:
        said.append(game.step(Action(text=text)))
        if said[-1].done:
            break
    game.close()
    return said


def test_a_game_is_played_from_its_instructions_to_its_end() -> None:
    before = generator_states()
    game = TextArenaEnvironment(GUESS, {"max_turns": 3})
    (opening,) = game.reset({"prompt": "play"}, 3)
    secret = random.Random(3).randint(1, 20)
    assert opening["content"].startswith("You are Player 0. You are playing Guess The Number.\n")
    step = game.step(Action(text=f"{secret + 1}"))  # in brackets by the wrapper of the game's actions
    assert step.messages == [{"role": "user", "content": "The target number is lower."}] and step.reward is None
    step = game.step(Action(text=f"[{secret}]"))
    assert (step.done, step.reward, step.metrics) == (True, 1.0, {"invalid_moves": 0.0})
    assert generator_states() == before


def test_an_answer_that_was_truncated_is_no_move() -> None:
    game = TextArenaEnvironment(GUESS)
    game.reset({"prompt": "play"}, 3)
    assert game.step(Action(text="[5]", finish=FinishReason.LENGTH)).done and game._game.guessed_numbers == set()  # noqa: SLF001


def test_invalid_moves_end_the_game_at_its_price() -> None:
    *_, last = play(GUESS, 3, ["what?", "what?"])
    assert (last.done, last.reward, last.metrics) == (True, 0.0, {"invalid_moves": 1.0})


@pytest.mark.parametrize("name", SINGLE)
def test_a_seed_decides_the_game_however_others_are_interleaved(name: str) -> None:
    answers = ["[1]", "[up]", "[red]", "[2]"]
    before = generator_states()
    first = play(name, 5, answers)
    other = TextArenaEnvironment(name)
    other.reset({"prompt": "play"}, 6)
    assert play(name, 5, answers) == first and generator_states() == before


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("TicTacToe-v0", "The number of players has to be 2, received 1"),
        ("SpiteAndMalice-v0", "TwoPlayerState has turns of several"),
        ("PublicGoodsGame-v0", "FFAMultiPlayerState has turns of several"),
        ("Golf-v0", "Golf supports 2-4 players"),
    ],
)
def test_a_game_for_several_is_refused_when_it_is_made(name: str, why: str) -> None:
    message = rf"expected a game for one player, got '{name}' \({why}\): a conversation has one policy"
    with pytest.raises(ValueError, match=message):
        TextArenaEnvironment(name)


def test_a_wrong_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(ValueError, match="that textarena knows, got 'GuesTheNumber': write 'GuessTheNumber-v0'"):
        TextArenaEnvironment("GuesTheNumber")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_policy_trains_on_a_game_under_the_audit(workers: int) -> None:
    rollouts: list[Rollout] = []
    module = chatting_module(
        [f"[{number}]" for number in range(1, 10)],
        environment=partial(TextArenaEnvironment, GUESS, {"max_number": 9, "max_turns": 3}),
        rewards=EnvironmentReward(),
        environment_workers=workers,
        max_new_tokens=200,
    )
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    trainer = fit(module, data=games(), callbacks=[recorder(rollouts)("seen"), audit])
    assert trainer.global_step == len(rollouts) == 2
    assert torch.cat([turn_numbers(rollout).amax(-1) for rollout in rollouts]).max() >= 3
    assert torch.cat([rollout.rewards for rollout in rollouts]).unique().numel() > 1
    assert FinishReason.FAILED not in torch.cat([rollout.finish for rollout in rollouts]).tolist()
