"""Tokens per second of three ways to generate the same requests: vLLM, the embedded engine, and ``model.generate``.

    python benchmarks/generation.py

Lengths are equal, or skewed as those of a reasoning model are: most responses short, a few as long as allowed. They
interleave, so that another load on the machine hits all three, and only sampled tokens count. vLLM takes part where it
is installed (``.venv-vllm``). There is no bound: at this size on a CPU all three do about the same work.
"""

import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lightning_rl import Engine, Sampling, TransformersEngine, VLLMEngine
from lightning_rl.generation import Request

ROWS, PROMPT, LONGEST, VOCABULARY, RUNS = 64, 16, 96, 512, 7
Generate = Callable[[Sequence[Request]], int]


def a_model() -> PreTrainedModel:
    """A Llama of 1.7 M parameters in four layers; nobody has trained it, so no response ends by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=PROMPT + LONGEST,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def the_requests(lengths: Sequence[int]) -> list[Request]:
    """One request for each length, with prompts of their own."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(VOCABULARY, (len(lengths), PROMPT), generator=draw).tolist()
    return [
        Request(
            prefix_ids=tuple(prompt),
            sample_id=n,
            seed=n,
            sampling=Sampling(max_new_tokens=length, eos_token_ids=()),
        )
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def skewed(rows: int) -> list[int]:
    """Lengths of which the middle one is an eighth of the longest."""
    draw = torch.Generator().manual_seed(2)
    return [
        min(LONGEST, max(1, round(LONGEST / 8 * float(factor.exp())))) for factor in torch.randn(rows, generator=draw)
    ]


def by_engine(engine: Engine, model: PreTrainedModel) -> Generate:
    """With log-probabilities, as a run asks for them."""
    engine.start(model, None)
    engine.expect(model.named_parameters())
    engine.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), 0)
    return lambda requests: sum(len(drawn.token_ids) for drawn in engine.generate(requests, logprobs=True))


def by_generate(model: PreTrainedModel) -> Generate:
    """Every row runs as long as the longest, because a batch has one limit; tokens beyond a row's own do not count."""

    def generate(requests: Sequence[Request]) -> int:
        ids: Tensor = torch.tensor([request.prefix_ids for request in requests])
        most = max(request.sampling.max_new_tokens for request in requests)
        options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=most, pad_token_id=0)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)  # pyright: ignore[reportCallIssue]
        return sum(request.sampling.max_new_tokens for request in requests)

    return generate


def rates(ways: dict[str, Generate], requests: Sequence[Request]) -> dict[str, float]:
    """Median tokens per second of each way, over interleaved runs after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = sum(request.sampling.max_new_tokens for request in requests)
    for _ in range(RUNS + 1):
        for name, generate in ways.items():
            begin = time.perf_counter()
            found = generate(requests)
            seconds[name].append(time.perf_counter() - begin)
            if found != tokens:
                raise RuntimeError(f"expected {tokens} tokens from {name}, got {found}")
    return {name: tokens / median(taken[1:]) for name, taken in seconds.items()}


def main() -> None:
    """Prints a table for each kind of lengths."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    model = a_model()
    ways: dict[str, Generate] = {
        "model.generate": by_generate(model),
        "TransformersEngine": by_engine(TransformersEngine(), model),
    }
    if find_spec("vllm") is None:
        print("vLLM is not installed: run this with .venv-vllm/bin/python to see it as well")
    else:
        ways["VLLMEngine"] = by_engine(VLLMEngine(canary=False, max_num_seqs=ROWS), model)
    for kind, lengths in (("equal", [LONGEST] * ROWS), ("skewed", skewed(ROWS))):
        found = rates(ways, the_requests(lengths))
        print(f"\n{ROWS} responses of {kind} lengths, {sum(lengths)} tokens, one CPU thread, float32")
        for name, rate in found.items():
            print(f"  {name:<20}{rate:8.0f} tokens/s   {rate / found['model.generate']:5.2f} x model.generate")


if __name__ == "__main__":
    main()
