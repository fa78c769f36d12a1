"""Pictures that environments and tools return: in the tokens of their turn, in the rollout, and in every later turn."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from kit.support import fit, recorder, tiny_module
from kit.vision import PROCESSORS, WORDS, Camera, picture, vision_model
from torch import Tensor
from typing_extensions import override

from lightning_rl import PromptDataModule, Rollout
from lightning_rl.environments import (
    Action,
    Environment,
    EnvironmentReward,
    Message,
    StepResult,
    ToolCall,
    ToolEnvironment,
)
from lightning_rl.environments.validation import check_messages
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.media import own_arguments
from lightning_rl.policy.text_model import freeze_towers

IMAGE, START = 13, 14
ASK = [{"role": "user", "content": "what color"}]


class Forgetful(Camera):
    """Rewrites the context in its second turn."""

    forgets = True


class Brief(Camera):
    """Ends the conversations of rows with a picture after one answer, without another one."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.turn = 2 if row["images"] else 0
        return ()


def rollout_of(environment: type[Environment], family: str = "qwen2_5_vl", **options: Any) -> Rollout:
    seen: list[Rollout] = []
    module = tiny_module(
        policy=lambda: vision_model(family),
        tokenizer=PROCESSORS[family](),
        environment=environment,
        rewards=EnvironmentReward(),
        max_new_tokens=9,
        max_turn_tokens=3,
        eos_token_ids=[1],
        packing=False,
        group_size=2,
        **options,
    )
    rows = [{"prompt": ASK, "images": [picture("green")] * (place % 2)} for place in range(4)]
    fit(module, callbacks=[recorder(seen)("watch")], data=PromptDataModule(rows, 4), max_steps=1)
    return seen[0]


def alone(family: str, rollout: Rollout, row: int) -> Tensor:
    """Log-probabilities of a row without a rewritten context, by the model's own forward."""
    one = rollout.select(torch.tensor([row]))
    prompt, length = int(one.prompt_lengths), int(one.response_lengths)
    ids = torch.cat([one.prompt_ids[0, :prompt], one.response_ids[0, :length]])[None]
    model = vision_model(family)
    with torch.no_grad():
        own = own_arguments(model.base_model, one)
        logits = model(input_ids=ids, **own, use_cache=False).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(1, one.response_ids[0, :length, None])[:, 0]


@pytest.mark.parametrize("environment", [Camera, Forgetful])
def test_pictures_of_turns_are_read_as_they_were_sampled(environment: type[Environment]) -> None:
    rollout = rollout_of(environment)
    assert rollout.rollout_logprobs is not None and rollout.segments is not None
    counts = rollout.response_items["image_grid_thw"].counts.tolist()
    assert counts == [2] * 8
    placeholders = ((rollout.response_ids == IMAGE) & ~rollout.action_mask).sum(1).tolist()
    assert placeholders == [(84 * 56 + 112 * 56) // 784] * 8
    model = vision_model("qwen2_5_vl")
    freeze_towers(model)
    for packed in (True, False):
        policy = PolicyModel(model, None, temperature=1.0, packed=packed)
        with torch.no_grad():
            scored = policy(pack(rollout, packed=packed)).logprobs
        torch.testing.assert_close(scored, rollout.rollout_logprobs, atol=1e-5, rtol=0)
    if environment is Camera:
        placeholder_free = [
            row for row in range(8) if not (rollout.response_ids[row][rollout.action_mask[row]] == IMAGE).any()
        ]
        assert placeholder_free
        for row in placeholder_free:
            actions = rollout.action_mask[row][: int(rollout.response_lengths[row])]
            expected = alone("qwen2_5_vl", rollout, row)[actions]
            torch.testing.assert_close(
                rollout.rollout_logprobs[row][rollout.action_mask[row]], expected, atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("packed", [True, False])
def test_a_microbatch_reads_the_pictures_of_prompts_where_only_other_rows_have_replies(*, packed: bool) -> None:
    rollout = rollout_of(Brief)
    counts = [items["image_grid_thw"].counts for items in (rollout.prompt_items, rollout.response_items)]
    rows = rollout.select(((counts[0] == 1) & (counts[1] == 0)).nonzero()[:, 0])
    assert len(rows) == 4 and int(counts[1].sum()) == 8 and rows.rollout_logprobs is not None
    model = vision_model("qwen2_5_vl")
    freeze_towers(model)
    with torch.no_grad():
        scored = PolicyModel(model, None, temperature=1.0, packed=packed)(pack(rows, packed=packed)).logprobs
    expected = rows.rollout_logprobs[:, : scored.shape[1]]
    torch.testing.assert_close(scored, expected, atol=1e-5, rtol=0)


def test_a_picture_for_a_policy_of_text_fails_its_conversation() -> None:
    tokenizer = PROCESSORS["qwen2_5_vl"]().tokenizer
    module = tiny_module(
        policy=lambda: vision_model("qwen2_5_vl"),
        tokenizer=tokenizer,
        environment=Camera,
        rewards=EnvironmentReward(),
        eos_token_ids=[1],
    )
    with pytest.raises(Exception, match="since the policy reads no pictures, got a picture"):
        fit(module, data=PromptDataModule([{"prompt": ASK}], 1), max_steps=1)


class Opened(Camera):
    """Begins with the messages of the row, whose pictures are parts without a picture."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, Any]]:
        return row["prompt"]


class Spoken(Camera):
    """Answers with parts that are all text."""

    @override
    def step(self, answer: Action) -> StepResult:
        found = super().step(answer)
        text = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}]
        return found if found.done else StepResult(messages=text)


def test_an_environment_may_begin_with_the_messages_of_its_row() -> None:
    opened, given = rollout_of(Opened), rollout_of(Camera)
    assert torch.equal(opened.prompt_ids, given.prompt_ids)
    for name, items in given.prompt_items.items():
        assert torch.equal(opened.prompt_items[name].values, items.values)


def test_parts_of_text_alone_are_read_as_their_text() -> None:
    rollout = rollout_of(Spoken)
    one, two = WORDS.index("one"), WORDS.index("two")
    assert any([one, two] == row[place : place + 2] for row in rollout.response_ids.tolist() for place in range(8))
    assert not any(int(items.counts.sum()) for items in rollout.response_items.values())


def test_pictures_beside_the_content_of_a_message_are_refused() -> None:
    with pytest.raises(TypeError, match=r'as parts of its content, .* got some in "images"'):
        check_messages([{"role": "user", "content": "what", "images": [picture("red")]}], "E.step")


def test_tools_return_pictures_as_parts() -> None:
    def look(place: str) -> Any:
        """Looks.

        Args:
            place: a place.
        """
        return ["seen", picture("red")] if place == "both" else picture("blue")

    tools = ToolEnvironment([look])
    tools.reset({"prompt": ASK}, 0)
    calls = [ToolCall(name="look", arguments={"place": place}) for place in ("one", "both")]
    one, both = tools.step(Action(text="", tool_calls=calls)).messages
    assert [part["type"] for part in one["content"]] == ["image"]
    assert [part["type"] for part in both["content"]] == ["text", "image"] and both["content"][0]["text"] == "seen"
