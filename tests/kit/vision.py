"""Tiny models that read pictures, with random weights, and their processors, which need Pillow alone."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typing_extensions import override

from kit.multimodal import tiny_multimodal
from lightning_rl.environments import Action, Environment, StepResult

WORDS = [
    "<unk>",
    "<eos>",
    "<user>",
    "<answer>",
    "red",
    "green",
    "blue",
    "white",
    "what",
    "color",
    "one",
    "two",
    "three",
]
MARKS = ["<image>", "<start>", "<end>", "<video>", "<row>", "<global>"]
WORDS_AND_MARKS = [*WORDS, *MARKS, "\n", "\n\n", "\n\n\n", "\n\n\n\n"]  # vLLM needs them for Gemma 3
VOCABULARY = 24
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role != 'assistant' else '<answer>' }}"
    "{% if m.content is string %} {{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %} IMAGE{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def vision_tokenizer(written: str = "<image>", **marks: str) -> PreTrainedTokenizerFast:
    """Tokenizer of words with marks of pictures; ``written`` stands for a picture in the chat template."""
    words = {word: number for number, word in enumerate(WORDS_AND_MARKS)}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Steps([Split(" ", "removed"), Split("\n", "isolated")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>", extra_special_tokens=marks
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<answer>", *MARKS]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", written)
    return tokenizer


def without_video(kind: type) -> type:
    """Class of processors without one of videos, which would need torchvision."""

    def check(self: Any, name: str, argument: Any) -> type:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def pil_processor(family: str, name: str, **options: Any) -> Any:
    return getattr(import_module(f"transformers.models.{family}.image_processing_pil_{family}"), name)(**options)


def processor_class(family: str, name: str) -> Any:
    return without_video(getattr(import_module(f"transformers.models.{family}.processing_{family}"), name))


def qwen(family: str, name: str, patch: int) -> Any:
    sizes = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
    images = pil_processor("qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=patch, size=sizes)
    tokenizer = vision_tokenizer(
        "<start><image><end>",
        image_token="<image>",
        video_token="<video>",
        vision_bos_token="<start>",
        vision_eos_token="<end>",
    )
    return processor_class(family, name)(images, tokenizer, None, chat_template=tokenizer.chat_template)


def qwen2_5_vl() -> Any:
    return qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", 14)


def qwen3_vl() -> Any:
    return qwen("qwen3_vl", "Qwen3VLProcessor", 14)


def gemma3() -> Any:
    tokenizer = vision_tokenizer("<start>", image_token="<image>", boi_token="<start>", eoi_token="<end>")
    images = pil_processor("gemma3", "Gemma3ImageProcessorPil", size={"height": 56, "width": 56})
    return processor_class("gemma3", "Gemma3Processor")(images, tokenizer, tokenizer.chat_template, image_seq_length=4)


def llava_next() -> Any:
    tokenizer = vision_tokenizer("<image>", image_token="<image>")
    images = pil_processor(
        "llava_next",
        "LlavaNextImageProcessorPil",
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=PINPOINTS,
    )
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return processor_class("llava_next", "LlavaNextProcessor")(
        images, tokenizer, chat_template=tokenizer.chat_template, **options
    )


def internvl() -> Any:
    marks = {
        "start_image_token": "<start>",
        "end_image_token": "<end>",
        "context_image_token": "<image>",
        "video_token": "<video>",
    }
    tokenizer = vision_tokenizer("<image>", **marks)
    images = pil_processor("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28}, max_patches=3)
    return processor_class("internvl", "InternVLProcessor")(
        images, tokenizer, None, image_seq_length=1, chat_template=tokenizer.chat_template
    )


def idefics3() -> Any:
    tokenizer = vision_tokenizer("<image>", image_token="<image>")
    images = pil_processor(
        "idefics3", "Idefics3ImageProcessorPil", size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return processor_class("idefics3", "Idefics3Processor")(
        images, tokenizer, image_seq_len=1, chat_template=tokenizer.chat_template
    )


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "gemma3": gemma3,
    "llava_next": llava_next,
    "internvl": internvl,
    "idefics3": idefics3,
}


TOKENS = {  # of configurations, where their names begin like this
    "image": WORDS_AND_MARKS.index("<image>"),
    "video": WORDS_AND_MARKS.index("<video>"),
    "vision_start": WORDS_AND_MARKS.index("<start>"),
    "vision_end": WORDS_AND_MARKS.index("<end>"),
    "boi": WORDS_AND_MARKS.index("<start>"),
    "eoi": WORDS_AND_MARKS.index("<end>"),
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 14},
    "qwen3_5": {"patch_size": 14},
    "gemma3": {"image_size": 56, "patch_size": 14},
    "llava_next": {"image_size": 28, "patch_size": 14},
    "internvl": {"image_size": [28, 28], "patch_size": [14, 14]},
    "idefics3": {"image_size": 28, "patch_size": 14},
}
TOPS: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "llava_next": {"image_grid_pinpoints": PINPOINTS},
    "internvl": {"image_seq_length": 1},
    "idefics3": {"scale_factor": 2},
}


def vision_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, *, text: Any = None, tower: Any = None
) -> PreTrainedModel:
    """A model of a family for pictures of its processor, far from uniform; ``text`` and ``tower`` are further sizes."""
    towers, top = {**TOWERS.get(family, {}), **(tower or {})}, TOPS.get(family, {})
    model = tiny_multimodal(family, seed, tokens=TOKENS, text={**TEXT, **(text or {})}, tower=towers, top=top)
    torch.nn.Module.to(model, dtype)
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # as the projector of Gemma 3
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=dtype)
    return model


def picture_rows(number: int) -> list[dict[str, Any]]:
    """Rows with no picture, one or two."""
    words = ("what color", "red", "one two three")
    colors = ("red", "green", "blue", "white")
    return [
        {
            "prompt": [{"role": "user", "content": words[place % 3]}],
            "images": [picture(colors[(place + n) % 4], (56 + 28 * n, 56)) for n in range(place % 3)],
        }
        for place in range(number)
    ]


def picture(color: str = "red", size: tuple[int, int] = (56, 56)) -> Image.Image:
    """A picture of one color."""
    return Image.new("RGB", size, color)


class Camera(Environment):
    """Shows a picture after each answer, three times, and from the second on in a rewritten context if ``forgets``."""

    forgets = False

    def __init__(self) -> None:
        self.turn = 0

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        if self.turn == 3:
            return StepResult(done=True, reward=float(len(answer.text) % 2))
        shown = picture(("red", "blue")[self.turn % 2], (56 + 28 * self.turn, 56))
        content: list[Any] = [{"type": "text", "text": "one"}, {"type": "image", "image": shown}]
        message = {"role": "user", "content": content}
        if self.forgets and self.turn == 2:
            return StepResult(rewritten=[message])
        return StepResult(messages=[message])
