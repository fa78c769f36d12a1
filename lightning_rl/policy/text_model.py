"""Text models: the language model of a checkpoint that reads pictures or sound as well.

Where transformers has a class for the language model alone, that class is built, and towers and projectors are dropped.
Where it has none, the whole model is built, and everything outside of its language model is frozen.
"""

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)


def has_towers(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of a language model and of other parts, such as a vision tower."""
    return config.get_text_config() is not config


def auto_class_of(config: PreTrainedConfig) -> Any:
    """Return the auto class of transformers that knows the class of a checkpoint; of decoders alone."""
    decodes = not config.is_encoder_decoder and has_towers(config)
    return AutoModelForMultimodalLM if decodes else AutoModelForCausalLM


def text_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that transformers has for the language model of a configuration alone; None if it has none."""
    listed: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return listed.get(type(config.get_text_config()), None)


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model alone, with the parameters of the whole; a model without a class for it as it is."""
    kind = text_class_of(model.config) if has_towers(model.config) else None
    if kind is None:
        return model
    text = next((part for part in model.modules() if type(part) is kind), None) or _with_head(kind, model)
    text.config.architectures = [kind.__name__]
    text.generation_config = model.generation_config
    return text.train(model.training)


def _with_head(kind: type[PreTrainedModel], model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of a class that is given backbone and vocabulary head of a model with towers."""
    head: Any = model.get_output_embeddings()
    with torch.device("meta"):
        shape = backbone_of(kind(model.config.get_text_config()))
    backbone: Any = next(part for part in model.modules() if type(part) is type(shape))
    config = backbone.config
    config.tie_word_embeddings = head.weight is backbone.get_input_embeddings().weight
    with torch.device("meta"):
        text = kind(config)
    name = next(name for name, part in text.named_children() if part is backbone_of(text))
    setattr(text, name, backbone)
    text.set_output_embeddings(head)
    return text


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model whose hidden states its vocabulary head reads."""
    inner: Any = model.get_decoder() if has_towers(model.config) else model.base_model
    if inner is model:  # Llama4ForCausalLM and MllamaForCausalLM name a base model that they do not have
        return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)
    return inner if inner.get_output_embeddings() is None else backbone_of(inner)


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze everything outside of the language model, which text alone gives no gradient."""
    if has_towers(model.config):
        head: Any = model.get_output_embeddings()
        trained = {*backbone_of(model).parameters(), *head.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter in trained)


def check_text_only(model: PreTrainedModel, engine: str) -> None:
    """Refuse a model with towers for an engine that would want them as well.

    Raises:
        ValueError: naming the model and what to do.
    """
    if has_towers(model.config):
        cure = "draw with engine=TransformersEngine()"
        if (kind := text_class_of(model.config)) is not None:
            cure = f"pass its name or folder as policy=, of which {kind.__name__} is built, or {cure}"
        raise ValueError(f"expected a model of text alone for {engine}, got {type(model).__name__}: {cure}")
