"""Pictures of rows: the forms in which data have them, their places in the messages, and pictures that are refused."""

import base64
import io
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, tiny_tokenizer
from kit.vision import PROCESSORS, picture, picture_rows, vision_model
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoProcessor

from lightning_rl import PromptDataModule
from lightning_rl.data import Prompt, PromptDataset
from lightning_rl.data.pictures import pixels_of
from lightning_rl.policy.build import build_tokenizer

RED, BLUE = picture("red"), picture("blue", (84, 56))
ASK, PLACE = {"type": "text", "text": "what color"}, {"type": "image"}
IMAGE, START, WORDS = 13, 14, range(4, 13)


def file_of(made: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    made.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def connect(rows: Any, **options: Any) -> PromptDataset:
    data = PromptDataset(rows, **options)
    data.connect(build_tokenizer(PROCESSORS["qwen2_5_vl"](), "none"), vocabulary=24)
    return data


def prompt_of(row: Any, **options: Any) -> Prompt:
    return connect([row], **options).prompt(0)


def shown(prompt: Prompt) -> list[tuple[int, ...]]:
    """Sizes of the pictures of a prompt and their first colors."""
    assert prompt.media is not None
    return [(*each.shape[:2], *each[0, 0].tolist()) for each in prompt.media.pictures]


@pytest.mark.parametrize(
    ("row", "order"),
    {
        "TRL, one column": ({"prompt": [{"role": "user", "content": "what color"}], "image": RED}, "pw"),
        "TRL, a list": ({"prompt": [{"role": "user", "content": "what color"}], "images": [RED, BLUE]}, "ppw"),
        "verl, tags": (
            {"prompt": [{"role": "user", "content": "red <image> what <image>"}], "images": [RED, BLUE]}, "wpwp",
        ),
        "a text": ({"prompt": "what color", "images": [RED]}, "pw"),
        "parts without a picture": (
            {"prompt": [{"role": "user", "content": [PLACE, ASK, PLACE]}], "images": [RED, BLUE]}, "pwp",
        ),
        "parts with their pictures": (
            {"prompt": [{"role": "user", "content": [ASK, {"type": "image", "image": RED}]}]}, "wp",
        ),
        "OpenAI": (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "FILE"}}, ASK]}]}, "pw",
        ),
    }.values(),
)  # fmt: skip
def test_a_picture_is_where_the_row_has_it(row: Any, order: str, tmp_path: Path) -> None:
    RED.save(tmp_path / "red.png")
    if "FILE" in str(row):
        row["prompt"][0]["content"][0]["image_url"]["url"] = str(tmp_path / "red.png")
    found = prompt_of(row, chat=True)
    assert found.media is not None
    wanted = [(56, 56, 255, 0, 0), (56, 84, 0, 0, 255)][: order.count("p")]
    assert shown(found) == wanted
    pieces, ids = "", list(found.token_ids)
    for token in ids:
        if token == START:
            pieces += "p"
        elif token in WORDS and not pieces.endswith("w"):
            pieces += "w"
    assert pieces == order
    assert sum(token == IMAGE for token in ids) == sum(value[0] * value[1] // 784 for value in wanted)
    assert sum(token == IMAGE for token in found.media.engine_ids) == len(wanted)
    assert found.columns.keys() == row.keys() - {"prompt"}


@pytest.mark.parametrize(
    "form",
    {
        "PIL": lambda _: RED,
        "bytes": lambda _: file_of(RED),
        "a path": lambda folder: folder / "red.png",
        "a text": lambda folder: str(folder / "red.png"),
        "a mapping with bytes": lambda _: {"bytes": file_of(RED), "path": None},
        "a mapping with a path": lambda folder: {"bytes": None, "path": str(folder / "red.png")},
        "a palette": lambda _: RED.convert("P"),
        "transparent": lambda _: RED.convert("RGBA"),
    }.values(),
)
def test_every_form_of_a_picture_gives_its_pixels(form: Any, tmp_path: Path) -> None:
    RED.save(tmp_path / "red.png")
    pixels = pixels_of(form(tmp_path), "a picture")
    assert pixels.shape == (56, 56, 3) and pixels.dtype == torch.uint8
    assert torch.equal(pixels, torch.tensor([255, 0, 0], dtype=torch.uint8).expand(56, 56, 3))


def test_a_picture_is_upright_and_a_transparent_one_is_on_white() -> None:
    tall = Image.new("RGB", (4, 8), "red")
    tall.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned right
    turned = pixels_of(file_of(tall, "PNG", exif=exif), "a picture")
    expected: Tensor = pixels_of(ImageOps.exif_transpose(Image.open(io.BytesIO(file_of(tall, "PNG", exif=exif)))), "it")
    assert turned.shape == (4, 8, 3) and torch.equal(turned, expected)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert pixels_of(clear, "a picture").unique().tolist() == [255]


def test_a_data_set_of_the_hub_has_pictures_as_features(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "what color"}], "images": [each]} for each in (RED, BLUE)]
    features = datasets.Features({
        "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        "images": [datasets.Image()],
    })  # fmt: skip
    table = datasets.Dataset.from_list(rows, features=features)
    assert [shown(each) for each in connect(table).prompts([0, 1])] == [[(56, 56, 255, 0, 0)], [(56, 84, 0, 0, 255)]]


