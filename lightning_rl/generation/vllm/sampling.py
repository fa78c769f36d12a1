"""What a request may ask of vLLM, how it is put, and why a response ended: in this process and over HTTP alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.generation.engine import Request
from lightning_rl.rollout import Finish

COLDEST = 0.01  # vLLM raises a temperature between 0 and this to this, without a word
FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
SCORING: dict[str, Any] = {
    "temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "skip_reading_prefix_cache": True,
}  # fmt: skip
CACHING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False, "ignore_eos": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a vLLM takes.

    Args:
        tokens: most of prompt and response together.
        vocabulary: number of token ids.
        speaks: whether it has a tokenizer.
    """

    tokens: int
    vocabulary: int
    speaks: bool

    def check(self, request: Request) -> None:
        """Refuses what vLLM would cut, change or fail at.

        Raises:
            ValueError: naming the sample and what to change.
        """
        ids, where = request.prefix_ids, f"for sample {request.sample_id}"
        if len(ids) + request.max_new_tokens > self.tokens:
            raise ValueError(
                f"expected prompt and response within {self.tokens} tokens, got {len(ids)} + {request.max_new_tokens} "
                f"{where}: raise max_model_len or lower max_new_tokens"
            )
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ValueError(f"expected token ids in [0, {self.vocabulary}), got {min(ids)}..{max(ids)} {where}")
        if 0 < request.temperature < COLDEST:
            raise ValueError(f"expected temperature 0 or at least {COLDEST}, got {request.temperature} {where}")
        if not 0 <= request.seed < 2**31:
            raise ValueError(f"expected a seed of 31 bits, got {request.seed} {where}")
        if request.stop and not self.speaks:
            raise ValueError(
                "expected a tokenizer, because stop strings need one: pass tokenizer= to the module, and the same to "
                "every server"
            )


def sampling(request: Request, *, logprobs: bool) -> dict[str, Any]:
    """VLLM's sampling parameters of a request, every one that its defaults could turn into something else."""
    return {
        "temperature": request.temperature,
        "top_k": request.keep.top_k,
        "top_p": request.keep.top_p,
        "min_p": request.keep.min_p,
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "ignore_eos": True,  # vLLM's idea of EOS; ours are the stop tokens, with a tokenizer and without
        "stop_token_ids": sorted(request.eos_ids),
        "stop": list(request.stop) or None,
        "detokenize": bool(request.stop),
        "skip_special_tokens": False,
        "logprobs": 0 if logprobs else None,
    }


def finish_of(request: Request, token_ids: Sequence[int], finish_reason: str, stop_reason: str | int | None) -> Finish:
    """VLLM's reason, held against what the last token says.

    Raises:
        RuntimeError: if it stopped for something that the request did not name.
    """
    finish = FINISH[finish_reason]
    said = token_ids[-1] in request.eos_ids if token_ids else False
    if finish is Finish.STOP and not said and stop_reason not in request.stop:
        raise RuntimeError(
            f"expected sample {request.sample_id} to stop for an id in {sorted(request.eos_ids)} or a string in "
            f"{list(request.stop)}, got {stop_reason!r} after {list(token_ids[-1:])}"
        )
    return finish
