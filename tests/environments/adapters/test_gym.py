"""Environments of gymnasium's shape play in conversations, and leave the run's generators alone."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from kit.chatter import chatting_module, games, generator_states
from kit.support import fit, recorder

from lightning_rl import FinishReason, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.environments import Action, EnvironmentReward
from lightning_rl.environments.adapters import GymEnvironment
from lightning_rl.rollout import turn_numbers

SAID = [{"role": "user", "content": "higher"}]


class Guess:
    """A number from 1 to 9, drawn and hinted at by all three global generators, which it seeds."""

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Draws it."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.secret = random.randint(1, 9)
        return "Guess my number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Says where it lies."""
        self.drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        guess = int(action)
        if guess == self.secret:
            return "Right.", 1.0, True, False, {}
        return "higher" if guess < self.secret else "lower", 0.0, False, guess == 9, {}


def secret_of(game: GymEnvironment) -> int:
    return game._game.secret  # noqa: SLF001


def begun(seed: int = 3) -> GymEnvironment:
    game = GymEnvironment(Guess)
    game.reset({"prompt": "play"}, seed)
    return game


def test_the_game_opens_the_conversation_and_system_messages_stay() -> None:
    system = {"role": "system", "content": "Be brief."}
    row = {"prompt": [system, {"role": "user", "content": "play"}]}
    assert GymEnvironment(Guess).reset(row, 3) == [system, {"role": "user", "content": "Guess my number."}]
    assert GymEnvironment(Guess).reset({"prompt": "play"}, 3) == [{"role": "user", "content": "Guess my number."}]


def test_steps_become_messages_rewards_and_an_end() -> None:
    game = begun()
    secret = secret_of(game)
    assert secret == random.Random(3).randint(1, 9) == 4
    step = game.step(Action(text="2"))
    assert (step.messages, step.reward, step.done) == (SAID, 0.0, False)
    step = game.step(Action(text="4"))
    assert (step.messages, step.reward, step.done) == ((), 1.0, True)
    assert begun().step(Action(text="9")).done  # truncated


def test_a_truncated_answer_is_no_action_and_ends_the_conversation() -> None:
    game = begun()
    step = game.step(Action(text="4", finish=FinishReason.LENGTH))
    assert (step.done, step.reward) == (True, None) and not hasattr(game._game, "drawn")  # noqa: SLF001


def test_the_generators_of_the_run_stay_where_they_are() -> None:
    before = generator_states()
    game = begun()
    game.step(Action(text="2"))
    with pytest.raises(ValueError, match="invalid literal"):
        game.step(Action(text="two"))
    game.close()
    assert generator_states() == before


def test_a_game_draws_the_same_however_it_is_interleaved() -> None:
    alone, (first, second) = begun(), (begun(), begun(5))
    for _ in range(2):
        alone.step(Action(text="2"))
    first.step(Action(text="2"))
    second.step(Action(text="1"))
    random.random()
    first.step(Action(text="2"))
    assert first._game.drawn == alone._game.drawn  # noqa: SLF001
    expected = random.Random(3)
    expected.randint(1, 9)
    expected.random()
    assert first._game.drawn[0] == expected.random()  # noqa: SLF001


@pytest.mark.nightly
def test_a_policy_trains_on_it_under_the_audit() -> None:
    rollouts: list[Rollout] = []
    module = chatting_module(
        "123456789", environment=lambda: GymEnvironment(Guess), rewards=EnvironmentReward(), group_size=4
    )
    audit = SignalAudit(every_n_rollouts=1, mode="raise")
    trainer = fit(module, data=games(), callbacks=[recorder(rollouts)("seen"), audit])
    assert trainer.global_step == len(rollouts) == 2
    numbers = torch.cat([turn_numbers(rollout).amax(-1) for rollout in rollouts])
    assert numbers.max() >= 3 and {0.0, 1.0} == set(torch.cat([rollout.rewards for rollout in rollouts]).tolist())
    assert FinishReason.FAILED not in torch.cat([rollout.finish for rollout in rollouts]).tolist()