def test_the_fingerprint_of_the_data_covers_the_pixels() -> None:
    rows = [{"prompt": "what color", "images": [RED]}, {"prompt": "red"}]
    other = [{"prompt": "what color", "images": [picture("green")]}, {"prompt": "red"}]
    one, same, changed = (connect(each, chat=True).fingerprint for each in (rows, rows, other))
    assert one == same != changed


BAD: dict[str, tuple[Any, str]] = {
    "no file": ("nowhere.png", "picture 0 of row.* to be a file that exists, got nowhere.png"),
    "an address": ("https://example.com/a.png", "got the address https://example.com/a.png: download it first"),
    "a text file": (b"hello", "to be a picture that Pillow reads, got 5 bytes"),
    "SVG": (b"<?xml version='1.0'?><svg xmlns='x'/>", "got a drawing in SVG: convert it to PNG"),
    "truncated": (file_of(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")[:700], "to be a whole picture"),
    "animated": (
        file_of(RED, "GIF", save_all=True, append_images=[picture("blue")]),
        "to be one picture, got one of 2 frames: save one frame",
    ),
    "CMYK": (RED.convert("CMYK"), r"in RGB, got the mode CMYK of Pillow: convert it, as picture.convert\(\"RGB\"\)"),
    "16 bits": (Image.new("I;16", (56, 56)), "in RGB, got the mode I;16 of Pillow"),
    "huge": (Image.new("1", (9000, 9000)), "of at most 67108864 pixels, got 9000 x 9000: make it smaller"),
    "a number": (5, "to be a file, bytes or a picture of Pillow, got 5"),
    "too flat": (picture("red", (3000, 3)), "pictures that Qwen2_5_VLProcessor takes, but it refuses"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_one_error_before_training_that_names_the_row(name: str) -> None:
    value, message = BAD[name]
    rows = [{"prompt": "what color", "images": [RED]}, {"prompt": "what color", "images": [value]}]
    with pytest.raises(ValueError, match=message.replace("row", "prompt 1")):
        connect(rows, chat=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": [PLACE, ASK]}]}, "got 0 .* for 1 places"),
        ({"prompt": [{"role": "user", "content": [PLACE, ASK]}], "images": [RED, BLUE]}, "got 2 .* for 1 places"),
        ({"prompt": "what <image> color", "images": [RED, BLUE]}, "got 2 .* for 1 places"),
        ({"prompt": "what <image> <image> color", "images": [RED]}, "got 1 .* for 2 places"),
        ({"prompt": "what <image> color"}, "expected a prompt without <image>, which stands for a picture"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "x"}, ASK]}]}, "sound and videos are not"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}, ASK]}]}, "sound and videos are not"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_pictures_or_another_kind_of_part_is_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_of(row, chat=True)


def test_pictures_of_a_text_that_is_no_chat_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for the pictures of prompt 0 .*, got str: pass chat=True"):
        prompt_of({"prompt": "what color", "images": [RED]})


def test_a_processor_without_pictures_or_a_template_without_placeholders_is_refused() -> None:
    processor = PROCESSORS["qwen2_5_vl"]()
    processor.tokenizer.chat_template = (
        "{% for m in messages %}<user>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    data = PromptDataset([{"prompt": "what color", "images": [RED]}], chat=True)
    with pytest.raises(ValueError, match=r"writes <image> for each picture.*got 0 for the 1 pictures of prompt 0"):
        data.connect(build_tokenizer(processor, "none"))
    processor.image_processor = None
    with pytest.raises(ValueError, match="expected a processor with a tokenizer and an image processor"):
        build_tokenizer(processor, "none")


Processor: Any = type(PROCESSORS["qwen2_5_vl"]())


class Jittered(Processor):
    """Adds noise to pixels at every call."""

    number = 0

    def __call__(self, **options: Any) -> Any:  # noqa: D102
        output, self.number = super().__call__(**options), self.number + 1
        return {**output, "pixel_values": output["pixel_values"] + 0.1 * self.number}


class Remembering(Processor):
    """Returns the pixels of the first picture of a size."""

    def __call__(self, **options: Any) -> Any:  # noqa: D102
        output = super().__call__(**options)
        kept: Any = self.__dict__.setdefault("kept", {})
        return {**output, "pixel_values": kept.setdefault(output["pixel_values"].shape, output["pixel_values"])}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Jittered, "equal outputs for equal pictures"), (Remembering, "other outputs for other pictures")],
)
def test_a_processor_that_does_not_give_a_picture_its_own_pixels_is_refused(kind: Any, message: str) -> None:
    known = PROCESSORS["qwen2_5_vl"]()
    processor = kind(known.image_processor, known.tokenizer, None, chat_template=known.chat_template)
    data = PromptDataset(picture_rows(4))
    with pytest.raises(ValueError, match=f"expected {kind.__name__} to give {message}"):
        data.connect(build_tokenizer(processor, "none"))


