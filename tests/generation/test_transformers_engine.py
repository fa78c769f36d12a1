"""The embedded engine: what it samples, with which probability, in which batches, and when it stops."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of, with_sampling
from kit.support import EOS, FAMILIES, VOCABULARY, tiny_model, tiny_policy
from kit.vllm_models import mean_gap, with_large_logits
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import FinishReason, TransformersEngine
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.cache import cache_argument
from lightning_rl.policy import PolicyModel

PROMPTS = [(2,), (3, 4, 5, 6, 7), (8, 9), (3, 4, 5, 6, 7), (2,), (10, 11, 12)]


def requests_for(prompts: Sequence[tuple[int, ...]], **options: Any) -> list[Request]:
    known: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "eos_token_ids": [EOS], **options}
    return [request_of(ids, n, 1000 + n, **known) for n, ids in enumerate(prompts)]


def start_engine(model: PreTrainedModel, *, max_rows: int = 512) -> TransformersEngine:
    engine = TransformersEngine(max_rows=max_rows)
    launch(engine, model)
    engine.load_weights([], 5)
    return engine


def draw(model: PreTrainedModel, requests: Sequence[Request], *, max_rows: int = 512) -> list[Completion]:
    return start_engine(model, max_rows=max_rows).generate(requests, logprobs=True)


def what(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], FinishReason]]:
    return [(completion.token_ids, completion.finish) for completion in completions]


def distributions(model: PreTrainedModel, request: Request, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities of every token before each token of a response, by teacher forcing of one sequence."""
    whole = torch.tensor([[*request.prefix_ids, *ids]])
    logits = model(input_ids=whole, use_cache=False).logits[0, len(request.prefix_ids) - 1 : -1]
    return (logits / (request.sampling.temperature or 1.0)).log_softmax(-1).detach()


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and width of every forward inside."""
    shapes: list[tuple[int, int]] = []

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        shapes.append(tuple(given["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    handle.remove()


def constant(logits: Sequence[float], eos: int | None = EOS) -> PreTrainedModel:
    """A policy that gives these logits everywhere."""
    model = tiny_policy(vocab_size=len(logits), eos_token_id=eos)
    head = torch.nn.Linear(32, len(logits))
    head.weight.data.zero_()
    head.bias.data = torch.tensor(logits)
    model.lm_head = head
    return model


def check_log_probabilities(model: PreTrainedModel) -> None:
    """Draws from ragged prompts and compares with teacher forcing of one sequence at a time."""
    requests, lengths = requests_for(PROMPTS * 2, eos_token_ids=[EOS, 5, 9, 12]), set()
    for request, completion in zip(requests, draw(model, requests), strict=True):
        expected = distributions(model, request, completion.token_ids)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs is not None and completion.logprobs.dtype == torch.float32
        torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-5)
        lengths.add(len(completion.token_ids))
    assert len(lengths) > 1 and max(lengths) > 3, "the prompts and responses should be ragged"


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "policy-is-packed"])
def test_log_probabilities_are_those_of_teacher_forcing(family: str, packed: bool) -> None:
    model = tiny_model(family, dtype=torch.float32)
    if packed:
        PolicyModel(model, None, temperature=0.7, packed=True)
    check_log_probabilities(model)


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "jamba", "bamba", "granitemoehybrid", "mamba2"]
)
def test_layers_that_carry_a_state_draw_as_teacher_forcing(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32, initializer_range=0.2)  # with 0.3 rounding alone exceeds the bound
    check_log_probabilities(model)


def test_rounding_of_mixed_precision_is_not_taken_for_a_wrong_state() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
    model = tiny_model("qwen3_5_text", dtype=torch.float32, initializer_range=0.1, **sizes)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(draw(model, requests_for(PROMPTS))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("dtype", "mixed"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "bf16-mixed", "bf16-true"],
)
@pytest.mark.parametrize("spread", [0.3, 0.02], ids=["far from uniform", "flat"])
def test_a_model_whose_states_are_outside_of_the_cache_is_refused_at_the_start(
    dtype: torch.dtype, spread: float, *, mixed: bool
) -> None:
    model = tiny_model("recurrent_gemma", dtype=dtype, initializer_range=spread)
    refusal = r"RecurrentGemmaForCausalLM to give the same log-probabilities .*but they differ by .*: pass engine=VLLM"
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed), pytest.raises(ValueError, match=refusal):
        start_engine(model)


class Shifted(torch.nn.Module):
    """A layer that adds a part of the token before, behind a gate that starts at 0."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.gate, self.last = layer, torch.nn.Parameter(torch.zeros(())), torch.zeros(1, 1, 1)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + self.gate * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def test_a_layer_that_shifts_tokens_without_the_cache_is_refused_behind_a_gate_of_0() -> None:
    model: Any = tiny_policy()
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match=r"with a KV cache as without, but they differ by .*: pass engine=VLLMEngine"):
        start_engine(model)


