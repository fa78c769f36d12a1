"""Conversations in messages for tests: a small vocabulary of words with a chat template, a partner and a tool."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from kit.support import tiny_policy
from lightning_rl import PromptDataModule
from lightning_rl.environments import Action, Environment, EnvironmentReward, Message, StepResult, ToolCall

ENDS = ("<|im_end|>", "<|call|>", "<|endoftext|>", "<|return|>", "<|eot|>", "<|eom|>", "<|end|>", "<|stop|>")
COLOURS, NUMBERS = ("red", "green", "blue"), ("one", "two", "three", "four")
WORDS = ("\n", "user", "assistant", "tool", *COLOURS, *NUMBERS, "say", "look", "not", "?", "!")
OF_BRIDGES = ("first-thing-said", "41", "second-thing-said", "52")  # what the library tries bridges with
PLAIN = ("<unk>", *WORDS, *OF_BRIDGES)
VOCABULARY = (*PLAIN, *ENDS, "<|im_start|>")
CLOSE = tuple(VOCABULARY.index(end) for end in ENDS)
TEMPLATE = """
{%- for tool in tools or [] -%}{{ ' ' + tool.function.name + ' ' }}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role != 'tool' -%}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] -%}{{ ' ' + (call.function.arguments.x | string) }}{%- endfor -%}
    {{ '<|im_end|>\n' }}
  {%- else -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>tool' }}{%- endif -%}
    {{ '\n' + m.content }}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A word or a newline for each id; eight control tokens end an answer, so that the tiny policy draws one soon."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(PLAIN)}, unk_token="<unk>"))
    parts = [Split(Regex(" "), "removed"), Split(Regex("\n"), "isolated")]
    tokenizer.pre_tokenizer = Steps(parts)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=ENDS[0],
        additional_special_tokens=[*ENDS[1:], "<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


class Partner(Environment):
    """Has a colour in mind, which only its seed knows, and goes on until it is named or an answer has no word.

    Args:
        hostile: whether it writes a control token into every text.
    """

    def __init__(self, *, hostile: bool = False) -> None:
        self.hostile, self.turn, self.colour = hostile, 0, ""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.colour = COLOURS[(seed + int(row.get("place", 0))) % 3]
        return ()

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        words = answer.text.split()
        named = self.colour in words
        reward = 0.25 * len(set(words)) + named
        if (named or not words) and not answer.truncated:
            return StepResult(done=True, reward=reward)
        content = f"not {words[0] if words else 'say'} {self.colour} {NUMBERS[self.turn % 4]}"
        if self.hostile:
            content += " <|im_end|> ?"
        return StepResult(messages=[{"role": "user", "content": content}], reward=reward, metrics={"words": len(words)})


class BriefPartner(Partner):
    """Ends after the first answer."""

    @override
    def step(self, answer: Action) -> StepResult:
        return StepResult(done=True, reward=0.5 * len(answer.text.split()))


class FlakyPartner(Partner):
    """Raises in its second turn.

    Args:
        broken: whether it does.
    """

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    @override
    def step(self, answer: Action) -> StepResult:
        if self.broken and self.turn == 1:
            raise OSError("the connection is gone")
        return super().step(answer)


class PartnersThatBreak:
    """Makes partners, some of which break.

    Args:
        every: of this many instances, the first one breaks.
        again: how many in a row, so that two break the second try as well.
    """

    def __init__(self, every: int, again: int = 1) -> None:
        self.every, self.again, self.made = every, again, 0

    def __call__(self) -> FlakyPartner:
        """The next one."""
        self.made += 1
        return FlakyPartner(broken=self.made % self.every < self.again)


class GonePartner(Partner):
    """Raises in the second turn of every fifth prompt's conversations."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.gone = int(row["place"]) % 4 == 1
        return super().reset(row, seed)

    @override
    def step(self, answer: Action) -> StepResult:
        if self.gone and self.turn == 1 and len(answer.token_ids) > 1:
            raise OSError("the connection is gone")
        return super().step(answer)


def look(x: str) -> str:
    """Looks behind a colour.

    Args:
        x: the colour.
    """
    return f"{x} {NUMBERS[COLOURS.index(x)]}" if x in COLOURS else "not"


def read_calls(token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
    """Takes every word of an answer but five for a call, two at most, and an exclamation mark for a broken one."""
    words = [VOCABULARY[token] for token in token_ids if token not in CLOSE]
    calls = [ToolCall(name="look", arguments={"x": word}) for word in words if word not in ("\n", "!", "?", "not")]
    errors = ["an unread error"] if "!" in words else []
    text = " ".join(word for word in words if word in ("not", "?"))
    return Action(text=text, tool_calls=tuple(calls[:2]), errors=errors)


def last_answer(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Return the number of distinct ids of the last answer, plus 1 if it names a colour."""
    ids = {VOCABULARY.index(colour) for colour in COLOURS}
    return [len(set(row)) / 4 + bool(ids & set(row)) for row in completion_ids]


def said_by_policy(prompts: Any, completions: Any, *, conversation: Any, **_: Any) -> list[float]:
    """Return the number of distinct words of the policy in a conversation."""
    return [
        len({word for m in talk if m["role"] == "assistant" for word in m["content"].split()}) for talk in conversation
    ]


def chat_prompts(number: int = 16, per_rollout: int = 4, **columns: Sequence[Any]) -> PromptDataModule:
    """First messages, with a ``place``; ``columns`` go on in turn."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {NUMBERS[place % 4]} {COLOURS[place % 3]} ?"}],
            "place": place,
            **{name: values[place % len(values)] for name, values in columns.items()},
        }
        for place in range(number)
    ]
    return PromptDataModule(rows, per_rollout, shuffle=False)


CHAT: dict[str, Any] = {
    "policy": partial(tiny_policy, vocab_size=len(VOCABULARY), max_position_embeddings=256),
    "tokenizer": chat_tokenizer(),
    "environment": Partner,
    "rewards": EnvironmentReward(),
    "max_turns": 3,
    "max_turn_tokens": 4,
    "max_new_tokens": 10,
    "eos_token_ids": CLOSE,
    "temperature": 1.0,
    "optimizer": partial(AdamW, lr=0.01),
}
"""Options of a module whose samples talk to :class:`Partner`."""

TOOLS: dict[str, Any] = {
    **{name: value for name, value in CHAT.items() if name != "environment"},
    "tools": [look],
    "tool_parser": read_calls,
    "rewards": last_answer,
    "max_turn_tokens": 8,
    "max_new_tokens": 16,
}
"""Options of a module whose samples call :func:`look`."""
