"""PolicyModel and FrozenModel: critics, parameter groups, a reference; what is refused at setup or later."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.support import (
    FAMILIES,
    cast_exactly,
    fit,
    ragged_rollout,
    tiny_model,
    tiny_module,
    tiny_policy,
    tiny_tokenizer,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from lightning_rl import GAE
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.corrections import Corrections
from lightning_rl.policy import FrozenModel, Outputs, PolicyModel, make_plan, pack
from lightning_rl.policy.build import build_model, build_policy, build_tokenizer, eos_ids_of
from lightning_rl.policy.lora import base_model_of
from lightning_rl.policy.model import FiniteOutputs, check_dropout, check_modes, check_scoring, use_packed_attention
from lightning_rl.rollouts.logprob_passes import add_logprobs

exactly = torch.testing.assert_close
forms = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
critics = pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])


def with_critic(*, separate: bool, temperature: float = 1.0, packed: bool = True) -> PolicyModel:
    model = tiny_policy(dtype=torch.float64)
    critic = tiny_policy(1, dtype=torch.float64, hidden_size=16) if separate else model
    policy = PolicyModel(model, critic, temperature=temperature, packed=packed)
    assert policy.value_head is not None
    policy.value_head.weight.data = torch.linspace(-1, 1, policy.value_head.in_features, dtype=torch.float64)[None]
    return policy


def values_of(policy: PolicyModel, *, packed: bool = True) -> Tensor:
    values = policy(pack(ragged_rollout(), packed=packed)).values
    assert values is not None
    return values


def test_cast_to_bfloat16_it_is_the_model_that_transformers_loads_in_bfloat16(tmp_path: Path) -> None:
    """Even far from the start, where rounded rotary frequencies are off."""
    model, ids = tiny_policy(max_position_embeddings=800), torch.arange(700)[None] % 11
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    policy = PolicyModel(model, None, temperature=1.0, packed=False).to(torch.bfloat16)
    with torch.no_grad():
        found, expected = policy.model(input_ids=ids).logits, loaded(input_ids=ids).logits
        model.base_model.rotary_emb.to(torch.bfloat16)
        rounded = policy.model(input_ids=ids).logits
    assert found.dtype == torch.bfloat16
    exactly(found, expected, rtol=0, atol=0)
    assert not torch.equal(rounded, expected)


@critics
@forms
def test_the_value_before_a_token_is_the_head_on_the_critics_hidden_state(separate: bool, packed: bool) -> None:
    policy, rows = with_critic(separate=separate, packed=packed), ragged_rollout()
    values = values_of(policy, packed=packed)
    backbone = policy.critic if policy.critic is not None else policy.model.base_model
    assert (policy.critic is not None) is separate and policy.value_head is not None
    for row, column in rows.valid_tokens.nonzero().tolist():
        seen = torch.cat([rows.prompt_ids[row, : rows.prompt_lengths[row]], rows.response_ids[row, :column]])
        state = backbone(input_ids=seen[None], use_cache=False).last_hidden_state[0, -1]
        exactly(values[row, column], policy.value_head(state)[0], rtol=0, atol=1e-6)


@critics
def test_values_are_never_divided_by_the_temperature(separate: bool) -> None:
    cold, hot = (with_critic(separate=separate, temperature=temperature) for temperature in (0.5, 2.0))
    assert torch.equal(values_of(cold), values_of(hot))
    layout = pack(ragged_rollout())
    assert not torch.allclose(cold(layout).logprobs, hot(layout).logprobs)


def test_a_new_critic_says_zero_and_no_critic_says_nothing() -> None:
    model, layout = tiny_policy(), pack(ragged_rollout())
    fresh = PolicyModel(model, model, temperature=1.0, packed=True)(layout).values
    assert fresh is not None and not fresh.any()
    without = PolicyModel(model, None, temperature=1.0, packed=True)
    assert without(layout).values is None and [group["name"] for group in without.parameter_groups()] == ["policy"]


@critics
def test_parameter_groups_hold_every_trainable_parameter_once(separate: bool) -> None:
    policy = with_critic(separate=separate)
    policy.model.get_input_embeddings().requires_grad_(requires_grad=False)
    groups = policy.parameter_groups()
    assert [group["name"] for group in groups] == ["policy", "critic"]
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    assert id(policy.value_head and policy.value_head.weight) in {id(p) for p in groups[1]["params"]}


@critics
def test_the_value_loss_reaches_the_policy_through_a_shared_critic_only(separate: bool) -> None:
    policy = with_critic(separate=separate)
    values_of(policy).square().sum().backward()
    reached = any(p.grad is not None and bool(p.grad.any()) for p in policy.model.parameters())
    assert reached is not separate
    assert policy.critic is None or any(p.grad is not None and bool(p.grad.any()) for p in policy.critic.parameters())


@forms
def test_the_reference_scores_like_the_policy_it_was_copied_from_and_is_frozen(packed: bool) -> None:
    policy = PolicyModel(tiny_policy(), None, temperature=0.7, packed=packed)
    reference = FrozenModel(copy.deepcopy(policy.model), temperature=0.7, packed=packed)
    layout = pack(ragged_rollout(), packed=packed)
    found = reference.logprobs(layout)
    assert torch.equal(found, policy(layout).logprobs) and not found.requires_grad
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_fingerprint_is_equal_exactly_if_the_weights_are(dtype: torch.dtype) -> None:
    first, same, other = (
        FrozenModel(tiny_policy(seed, dtype=dtype), temperature=1.0, packed=True) for seed in (0, 0, 1)
    )
    nudged = tiny_policy(dtype=dtype)
    nudged.model.norm.weight.data[0] += 0.01
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert FrozenModel(nudged, temperature=1.0, packed=True).fingerprint != first.fingerprint


def test_the_fingerprint_takes_scalar_parameters() -> None:
    model = tiny_policy()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    assert len(FrozenModel(model, temperature=1.0, packed=True).fingerprint) == 12


@pytest.mark.parametrize(("what", "field"), [("log-probability", "logprobs"), ("value", "values")])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_output_raises_with_sample_and_position(what: str, field: str, broken: float) -> None:
    rows = ragged_rollout(6).replace(sample_ids=torch.arange(6) + 40)
    zeros = torch.zeros(6, rows.width)
    outputs, finite = Outputs(zeros, zeros, zeros.clone()), FiniteOutputs(torch.device("cuda"))
    finite.note(outputs, rows)
    finite.check()
    wrong = zeros.clone()
    wrong[3, 2] = broken
    finite.note(outputs._replace(**{field: wrong}), rows)
    finite.note(outputs, rows)
    with pytest.raises(FloatingPointError, match=rf"{what} {broken} at row 3 \(sample 43\), response position 2"):
        finite.check()
    with pytest.raises(FloatingPointError, match=rf"{what} {broken} at row 3"):
        FiniteOutputs(torch.device("cpu")).note(outputs._replace(**{field: wrong}), rows)


def test_no_microbatch_of_an_accelerator_is_waited_for_to_see_whether_it_is_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, finite, waits = ragged_rollout(6), FiniteOutputs(torch.device("cuda")), list[Tensor]()
    zeros = torch.zeros(6, rows.width, requires_grad=True)
    truth = Tensor.__bool__

    def watched(tensor: Tensor) -> bool:
        waits.append(tensor)
        return truth(tensor)

    monkeypatch.setattr(Tensor, "__bool__", watched)
    for _ in range(5):
        finite.note(Outputs(zeros, zeros, zeros), rows)
    assert not waits
    finite.check()
    assert len(waits) == 1


def test_non_finite_weights_stop_the_scoring_of_a_rollout() -> None:
    policy, rollout = PolicyModel(tiny_policy(), None, temperature=1.0, packed=True), ragged_rollout()
    plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=1000)
    add_logprobs(rollout, plan, policy, None, Corrections(), old=True)
    tuple(policy.model.parameters())[-1].data[3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"\(sample \d+\), response position \d+: its weights"):
        add_logprobs(rollout, plan, policy, None, Corrections(), old=True)


def test_check_scoring_refuses_a_head_that_is_more_than_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy()
    forward: Callable[..., dict[str, Tensor]] = model.forward

    def scaled(**keywords: Any) -> dict[str, Tensor]:
        output = forward(**keywords)
        output["logits"] = output["logits"] * 0.5
        return output

    monkeypatch.setattr(model, "forward", scaled)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM .* padded as alone.*its head is not a plain linear layer"):
        check_scoring(model, packed=False)


@forms
def test_check_scoring_does_not_advise_padding_where_it_does_not_help(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_policy()
    forward: Callable[..., dict[str, Tensor]] = model.forward

    def one_late(**keywords: Any) -> dict[str, Tensor]:
        output = forward(**keywords)
        output["logits"] = output["logits"].roll(1, 1)
        return output

    monkeypatch.setattr(model, "forward", one_late)
    with pytest.raises(ValueError, match=r"padded as alone, .*: its head is not a plain linear layer"):
        check_scoring(model, packed=packed)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("nanochat", {"final_logit_softcapping": 2.0}),
        ("recurrent_gemma", {"logits_soft_cap": 0.2}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("hyperclovax", {"logits_scaling": 0.25}),
        ("falcon_h1", {"lm_head_multiplier": 0.25}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(family: str, options: dict[str, Any]) -> None:
    model, ids = tiny_model(family, **options), torch.tensor([[2, 3, 4, 5]])
    head = model.get_output_embeddings()
    assert head is not None
    products = head(model.base_model(ids, use_cache=False).last_hidden_state)
    assert (model(ids, use_cache=False).logits - products).abs().max() > 0.1
    check_scoring(model, packed=False)


@pytest.mark.parametrize("name", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
def test_a_scale_or_a_cap_of_none_is_none(name: str) -> None:
    model = tiny_model("qwen2")
    setattr(model.config, name, None)
    check_scoring(model, packed=False)


def test_check_scoring_refuses_layers_that_carry_state_from_one_packed_sequence_to_the_next() -> None:
    class Leaky(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.cumsum(1)

    model = tiny_policy()
    model.model.layers[0].mlp = Leaky()
    build_policy(lambda: model, None, temperature=1.0, packed=False)
    with pytest.raises(ValueError, match=r"packed as alone, .*: use packing=False"):
        build_policy(lambda: model, None, temperature=1.0, packed=True)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "mamba", "recurrent_gemma"])
def test_check_scoring_refuses_packed_layers_that_carry_a_state_however_small(family: str) -> None:
    model = tiny_model(family, initializer_range=1e-6, dtype=torch.float32)
    check_scoring(model, packed=False)
    with pytest.raises(ValueError, match=r"packed sequences would read the states of \w+: use packing=False"):
        use_packed_attention(model)


NO_DROPOUT = dict.fromkeys(
    ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "layerdrop"), 0.0
)
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "falcon": {"alibi": False},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "pad_token_id": 0},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_an_attention_that_reads_no_boundaries_is_refused_however_flat_the_model_is(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, OWN_ATTENTION[family])
    model = partial(tiny_model, family, initializer_range=0.02, dtype=torch.bfloat16, **NO_DROPOUT)
    build_policy(model, None, temperature=1.0, packed=False)
    with pytest.raises(ValueError, match=r"AttentionInterface .*: use packing=False"):
        build_policy(model, None, temperature=1.0, packed=True)


def test_an_attention_with_a_mask_of_its_inputs_is_refused_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "doge", {"keep_window_size": 64})
    model = partial(tiny_model, "doge", dtype=torch.float32, **NO_DROPOUT)
    build_policy(model, None, temperature=1.0, packed=False)
    with pytest.raises(ValueError, match=r"^policy: packed attention does not support the mask of .*: use packing=Fal"):
        build_policy(model, None, temperature=1.0, packed=True)


class Unpacked(nn.Module):
    """Fails with an error of some kind on packed sequences."""

    def __init__(self, layer: nn.Module, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = layer, error

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.shape[0] == 1 and hidden.shape[1] > 10:  # several sequences
            raise self.error
        return self.layer(hidden)


@pytest.mark.parametrize("error", [RuntimeError("of its sizes"), ValueError("of its mask"), AssertionError("of its")])
def test_an_error_of_packed_sequences_alone_is_refused_with_padding(error: Exception) -> None:
    model = tiny_policy()
    model.model.layers[0].mlp = Unpacked(model.model.layers[0].mlp, error)
    with pytest.raises(ValueError, match=rf"^policy: .* packed tokens .*, got {type(error).__name__}: of .*: use pack"):
        build_policy(lambda: model, None, temperature=1.0, packed=True)


class Shift(nn.Module):
    """A faint part of the token before, which may be of another sequence."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.roll(1, 1) * 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_reads_a_neighbor_is_refused_however_little(dtype: torch.dtype) -> None:
    model = tiny_policy()
    model.model.layers[0].mlp = Shift()
    cast_exactly(model, dtype)
    with pytest.raises(ValueError, match="packed sequences would read each other in Qwen2ForCausalLM: use packing"):
        build_policy(lambda: model, None, temperature=1.0, packed=True)


