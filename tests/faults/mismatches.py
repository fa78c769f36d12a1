"""Faults in an engine's copy of a model, and the module that a comparison with the trainer's copy must name."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from kit.support import tiny_model
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOKENS = (5, 2, 9, 14, 3, 11, 7, 5, 12, 4, 8, 13)  # every fault of the list changes the logits of this sequence


@dataclass(frozen=True)
class Mismatch:
    """A fault in an engine's model.

    Attributes:
        name: Description in the words of a user.
        family: Kind of the tiny model, as :func:`model_of` builds it.
        apply: Changes the engine's copy in place.
        module: First module, in the order of the forward pass, whose outputs differ although its inputs agree.
    """

    name: str
    family: str
    apply: Callable[[PreTrainedModel], None]
    module: str


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of a family in float32 whose norms and biases are as uneven as those of a trained one."""
    model = tiny_model({"gemma3": "gemma3_text"}.get(family, family), seed, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=draw) * 0.2
    return model


def forward(path: str, wrong: Callable[..., Any]) -> Callable[[PreTrainedModel], None]:
    """Return a fault that replaces the forward pass of a module; ``wrong`` is a method of it."""

    def apply(model: PreTrainedModel) -> None:
        module = model.get_submodule(path)
        module.forward = MethodType(wrong, module)

    return apply


def attribute(path: str, name: str, change: Callable[[Any], Any]) -> Callable[[PreTrainedModel], None]:
    """Return a fault that changes an attribute of a module: a number, a buffer or a submodule."""

    def apply(model: PreTrainedModel) -> None:
        module = model.get_submodule(path)
        setattr(module, name, change(getattr(module, name)))

    return apply


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[PreTrainedModel], None]:
    """Return a fault that changes a parameter."""

    def apply(model: PreTrainedModel) -> None:
        with torch.no_grad():
            parameter = model.get_parameter(name)
            parameter.copy_(change(parameter.clone()))

    return apply


def untied_head(change: Callable[[Tensor], Tensor]) -> Callable[[PreTrainedModel], None]:
    """Return a fault in the head alone, even if it shares its weight with the embedding."""

    def apply(model: PreTrainedModel) -> None:
        head = model.get_submodule("lm_head")
        head.weight = nn.Parameter(change(model.get_parameter("lm_head.weight").detach().clone()))

    return apply


def config_value(name: str, value: Any) -> Callable[[PreTrainedModel], None]:
    """Return a fault in a value of the configuration that a forward pass reads."""
    return lambda model: setattr(model.config, name, value)


# Attention of one layer by another function.


def attention(path: str, function: Callable[..., Any]) -> Callable[[PreTrainedModel], None]:
    """Return a fault that gives one layer another attention function."""
    name = f"mismatch_{function.__name__}"
    ALL_ATTENTION_FUNCTIONS.register(name, function)

    def apply(model: PreTrainedModel) -> None:
        own = copy(model.config)
        own._attn_implementation = name  # noqa: SLF001
        attribute(path, "config", lambda _: own)(model)

    return apply


def scores_of(query: Tensor, key: Tensor, scaling: float, *, cap: float | None = None) -> Tensor:
    """Return the scores of attention before the mask."""
    scores = query @ key.transpose(2, 3) * scaling
    return scores if cap is None else torch.tanh(scores / cap) * cap


