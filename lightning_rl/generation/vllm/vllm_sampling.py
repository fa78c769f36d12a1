"""Sampling parameters and finish reasons of vLLM, in process and over HTTP."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from lightning_rl.generation.engine import EngineError
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import Request
from lightning_rl.samples.media import pillow_images

TEMPERATURES = 0.01, 2.0  # vLLM silently raises a lower temperature above 0
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
SCORING: dict[str, Any] = {
    "temperature": 0.0,
    "seed": 0,  # without a seed vLLM's second model runner uses numpy's global generator
    "max_tokens": 1,
    "prompt_logprobs": 0,
    "detokenize": False,
    "skip_reading_prefix_cache": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a vLLM instance."""

    max_length: int  # of prompt and response together
    vocabulary: int  # number of token ids
    has_tokenizer: bool  # can find stop strings
    placeholders: Collection[int] = ()  # token ids that stand for pictures
    max_pictures: int | None  # in a prompt

    def check(self, request: Request) -> None:
        """Raise for a request that vLLM would truncate, change or fail at.

        Raises:
            ValueError: If it does not fit; names the sample and the cure.
        """
        ids, sampling, where = request.prefix_ids, request.sampling, f"for sample {request.sample_id}"
        if len(ids) + sampling.max_new_tokens > self.max_length:
            raise ValueError(
                f"expected prompt and response within {self.max_length} tokens, got {len(ids)} + "
                f"{sampling.max_new_tokens} {where}: raise max_model_len or lower max_new_tokens"
            )
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ValueError(f"expected token ids in [0, {self.vocabulary}), got {min(ids)}..{max(ids)} {where}")
        lowest, highest = TEMPERATURES
        if sampling.temperature > 0 and not lowest <= sampling.temperature <= highest:
            raise ValueError(
                f"expected temperature 0 or within [{lowest:g}, {highest:g}], got {sampling.temperature} {where}"
            )
        pictures = 0 if request.media is None else len(request.media.pictures)
        if pictures > (self.max_pictures or 0):
            raise ValueError(
                f'expected at most {self.max_pictures} pictures, the limit_mm_per_prompt["image"] of vLLM, got '
                f"{pictures} {where}: raise it, or shorten the row or conversation"
            )
        if not 0 <= request.seed < 2**31:
            raise ValueError(f"expected a seed of 31 bits, got {request.seed} {where}")
        if sampling.stop and not self.has_tokenizer:
            raise ValueError(
                "expected a tokenizer, because stop strings need one: pass tokenizer= to the module, and the same to "
                "every server"
            )

    def reads(self, request: Request, prompt_ids: Sequence[int]) -> bool:
        """Return True if vLLM read the request's prefix; False if it replaced sampled tokens.

        It takes a sampled placeholder for a picture, and merges newlines of Gemma 3.

        Args:
            request: Request.
            prompt_ids: Token ids of the prompt as vLLM read it, with as many placeholders as pictures need.

        Raises:
            EngineError: If it read another prompt.
        """
        if tuple(prompt_ids) == request.prefix_ids:
            return True
        where, media = f"for sample {request.sample_id}", request.media
        if media is None:
            raise EngineError(f"expected vLLM to answer the prompt of the request, got another one {where}")
        sent = list(zip(request.prefix_ids, media.drawn.tolist(), strict=True))
        numbers = [sum(token in self.placeholders for token in ids) for ids in (request.prefix_ids, prompt_ids)]
        pattern = "".join("*" if own else chr(256 + token) for token, own in sent)  # beyond characters with a meaning
        text = "".join(chr(256 + token) for token in prompt_ids)
        rewritten = numbers[0] == numbers[1] and re.match(translate(pattern), text)
        if rewritten or any(own and token in self.placeholders for token, own in sent):
            return False
        raise EngineError(
            f"expected vLLM to read {len(sent)} tokens with {numbers[0]} placeholders for {len(media.pictures)} "
            f"pictures, as the trainer's processor writes them, got {len(prompt_ids)} with {numbers[1]} {where}: serve "
            "the model with the trainer's processor, of the same files and versions"
        )


def check_pictures(limit: int | None, where: str) -> None:
    """Raise ValueError if vLLM reads no pictures, or not as the policy does; ``limit`` is its number in a prompt."""
    if limit is None:
        raise ValueError(
            f"expected {where} to attend in both directions within a picture, as the policy does, got vLLM's attention "
            "on a CPU, which is causal: use a GPU, or engine=TransformersEngine()"
        )
    if limit == 0:
        raise ValueError(f"expected {where} to take pictures, got a limit of 0: remove the option that sets it")


def prompt_of(request: Request) -> dict[str, Any]:
    """Return the prompt of a request as vLLM takes it, with pictures, whose placeholders it repeats itself."""
    media = request.media
    if media is None:
        return {"prompt_token_ids": list(request.prefix_ids)}
    return {
        "prompt_token_ids": list(media.engine_ids),
        "multi_modal_data": {"image": pillow_images(media.pictures)},
    }


def pictures_of(request: Request) -> dict[str, Any]:
    """Return the entries of a request over HTTP for its pictures, with which vLLM returns the prompt that it read."""
    if request.media is None:
        return {}
    parts = [{"type": "image_url", "url": url} for url in request.media.data_urls]
    return {"token_ids": list(request.media.engine_ids), "content_parts": parts, "return_token_ids": True}


def parameters_of(request: Request, *, logprobs: bool) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a request, with a value for every one whose default could differ."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.seed,
        "max_tokens": sampling.max_new_tokens,
        "ignore_eos": True,  # vLLM's EOS ids; the request's are stop_token_ids, with and without a tokenizer
        "stop_token_ids": list(request.eos_token_ids),
        "stop": list(sampling.stop) or None,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0 if logprobs else None,
    }


def bounded_parameters(parameters: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return equivalent parameters that vLLM accepts with ``return_sampling_mask``: temperature and top-k above 0.

    Top-k of the whole vocabulary keeps every token. A greedy response is sampled with top-k 1, so its
    log-probabilities are 0 and its masks have one token.

    Example:
        >>> bounded_parameters({"temperature": 0.7, "top_k": 0, "top_p": 0.9}, 32)
        {'temperature': 0.7, 'top_k': 32, 'top_p': 0.9}
        >>> bounded_parameters({"temperature": 0.0, "max_tokens": 1}, 32)
        {'temperature': 1.0, 'max_tokens': 1, 'top_k': 1, 'top_p': 1.0, 'min_p': 0.0}
    """
    if parameters["temperature"] == 0:
        return {**parameters, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    return {**parameters, "top_k": parameters["top_k"] or vocabulary}


def finish_of(
    request: Request, token_ids: Sequence[int], finish_reason: str, stop_reason: str | int | None
) -> FinishReason:
    """Return the finish reason, after comparing vLLM's with the last token.

    Raises:
        RuntimeError: If it stopped for an id or a string that the request did not name.
    """
    finish = FINISH[finish_reason]
    ends, stop = bool(token_ids) and token_ids[-1] in request.eos_token_ids, request.sampling.stop
    if finish is FinishReason.STOP and not ends and stop_reason not in stop:
        raise RuntimeError(
            f"expected sample {request.sample_id} to stop for an id in {list(request.eos_token_ids)} or a string in "
            f"{list(stop)}, got {stop_reason!r} after {list(token_ids[-1:])}"
        )
    return finish