class Gated(nn.Module):
    """A layer behind a gate that starts at 0."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.gate = layer, nn.Parameter(torch.zeros(1))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * self.gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_gate_that_starts_at_0_hides_neither_neighbors_nor_noise(dtype: torch.dtype, *, frozen: bool) -> None:
    for layer, packed, message in (
        (Shift(), True, "read each other"),
        (Noisy(), False, r"layers\.0\.mlp\.layer differs"),
    ):
        model = tiny_policy()
        model.model.layers[0].mlp = Gated(layer)
        cast_exactly(model, dtype).requires_grad_(not frozen)
        with pytest.raises(ValueError, match=message):
            build_policy(lambda model=model: model, None, temperature=1.0, packed=packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checks_of_a_forward_leave_every_bit_and_every_tensor(dtype: torch.dtype) -> None:
    model = tiny_policy()
    model.model.layers[0].mlp = Gated(model.model.layers[0].mlp)
    cast_exactly(model, dtype).model.layers[1].mlp.up_proj.weight.data[:2] = torch.tensor([[-0.0], [0.0]])
    before = {name: (part.data_ptr(), part.detach().clone()) for name, part in model.named_parameters()}
    torch.set_default_dtype(dtype)  # as Trainer(precision="bf16-true") does
    try:
        build_policy(lambda: model, None, temperature=1.0, packed=True)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, part in model.named_parameters():
        assert part.data_ptr() == before[name][0] and part.dtype == dtype
        assert torch.equal(part.view(torch.uint8), before[name][1].view(torch.uint8))


def test_noise_below_the_precision_of_the_policy_is_named() -> None:
    model = tiny_policy()
    model.model.layers[1].mlp = Noisy()
    cast_exactly(model, torch.bfloat16)
    with pytest.raises(ValueError, match=r"but model\.layers\.1\.mlp differs by"):
        build_policy(lambda: model, None, temperature=1.0, packed=False)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "moe" in name and "hybrid" not in name])
def test_experts_that_round_by_their_batch_are_no_neighbors(family: str) -> None:
    packed = not family.startswith("qwen3_5")  # has layers that carry a state
    build_policy(partial(tiny_model, family, dtype=torch.float32), None, temperature=1.0, packed=packed)


class Noisy(nn.Module):
    """Adds noise in train mode, as the jitter of a router does."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + 1e-5 * torch.rand_like(hidden)) if self.training else hidden


