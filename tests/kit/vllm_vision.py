"""Models that read pictures, of sizes that vLLM's CPU kernels take."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2VLVideoProcessor

from kit.multimodal import tiny_multimodal
from kit.vision import PROCESSORS, picture, vision_model
from kit.vllm_models import VOCABULARY
from lightning_rl.data.pictures import pixels_of
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.processor import attach, processor_of
from lightning_rl.rollout import Rollout
from lightning_rl.samples import PROMPT, Completion, Prompt, Request, SamplingParams, Trajectory

SIZES = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.08}  # far from deterministic: 2.8 of 3.2 nats
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
MERGED = {"out_hidden_size": 128}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # further sizes of text and tower
    "qwen2_5_vl": ({"rope_parameters": ROTARY}, MERGED),
    "qwen3_vl": ({"rope_parameters": {**ROTARY, "mrope_interleaved": True}}, MERGED),
    "gemma3": ({}, {}),
    "llava_next": ({}, {"num_hidden_layers": 3}),
    "idefics3": ({}, {}),
}
CAUSAL = [name for name in FAMILIES if name != "gemma3"]  # within a picture, as vLLM's attention is on a CPU
WHOLE: dict[str, dict[str, Any]] = {  # families without a class of text, and further sizes of their text
    "qwen2_vl": {"rope_parameters": ROTARY},
    "qwen2_5_vl": {"rope_parameters": ROTARY},
    "qwen3_vl": {"rope_parameters": {**ROTARY, "mrope_interleaved": True}},
    "paddleocr_vl": {"rope_parameters": ROTARY},
    "cosmos3_edge": {"rope_parameters": ROTARY},
    "glm_ocr": {"rope_parameters": {**ROTARY, "mrope_section": [4, 4, 0], "partial_rotary_factor": 0.5}},
}
RED, WIDE = picture("red"), picture("blue", (84, 56))


def served_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of a family, float32."""
    text, tower = FAMILIES[family]
    return vision_model(family, seed, text={**SIZES, **text}, tower=tower)


def whole_model(family: str) -> PreTrainedModel:
    """A model with towers of one of :data:`WHOLE`, float32."""
    return tiny_multimodal(family, text={**SIZES, "vocab_size": VOCABULARY, **WHOLE[family]}, tower=MERGED)


def served_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a family, with its processor, which has a part for videos as a real one."""
    processor = PROCESSORS[family]()
    if "qwen" in family:
        processor.video_processor = Qwen2VLVideoProcessor(patch_size=14)
    return attach(processor)


def processor_in(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The processor of a tokenizer."""
    found = processor_of(tokenizer)
    assert found is not None
    return found.processor


def prompts_with_pictures(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Prompts of one picture, of two, of none, and of the first one again."""
    processor = processor_of(tokenizer)
    assert processor is not None
    rows = [[RED], [WIDE, RED], [], [RED], [WIDE]]
    return [
        processor.prompt([pixels_of(each, "picture") for each in row], words, number)
        for number, (row, words) in enumerate(zip(rows, ("what color", "red", "one", "blue", "two"), strict=True))
    ]


def trajectories_of(
    prompts: Sequence[Prompt], temperature: float = 1.0, tokens: int = 12, eos: Sequence[int] = ()
) -> list[Trajectory]:
    """Samples of prompts that have not begun."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=tokens, eos_token_ids=tuple(eos))
    return [
        Trajectory(prompt=prompt, request=Request.of(prompt, sample_id=number, seed=1000 + number, sampling=sampling))
        for number, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def gap(model: PreTrainedModel, samples: Sequence[Trajectory], completions: Sequence[Completion]) -> float:
    """Largest difference between log-probabilities of an engine and those that the policy trains with."""
    rollout = Rollout.of([each.extend(PROMPT, (), answer) for each, answer in zip(samples, completions, strict=True)])
    policy = PolicyModel(model, None, temperature=samples[0].request.sampling.temperature, packed=False)
    drawn = torch.cat([each.logprobs for each in completions if each.logprobs is not None])
    outputs = policy(pack(rollout, packed=False))
    assert outputs.entropy is not None and float(outputs.entropy[rollout.valid_tokens].mean()) > 1
    return float((outputs.logprobs[rollout.valid_tokens] - drawn).abs().max())
