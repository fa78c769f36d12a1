"""Models that vLLM's CPU kernels take, and what the trainer says about the same tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kit.engine_requests import request_of
from kit.support import tiny_model
from lightning_rl import Engine, Rollout, VLLMEngine
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.weights.weight_stream import persistent_buffers
from lightning_rl.policy import PolicyModel, pack

AnyEngine = TypeVar("AnyEngine", bound=Engine)
Starter = Callable[..., VLLMEngine]
EOS, VOCABULARY = 1, 151
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},  # first: vLLM makes the group of the experts with its first engine
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 16},
    "gemma4_text": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text-k_eq_v": {
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
    },
    "mistral": {},
    "exaone4": {"sliding_window": 16},
    "granite": {},
}
DELTA_NET = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
HYBRIDS: dict[str, dict[str, Any]] = {  # vLLM's CPU kernel takes bfloat16 and heads of 128
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}


def a_model(name: str = "qwen2", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of one of :data:`FAMILIES` or :data:`HYBRIDS`, float32, far from uniform."""
    family, known = name.partition("-")[0], FAMILIES | HYBRIDS
    options = {"dtype": torch.float32, "tie_word_embeddings": False, **SHAPE, **known[name], **options}
    return tiny_model(family, seed, **options)


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a run sends of a model."""
    yield from ((name, weight.detach()) for name, weight in model.named_parameters())
    yield from persistent_buffers(model)


def synced(engine: AnyEngine, model: PreTrainedModel, version: int = 0) -> AnyEngine:
    """The engine with the weights of a model."""
    engine.load_weights(weights_of(model), version)
    return engine


def moved(model: PreTrainedModel, scale: float, seed: int = 0) -> None:
    """Every weight takes a random step."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (torch.randn(parameter.shape, generator=draw) * scale).to(parameter.dtype)


def requests_for(prompts: Sequence[Sequence[int]], **options: Any) -> list[Request]:
    """Return one request per prompt, with different seeds."""
    known: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.7, **options}
    return [request_of(ids, n, 1000 + n, **known) for n, ids in enumerate(prompts)]


def prompts_of(number: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of random ids and lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=draw).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """Log-probability of each token of a completion by teacher forcing of one sequence."""
    ids = torch.tensor(completion.token_ids)
    whole = torch.cat([torch.tensor(request.prefix_ids), ids])
    logits = model(input_ids=whole[None], use_cache=False).logits[0, len(request.prefix_ids) - 1 : -1].float()
    return (logits / (request.sampling.temperature or 1.0)).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def with_large_logits(model: PreTrainedModel) -> PreTrainedModel:
    """The model with logits about 17, as trained ones have, which half precision spaces by 0.125."""
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").add_(0.5)
        model.get_parameter("lm_head.weight").add_(0.2)
    return model


@torch.no_grad()
def mean_gap(model: PreTrainedModel, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Mean difference between the engine's log-probabilities and those that the policy trains with."""
    prompts, responses = [each.prefix_ids for each in requests], [each.token_ids for each in completions]
    rollout = Rollout.of_samples(prompts, responses, groups=range(len(requests)))
    policy = PolicyModel(model, None, temperature=requests[0].sampling.temperature, packed=True)
    drawn = torch.cat([each.logprobs for each in completions if each.logprobs is not None])
    return float((policy(pack(rollout)).logprobs[rollout.valid_tokens] - drawn).abs().mean())


def worst(model: PreTrainedModel, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Largest difference between engine and trainer over all tokens."""
    largest = 0.0
    for request, completion in zip(requests, completions, strict=True):
        assert completion.logprobs is not None and completion.logprobs.dtype == torch.float32
        assert len(completion.logprobs) == len(completion.token_ids)
        expected = trainer_logprobs(model, request, completion)
        largest = max(largest, float((completion.logprobs - expected).abs().max()))
    return largest