class Scaled(Noisy):
    """Scales in train mode."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1.001 if self.training else 1)


@forms
@pytest.mark.parametrize("kind", [Noisy, Scaled])
@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_computes_otherwise_in_train_mode_is_named(
    kind: type[nn.Module], *, training: bool, packed: bool
) -> None:
    model = tiny_policy().train(training)
    model.model.layers[1].mlp = kind()
    message = r"same in train mode as in eval mode, but model\.layers\.1\.mlp differs by"
    with pytest.raises(ValueError, match=message):
        build_policy(lambda: model, None, temperature=1.0, packed=packed)
    with pytest.raises(ValueError, match=message):
        build_policy(tiny_policy, lambda: model, temperature=1.0, packed=packed)


RARE = 1e-5  # probability of a draw that changes a layer's output
DRAWS: dict[str, Callable[[], Any]] = {
    "rand below": lambda: 0 if torch.rand(()) < RARE else 1,
    "rand above": lambda: torch.rand(()) > RARE,
    "floor of keep and rand": lambda: (1 - RARE + torch.rand(1)).floor(),
    "rand_like": lambda: torch.rand_like(torch.ones(1, 1, 1)) >= RARE,
    "uniform_": lambda: torch.empty(()).uniform_(-RARE, 1 - RARE) > 0,
    "uniform_ by name": lambda: torch.empty(1).uniform_(to=2) > 2 * RARE,
    "bernoulli": lambda: torch.bernoulli(torch.tensor(1 - RARE)),
    "bernoulli_": lambda: torch.empty(1, 1, 1).bernoulli_(1 - RARE),
    "bernoulli_ of skips": lambda: 1 - torch.empty(()).bernoulli_(p=RARE),
    "a generator of the module": lambda: torch.rand((), generator=torch.Generator().manual_seed(1)) > RARE,
    "dropout": lambda: nn.functional.dropout(torch.ones(()), RARE),
    "a module of dropout": lambda: nn.Dropout1d(RARE)(torch.ones(1, 1, 1)),
    "python": lambda: random.random() > RARE,
    "numpy": lambda: float(np.random.uniform() > RARE),
}


class Rarely(nn.Module):
    """Changes its output with a small probability."""

    def __init__(self, draw: Callable[[], Any], *, always: bool = False) -> None:
        super().__init__()
        self.draw, self.always = draw, always

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.draw() if self.training or self.always else hidden


@forms
@pytest.mark.parametrize("always", [False, True], ids=["in train mode", "in both modes"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_layer_that_is_skipped_now_and_then_is_named_however_rarely(draw: str, *, always: bool, packed: bool) -> None:
    model = tiny_policy()
    model.model.layers[1].mlp = Rarely(DRAWS[draw], always=always)
    message = "draws some of Python" if draw in ("python", "numpy") else r"but model\.layers\.1\.mlp differs by"
    with pytest.raises(ValueError, match=message):
        check_modes(model, packed=packed)


def test_draws_that_change_nothing_are_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT draws whether to skip a layer, even with a probability of 0."""
    monkeypatch.setitem(FAMILIES, "opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "pad_token_id": 0})
    check_modes(partial(tiny_model, "opt", **NO_DROPOUT)(), packed=False)
    model = tiny_policy()
    model.model.layers[1].mlp = Rarely(lambda: (torch.rand(1, 1, 1) < 0) + torch.bernoulli(torch.ones(())))
    check_modes(model, packed=False)


@pytest.mark.parametrize("name", [None, "router_jitter_noise"])
def test_phi_moe_trains_without_its_default_noise_alone(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "phimoe", {"num_local_experts": 4})
    model = partial(tiny_model, "phimoe", dtype=torch.float32, **({name: 0.0} if name else {}))
    if name is None:
        with pytest.raises(ValueError, match=r"but model\.layers\.\d\.mlp\.router differs by"):
            build_policy(model, None, temperature=1.0, packed=True)
    else:
        build_policy(model, None, temperature=1.0, packed=True)


def test_the_check_of_modes_draws_no_random_number() -> None:
    state = torch.random.get_rng_state()
    check_modes(tiny_policy(), packed=False)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout_prob", "resid_pdrop", "decoder_layerdrop"])
def test_check_dropout_names_what_switches_it_on(name: str) -> None:
    model = tiny_policy()
    check_dropout(model)
    setattr(model.config, name, 0.1)
    with pytest.raises(ValueError, match=rf"config\.{name}=0\.1: set it to 0"):
        check_dropout(model)


def test_check_dropout_names_that_of_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"got .*q_proj.lora_dropout.default: set lora_dropout=0"):
        check_dropout(base_model_of(peft.get_peft_model(tiny_policy(), config)))


