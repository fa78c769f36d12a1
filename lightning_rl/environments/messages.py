"""Adapter from an environment in messages to one in token ids."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_rl.data.pictures import has_open_place, pixels_of, place_pictures
from lightning_rl.environments.chat_template import Bridge, with_callers
from lightning_rl.environments.environment import Action, Environment, StepResult, TokenStep
from lightning_rl.environments.parsing import AnswerParser, truncated_parser
from lightning_rl.environments.validation import check_messages, check_reset, check_step, copy_message, name_of
from lightning_rl.policy.processor import Pixels, processor_of
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import Media, Message
from lightning_rl.samples.prompt import REWRITTEN
from lightning_rl.utils.mutation_guard import copy_plain


class MessageEnvironment:
    """Environment in messages as one in token ids.

    Args:
        environment: Environment in messages.
        bridge: Bridge that renders messages before and between answers.
        parse: Parser of answers.
        schemas: Schemas of the environment's tools.
        prompt: Prompt of the row as messages, for an environment that begins with it.
        pictures: Pictures of these messages.

    Attributes:
        opening_media: Pictures of the first prompt; None without.
        opening_length: Number of messages before the first answer.
        unanswered: Messages that the environment has not answered, for the log of a failure.
    """

    def __init__(
        self,
        environment: Environment,
        bridge: Bridge,
        parse: AnswerParser,
        schemas: Sequence[Any] = (),
        prompt: Sequence[Message] = (),
        pictures: Sequence[Pixels] = (),
    ) -> None:
        self.environment, self._bridge, self._parse = environment, bridge, parse
        self._schemas, self._prompt, self._prefix, self._turn = schemas, prompt, list[int](), 0
        self._pictures = pictures
        self.opening_media: Media | None = None
        self._opening: tuple[Message, ...] = ()
        self.unanswered: tuple[Message, ...] = ()
        self.opening_length = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Return the prompt of the environment's first messages, or of the row's."""
        own = check_reset(self.environment, self.environment.reset(row, seed))
        opening, pictures = self._take_pictures(own, self._pictures) if own else (self._prompt, self._pictures)
        if not opening:
            raise ValueError(
                f"expected {name_of(self.environment)}.reset to return messages for a prompt of token ids, got none: "
                "write the prompts as text, or return messages"
            )
        check_messages(opening, "the row's prompt")
        self._opening = tuple(copy_plain(copy_message(message)) for message in opening)
        self.opening_length = len(self._opening)
        ids, self.opening_media = self._expand(self._bridge.encode(self._opening, self._schemas), pictures)
        self._prefix = list(ids)
        return self._prefix

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Parse a complete answer and return the environment's reply."""
        parse = self._parse
        if finish == FinishReason.LENGTH:
            parse = truncated_parser(parse, self._bridge.tokenizer, self._bridge.close)
        parsed = parse(token_ids, self._prefix, self._schemas)
        answer = dataclasses.replace(parsed, finish=finish, turn=self._turn, token_ids=tuple(token_ids))
        self.unanswered, self._opening = (*self._opening, copy_plain(message_of(answer))), ()
        step: StepResult = check_step(self.environment, self.environment.step(answer))
        self._turn += 1
        placed, pictures = self._take_pictures(step.rewritten or step.messages)
        messages = [copy_plain(copy_message(message)) for message in placed]
        rewritten = self._bridge.encode(messages, self._schemas) if step.rewritten else ()
        replies = with_callers([message_of(answer), *messages])[1:]
        ids = () if step.done or rewritten else self._bridge.after(token_ids, replies)
        media = None
        if rewritten:
            rewritten, media = self._expand(rewritten, pictures)
        elif ids:
            ids, media = self._expand(ids, pictures)
        self._prefix = list(rewritten) or [*self._prefix, *token_ids, *ids]
        marked = [{**message, REWRITTEN: True} for message in messages] if rewritten else messages
        answered, self.unanswered = self.unanswered, ()
        counts = {"tool_calls": float(len(answer.tool_calls)), "parse_errors": float(len(answer.errors))}
        return TokenStep(
            token_ids=ids,
            rewritten=rewritten,
            reward=step.reward,
            done=step.done,
            metrics={**counts, **step.metrics},
            messages=(*answered, *marked),
            media=media,
        )

    def _take_pictures(
        self, messages: Sequence[Message], of_row: Sequence[Pixels] = ()
    ) -> tuple[Sequence[Message], list[Pixels]]:
        """Return messages with places of pictures, and the pictures; places without a picture have those of the row."""
        given = of_row if has_open_place(messages) else ()
        placed, found = place_pictures(messages, given, f"messages of {name_of(self.environment)}")
        names = (f"picture {number} of {name_of(self.environment)}" for number in range(len(found)))
        pairs = zip(found, names, strict=True)
        return placed, [value if isinstance(value, Tensor) else pixels_of(value, name) for value, name in pairs]

    def _expand(self, token_ids: Sequence[int], pictures: Sequence[Pixels]) -> tuple[tuple[int, ...], Media | None]:
        """Return token ids with all placeholders of pictures, and their media."""
        if not pictures:
            return tuple(token_ids), None
        if (processor := processor_of(self._bridge.tokenizer)) is None:
            raise ValueError(
                f"expected messages of text from {name_of(self.environment)}, since the policy reads no pictures, got "
                "a picture: pass tokenizer=AutoProcessor.from_pretrained(...) of the policy"
            )
        return processor.expand(token_ids, pictures, f"messages of {name_of(self.environment)}")

    def reward(self) -> float | None:
        """Return the final reward of a conversation that ends at a limit."""
        return self.environment.reward()

    def close(self) -> None:
        """End the conversation."""
        self.environment.close()


def message_of(answer: Action) -> Message:
    """Return an answer as a chat message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": call.id}),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in answer.tool_calls
        ]
    return message