PADDED: dict[str, dict[str, Any]] = {  # positions, states or chunks are counted with the padding
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "dropout": 0.0},
    "mamba": {"state_size": 4},
    "llama4_text": {"attention_chunk_size": 4, "floor_scale": 2, "attn_scale": 0.5, "attn_temperature_tuning": True},
}


@pytest.mark.parametrize("family", PADDED)
def test_prompts_of_a_model_that_minds_padding_decode_with_those_of_equal_length(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, {**FAMILIES.get(family, {}), **PADDED[family]})
    model = tiny_model(family, dtype=torch.float32, initializer_range=0.2).eval()
    with forwards(model) as shapes:
        check_log_probabilities(model)
    assert (1, 1) in shapes  # a prompt alone


@pytest.mark.parametrize(
    "error", [ValueError("MiniMax uses cache of another class"), AttributeError("no has_previous_state"), KeyError(0)]
)
def test_a_model_that_cannot_read_the_cache_is_refused_with_what_can_draw(error: Exception) -> None:
    model = tiny_model("lfm2", dtype=torch.float32)
    forward = model.forward

    def own_cache(*args: Any, use_cache: bool, **given: Any) -> Any:
        if use_cache:
            raise error
        return forward(*args, use_cache=use_cache, **given)

    vars(model)["forward"] = own_cache
    refusal = rf"a KV cache as without, but {type(error).__name__}: .*{error.args[0]}.*: pass engine=VLLMEngine\(\)"
    with pytest.raises(ValueError, match=refusal):
        draw(model, requests_for(PROMPTS))


def test_a_model_with_a_cache_of_another_kind_is_refused_at_the_start() -> None:
    expected = "expected a model whose forward takes cache or past_key_values, got RwkvForCausalLM: pass engine="
    with pytest.raises(ValueError, match=expected):
        start_engine(tiny_model("rwkv", dtype=torch.float32))


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["linear_attention", "full_attention"]])
def test_a_model_that_takes_its_own_class_of_cache_alone_is_refused_at_the_start(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "minimax", {"layer_types": kinds, "num_local_experts": 4, "block_size": 4})
    with pytest.raises(ValueError, match=r"got MiniMaxForCausalLM, which takes MiniMaxCache alone: pass engine=VLLME"):
        start_engine(tiny_model("minimax", dtype=torch.float32))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_forward_gets_the_cache_under_the_name_that_it_takes(name: str) -> None:
    """The argument was renamed in transformers 5.24: models outside of it may keep the old name."""
    model = tiny_policy()
    family, native = type(model), cache_argument(model)

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        return family.forward(self, *args, **{native if key == name else key: value for key, value in given.items()})

    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    forward.__signature__ = inspect.Signature([parameter])  # pyrefly: ignore[missing-attribute]
    expected = draw(model, requests_for(PROMPTS))
    model.__class__ = type("Renamed", (family,), {"forward": forward})
    assert what(draw(model, requests_for(PROMPTS))) == what(expected)


def test_a_sample_depends_neither_on_its_batch_nor_on_order_nor_on_max_rows() -> None:
    model = tiny_policy()
    requests = requests_for(PROMPTS * 3)
    together = what(draw(model, requests))
    assert what([draw(model, [request])[0] for request in requests]) == together
    assert what(draw(model, requests[::-1]))[::-1] == together
    for max_rows in (1, 4, 7):
        assert what(draw(model, requests, max_rows=max_rows)) == together
    longer = [*requests, replace(with_sampling(requests[0], max_new_tokens=40), sample_id=99)]
    assert what(draw(model, longer))[:-1] == together, "another request's limit changed the random numbers"


def test_every_different_prompt_is_prefilled_once() -> None:
    model = tiny_policy()
    engine = start_engine(model)
    with forwards(model) as shapes:
        engine.generate(requests_for(PROMPTS * 4, eos_token_ids=[], max_new_tokens=3))
    assert shapes == [(4, 5), (24, 1), (24, 1)], "no forward after the last token"