def test_a_configuration_that_asks_for_an_auxiliary_loss_is_refused_where_it_would_train_nothing() -> None:
    moe = partial(tiny_model, "qwen3_moe", dtype=torch.float32)
    asks = partial(moe, output_router_logits=True)
    with pytest.raises(
        ValueError, match=r"Qwen3MoeForCausalLM with config\.output_router_logits=True.*: set it to Fal"
    ):
        fit(tiny_module(policy=asks), max_steps=1)
    critic = {"critic": asks, "advantages": GAE(), "group_size": 1}  # whose routers' losses no one asks for
    fit(tiny_module(policy=moe, reference=asks, **critic), callbacks=[ReferenceKL()], max_steps=1)


@pytest.mark.parametrize("argument", ["critic", "reference"])
def test_a_critic_or_reference_of_another_vocabulary_is_refused(argument: str) -> None:
    other = {"critic": {"advantages": GAE(), "group_size": 1}, "reference": {}}[argument]
    module = tiny_module(**{argument: partial(tiny_policy, vocab_size=20), **other})
    callbacks = [ReferenceKL(as_loss=True)] if argument == "reference" else []
    expected = f"^{argument}: expected a model with the policy's vocabulary of 16 tokens, got 20 tokens"
    with pytest.raises(ValueError, match=expected):
        fit(module, callbacks=callbacks)


