"""Processor of pictures: token ids with placeholders, and the arguments of the model for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rl.policy.media import NEW_AXIS
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Media, Prompt
from lightning_rl.samples.media import join_media, pillow_images

Pixels = UInt8[Tensor, "H W 3"]
PART = {"type": "image"}  # of a message, where its picture stands
PROBE = torch.zeros(56, 56, 3, dtype=torch.uint8)
TEXTURED = torch.randint(256, PROBE.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ATTRIBUTE = "lightning_rl_processor"  # of a tokenizer
DROPPED = ("input_ids", "attention_mask")


def attach(processor: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor of transformers, which has the processor with it from now on.

    Raises:
        ValueError: If the processor has no tokenizer or no image processor.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"expected a processor with a tokenizer and an image processor, got {type(processor).__name__}: pass "
            "AutoProcessor.from_pretrained(...) of a model that reads pictures"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    setattr(tokenizer, ATTRIBUTE, PictureProcessor(processor))
    return tokenizer


def processor_of(tokenizer: PreTrainedTokenizerBase | None) -> "PictureProcessor | None":
    """Return the processor that a tokenizer was attached to; None for a tokenizer alone."""
    return getattr(tokenizer, ATTRIBUTE, None)


@dataclass(frozen=True, eq=False)
class PictureProcessor:
    """Processor of transformers, with the axis of pictures of each of its outputs.

    Args:
        processor: Processor with an image processor, a tokenizer and a chat template.

    Raises:
        ValueError: If an output has an entry neither for each token nor for each picture, or if equal pictures have
            other outputs the second time, or different ones the same; names it.
    """

    processor: Any

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the processor."""
        return self.processor.tokenizer

    def encode(self, text: str, pictures: Sequence[Pixels], name: str) -> tuple[tuple[int, ...], Media]:
        """Return the token ids of a text that the chat template wrote, and the media of its pictures.

        Args:
            text: Text with a placeholder for each picture.
            pictures: Pictures in order.
            name: Name of the row in errors.

        Raises:
            ValueError: If the processor refuses them, or the text has another number of placeholders.
        """
        self.check(text, len(pictures), name)
        output = self._call(text, pictures, name)
        ids = output["input_ids"][0]
        types = {key: output[key][0] for key, axis in self._axes.items() if axis is None}
        items = {
            key + NEW_AXIS * axis: output[key][0] if axis else output[key]
            for key, axis in self._axes.items()
            if axis is not None
        }
        media = Media(
            engine_ids=tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]),
            pictures=tuple(pictures),
            items=items,
            types=types,
            drawn=torch.zeros(len(ids), dtype=torch.bool),
        )
        return tuple(ids.tolist()), media

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Pixels], name: str
    ) -> tuple[tuple[int, ...], Media | None]:
        """Return token ids with as many placeholders as the model needs for each picture, and the media.

        Args:
            token_ids: Token ids with one placeholder for each picture.
            pictures: Pictures in order.
            name: Name of the messages in errors.

        Raises:
            ValueError: If there are more or fewer placeholders than pictures, or the processor refuses a picture.
        """
        mark, place = str(self.processor.image_token), self._placeholder
        if (written := list(token_ids).count(place)) != len(pictures):
            raise ValueError(
                f"expected a chat template that writes {mark} for each picture, got {written} for the {len(pictures)} "
                f"pictures of {name}: set a chat template for pictures"
            )
        if not pictures:
            return tuple(token_ids), None
        ids, parts, rest = list[int](), list[Media](), iter(pictures)
        for is_place, run in groupby(token_ids, key=place.__eq__):
            for part in ([token] for token in run) if is_place else [list(run)]:
                own, media = self.encode(mark, [next(rest)], name) if is_place else (tuple(part), Media.of_text(part))
                ids, parts = [*ids, *own], [*parts, media]
        return tuple(ids), join_media(parts)

    def save(self, folder: Path) -> None:
        """Write the processor; one without a part, such as that of videos, as its tokenizer and image processor."""
        parts = [getattr(self.processor, name, None) for name in self.processor.get_attributes()]
        whole = all(part is not None for part in parts)
        for part in [self.processor] if whole else [part for part in parts if part is not None]:
            part.save_pretrained(folder)

    def check(self, text: str, number: int, name: str) -> None:
        """Check that a text that the chat template wrote has one placeholder for each picture.

        Raises:
            ValueError: If it has more or fewer; names the row.
        """
        mark = getattr(self.processor, "image_token", None)
        if mark is not None and (written := text.count(mark)) != number:
            raise ValueError(
                f"expected a chat template that writes {mark} for each picture, and a text without it, got {written} "
                f"for the {number} pictures of {name}: set a chat template for pictures, or take {mark} out of the text"
            )

    def check_ids(self, token_ids: Sequence[int], name: str) -> None:
        """Check that the token ids of a prompt without pictures have no placeholder of one.

        Raises:
            ValueError: If they have; names the row.
        """
        if self._placeholder in token_ids:
            mark = self.processor.image_token
            raise ValueError(
                f"expected a prompt without {mark}, which stands for a picture, got one in {name}, which has none: "
                "take it out, or give the row its pictures"
            )

    def check_rows(self, rows: Rollout) -> None:
        """Check that rows with a placeholder among the tokens that the policy did not sample have pictures.

        Raises:
            ValueError: If one has none; names its sample.
        """
        prompts, replies = (ids == self._placeholder for ids in (rows.prompt_ids, rows.response_ids))
        for places, items in ((prompts, rows.prompt_items), (replies & ~rows.action_mask, rows.response_items)):
            counts = sum((part.counts for part in items.values()), torch.zeros(len(rows)))
            if (blind := places.any(-1).cpu() & (counts == 0)).any():
                raise ValueError(
                    f"expected pictures in rows with {self.processor.image_token}, which stands for one, got none in "
                    f"{int(blind.sum())} rows (sample {int(rows.sample_ids[blind.nonzero()[0, 0]])}): keep "
                    "prompt_items and response_items with their rows"
                )

    @property
    def _placeholder(self) -> Any:
        """Token id that stands for a picture; -1 without."""
        mark = getattr(self.processor, "image_token", None)
        return -1 if mark is None else self.tokenizer.convert_tokens_to_ids(mark)

    @cached_property
    def _axes(self) -> dict[str, int | None]:
        """Axis along which an output grows with the number of pictures, by its name; None if it grows with tokens."""
        outputs = [self._call(self.write([PROBE] * number), [PROBE] * number, "a probe") for number in (1, 2)]
        self._check_repeats(outputs[0])
        axes = dict[str, int | None]()
        for name in outputs[0].keys() - set(DROPPED):
            sizes = [tuple(output[name].shape) for output in outputs]
            grown = [axis for axis, (one, two) in enumerate(zip(*sizes, strict=True)) if two == 2 * one]
            if sizes == [tuple(output["input_ids"].shape) for output in outputs]:
                axes[name] = None
            elif len(grown) == 1 and grown[0] <= 1:
                axes[name] = grown[0]
            else:
                raise ValueError(
                    f"expected outputs of {type(self.processor).__name__} with entries for each token or picture, got "
                    f"{name} of the shapes {list(sizes[0])} for one picture and {list(sizes[1])} for two: train "
                    "another model"
                )
        return axes

    def _check_repeats(self, dark: Mapping[str, Tensor]) -> None:
        """Check that outputs for a dark and a textured picture differ, and that those for the same one are equal."""
        one, *again = (self._call(self.write([TEXTURED]), [TEXTURED], "a probe") for _ in range(4))
        if any(not torch.equal(one[name], other[name]) for other in again for name in one):
            raise ValueError(
                f"expected {type(self.processor).__name__} to give equal outputs for equal pictures, got others the "
                "second time: change pictures at random before training, in the data"
            )
        if all(torch.equal(one[name], dark[name]) for name in one):
            raise ValueError(
                f"expected {type(self.processor).__name__} to give other outputs for other pictures, got the same: let "
                "it read the pixels of every call"
            )

    def prompt(self, pictures: Sequence[Pixels], words: str = "", index: int = 0) -> Prompt:
        """Return a prompt of pictures and words."""
        text = self.write(pictures, words)
        if not pictures:
            ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return Prompt(index, tuple(ids), text, {})
        ids, media = self.encode(text, pictures, "a probe")
        return Prompt(index, ids, text, {}, media=media)

    def write(self, pictures: Sequence[Any], words: str = "") -> str:
        """Return the text of a chat with some pictures and words."""
        messages: Any = [
            {"role": "user", "content": [*(dict(PART) for _ in pictures), {"type": "text", "text": words}]}
        ]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _call(self, text: str, pictures: Sequence[Pixels], name: str) -> dict[str, Tensor]:
        images = [pillow_images(pictures)]
        try:
            output = self.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
        except Exception as error:
            raise ValueError(
                f"expected pictures that {type(self.processor).__name__} takes, but it refuses {name}: {error}"
            ) from error
        return {key: value for key, value in output.items() if isinstance(value, Tensor)}
