"""Bitwise consistency: decoding with a cache, scoring and updating give the same bits for every token."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from kit.support import a_trainer, callback_of, tiny_model, tiny_module, tiny_prompts
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_rl import RLLightningModule, SamplingParams
from lightning_rl.generation import Completion, Request, TransformersEngine
from lightning_rl.policy import ModelOptions, PolicyModel, logprobs
from lightning_rl.policy.attention import causal_attention
from lightning_rl.policy.batch_invariance import KEYS, BatchInvariance, blocked_attention
from lightning_rl.policy.logprobs import logprobs_of
from lightning_rl.policy.packing import pack
from lightning_rl.rollout import Rollout

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe", "qwen2_moe")
BATCHES = [
    (1, 1, 8),
    (1, 70, 30),
    (2, 5, 40),
    (3, 33, 9),
    (5, 40, 20),
    (9, 12, 12),
    (17, 30, 6),
    (33, 9, 10),
    (70, 6, 5),
    (2, 100, 3),
]


def a_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    special = {"gemma3_text": {"sliding_window": 20}, "qwen2_moe": {"shared_expert_intermediate_size": 200}}
    sizes = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 1003, "max_position_embeddings": 256}
    return tiny_model(family, dtype=torch.float32, **sizes, **special.get(family, {})).to(dtype)  # pyrefly: ignore[bad-argument-type]


def draw(model: PreTrainedModel, requests: list[Request]) -> list[Completion]:
    engine = TransformersEngine(max_rows=64)
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.load_weights(model.named_parameters(), version=0)
    return engine.generate(requests, logprobs=True)


def some_requests(rows: int, longest: int, tokens: int, *, temperature: float = 0.7) -> list[Request]:
    """Two requests per prompt, of up to ``longest`` tokens."""
    drawn = random.Random(rows * longest)
    prompts = [tuple(drawn.randrange(3, 1003) for _ in range(drawn.randint(1, longest))) for _ in range(rows)]
    sampling = SamplingParams(max_new_tokens=tokens, temperature=temperature, eos_token_ids=(0,))
    return [
        Request(prefix_ids=prompt, sample_id=2 * row + side, seed=2 * row + side, sampling=sampling)
        for row, prompt in enumerate(prompts)
        for side in (0, 1)
    ]


def rows_of(requests: list[Request], completions: list[Completion]) -> Rollout:
    prompts = [list(request.prefix_ids) for request in requests]
    answers = [list(completion.token_ids) for completion in completions]
    return Rollout.of_samples(prompts, answers, groups=tuple(row // 2 for row in range(len(requests))))


def differing(policy: PolicyModel, requests: list[Request], completions: list[Completion], *, packed: bool) -> int:
    """The number of tokens whose bits differ, of all rows and of parts of them."""
    rows, number = rows_of(requests, completions), len(requests)
    found = 0
    for part in (range(number), range(1), range(number // 2, number)):
        scored = policy(pack(rows.select(torch.tensor(part)), packed=packed)).logprobs.detach()
        for line, row in enumerate(part):
            drawn = completions[row].logprobs
            assert drawn is not None
            found += int((scored[line, : len(drawn)] != drawn).sum())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_and_scoring_give_equal_bits(family: str, dtype: torch.dtype) -> None:
    compare(family, dtype, BATCHES[1:4])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_equal_at_twenty_batch_shapes(family: str, dtype: torch.dtype) -> None:
    compare(family, dtype, BATCHES)


def compare(family: str, dtype: torch.dtype, batches: list[tuple[int, int, int]]) -> None:
    """Assert that no bit differs in any batch, packed or padded."""
    policy = PolicyModel(a_model(family, dtype), None, temperature=0.7, packed=True, batch_invariant=True)
    found = {}
    for rows, longest, tokens in batches:
        requests = some_requests(rows, longest, tokens)
        completions = draw(policy.model, requests)
        for packed in (True, False):
            found[rows, longest, packed] = differing(policy, requests, completions, packed=packed)
    assert len(found) == 2 * len(batches)
    assert set(found.values()) == {0}


def test_without_it_bits_differ() -> None:
    policy = PolicyModel(a_model("qwen2", torch.float32), None, temperature=0.7, packed=True)
    requests = some_requests(9, 12, 12)
    assert differing(policy, requests, draw(policy.model, requests), packed=True) > 50


def test_filtered_samples_have_equal_bits() -> None:
    policy = PolicyModel(a_model("qwen2", torch.float32), None, temperature=0.7, packed=True, batch_invariant=True)
    engine = TransformersEngine()
    engine.select_extras(frozenset(("sampling_mask",)))
    engine.start(policy.model, None, device=policy.model.device, dtype=torch.float32)
    engine.load_weights(policy.model.named_parameters(), version=0)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.8, eos_token_ids=(0,))
    requests = [Request(prefix_ids=(5, 6, 7 + row), sample_id=row, seed=row, sampling=sampling) for row in range(6)]
    completions = engine.generate(requests, logprobs=True)
    masks = [completion.token_extras["sampling_mask"] for completion in completions]
    rows = rows_of(requests, completions)
    rows = rows.replace(token_extras={"sampling_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)})
    scored = policy(pack(rows)).logprobs.detach()
    for row, completion in enumerate(completions):
        assert completion.logprobs is not None
        assert torch.equal(scored[row, : len(completion.logprobs)], completion.logprobs)


def test_kernels_with_other_bits_than_the_engine_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "kernels_for", lambda *_: pytest.fail("asked for kernels"))
    policy = PolicyModel(a_model("qwen2", torch.float32), None, temperature=0.7, packed=True, batch_invariant=True)
    policy(pack(Rollout.of_samples([[5, 6]], [[7, 8]], groups=(0,))))


def test_gradients_are_those_of_the_default() -> None:
    layout = pack(rows_of(requests := some_requests(5, 12, 9), draw(a_model("qwen2", torch.float32), requests)))
    gradients: list[dict[str, Tensor]] = []
    for batch_invariant in (False, True):
        model = a_model("qwen2", torch.float32)
        policy = PolicyModel(model, None, temperature=0.7, packed=True, batch_invariant=batch_invariant)
        policy(layout).logprobs.sum().backward()
        gradients.append({name: part.grad for name, part in model.named_parameters() if part.grad is not None})
    default, invariant = gradients
    assert default.keys() == invariant.keys()
    for name, gradient in default.items():
        torch.testing.assert_close(invariant[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_attention_is_that_of_torch() -> None:
    query, key, value = torch.randn(3, 4, 50, 8), torch.randn(3, 2, 50, 8), torch.randn(3, 2, 50, 8)
    keys, values = (functional.pad(part, (0, 0, 0, -50 % KEYS)) for part in (key, value))
    for window in (None, 7):
        found = blocked_attention(query, keys, values, torch.arange(50)[None], 0.3, window)
        torch.testing.assert_close(found, causal_attention(query, key, value, 0.3, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [functional.silu, functional.gelu, torch.sigmoid, lambda x: x.sum(-1)])
def test_replaced_functions_are_those_of_torch(function: Callable[[Tensor], Tensor]) -> None:
    values, weight = torch.randn(7, 33, requires_grad=True), torch.rand(7, 33)
    results = []
    for context in (torch.enable_grad(), BatchInvariance()):
        with context:
            out = function(values)
        values.grad = None
        (out * weight[:, : out[0].numel()].squeeze(-1)).sum().backward()
        results.append((out.detach(), values.grad))
    for native, replaced in zip(*results, strict=True):
        torch.testing.assert_close(replaced, native, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [functional.silu, functional.gelu, torch.sigmoid])
def test_an_element_does_not_depend_on_its_place(function: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(1003) * 3
    with BatchInvariance():
        whole = function(values)
        parts = [function(values[start:end]) for start, end in pairwise((0, 1, 18, 50, 1003))]
    assert torch.equal(torch.cat(parts), whole)


def a_run(*, updates: int = 1, **model: object) -> tuple[list[float], RLLightningModule]:
    """A fit of three rollouts; returns the largest |log-probability of update and rollout| of each first step."""
    module = tiny_module(model=ModelOptions(consistency="bitwise", **model), minibatches_per_rollout=updates)  # pyrefly: ignore[bad-argument-type]
    seen: list[float] = []

    def metrics(view: object) -> dict[str, object]:
        seen.append(float((view.logprobs - view.rollout_logprobs)[view.valid_tokens].abs().max()))  # pyrefly: ignore[missing-attribute]
        return {}

    trainer = a_trainer([callback_of("Mismatch", metrics=metrics)], max_steps=3 * updates)
    trainer.fit(module, tiny_prompts())
    return seen, module


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fit_has_no_mismatch(*, checkpointing: bool) -> None:
    seen, module = a_run(activation_checkpointing=checkpointing, max_tokens_per_microbatch=40)
    assert len(seen) > 3
    assert set(seen) == {0.0}
    assert not module.run.needs.old_logprobs


def test_the_rollout_gives_the_old_logprobs_of_several_steps() -> None:
    seen, module = a_run(updates=2)
    assert seen[0] == 0.0 < max(seen)  # the second step is off-policy
    assert module.run.needs.rollout_as_old
    assert not module.run.needs.old_logprobs


def test_a_difference_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl.generation.transformers.logprobs_of", lambda logits: logprobs_of(logits) + 2**-12)
    with pytest.raises(RuntimeError, match=r"agree bit for bit.* got log-probability -\d\.\d+ from the engine"):
        a_run()


@pytest.mark.parametrize("option", [{"compile": True}, {"liger": True}, {"attention": "sdpa"}])
def test_other_kernels_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"without {next(iter(option))}="):
        ModelOptions(consistency="bitwise", **option)  # pyrefly: ignore[bad-argument-type]


def test_an_unknown_consistency_is_refused() -> None:
    with pytest.raises(ValueError, match="expected consistency to be"):
        ModelOptions(consistency="exact")  # pyrefly: ignore[bad-argument-type]
