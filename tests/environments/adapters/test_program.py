"""Programs as environments: prefixes continue the sampled tokens, or the row fails."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kit.conversations import response_of, turn_numbers_of, wanted
from kit.programs import Ask, ScriptedProgram

from lightning_rl import FakeEngine, FinishReason, SamplingParams
from lightning_rl.environments import Conversation, ConversationLimits, converse
from lightning_rl.environments.adapters.program import ProgramEnvironment, ProgramResult
from lightning_rl.generation import Request, turn_seed
from lightning_rl.samples import Trajectory

EOS = 9
FIRST = Request(
    prefix_ids=(1, 2), sample_id=5, seed=77, sampling=SamplingParams(max_new_tokens=12, eos_token_ids=[EOS])
)


def held(script: Callable[[Ask], ProgramResult], seconds: float = 10.0, **limits: Any) -> tuple[Trajectory, Any]:
    """Return the trajectory of a conversation whose turn k samples (20 + k, EOS)."""
    programs: list[ScriptedProgram] = []

    def make() -> ProgramEnvironment:
        programs.append(ScriptedProgram(script, seconds))
        return ProgramEnvironment(programs[-1])

    engine = FakeEngine(lambda request: (20 + request.turn, EOS))
    engine.load_weights([], 0)
    conversation = Conversation(None, wanted(FIRST), ConversationLimits(**limits), "env", make, seed=3)
    (trajectory,) = converse([conversation], engine)
    assert all(program.closed == 1 for program in programs)
    return trajectory, (programs, engine.requests)


def talk(ask: Ask) -> ProgramResult:
    """Three turns; each reply begins with a newline."""
    prefix = [7, 7]
    for turn in range(3):
        status, body = ask(*prefix, stop=[EOS])
        if status != 200:
            return ProgramResult(reward=0.25, metrics={"cut": 1.0})
        prefix += [*body["choices"][0]["token_ids"], 50 + turn, 60]
    return ProgramResult(reward=0.75, metrics={"turns": 3.0, "asked": 3.0})


def test_the_row_is_what_was_asked_and_drawn_and_the_seeds_are_ours() -> None:
    trajectory, (_, asked) = held(talk)
    assert trajectory.request.prefix_ids == (7, 7)
    assert response_of(trajectory) == (20, EOS, 50, 60, 21, EOS, 51, 60, 22, EOS)
    assert turn_numbers_of(trajectory) == (1, 1, 0, 0, 2, 2, 0, 0, 3, 3)
    assert [(request.sample_id, request.turn, request.seed) for request in asked] == [
        (5, 0, 77),
        (5, 1, turn_seed(77, 1)),
        (5, 2, turn_seed(77, 2)),
    ]
    assert (trajectory.finish, trajectory.environment_reward) == (FinishReason.STOP, 0.75)
    assert trajectory.failure is None
    assert [trajectory.metrics[name] for name in ("asked", "program_turns", "turns")] == [3, 3, 3]


def test_a_limit_of_the_run_stops_the_program_and_what_it_scores_counts() -> None:
    trajectory, ((program,), _) = held(talk, turns=2)
    assert (trajectory.finish, trajectory.environment_reward, program.stopped) == (FinishReason.TURNS, 0.25, 1)
    assert trajectory.metrics["cut"] == 1 and trajectory.segments[-1].reward == 0.25
    assert response_of(trajectory) == (20, EOS, 50, 60, 21, EOS)


def rewrite(ask: Ask) -> ProgramResult:
    ask(7, 7)
    ask(7, 7, 21, EOS, 50)
    return ProgramResult(reward=1.0)


def drop(ask: Ask) -> ProgramResult:
    ask(7, 7)
    ask(7, 7, 20, EOS)
    return ProgramResult(reward=1.0)


def change_agent(ask: Ask) -> ProgramResult:
    ask(7, 7)
    ask(7, 7, 20, EOS, 50, session="two")
    return ProgramResult(reward=1.0)


def go_on_behind_an_end(ask: Ask) -> ProgramResult:
    ask(7, 7, stop=[20])
    return ProgramResult(reward=1.0)


def ask_nothing(ask: Ask) -> ProgramResult:
    return ProgramResult(reward=1.0)


def fail(ask: Ask) -> ProgramResult:
    ask(7, 7)
    raise KeyError("gone")


def give_nan(ask: Ask) -> ProgramResult:
    ask(7, 7)
    return ProgramResult(reward=float("nan"))


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (rewrite, "ValueError: expected question 2 to go on from the 4 ids .* got other ids from place 2"),
        (drop, "ValueError: expected question 2 to go on from the 4 ids .* got 4 ids"),
        (change_agent, "ValueError: expected one agent that asks the policy in a conversation, got a second one"),
        (go_on_behind_an_end, r"ValueError: expected answers to end at token ids \[20\].* got 20 inside of one"),
        (ask_nothing, "ValueError: expected a program that asks the policy, got one that ended without a question"),
        (fail, "KeyError: 'gone'"),
        (give_nan, "ValueError: expected reward to be a number or None, got nan"),
    ],
    ids=lambda value: getattr(value, "__name__", "cause"),
)
def test_what_is_no_row_fails_with_its_reason_and_is_never_worth_0(
    script: Callable[[Ask], ProgramResult], cause: str
) -> None:
    trajectory, (programs, _) = held(script)
    assert (trajectory.finish, trajectory.environment_reward) == (FinishReason.FAILED, None)
    assert trajectory.failure is not None and re.match(cause, trajectory.failure.cause)
    assert len(programs) == 2 and trajectory.metrics["retries"] == 1


def test_a_program_that_hangs_costs_its_time_twice_and_its_row() -> None:
    def hang(ask: Ask) -> ProgramResult:
        ask(7, 7)
        threading.Event().wait(3)
        return ProgramResult()

    trajectory, _ = held(hang, seconds=0.2)
    assert trajectory.finish == FinishReason.FAILED and trajectory.metrics["timeouts"] == 2
    assert trajectory.failure is not None
    assert trajectory.failure.cause == "timeout: the program took longer than 0.2 s for a conversation (timeout)"
