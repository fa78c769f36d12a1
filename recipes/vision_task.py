"""Colors of squares: pictures, processor, reward and policy of the recipe ``vision.py``, built without a download.

A prompt is a picture with one square on gray and ``what color``; the only correct response is the color's name and EOS.
The policy is a Qwen2.5-VL of 0.4 million random weights that has learned to answer with some color, so that one answer
in four is right.
"""

import copy
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, cast

import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLORS = ("red", "green", "blue", "white")
MARKS = ("<start>", "<image>", "<end>", "<video>")
WORDS = ("<pad>", "<eos>", "<unk>", "<user>", "<answer>", "what", "color", *COLORS, *MARKS)
IDS = {word: index for index, word in enumerate(WORDS)}
PATCH = 14  # pixels
SIDE = 8 * PATCH  # of a picture: 16 tokens
QUESTION = "what color"
WARM_START_SEED = 20_000
WARM_START_STEPS, WARM_START_PICTURES = 40, 32
TEMPLATE = (
    "{% for message in messages %}{{ '<answer>' if message.role == 'assistant' else '<user>' }}"
    "{% for part in message.content %}"
    "{{ ' <start> <image> <end>' if part.type == 'image' else ' ' + part.text }}{% endfor %}"
    "{{ ' <eos> ' if message.role == 'assistant' else ' ' }}{% endfor %}{{ '<answer>' if add_generation_prompt }}"
)


class PictureProcessor(Qwen2_5_VLProcessor):
    """Processor of Qwen2.5-VL without videos, for which transformers needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept no processor of videos."""
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def color_processor() -> PictureProcessor:
    """Return the processor of the task: 15 words, and a token for each 28 x 28 pixels."""
    words = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokens = {"image_token": "<image>", "video_token": "<video>"}
    marks = {"vision_bos_token": "<start>", "vision_eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens={**tokens, **marks},
    )  # fmt: skip
    size = {"shortest_edge": 4 * PATCH**2, "longest_edge": SIDE**2}
    pictures = Qwen2VLImageProcessorPil(patch_size=PATCH, size=size)
    return PictureProcessor(pictures, tokenizer, None, chat_template=TEMPLATE)


def color_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return rows with a chat, its picture in the column ``images``, and the color as ``answer``."""
    draw, rows = Random(seed), list[dict[str, Any]]()
    for _ in range(count):
        color, side = draw.choice(COLORS), draw.randint(2 * PATCH, 6 * PATCH)
        left, top = (draw.randint(0, SIDE - side) for _ in "xy")
        picture = Image.new("RGB", (SIDE, SIDE), "gray")
        picture.paste(color, (left, top, left + side, top + side))
        rows.append({"prompt": [{"role": "user", "content": QUESTION}], "images": [picture], "answer": color})
    return rows


def color_named(
    prompts: Sequence[Any],  # noqa: ARG001 - the signature of a reward
    completions: Sequence[Any],
    *,
    answer: Sequence[str],
    **columns: object,  # noqa: ARG001 - the signature of a reward
) -> list[float]:
    """Return 1 for an answer that is the color's name, in any case and with or without a full stop, and 0 otherwise."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(text.strip(" .\n").lower() == color) for text, color in zip(texts, answer, strict=True)]


def untrained_policy(seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a randomly initialized Qwen2.5-VL; global random generators are unchanged."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(WORDS),
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
            "bos_token_id": None,
            "eos_token_id": IDS["<eos>"],
            "pad_token_id": IDS["<pad>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 96,
            "patch_size": PATCH,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.1,
        },
        image_token_id=IDS["<image>"],
        video_token_id=IDS["<video>"],
        vision_start_token_id=IDS["<start>"],
        vision_end_token_id=IDS["<end>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def warm_started_policy(seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a copy of :func:`warm_started`, which is cached."""
    return copy.deepcopy(warm_started(seed))


@cache
def warm_started(seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a policy that answers every picture with some color and EOS."""
    policy, draw, processor = untrained_policy(seed), torch.Generator().manual_seed(seed), cast(Any, color_processor())
    optimizer = AdamW(policy.model.language_model.parameters(), lr=3e-3, weight_decay=0.0)
    rows = color_rows(WARM_START_PICTURES, seed=WARM_START_SEED + seed)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    inputs = processor(text=[text] * len(rows), images=[row["images"] for row in rows], return_tensors="pt")
    inputs.pop("attention_mask")  # the prompts have one length
    question, kinds = inputs.pop("input_ids"), inputs.pop("mm_token_type_ids")
    for _ in range(WARM_START_STEPS):
        colors = torch.randint(IDS[COLORS[0]], IDS[COLORS[-1]] + 1, (len(rows), 1), generator=draw)
        answer = torch.cat([colors, torch.full_like(colors, IDS["<eos>"])], 1)
        ids, types = torch.cat([question, answer], 1), torch.cat([kinds, torch.zeros_like(answer)], 1)
        further = {"mm_token_type_ids": types[:, :-1], "logits_to_keep": 2, "use_cache": False}
        logits = policy(input_ids=ids[:, :-1], **inputs, **further).logits
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), answer.flatten()).backward()
        optimizer.step()
    return policy