def additive(mask: Tensor | None, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return a mask that is added to scores; without one, the causal mask."""
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)[None, None]
    if mask.dtype == torch.bool:
        return like.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
    return mask.to(like.dtype)


def attend(scores: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
    """Return the heads' outputs in the form that transformers takes them."""
    scores = scores + additive(mask, scores.shape[-2], scores.shape[-1], scores)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def tiled_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Repeat key and value heads one behind the other (0, 1, 0, 1) instead of each in a run (0, 0, 1, 1)."""
    repeats = module.num_key_value_groups
    key, value = key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1)
    return attend(scores_of(query, key, scaling), value, attention_mask)


def capped_scores(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Cap scores at 5, as Gemma 2 does at 50."""
    repeats = module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return attend(scores_of(query, key, scaling, cap=5.0), value, attention_mask)


def rounded_probabilities(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Round the attention's probabilities to bfloat16 before the values are averaged."""
    repeats = module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = scores_of(query, key, scaling)
    scores = scores + additive(attention_mask, scores.shape[-2], scores.shape[-1], scores)
    return (round_to_bfloat16(scores.softmax(-1)) @ value).transpose(1, 2).contiguous(), None


# What a layer's attention is given.


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a forward pass of attention with another mask; a single query is left alone."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        length = hidden.shape[1]
        if length > 1:
            mask = additive(kwargs.get("attention_mask"), length, length, hidden)
            kwargs["attention_mask"] = change(mask.clone())
        return type(self).forward(self, *args, **kwargs)

    return wrong


def looking_ahead(mask: Tensor) -> Tensor:
    mask[..., 3:4, 4:5] = 0
    return mask


def narrow_to_window(mask: Tensor, window: int) -> Tensor:
    """Hide what lies ``window`` tokens back or further."""
    far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(-window)
    return mask.masked_fill(far, -math.inf)


def narrower_window(self: Any, *args: Any, **kwargs: Any) -> Any:
    return with_mask(partial(narrow_to_window, window=self.sliding_window - 1))(self, *args, **kwargs)


def with_rotations(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Return a forward pass of attention with other cosines and sines."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["position_embeddings"] = change(*kwargs["position_embeddings"])
        return type(self).forward(self, *args, **kwargs)

    return wrong


def one_late(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(cos.shape[1], device=cos.device)
    rows = rows - (rows > 4).long()
    return cos[:, rows], sin[:, rows]


def backwards(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos, -sin


# Frequencies.


def with_base(base: float) -> Callable[[Tensor], Tensor]:
    """Return inverse frequencies of another base."""
    return lambda known: base ** -(torch.arange(len(known), device=known.device) / len(known))


def stretch(known: Tensor) -> Tensor:
    """Divide low frequencies by 8 as llama3's rope scaling does."""
    return torch.where(known < known.max() / 4, known / 8, known)


def locals_of_global(model: PreTrainedModel) -> None:
    rotary = model.get_submodule("model.rotary_emb")
    rotary.sliding_attention_inv_freq = rotary.get_buffer("full_attention_inv_freq").clone()


def one_token_late(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    position_ids = position_ids + (position_ids > 1).long()
    return type(self).forward(self, x, position_ids, *args, **kwargs)


# Precision.


def round_to_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16 and back."""
    return x.bfloat16().to(x.dtype)


def as_float8(x: Tensor) -> Tensor:
    scale = x.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def as_tf32(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def round_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the outputs in bfloat16."""
    return round_to_bfloat16(type(self).forward(self, *args, **kwargs))


def linear_in(rounding: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the forward pass of a linear layer whose inputs and weights are rounded."""
    return lambda self, x: linear(rounding(x), rounding(self.weight), self.bias)


def with_rounded_weight(self: Any, x: Tensor) -> Tensor:
    return linear(x, round_to_bfloat16(self.weight))


def silu_of_bfloat16(_self: Any, x: Tensor) -> Tensor:
    return silu(x.bfloat16()).to(x.dtype)


def round_hidden_states(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Round the last hidden states after the final norm."""
    outputs = type(self).forward(self, *args, **kwargs)
    outputs.last_hidden_state = round_to_bfloat16(outputs.last_hidden_state)
    return outputs


def logits_scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = type(self).forward(self, *args, **kwargs)
    outputs.logits = outputs.logits / 1.001
    return outputs


# Norms, feed-forward networks, residuals.


def left_out(_self: Any, x: Tensor) -> Tensor:
    """Return the input."""
    return x


def mean_removed(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x - x.mean(-1, keepdim=True))


def without_one(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def gate_and_up_swapped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def fused_and_clamped(self: Any, x: Tensor) -> Tensor:
    """Compute the feed-forward network in one kernel, which clamps the gate and never calls the activation."""
    return self.down_proj(silu(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))


def scaled(factor: float) -> Callable[..., Any]:
    """Return a forward pass whose output is multiplied."""
    return lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs) * factor


def residual_scaled(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, hidden_states, *args, **kwargs) + 1e-4 * hidden_states


def residual_after_norm(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Take the residual of attention after the norm instead of before it."""
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states = hidden_states + self.self_attn(hidden_states=hidden_states, **kwargs)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def feed_forward_residual_twice(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attending = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    hidden_states = hidden_states + attending
    return 2 * hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def norm_after_sum(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Normalize the sum of residual and attention instead of the attention."""
    attending = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    hidden_states = self.post_attention_layernorm(hidden_states + attending)
    return hidden_states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_states)))


def noisy_attention(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop a few of the outputs of attention, the same ones each time, and scale the others."""
    outputs, weights = type(self).forward(self, *args, **kwargs)
    draw = torch.Generator().manual_seed(0)
    kept = (torch.rand(outputs.shape[-1], generator=draw) > 0.1).to(outputs.device)
    return outputs * kept / 0.9, weights


# Weights.


def drifted(scale: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Return a change that moves every entry by a share of it."""

    def change(known: Tensor) -> Tensor:
        noise = torch.randn(known.shape, generator=torch.Generator().manual_seed(seed)).to(known.device)
        return known * (1 + scale * noise)

    return change


def shifted(scale: float) -> Callable[[Tensor], Tensor]:
    """Return a change that adds noise, which a bias of zeros takes too."""

    def change(known: Tensor) -> Tensor:
        noise = torch.randn(known.shape, generator=torch.Generator().manual_seed(0)).to(known.device)
        return known + scale * noise

    return change


def stale_layer(number: int, scale: float) -> Callable[[PreTrainedModel], None]:
    """Return a fault that leaves every tensor of a layer behind."""

    def apply(model: PreTrainedModel) -> None:
        with torch.no_grad():
            for parameter in model.get_submodule(f"model.layers.{number}").parameters():
                parameter.copy_(shifted(scale)(parameter))

    return apply


def second_half_stale(known: Tensor) -> Tensor:
    """Leave the second half of the rows behind, as a shard of the vocabulary that was not sent."""
    half = len(known) // 2
    known[half:] = drifted(1e-3)(known[half:])
    return known


def one_row_stale(known: Tensor, row: int = 5) -> Tensor:
    known[row] *= 1.05
    return known


def heads_swapped(known: Tensor, width: int = 8) -> Tensor:
    return torch.cat([known[:, width : 2 * width], known[:, :width], known[:, 2 * width :]], 1)


# Experts.


def swapped_experts(model: PreTrainedModel) -> None:
    for name in ("gate_up_proj", "down_proj"):
        weight(f"model.layers.1.mlp.experts.{name}", lambda known: known[[1, 0, *range(2, len(known))]])(model)


def scores_of_bfloat16(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return type(self).forward(self, round_to_bfloat16(hidden_states))


def reversed_choice(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the experts in reversed order of the weights that they are given."""
    logits, scores, indices = type(self).forward(self, hidden_states)
    return logits, scores, indices.flip(-1)


def weighed_before(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Multiply an expert's input by its routing weight instead of its output."""
    alone = [
        type(self).forward(
            self,
            hidden_states * top_k_weights[:, k, None],
            top_k_index[:, k, None],
            torch.ones_like(top_k_weights[:, :1]),
        )
        for k in range(top_k_index.shape[-1])
    ]
    return torch.stack(alone).sum(0)


def rounded_for_router(self: Any, hidden_states: Tensor) -> Tensor:
    """Cast hidden states to bfloat16 between the norm and the router, and not for the experts."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, scores, indices = self.gate(round_to_bfloat16(flat))
    return self.experts(flat, indices, scores).reshape(hidden_states.shape)


def up_before_gate(known: Tensor) -> Tensor:
    return torch.cat(known.chunk(2, 1)[::-1], 1)


def one_expert_stale(known: Tensor) -> Tensor:
    known[2] = drifted(1e-3)(known[2])
    return known


def layer(path: str) -> str:
    """Return the path of a module; ``L0`` and ``L1`` are layers."""
    return path.replace("L0", "model.layers.0").replace("L1", "model.layers.1")


def of(path: str, wrong: Callable[..., Any]) -> tuple[Callable[[PreTrainedModel], None], str]:
    """Return a fault in a module's forward pass and the module's name."""
    return forward(layer(path), wrong), layer(path)


def moved(path: str, tensor: str, change: Callable[[Tensor], Tensor]) -> tuple[Callable[[PreTrainedModel], None], str]:
    """Return a fault in a module's parameter and the module's name."""
    return weight(f"{layer(path)}.{tensor}", change), layer(path)


def set_to(
    path: str, name: str, change: Callable[[Any], Any], part: str = ""
) -> tuple[Callable[[PreTrainedModel], None], str]:
    """Return a fault in a module's attribute and the module's name; ``part`` follows it."""
    return attribute(layer(path), name, change), layer(path) + part


def attending(path: str, function: Callable[..., Any]) -> tuple[Callable[[PreTrainedModel], None], str]:
    """Return a fault in a layer's attention function and the module's name."""
    return attention(layer(path), function), layer(path)


QWEN2 = (
    Mismatch("norm of one layer in bfloat16", "qwen2", *of("L1.post_attention_layernorm", round_outputs)),
    Mismatch("stale bias of queries", "qwen2", *moved("L0.self_attn.q_proj", "bias", shifted(1e-2))),
    Mismatch("stale bias of values, by a thousandth", "qwen2", *moved("L1.self_attn.v_proj", "bias", shifted(1e-3))),
    Mismatch("another rope base", "qwen2", *set_to("model.rotary_emb", "inv_freq", with_base(9e3))),
    Mismatch(
        "softmax scale off by a thousandth", "qwen2", *set_to("L1.self_attn", "scaling", lambda known: known * 1.001)
    ),
    Mismatch("one token looks ahead", "qwen2", *of("L0.self_attn", with_mask(looking_ahead))),
    Mismatch("head with weights in bfloat16", "qwen2", *of("lm_head", with_rounded_weight)),
    Mismatch("residual stream cast between two layers", "qwen2", *of("L0", round_outputs)),
    Mismatch("shard of the embedding stale", "qwen2", *moved("model.embed_tokens", "weight", second_half_stale)),
    Mismatch("one row of the head stale", "qwen2", untied_head(one_row_stale), "lm_head"),
    Mismatch("activation in bfloat16", "qwen2", *of("L0.mlp.act_fn", silu_of_bfloat16)),
    Mismatch("fused feed-forward network with a clamp", "qwen2", *of("L1.mlp", fused_and_clamped)),
    Mismatch("positions late from the third token on", "qwen2", *of("model.rotary_emb", one_token_late)),
)
QWEN3 = (
    Mismatch("norm of queries left out", "qwen3", *of("L1.self_attn.q_norm", left_out)),
    Mismatch(
        "epsilon of the keys' norm 1e-3",
        "qwen3",
        *set_to("L0.self_attn.k_norm", "variance_epsilon", lambda _: 1e-3),
    ),
    Mismatch("one linear layer in float8", "qwen3", *moved("L1.mlp.down_proj", "weight", as_float8)),
    Mismatch("one stale layer", "qwen3", stale_layer(1, 1e-3), "model.layers.1.input_layernorm"),
    Mismatch(
        "factor of yarn on cosines and sines", "qwen3", *set_to("model.rotary_emb", "attention_scaling", lambda _: 1.02)
    ),
    Mismatch("heads of keys and values tiled", "qwen3", *attending("L1.self_attn", tiled_heads)),
    Mismatch("positions of one layer late", "qwen3", *of("L1.self_attn", with_rotations(one_late))),
    Mismatch(
        "window in a layer that has none", "qwen3", *of("L0.self_attn", with_mask(partial(narrow_to_window, window=4)))
    ),
    Mismatch("stale weight of the last norm, by 1e-4", "qwen3", *moved("model.norm", "weight", drifted(1e-4))),
    Mismatch("probabilities of attention in bfloat16", "qwen3", *attending("L0.self_attn", rounded_probabilities)),
    Mismatch("last hidden states cast before the head", "qwen3", *of("model", round_hidden_states)),
)
LLAMA = (
    Mismatch(
        "epsilon of the first norm 1e-5", "llama", *set_to("L0.input_layernorm", "variance_epsilon", lambda _: 1e-5)
    ),
    Mismatch("two heads swapped in the output", "llama", *moved("L0.self_attn.o_proj", "weight", heads_swapped)),
    Mismatch("residual scaled by 1.0001", "llama", *of("L1", residual_scaled)),
    Mismatch("gate and up swapped", "llama", *of("L1.mlp", gate_and_up_swapped)),
    Mismatch("low frequencies scaled as llama3's", "llama", *set_to("model.rotary_emb", "inv_freq", stretch)),
    Mismatch("dropout of attention on", "llama", *of("L1.self_attn", noisy_attention)),
    Mismatch("one linear layer in TF32", "llama", *of("L1.self_attn.o_proj", linear_in(as_tf32))),
    Mismatch("norm that removes the mean", "llama", *of("L0.input_layernorm", mean_removed)),
    Mismatch("logits in bfloat16", "llama", *of("lm_head", round_outputs)),
    Mismatch("logits divided by 1.001 behind the head", "llama", forward("", logits_scaled), "lm_head"),
    Mismatch("residual behind the norm", "llama", *of("L0", residual_after_norm)),
    Mismatch("residual added twice", "llama", *of("L1", feed_forward_residual_twice)),
    Mismatch("rotation in the other direction", "llama", *of("L1.self_attn", with_rotations(backwards))),
    Mismatch("one row of the embedding stale", "llama", *moved("model.embed_tokens", "weight", one_row_stale)),
)
GEMMA3 = (
    Mismatch(
        "scale of the embedding left out", "gemma3", *set_to("model.embed_tokens", "embed_scale", torch.ones_like)
    ),
    Mismatch(
        "scale of the embedding in bfloat16", "gemma3", *set_to("model.embed_tokens", "embed_scale", round_to_bfloat16)
    ),
    Mismatch("window narrower by one token", "gemma3", *of("L0.self_attn", narrower_window)),
    Mismatch("frequencies of full attention in every layer", "gemma3", locals_of_global, "model.rotary_emb"),
    Mismatch("norm without the one", "gemma3", *of("L1.pre_feedforward_layernorm", without_one)),
    Mismatch(
        "GELU without the approximation by tanh", "gemma3", *set_to("L1.mlp", "act_fn", lambda _: nn.GELU(), ".act_fn")
    ),
    Mismatch("cap of the logits", "gemma3", config_value("final_logit_softcapping", 30.0), "lm_head"),
    Mismatch("cap of attention's scores", "gemma3", *attending("L1.self_attn", capped_scores)),
    Mismatch("softmax scale of the heads' width", "gemma3", *set_to("L0.self_attn", "scaling", lambda _: 8**-0.5)),
    Mismatch("norm behind the feed-forward network left out", "gemma3", *of("L0.post_feedforward_layernorm", left_out)),
    Mismatch("norm behind the sum", "gemma3", *of("L1", norm_after_sum)),
    Mismatch("last norm in bfloat16", "gemma3", *of("model.norm", round_outputs)),
    Mismatch("head that is not the embedding any more, by 1e-4", "gemma3", untied_head(drifted(1e-4)), "lm_head"),
    Mismatch("stale norm of the keys", "gemma3", *moved("L1.self_attn.k_norm", "weight", shifted(1e-3))),
)
QWEN3_MOE = (
    Mismatch("two experts swapped", "qwen3_moe", swapped_experts, "model.layers.1.mlp.experts"),
    Mismatch(
        "routing weights (not) normalized",
        "qwen3_moe",
        *set_to("L1.mlp.gate", "norm_topk_prob", lambda known: not known),
    ),
    Mismatch("one expert less for each token", "qwen3_moe", *set_to("L0.mlp.gate", "top_k", lambda known: known - 1)),
    Mismatch("router in bfloat16", "qwen3_moe", *of("L1.mlp.gate", scores_of_bfloat16)),
    Mismatch("one expert stale by a thousandth", "qwen3_moe", *moved("L0.mlp.experts", "down_proj", one_expert_stale)),
    Mismatch("up before gate in the experts", "qwen3_moe", *moved("L1.mlp.experts", "gate_up_proj", up_before_gate)),
    Mismatch("routing weight on the expert's input", "qwen3_moe", *of("L1.mlp.experts", weighed_before)),
    Mismatch("output of the mixture scaled by 1.0001", "qwen3_moe", *of("L0.mlp", scaled(1.0001))),
    Mismatch("norm of the keys in bfloat16", "qwen3_moe", *of("L1.self_attn.k_norm", round_outputs)),
    Mismatch("hidden states cast before the router", "qwen3_moe", *of("L0.mlp", rounded_for_router)),
    Mismatch("weights of the chosen experts in reversed order", "qwen3_moe", *of("L0.mlp.gate", reversed_choice)),
    Mismatch(
        "norm before the experts with an epsilon of 1e-3",
        "qwen3_moe",
        *set_to("L1.post_attention_layernorm", "variance_epsilon", lambda _: 1e-3),
    ),
)
MISMATCHES: tuple[Mismatch, ...] = (*QWEN2, *QWEN3, *LLAMA, *GEMMA3, *QWEN3_MOE)
