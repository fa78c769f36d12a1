"""Thoughts of a policy: reasoning between tags, in which nothing is a call, and the rest of an answer."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.environments.environment import Action

TAGS = ("<think>", "</think>")
TOKEN_TAGS = (
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)  # of Mistral and Gemma 4, in their vocabularies
HEAD = 8  # tokens at the end of a prompt in which a tag may open a thought


@dataclass(frozen=True, slots=True)
class ThoughtParser(ABC):
    """Base of parsers that takes the thoughts out of an answer before a subclass reads the rest.

    A thought that the prompt began, or whose opening is missing, ends with the first closing tag. A thought that is not
    closed goes to the end of the answer. Tags within a call are text of the call.

    Args:
        tokenizer: Tokenizer of the ids.
    """

    tokenizer: PreTrainedTokenizerBase

    @abstractmethod
    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        """Return the parts of an answer without thoughts."""

    def __call__(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Action:
        """Return the parts of an answer."""
        added = self.tokenizer.get_added_vocab()
        opening, closing = next((tags for tags in TOKEN_TAGS if tags[1] in added), TAGS)
        ids, prefix, said, thoughts = list(token_ids), list(prefix_ids), "", list[str]()
        while ids and self._is_special(ids[-1], opening, closing):
            ids.pop()
        rest, closed, ends = str(self.tokenizer.decode(ids)), closing, list(token_ids[len(ids) :])
        begun = str(self.tokenizer.decode(prefix[-HEAD:])).rstrip().endswith(opening)
        if begun or closing in rest.partition(opening)[0]:
            thought, closed, rest = rest.partition(closing)
            thoughts.append(thought.replace(opening, ""))
            prefix += self._encode(closing) if begun else ()
        while opening in rest:
            before, _, after = rest.partition(opening)
            said += before
            if said.strip() and self.read(self._encode(said), prefix, tools).errors:  # the tag is in a call
                said, rest = said + opening, after
            else:
                thought, closed, rest = after.partition(closing)
                thoughts.append(thought)
        if not thoughts:
            return self.read(token_ids, prefix_ids, tools)
        said += rest
        answer = Action(text="")
        if said.strip():
            answer = self.read(self._encode(said) + (ends if closed else []), prefix, tools)
        reasoning = "\n".join(part for part in map(str.strip, (*thoughts, answer.reasoning or "")) if part)
        text = re.sub(rf"{re.escape(opening)}\s*{re.escape(closing)}", "", answer.text)  # of the prompt
        return replace(answer, text=text.strip(), reasoning=reasoning or None)

    def _is_special(self, token: int, *tags: str) -> bool:
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special and added.content not in tags

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