def test_a_critic_of_its_own_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="attention_dropout"):
        build_policy(tiny_policy, lambda: tiny_policy(attention_dropout=0.1), temperature=1.0, packed=True)


def test_a_built_policy_is_in_train_mode_for_activation_checkpointing() -> None:
    assert build_policy(lambda: tiny_policy().eval(), "shared", temperature=1.0, packed=True).model.training


@pytest.mark.parametrize(
    ("configured", "tokenizer", "given", "found"),
    [
        pytest.param(5, False, None, {5}, id="one"),
        pytest.param([5, 7], True, None, {1, 5, 7}, id="several-and-the-tokenizers"),
        pytest.param(0, False, None, {0}, id="id-zero"),
        pytest.param([5, 7], True, [3], {3}, id="given-ones-alone"),
    ],
)
def test_every_end_of_a_response_is_found(
    configured: int | list[int], tokenizer: bool, given: list[int] | None, found: set[int]
) -> None:
    model = tiny_policy()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = configured
    assert eos_ids_of(model, tiny_tokenizer() if tokenizer else None, given) == found


def test_responses_that_could_never_end_are_refused_unless_a_string_stops_them() -> None:
    model = tiny_policy(eos_token_id=None)
    with pytest.raises(ValueError, match="expected an end of responses"):
        eos_ids_of(model, None)
    assert eos_ids_of(model, None, stop=["!"]) == set()


def test_a_model_without_generation_config_leaves_it_to_the_tokenizer() -> None:
    bare: PreTrainedModel = SimpleNamespace(generation_config=None)  # pyrefly: ignore[bad-assignment]
    assert eos_ids_of(bare, tiny_tokenizer()) == {1}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_policy_folder_without_tokenizer_files_has_no_tokenizer(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    assert build_tokenizer(None, tmp_path) is None


def test_a_tokenizer_without_files_is_an_error_without_advice_on_remote_code(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a model or tokenizer that transformers can load, got") as caught:
        build_tokenizer(tmp_path, tiny_policy)
    assert "remote" not in str(caught.value)


def test_a_saved_policy_and_its_tokenizer_are_found_by_path(tmp_path: str) -> None:
    tiny_policy().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = build_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), tiny_policy().parameters(), strict=True))
    tokenizer = build_tokenizer(None, tmp_path)
    assert tokenizer is not None and tokenizer("a b")["input_ids"] == [2, 3]
    assert build_tokenizer(None, tiny_policy) is None