def test_prompts_beyond_the_limit_are_measured_with_their_pictures() -> None:
    rows = [{"prompt": "red", "images": [picture("red", (side, side))]} for side in (56, 112)]
    data = PromptDataModule(rows, 1, chat=True, max_prompt_tokens=12, too_long="drop")
    data.connect(build_tokenizer(PROCESSORS["qwen2_5_vl"](), "none"), None)
    assert data.pass_length == 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("family", "processor"), [("", "qwen2_5_vl"), ("llava_next", "internvl"), ("gemma3", "qwen3_vl")]
)
def test_a_policy_that_does_not_read_the_pictures_of_its_processor_is_refused(
    family: str, processor: str, packed: bool
) -> None:
    policy = (lambda: vision_model(family)) if family else tiny_policy
    module = tiny_module(policy=policy, tokenizer=PROCESSORS[processor](), packing=packed, eos_token_ids=[1])
    with pytest.raises(ValueError, match="pass the processor of its files as tokenizer="):
        fit(module, data=PromptDataModule(picture_rows(8), 4))


def test_a_policy_that_reads_pictures_is_written_with_its_processor(tmp_path: Path) -> None:
    known, folders = PROCESSORS["gemma3"](), [tmp_path / "given", tmp_path / "written"]
    vision_model("gemma3").save_pretrained(folders[0])
    options: dict[str, Any] = {"tokenizer": known, "packing": False, "eos_token_ids": [1]}
    trained = tiny_module(policy=str(folders[0]), **options)
    fit(trained, data=PromptDataModule(picture_rows(4), 4))
    trained.save_pretrained(folders[1])
    again = tiny_module(policy=str(folders[1]), **{**options, "tokenizer": AutoProcessor.from_pretrained(folders[1])})
    fit(again, data=PromptDataModule(picture_rows(4), 4), max_steps=0)
    weights = (dict(module.required_policy.model.named_parameters()) for module in (trained, again))
    one, two = weights
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_column_of_pictures_is_refused_by_a_policy_of_text() -> None:
    data = PromptDataset([{"prompt": "red", "images": [RED]}])
    with pytest.raises(ValueError, match="the policy reads no pictures, got a picture in prompt 0"):
        data.connect(tiny_tokenizer())
    other = PromptDataset([{"prompt": "red", "image": "python:3.11"}])
    other.connect(tiny_tokenizer())
    assert other.prompt(0).columns == {"image": "python:3.11"}


def base64_of(made: Image.Image) -> str:
    return base64.b64encode(file_of(made)).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(RED)}"}},
        {"type": "image", "path": "red.png"},
        {"type": "image", "url": "red.png"},
    ],
)
def test_parts_as_openai_and_transformers_write_them_have_their_pictures(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RED.save("red.png")
    assert shown(prompt_of({"prompt": [{"role": "user", "content": [part, ASK]}]})) == [(56, 56, 255, 0, 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": [None]}, "got None: leave it out"),
        ({"images": [RED], "image": RED}, "got both: leave one out"),
        ({"image": base64_of(Image.effect_noise((64, 64), 9)) * 20}, "to be a file that exists, got "),
        ({"image": Image.new("I;16", (56, 56))}, "scale its values to 0 to 255, and save 8 bits"),
    ],
)
def test_columns_that_contradict_themselves_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        prompt_of({"prompt": [{"role": "user", "content": "what color"}], **row})
    assert len(str(error.value)) < 600


def test_an_empty_cell_is_no_picture_and_a_prompt_of_text_has_no_placeholder() -> None:
    assert prompt_of({"prompt": [{"role": "user", "content": "what color"}], "image": ""}).media is None
    with pytest.raises(ValueError, match="expected a prompt without <image>, which stands for a picture, got one in"):
        connect([{"prompt": [5, IMAGE, 6]}])


def test_a_picture_that_changes_during_a_run_is_refused() -> None:
    drawn = RED.copy()
    data = connect([{"prompt": [{"role": "user", "content": "what color"}], "images": [drawn]}])
    data.prompt(0)
    drawn.paste("blue", (0, 0, 20, 20))
    with pytest.raises(ValueError, match=r"expected the pictures of prompt 0 .* as they were at the start, got others"):
        data.prompt(0)
