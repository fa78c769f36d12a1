"""Tiny checkpoints of models that read pictures or sound as well, with random weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from kit.support import DELTA_NET, EOS, SHARED, VOCABULARY

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
SIZES: dict[str, Any] = {  # of what a text configuration has
    "hidden_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **DELTA_NET,
}
TOWER_SIZES: dict[str, Any] = {  # of what the configuration of a tower has
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "depth": 1,
    "embed_dim": 16,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projection_dim": 16,
    "encoder_layers": 1,
    "d_model": 16,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "hidden_dim": 16,
    "num_layers": 1,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "vocab_size": VOCABULARY,
    "position_embedding_size": 8,
    "text_hidden_size": 32,
    "projection_hidden_dim": 16,
    "projection_intermediate_size": 16,
    "num_position_embeddings": 16,
    "posemb_grid_size": 4,
    "adapter_in_dim": 16,
    "adapter_input_size": 16,
    "adapter_out_dim": 32,
    "output_dim": 32,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "base_channels": 32,
    "latent_channels": 32,
    "num_filters": 4,
    "mlp_dim": 32,
    "output_channels": 16,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}


def sections(*sizes: int, **options: Any) -> dict[str, Any]:
    """Rotary embeddings of three positions for a token."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes), **options}}


TEXT: dict[str, dict[str, Any]] = {
    "gemma3": SLIDING,
    "gemma4": SHARED,
    "gemma4_unified": SHARED,
    "cohere2_vision": SLIDING,
    "exaone4_5": SLIDING,
    "lfm2_vl": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]},
    "kimi_k25": LATENT,
    "minimax_m3_vl": {
        **SPARSE,
        "layer_types": ["full_attention"] * 2,
        "rotary_dim": 4,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 16,
    },
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 0, "pad_token_id": 0},
    "qwen2_vl": sections(2, 1, 1),
    "qwen2_5_vl": sections(2, 1, 1),
    "qwen2_5_omni_thinker": sections(2, 1, 1),
    "paddleocr_vl": sections(2, 1, 1),
    "glm4v": sections(1, 1, 0, partial_rotary_factor=0.5),
    "glm46v": sections(1, 1, 0, partial_rotary_factor=0.5),
    "glm_ocr": sections(1, 1, 0, partial_rotary_factor=0.5),
    "glm4v_moe": {**sections(1, 1, 0, partial_rotary_factor=0.5), "first_k_dense_replace": 1, "n_group": 1},
    "step3p7": {
        **SPARSE,
        **SLIDING,
        "num_sliding_attention_heads": 4,
        "share_expert_dim": 16,
        "pad_token_id": 0,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in SLIDING["layer_types"]},
    },
    "cohere_compass": {
        **SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in SLIDING["layer_types"]},
    },
    "cosmos3_edge": sections(2, 1, 1),
    "qwen2_5_omni": sections(2, 1, 1),
    "qwen3_omni_moe_thinker": sections(2, 1, 1),
    "dots3_note": {**LATENT, **SPARSE, "head_dim": 16},
    "glm5_next": {
        **LATENT,
        **SPARSE,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "ernie4_5_vl_moe": {**sections(1, 1, 2), "mlp_layer_types": ["dense", "sparse"], "moe_num_experts": 4, "moe_k": 2},
    "hunyuan_vl": {**sections(2, 1, 1), "head_dim": 8},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 4,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "diffusion_gemma": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_ocr2": {
        **SPARSE,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "unlimited_ocr": {**SPARSE, "num_key_value_heads": 4},
    "glmga": sections(1, 1, 0, partial_rotary_factor=0.5),
    "emu3": {"pad_token_id": 0, "bos_token_id": 2},
    "inkling2": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 3,
        "unpadded_vocab_size": VOCABULARY - 2,
    },
    "inkling_mm_model": {
        **SPARSE,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 3,
        "unpadded_vocab_size": VOCABULARY - 2,
    },
    "muse_glimmer": {"final_logit_softcapping": 1.0},  # low, so that it shows whether logits are scaled before it
    "muse_spark": {"final_logit_softcapping": 1.0},
    "nemotron_h_omni": {
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 16,
    },
    "mistral_large4": {
        **LATENT,
        **SPARSE,
        "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full"] * 2,
        "no_rope_layers": [1, 0],
        "kv_source_layers": [0, 1],
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
}
TOP_SIZES = {"projector_hidden_size": 16}
TOWER: dict[str, dict[str, Any]] = {
    "inkling_mm_model": {"patch_size": 40},
    "vibevoice_asr": {"num_filters": 2, "depths": [1] * 7},
    "molmo2": {"image_size": [28, 28], "vision_feature_layer": [0, 0]},
    "llama4": {"hidden_size": 16, "intermediate_size": 64},
}
TOP: dict[str, dict[str, Any]] = {
    "muse_glimmer": {"image_token_id": VOCABULARY, "video_token_id": VOCABULARY},
    "muse_spark": {"audio_token_id": VOCABULARY, "image_token_id": VOCABULARY, "video_token_id": VOCABULARY},
    "ovis2": {"vocab_size": VOCABULARY, "hidden_size": 32},
    "emu3": {"vocabulary_map": {"<image>": 63, "<|extra_200|>": 62}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "nemo_speechlm": {"blank_token_id": 15},
}
PARTS: dict[str, dict[str, Any]] = {  # towers that a default configuration leaves out, and other parts of it
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
}


def tiny_multimodal(
    family: str,
    seed: int = 0,
    *,
    tokens: Mapping[str, int] = MappingProxyType({}),
    text: Mapping[str, Any] = MappingProxyType({}),
    tower: Mapping[str, Any] = MappingProxyType({}),
    top: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedModel:
    """A model of a family with towers, by the class that writes its checkpoints; float32, far from uniform.

    ``tokens`` are ids of placeholders by the beginning of their names, the others options of parts and of the whole.
    """
    kind: Any = CONFIG_MAPPING[family]
    default = kind(**PARTS.get(family, {}))
    parts = {name: getattr(default, name) for name in kind.sub_configs if getattr(default, name, None) is not None}
    inner, outer = default.get_text_config(), dict[str, Any]()
    for name, value in vars(default).items():
        if name in TOP_SIZES and isinstance(value, int):
            outer[name] = TOP_SIZES[name]
        if isinstance(value, int) and (kind_of := re.fullmatch(r"(\w+)_token_(id|index)", name)):
            outer[name] = tokens.get(kind_of[1], text.get("vocab_size", VOCABULARY) - 1)
    made = {
        name: _shrink(part, family, text=part is inner) | dict(text if part is inner else tower)
        for name, part in parts.items()
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForMultimodalLM.from_config(kind(**{**outer, **made, **TOP.get(family, {}), **top})).eval()


def _shrink(config: PreTrainedConfig, family: str, *, text: bool) -> dict[str, Any]:
    options = config.to_dict()
    sizes = {name: size for name, size in (SIZES if text else TOWER_SIZES).items() if options.get(name) is not None}
    layers = options.get("num_hidden_layers")
    for name, value in options.items():
        if not isinstance(value, list | tuple):
            continue
        kinds = [sizes[name]] if name in sizes and name != "layer_types" else list({str(k): k for k in value}.values())
        if len(value) == layers:  # an entry for each layer
            sizes[name] = (kinds * 2)[: sizes["num_hidden_layers"]]
        elif name in sizes and not isinstance(sizes[name], list):
            sizes[name] = kinds * len(value)
    for name in config.sub_configs if not text else ():
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            sizes[name] = _shrink(part, family, text=False)
    if "per_layer_config" in options:
        sizes["per_layer_config"] = {}
    if not text:
        return {**options, **sizes, **TOWER.get(family, {})}
    tokens = dict.fromkeys({"bos_token_id", "pad_token_id"} & options.keys())
    dropout = {name: 0.0 for name in options if "dropout" in name}
    return {**options, **sizes, **tokens, **dropout, "eos_token_id": EOS, **TEXT.get(family, {})}
