"""Generation of the same requests by the embedded engine, ``model.generate`` and vLLM, beside what forwards alone take.

    python benchmarks/generation.py
    python benchmarks/generation.py --model FOLDER    # packed against plain weights, for responses of at most 32 tokens

Lengths are equal, long and equal, or skewed as those of a reasoning model are: most responses short, a few as long as
allowed. "forward alone" makes the forwards of the live rows with the embedded engine's cache, and draws nothing. Every
way counts the tokens that it sampled for a row up to the row's end. vLLM takes part where it is installed
(``.venv-vllm``); bounds are for the embedded engine.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from against_trl import MIXES
from jsonargparse import auto_cli
from measure import MIN_ROUNDS, Report, take_turns
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
)
from workload import EOS, PAD, PROMPT, ScriptedLengths, lengths_of

from lightning_rl import Engine, SamplingParams, TransformersEngine, VLLMEngine
from lightning_rl.generation import Request
from lightning_rl.generation.cache import KVCache, cache_argument

LONGEST, VOCABULARY, COMPACT_BELOW = 512, 512, 0.75
Generate = Callable[[Sequence[Request]], int]


def llama() -> PreTrainedModel:
    """1.7 M parameters in four layers."""
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


def requests_of(lengths: Sequence[int], group: int = 1) -> list[Request]:
    """Return one request per length, without an EOS; those of a group share a prompt."""
    prompts = torch.randint(2, VOCABULARY, (len(lengths), PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    base = SamplingParams(eos_token_ids=())
    return [
        Request(
            prefix_ids=tuple(prompts[n // group]), sample_id=n, seed=n, sampling=replace(base, max_new_tokens=length)
        )
        for n, length in enumerate(lengths)
    ]


def skewed_lengths(rows: int, longest: int) -> list[int]:
    """Lengths of which the middle one is an eighth of the longest."""
    draw = torch.randn(rows, generator=torch.Generator().manual_seed(2))
    return [min(longest, max(1, round(longest / 8 * float(factor.exp())))) for factor in draw]


def by_engine(engine: Engine, model: PreTrainedModel) -> Generate:
    """With log-probabilities, as a run asks for them."""
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    engine.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), 0)
    return lambda requests: sum(len(drawn.token_ids) for drawn in engine.generate(requests, logprobs=True))


def by_packing(model: PreTrainedModel, *, packs: bool) -> Generate:
    """With or without packed weights, in place of the engine's own choice."""
    engine = TransformersEngine()
    generate = by_engine(engine, model)
    engine.load_state_dict({"packs": packs})
    return generate


def by_generate(model: PreTrainedModel, requests: Sequence[Request]) -> int:
    """Every row runs as long as the longest, padded behind its own end."""
    ids = torch.tensor([request.prefix_ids for request in requests])
    lengths = [request.sampling.max_new_tokens for request in requests]
    options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=PAD, eos_token_id=EOS)
    drawn = model.generate(  # pyrefly: ignore[not-callable]
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=options,
        logits_processor=LogitsProcessorList([ScriptedLengths(lengths)]),
    )
    return int(((drawn[:, PROMPT:] == EOS).cumsum(-1) == 0).sum()) + len(requests)


@torch.no_grad()
def forward_alone(model: PreTrainedModel, requests: Sequence[Request]) -> int:
    """Run the forwards of a decode that drops rows as the embedded engine does; return the number of tokens."""
    left = torch.tensor([request.sampling.max_new_tokens for request in requests])
    cache, name = KVCache(model.config, PROMPT + int(left.max())), cache_argument(model)
    ids = torch.tensor([request.prefix_ids for request in requests])
    places, tokens = torch.arange(PROMPT).expand_as(ids), 0
    while True:
        model(input_ids=ids, position_ids=places, use_cache=True, logits_to_keep=1, **{name: cache})
        tokens, left = tokens + int((left > 0).sum()), left - 1
        alive = left > 0
        if not alive.any():
            return tokens
        ids, places = ids[:, -1:], places[:, -1:] + 1
        if alive.float().mean() < COMPACT_BELOW:
            keep = alive.nonzero()[:, 0]
            cache.take_rows(keep)
            ids, places, left = ids[keep], places[keep], left[keep]


def compare_packing(report: Report, folder: Path, rounds: int) -> None:
    """Add a table for each kind of lengths, of packed against plain weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ways = {name: by_packing(model, packs=name == "packed") for name in ("plain", "packed")}
    for kind in MIXES:
        lengths = lengths_of(kind, 32, 32)
        calls = {name: partial(way, requests_of(lengths, 8)) for name, way in ways.items()}
        seconds = take_turns(calls, rounds, tokens=sum(lengths))
        report.table(f"{folder.name}, {kind}: {sum(lengths)} tokens", seconds, base="plain")


def main(*, rows: int = 64, rounds: int = MIN_ROUNDS, quick: bool = False, model: Path | None = None) -> None:
    """Print a table for each kind of lengths."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report, built = Report("packed_weights" if model else "generation"), llama()
    if model is not None:
        compare_packing(report, model.resolve(), rounds)
        report.finish()
        return
    ways: dict[str, Generate] = {
        "forward alone": partial(forward_alone, built),
        "TransformersEngine": by_engine(TransformersEngine(), built),
        "model.generate": partial(by_generate, built),
    }
    if find_spec("vllm") is not None:
        ways["VLLMEngine"] = by_engine(VLLMEngine(canary=False, max_num_seqs=rows), built)
    kinds = {"equal": [96] * rows, "skewed": skewed_lengths(rows, 96), "long": [LONGEST] * (rows // 2)}
    for kind, whole in kinds.items():
        lengths = [max(1, length // 8) for length in whole] if quick else whole
        requests = requests_of(lengths)
        seconds = take_turns({name: partial(way, requests) for name, way in ways.items()}, rounds, tokens=sum(lengths))
        report.table(f"{kind}: {len(lengths)} responses, {sum(lengths)} tokens", seconds, base="forward alone")
        rates = [(name, f"{sum(lengths) / median(both.cpu):.0f}") for name, both in seconds.items()]
        report.rows(f"{kind}: tokens a second of CPU time", ("", "tokens/s"), rates)
        cost = median(seconds["TransformersEngine"].of_all(seconds["forward alone"]).cpu)
        report.bound(f"{kind}: CPU seconds of the embedded engine, of forward alone", cost, at_most=1.15)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
