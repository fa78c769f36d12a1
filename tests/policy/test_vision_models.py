"""Models that read pictures: the forward packed, padded and alone, gradients, and placeholders that were sampled."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.support import keep_double
from kit.vision import PROCESSORS, picture, vision_model
from torch import Tensor

from lightning_rl import TransformersEngine
from lightning_rl.data.pictures import pixels_of
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.processor import PictureProcessor
from lightning_rl.policy.text_model import freeze_towers
from lightning_rl.rollout import Rollout, concatenate
from lightning_rl.samples import PROMPT, Completion, FinishReason, Media, Prompt, Request, SamplingParams, Trajectory

PADDED_ALONE = ("qwen3_5", "gemma3")  # linear attention; attention in both directions within a picture
RED, WIDE = picture("red"), picture("blue", (84, 56))
ROWS: list[tuple[int, list[Any], list[int]]] = [  # group, pictures, response
    (0, [RED], [4, 5, 1]),
    (0, [RED], [6, 7, 8, 9, 4, 1]),
    (1, [WIDE, RED], [9, 1]),
    (2, [], [5, 6, 4, 7]),
    (3, [WIDE], [1]),
    (3, [WIDE], [13, 4, 14, 13, 1]),  # sampled placeholders
]


def prompt_of(processor: PictureProcessor, group: int, pictures: Sequence[Any]) -> Prompt:
    pixels = [pixels_of(each, "picture") for each in pictures]
    text = processor.write(pixels, "what color")
    ids: Any = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    media: Media | None = None
    if pixels:
        ids, media = processor.encode(text, pixels, "row")
    return Prompt(group, tuple(ids), text, {}, media=media)


def trajectory(prompt: Prompt, number: int, response: Sequence[int]) -> Trajectory:
    sampling = SamplingParams(eos_token_ids=[1])
    request = Request(prefix_ids=prompt.token_ids, sample_id=number, seed=number, sampling=sampling, media=prompt.media)
    answer = Completion(token_ids=tuple(response), logprobs=None, finish=FinishReason.STOP, version=0)
    return Trajectory(prompt=prompt, request=request).extend(PROMPT, (), answer)


def rollout_of(family: str, rows: Sequence[tuple[int, list[Any], list[int]]] = ROWS) -> Rollout:
    processor = PictureProcessor(PROCESSORS[family]())
    prompts = {group: prompt_of(processor, group, pictures) for group, pictures, _ in rows}
    return Rollout.of([trajectory(prompts[group], number, each) for number, (group, _, each) in enumerate(rows)])


def policy_of(family: str, dtype: torch.dtype = torch.float32, *, packed: bool) -> PolicyModel:
    model = vision_model(family, dtype=dtype)
    freeze_towers(model)
    return PolicyModel(model, None, temperature=1.0, packed=packed)


def logprobs_alone(policy: PolicyModel, rollout: Rollout, row: int) -> Tensor:
    """Log-probabilities of a row by the model's own forward; placeholders in the response are left out of it."""
    one = rollout.select(torch.tensor([row]))
    layout = pack(one, packed=False)
    prompt, length = int(one.prompt_lengths), int(one.response_lengths)
    ids = torch.cat([one.prompt_ids[0, :prompt], one.response_ids[0, :length]])[None]
    items = {name: value.values for name, value in one.prompt_items.items()}
    given = {name.removesuffix("[None]"): value[None] if "[None]" in name else value for name, value in items.items()}
    types = {
        name: torch.cat([value[:, :prompt], torch.zeros(1, length, dtype=torch.int64)], 1)
        for name, value in one.prompt_types.items()
    }
    arguments = given if any(len(value) for value in items.values()) else {}
    types = types if arguments or "token_type_ids" in types else {}
    with torch.no_grad():
        logits = policy.model(input_ids=ids, **arguments, **types, use_cache=False).logits[0, prompt - 1 : -1]
    assert layout.shape[0] == 1
    return logits.log_softmax(-1).gather(1, one.response_ids[0, :length, None])[:, 0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", PROCESSORS)
def test_pictures_give_the_same_log_probabilities_packed_padded_and_alone(family: str, packed: bool) -> None:
    if packed and family in PADDED_ALONE:
        pytest.skip("refused")
    rollout, policy = rollout_of(family), policy_of(family, packed=packed)
    with torch.no_grad():
        found = policy(pack(rollout, packed=packed)).logprobs
    for row in range(5):
        expected = logprobs_alone(policy, rollout, row)
        torch.testing.assert_close(found[row, : len(expected)], expected, atol=1e-5, rtol=0)


def gradient(policy: PolicyModel, parts: Sequence[Rollout]) -> Tensor:
    """Gradient of the sum of log-probabilities, weighted by sample and position, over microbatches."""
    policy.zero_grad()
    for rows in parts:
        logprobs = policy(pack(rows, packed=policy.packed)).logprobs
        weights = torch.sin(rows.sample_ids[:, None].double() * 7 + torch.arange(rows.width) + 1) * rows.valid_tokens
        (logprobs * weights).sum().backward()
    gradients = [part.grad.flatten() for part in policy.parameters() if part.grad is not None]
    assert len(gradients) > 5
    return torch.cat(gradients)


@pytest.mark.parametrize("family", PROCESSORS)
def test_gradients_do_not_depend_on_microbatches_order_or_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_double(monkeypatch)
    rollout = rollout_of(family)
    expected = gradient(policy_of(family, torch.float64, packed=False), [rollout])
    for packed in (False, True):
        if packed and family in PADDED_ALONE:
            continue
        policy = policy_of(family, torch.float64, packed=packed)
        wide = concatenate([rollout, rollout.padding_rows(2)]).fit_width(rollout.width + 3)
        for rows in (
            [[0, 1, 2, 3, 4, 5]],
            [[5, 3], [1, 0], [4, 2]],
            [[4], [2, 3, 1], [0, 5]],
            [[3]] + [[n] for n in (5, 4, 2, 1, 0)],
        ):
            found = gradient(policy, [wide.select(torch.tensor(part)) for part in rows])
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
        with_padding = gradient(policy, [wide])
        torch.testing.assert_close(with_padding, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", PROCESSORS)
def test_a_picture_changes_the_log_probabilities_of_its_rows_alone(family: str) -> None:
    policy, rows = policy_of(family, packed=False), list(ROWS)
    rows[0], rows[1] = (0, [picture("green")], ROWS[0][2]), (0, [picture("green")], ROWS[1][2])
    with torch.no_grad():
        before, after = (policy(pack(rollout_of(family, each), packed=False)).logprobs for each in (ROWS, rows))
    changed = [float((one - other).abs().max()) > 1e-4 for one, other in zip(before, after, strict=True)]
    assert changed == [True, True, False, False, False, False]


def test_a_picture_of_a_group_is_in_the_inputs_once_only_if_it_is_the_same() -> None:
    rollout = rollout_of("qwen2_5_vl")
    media = pack(rollout, packed=True).media
    assert media is not None
    assert len(media.items["image_grid_thw"]) == 4  # RED; WIDE and RED; WIDE
    assert len(rollout.prompt_items["image_grid_thw"].values) == 4
    processor = PictureProcessor(PROCESSORS["qwen2_5_vl"]())
    other = [
        trajectory(prompt_of(processor, 0, [picture(color)]), n, [4, 1]) for n, color in enumerate(["red", "blue"])
    ]
    both = pack(Rollout.of(other), packed=True)
    assert both.shared is None
    assert both.media is not None
    assert len(both.media.items["image_grid_thw"]) == 2


@pytest.mark.parametrize("family", PROCESSORS)
def test_the_embedded_engine_samples_with_pictures_as_training_scores(family: str) -> None:
    rollout, processor = rollout_of(family), PictureProcessor(PROCESSORS[family]())
    policy = policy_of(family, packed=False)
    same_ids = (4, [picture("green")], [4])  # as of RED
    prompts = [prompt_of(processor, group, pictures) for group, pictures, _ in [*ROWS, same_ids]]
    sampling = SamplingParams(max_new_tokens=6, eos_token_ids=[], temperature=1.0)
    requests = [
        Request(prefix_ids=prompt.token_ids, sample_id=number, seed=number, sampling=sampling, media=prompt.media)
        for number, prompt in enumerate(prompts)
    ]
    engine = TransformersEngine()
    engine.start(policy.model, None, device=torch.device("cpu"), dtype=torch.float32)
    engine.load_weights(iter(()), 1)
    drawn = engine.generate(requests, logprobs=True)
    made = [Trajectory(prompt=prompt, request=request) for prompt, request in zip(prompts, requests, strict=True)]
    rows = Rollout.of([each.extend(PROMPT, (), one) for each, one in zip(made, drawn, strict=True)], logprobs=True)
    assert rows.rollout_logprobs is not None
    with torch.no_grad():
        scored = policy(pack(rows, packed=False)).logprobs
    torch.testing.assert_close(rows.rollout_logprobs, scored.to(rows.rollout_logprobs), atol=1e-5, rtol=0)
    assert rollout.prompt_ids.shape[1] == rows.prompt_ids.shape[1]
    assert drawn[0].token_ids != drawn[5].token_ids