def test_finished_rows_leave_the_batch() -> None:
    model = tiny_policy()
    limits = [1, 1, 2, 2, 3, 8]
    requests = [
        with_sampling(r, max_new_tokens=n) for r, n in zip(requests_for(PROMPTS, eos_token_ids=[]), limits, strict=True)
    ]
    engine = start_engine(model)
    with forwards(model) as shapes:
        found = engine.generate(requests)
    assert [len(completion.token_ids) for completion in found] == limits
    assert [rows for rows, _ in shapes] == [4, 4, 2, 1, 1, 1, 1, 1]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    model, requests = tiny_policy(), requests_for(PROMPTS, temperature=0.0)
    for request, completion in zip(requests, draw(model, requests), strict=True):
        expected = distributions(model, request, completion.token_ids)
        assert completion.token_ids == tuple(expected.argmax(-1).tolist())
        assert completion.logprobs is not None
        torch.testing.assert_close(completion.logprobs, expected.amax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("eos_ids", "limit", "length", "finish"),
    [
        pytest.param({3}, 4, 1, FinishReason.STOP, id="eos-at-once"),
        pytest.param({5, 3, 7}, 4, 1, FinishReason.STOP, id="one-of-several"),
        pytest.param({5}, 4, 4, FinishReason.LENGTH, id="limit"),
        pytest.param(set(), 4, 4, FinishReason.LENGTH, id="no-eos-at-all"),
        pytest.param({3}, 1, 1, FinishReason.STOP, id="eos-is-the-last-token-allowed"),
        pytest.param({5}, 1, 1, FinishReason.LENGTH, id="one-token-allowed"),
    ],
)
def test_a_response_ends_for_the_reason_given(eos_ids: set[int], limit: int, length: int, finish: FinishReason) -> None:
    model = constant([9.0 if token == 3 else -9.0 for token in range(VOCABULARY)])
    request = requests_for([(2,)], eos_token_ids=sorted(eos_ids), max_new_tokens=limit)
    (completion,) = draw(model, request)
    assert what([completion]) == [((3,) * length, finish)] and completion.version == 5
    assert completion.logprobs is not None and len(completion.logprobs) == length


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_a_token_of_probability_zero_is_never_drawn(temperature: float) -> None:
    model = constant([-torch.inf, 0.0, -torch.inf, 0.5, -torch.inf, -torch.inf], eos=None)
    found = draw(model, requests_for([(1,)] * 50, temperature=temperature, eos_token_ids=[], max_new_tokens=40))
    assert {token for completion in found for token in completion.token_ids} == {1, 3}


def test_tokens_are_drawn_as_often_as_the_softmax_says() -> None:
    logits = torch.linspace(-2, 2, 8)
    requests = requests_for([(1,)] * 400, temperature=0.7, eos_token_ids=[], max_new_tokens=25)
    drawn = [
        token for completion in draw(constant(logits.tolist(), eos=None), requests) for token in completion.token_ids
    ]
    expected = (logits / 0.7).softmax(-1) * len(drawn)
    counts = torch.bincount(torch.tensor(drawn), minlength=8)
    assert float(((counts - expected).square() / expected).sum()) < 24.3  # chi-square, 7 degrees of freedom, 1 in 1000


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored_even_after_a_failure(training: bool) -> None:
    model = tiny_policy().train(training)
    draw(model, requests_for([(2,)]))
    assert model.training is training
    with pytest.raises(ValueError, match="stop strings need one"):
        draw(model, requests_for([(2,)], stop=("x",)))
    assert model.training is training and all(part.training is training for part in model.modules())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_activation_checkpointing_changes_no_sample_and_keeps_the_cache() -> None:
    plain, saving = tiny_policy(), tiny_policy().train()
    saving.gradient_checkpointing_enable()
    engine = start_engine(saving)
    with forwards(saving) as shapes:
        assert what(engine.generate(requests_for(PROMPTS))) == what(draw(plain, requests_for(PROMPTS)))
    assert {width for _, width in shapes[1:]} == {1}


def test_nothing_asked_gives_nothing_and_no_gradient_is_recorded() -> None:
    model = tiny_policy()
    engine = start_engine(model)
    with forwards(model) as shapes:
        assert engine.generate([]) == [] and shapes == []
    (completion,) = draw(model, requests_for([(2,)]))
    assert completion.logprobs is not None and not completion.logprobs.requires_grad
    assert start_engine(model).generate(requests_for([(2,)]))[0].logprobs is None


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_logits_are_float32_as_those_that_train(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model = with_large_logits(tiny_model("qwen2", dtype=dtype, hidden_size=128, initializer_range=0.05))
    head, requests = model.get_output_embeddings(), requests_for(PROMPTS * 8, temperature=1.0, eos_token_ids=())
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        engine = start_engine(model)
        completions = engine.generate(requests, logprobs=True)
        (scores,) = engine.score([[5, *range(2, 14), *range(2, 14)]])
        scored = replace(completions[0], token_ids=(*range(2, 14), *range(2, 14)), logprobs=scores)
        assert mean_gap(model, requests, completions) < 4e-3, "3e-2 if logits are rounded"
        assert mean_gap(model, requests_for([(5,)], temperature=1.0), [scored]) < 4e-3
        assert model(torch.tensor([[5]])).logits.dtype == torch.bfloat16 and "forward" not in vars(head)
