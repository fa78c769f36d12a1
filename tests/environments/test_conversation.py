"""Conversations, turn by turn: prefixes, limits, rewards, and failures of the environment."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.conversations import response_of, turn_numbers_of, wanted
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import Conversation, ConversationLimits, TokenEnvironment, TokenStep
from lightning_rl.generation import Completion, Request, turn_seed
from lightning_rl.samples import Prompt, Trajectory

EOS = 9
FIRST = Request(prefix_ids=(1, 2), sample_id=5, seed=77, sampling=SamplingParams(max_new_tokens=6, eos_token_ids=[EOS]))


class Scripted(TokenEnvironment):
    """Says what it is told to, and remembers what it heard."""

    def __init__(self, *steps: Any, prompt: Sequence[int] = ()) -> None:
        self.steps, self.prompt, self.heard, self.closed = list(steps), prompt, list[Any](), 0

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        self.heard.append((row, seed))
        return self.prompt

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.heard.append((tuple(token_ids), finish))
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    @override
    def close(self) -> None:
        self.closed += 1


def drawn(*ids: int, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(token_ids=ids, logprobs=torch.zeros(len(ids)), finish=finish, version=0)


def conversation(environment: Scripted, **limits: Any) -> Conversation:
    made = Conversation(environment, wanted(FIRST), ConversationLimits(**limits), seed=3)
    made.begin()
    return made


def cause_of(talk: Conversation) -> str | None:
    failure = None if talk.trajectory is None else talk.trajectory.failure
    return None if failure is None else failure.cause


def test_a_prefix_is_the_one_before_with_what_was_drawn_and_said() -> None:
    environment = Scripted(TokenStep(token_ids=(4, 5), reward=0.25), TokenStep(done=True, reward=0.5))
    talk = conversation(environment)
    assert talk.request is not None and talk.request.prefix_ids == (1, 2)
    talk.receive(drawn(3, EOS))
    assert (talk.request.prefix_ids, talk.request.turn, talk.request.seed) == (
        (1, 2, 3, EOS, 4, 5),
        1,
        turn_seed(77, 1),
    )
    assert (talk.request.sample_id, talk.request.sampling.max_new_tokens) == (5, 4)
    talk.receive(drawn(6, EOS))
    trajectory = talk.trajectory
    assert trajectory is not None and talk.request is None
    assert (trajectory.request.prefix_ids, response_of(trajectory)) == ((1, 2), (3, EOS, 4, 5, 6, EOS))
    assert turn_numbers_of(trajectory) == (1, 1, 0, 0, 2, 2)
    assert (trajectory.finish, trajectory.environment_reward, trajectory.failure) == (FinishReason.STOP, 0.75, None)
    assert environment.heard == [({"prompt": "?"}, 3), ((3, EOS), FinishReason.STOP), ((6, EOS), FinishReason.STOP)]
    assert environment.closed == 1


def test_a_conversation_that_is_done_with_a_truncated_answer_is_truncated() -> None:
    talk = conversation(Scripted(TokenStep(done=True, reward=0.5)))
    talk.receive(drawn(3, 4, finish=FinishReason.LENGTH))
    assert talk.trajectory is not None
    assert (talk.trajectory.finish, talk.trajectory.environment_reward) == (FinishReason.LENGTH, 0.5)


def test_a_prefix_that_is_rewritten_stands_behind_the_answer_and_is_all_that_the_next_turn_reads() -> None:
    environment = Scripted(
        TokenStep(rewritten=(7, 8), reward=0.25), TokenStep(token_ids=(4,)), TokenStep(done=True, reward=0.5)
    )
    talk = conversation(environment, length=9)
    talk.receive(drawn(3, EOS))
    assert talk.request is not None
    assert (talk.request.prefix_ids, talk.request.turn, talk.request.seed) == ((7, 8), 1, turn_seed(77, 1))
    assert talk.request.sampling.max_new_tokens == 4, "of 6 for the whole conversation"
    talk.receive(drawn(6, EOS))
    assert talk.request.prefix_ids == (7, 8, 6, EOS, 4)
    talk.receive(drawn(5, EOS))
    trajectory = talk.trajectory
    assert trajectory is not None and trajectory.finish == FinishReason.STOP
    assert (trajectory.request.prefix_ids, response_of(trajectory)) == ((1, 2), (3, EOS, 7, 8, 6, EOS, 4, 5, EOS))
    assert turn_numbers_of(trajectory) == (1, 1, -1, -1, 2, 2, 0, 3, 3)
    counts = trajectory.metrics
    assert (trajectory.environment_reward, counts["turns"], counts["tokens"], counts["rewritten"]) == (0.75, 3, 3, 1)


@pytest.mark.parametrize(
    ("limits", "completions", "finish", "response"),
    [
        ({"turns": 1}, [drawn(3, EOS)], FinishReason.TURNS, (3, EOS)),
        ({"turns": 2}, [drawn(3, EOS), drawn(EOS)], FinishReason.TURNS, (3, EOS, 4, 5, EOS)),
        ({"length": 6}, [drawn(3, EOS)], FinishReason.LENGTH, (3, EOS)),  # 2 + 2 drawn + 2 said leave no room
        ({"length": 7}, [drawn(3, EOS), drawn(3)], FinishReason.LENGTH, (3, EOS, 4, 5, 3)),
        (
            {},
            [drawn(3, 3, 3, EOS), drawn(3, 3, finish=FinishReason.LENGTH)],
            FinishReason.LENGTH,
            (3, 3, 3, EOS, 4, 5, 3, 3),
        ),
        ({}, [drawn(3, finish=FinishReason.ABORT)], FinishReason.ABORT, (3,)),
    ],
)
def test_limits_end_it_and_nothing_is_said_behind_the_last_answer(
    limits: Any, completions: Any, finish: FinishReason, response: Any
) -> None:
    talk = conversation(Scripted(*[TokenStep(token_ids=(4, 5))] * 5), **limits)
    for completion in completions:
        talk.receive(completion)
    assert talk.trajectory is not None
    assert (talk.trajectory.finish, response_of(talk.trajectory)) == (finish, response)
    counts = talk.trajectory.metrics
    assert counts["cut_by_tokens"] == float(finish == FinishReason.LENGTH)
    assert counts["cut_by_turns"] == float(finish == FinishReason.TURNS)
    assert (counts["turns"], counts["tokens"]) == (len(completions), response.count(4) + response.count(5))


def test_an_environment_that_raises_fails_its_own_row_and_is_closed() -> None:
    environment = Scripted(TokenStep(token_ids=(4,)), OSError("gone"))
    talk = conversation(environment)
    talk.receive(drawn(3, EOS))
    talk.receive(drawn(EOS))
    assert talk.trajectory is not None
    assert (talk.trajectory.finish, cause_of(talk)) == (FinishReason.FAILED, "OSError: gone")
    assert (response_of(talk.trajectory), environment.closed) == ((3, EOS, 4, EOS), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected token_ids for the policy to answer, or done=True, got neither"),
        ({"done": True, "metrics": {"turns": 1.0}}, "expected another name than 'turns' for a metric"),
        ({"done": True, "metrics": {3: 1.0}}, "expected metrics to map names to numbers, got {3: 1.0}"),
        ({"token_ids": "ab"}, "expected token_ids to be a list, got str 'ab'"),
        ({"rewritten": "ab"}, "expected rewritten to be a list, got str 'ab'"),
        (
            {"rewritten": [1], "token_ids": [2]},
            "expected rewritten without token_ids and done=True, got more: put the whole",
        ),
        (
            {"rewritten": [1], "done": True},
            "expected rewritten without token_ids and done=True, got more: put the whole",
        ),
    ],
)
def test_a_step_says_how_it_goes_on(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenStep(**options)


class Scoring(Scripted):
    """Says at the end what a conversation is worth."""

    def __init__(self, score: Any, *steps: Any) -> None:
        super().__init__(*steps)
        self.score = score

    def reward(self) -> float | None:
        """Return or raise the given score."""
        if isinstance(self.score, Exception):
            raise self.score
        return self.score


@pytest.mark.parametrize(
    ("limits", "finish"),
    [({"turns": 2}, FinishReason.TURNS), ({"length": 9}, FinishReason.LENGTH), ({}, FinishReason.STOP)],
)
def test_a_conversation_that_a_limit_ends_is_worth_what_the_environment_says(limits: Any, finish: FinishReason) -> None:
    go_on = TokenStep(token_ids=(4, 5), reward=0.25)
    last = TokenStep(done=True, reward=0.25) if finish == FinishReason.STOP else go_on
    talk = conversation(Scoring(0.5, go_on, last), **limits)
    talk.receive(drawn(3, EOS))
    talk.receive(drawn(6))
    assert talk.trajectory is not None and talk.trajectory.finish == finish
    cut = 0.0 if finish == FinishReason.STOP else 0.5  # who ends it itself has said its worth
    assert talk.trajectory.environment_reward == 0.5 + cut
    assert [each.reward for each in talk.trajectory.segments if each.sampled] == [0.25, 0.25 + cut]


class Acting(TokenEnvironment):
    """Does what it is told in one of its calls."""

    def __init__(self, **acts: Any) -> None:
        self.acts, self.closed = acts, 0

    def act(self, call: str) -> None:
        """Raises what is an exception, and calls what is not."""
        act = self.acts.get(call)
        if isinstance(act, BaseException):
            raise act
        if act is not None:
            act()

    @override
    def reset(self, row: Any, seed: int) -> Sequence[int]:
        self.act("reset")
        return self.acts.get("prompt", ())

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.act("step")
        return TokenStep(done=True, reward=1.0)

    @override
    def close(self) -> None:
        self.closed += 1
        self.act("close")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit("x"), "GeneratorExit: x"),
    ],
    ids=["exit", "other"],
)
@pytest.mark.parametrize("call", ["made", "reset", "step", "close"])
def test_whatever_an_environment_raises_costs_its_own_row(call: str, error: BaseException, failure: str) -> None:
    made: list[Acting] = []

    def make() -> Acting:
        made.append(Acting(**{call: error}))
        made[-1].act("made")
        return made[-1]

    talk = Conversation(None, wanted(FIRST), ConversationLimits(), again=make)
    talk.begin()
    for _ in range(2):
        if talk.request is not None:
            talk.receive(drawn(EOS))
    assert talk.trajectory is not None and talk.trajectory.environment_reward is None
    assert (talk.trajectory.finish, cause_of(talk)) == (FinishReason.FAILED, failure)
    assert len(made) == 2 and talk.trajectory.metrics["retries"] == 1.0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SIGTERMException()], ids=["interrupt", "termination"])
@pytest.mark.parametrize("call", ["reset", "step", "close"])
def test_what_ends_the_run_is_no_failure_of_an_environment(call: str, error: BaseException) -> None:
    talk = Conversation(Acting(**{call: error}), wanted(FIRST), ConversationLimits())
    with pytest.raises(type(error)):  # noqa: PT012  whichever call it is
        talk.begin()
        talk.receive(drawn(EOS))
    assert talk.trajectory is None


def test_an_environment_edits_a_row_of_its_own() -> None:
    columns, content = {"stock": {"apples": [1, 2]}}, [{"role": "user", "content": "?"}]
    sample = Trajectory(prompt=Prompt(0, (1, 2), content, columns), request=FIRST)

    class Editing(Acting):
        @override
        def reset(self, row: Any, seed: int) -> Sequence[int]:
            row["stock"]["apples"].clear()
            row["prompt"][0]["content"] = "edited"
            row["new"] = 1
            return ()

    Conversation(Editing(), sample, ConversationLimits()).begin()
    assert (columns, content) == ({"stock": {"apples": [1, 2]}}, [{"role": "user", "content": "?"}])


def test_a_message_stays_what_it_was_when_it_was_said() -> None:
    reused: dict[str, Any] = {"role": "tool", "content": ["first"]}
    talk = conversation(Scripted(TokenStep(token_ids=(4,), messages=[reused]), TokenStep(done=True)))
    talk.receive(drawn(EOS))
    reused["content"].append("second")
    talk.receive(drawn(EOS))
    assert talk.trajectory is not None
    assert talk.trajectory.messages == ({"role": "tool", "content": ["first"]},)


def test_a_prompt_that_no_answer_can_follow_fails_with_its_length() -> None:
    talk = Conversation(Acting(prompt=range(2, 9)), wanted(FIRST), ConversationLimits(length=7))
    talk.begin()
    assert talk.request is None and talk.trajectory is not None
    assert (talk.trajectory.finish, talk.trajectory.segments) == (FinishReason.FAILED, ())
    message = "ValueError: expected a prompt of fewer tokens than the context of 7, got 7 by reset"
    assert cause_of(talk) == message
