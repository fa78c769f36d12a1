"""Environments in messages: their record, also if messages are used again, contexts rewritten, or a call fails."""

from collections.abc import Mapping, Sequence
from typing import Any

from environments.templates import close_of, tokenizer_of
from kit.conversations import response_of, wanted
from typing_extensions import override

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.environments import (
    Action,
    Bridge,
    Conversation,
    ConversationLimits,
    Environment,
    Message,
    StepResult,
)
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.parsing import plain_text
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Completion, Request
from lightning_rl.samples import Trajectory

TOKENIZER = tokenizer_of("qwen2.5")


class Reusing(Environment):
    """Says everything with the same dict; fails at its third answer."""

    def __init__(self) -> None:
        self.message, self.turn = {"role": "user", "content": "0"}, 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return [self.message]

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        if self.turn == 3:
            raise OSError("gone")
        self.message["content"] = str(self.turn)
        return StepResult(messages=[self.message])


def held(environment: Environment, *answers: str) -> tuple[list[str], Trajectory]:
    """Return the prefix of each turn as text, and the trajectory of a conversation with the given answers."""
    bridge = Bridge(TOKENIZER, close_of("qwen2.5"))
    sampling = SamplingParams(max_new_tokens=99, eos_token_ids=sorted(close_of("qwen2.5")))
    first = Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=sampling)
    partner = MessageEnvironment(environment, bridge, plain_text(TOKENIZER))
    talk = Conversation(partner, wanted(first), ConversationLimits())
    talk.begin()
    prefixes: list[str] = []
    for answer in answers:
        assert talk.request is not None
        prefixes.append(TOKENIZER.decode(talk.request.prefix_ids))
        ids = tuple(TOKENIZER(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"])
        talk.receive(Completion(token_ids=ids, logprobs=None, finish=FinishReason.STOP, version=0))
    assert talk.trajectory is not None
    return prefixes, talk.trajectory


def test_the_record_has_the_messages_of_the_row_up_to_an_unanswered_answer() -> None:
    _, trajectory = held(Reusing(), *"abc")
    assert trajectory.failure is not None and trajectory.failure.cause == "OSError: gone"
    said = [(message["role"], message["content"]) for message in trajectory.messages]
    assert said == list(zip(("user", "assistant") * 3, "0a1b2c", strict=True))
    whole = TOKENIZER.decode([*trajectory.request.prefix_ids, *response_of(trajectory)])
    places = [whole.index(f"{role}\n{content}<|im_end|>") for role, content in said]
    assert places == sorted(places)


class Summing(Reusing):
    """Sums up what was said before its second question."""

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(done=True)
        summary = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"so far: {answer.text}"}]
        return StepResult(rewritten=summary)


def test_a_rewritten_context_is_rendered_as_a_first_prompt() -> None:
    prefixes, trajectory = held(Summing(), "abc", "abc")
    assert prefixes[1] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nso far: abc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.messages == (
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": "abc"},
        {"role": "system", "content": "be brief", "rewritten": True},
        {"role": "user", "content": "so far: abc", "rewritten": True},
        {"role": "assistant", "content": "abc"},
    )


class Unclosable(Reusing):
    """Has something to close only once it was reset; can be made once."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1

    @override
    def close(self) -> None:
        raise AttributeError("nothing to close")


def test_an_environment_that_was_never_reset_need_not_be_able_to_close() -> None:
    environments = Environments(
        factories={"environment": Unclosable}, tokenizer=TOKENIZER, close=frozenset(close_of("qwen2.5"))
    )
    environments.check()
    made = Unclosable.made
    first = Request(prefix_ids=(1,), sample_id=0, seed=0, sampling=SamplingParams(eos_token_ids=[1]))
    conversation = environments.open(wanted(first))
    assert isinstance(conversation, Conversation)
    assert Unclosable.made == made, "it is made when its conversation begins, which fails alone if it cannot be"
    conversation.begin()
    assert Unclosable.made == made + 1 and conversation.request is not None
