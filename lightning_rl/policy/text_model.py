"""Language model of a multimodal checkpoint.

Where transformers has a class for the language model alone, that class is built, without towers and projectors.
Otherwise the whole model is built, with everything but its language model frozen.
"""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)


def has_towers(config: PreTrainedConfig) -> bool:
    """Return True for a configuration with parts besides the language model, such as a vision tower."""
    return config.get_text_config() is not config


def auto_class_of(config: PreTrainedConfig) -> Any:
    """Return the auto class of transformers for a checkpoint; multimodal only for decoders."""
    decodes = not config.is_encoder_decoder and has_towers(config)
    return AutoModelForMultimodalLM if decodes else AutoModelForCausalLM


def text_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of transformers for the language model alone, or None."""
    listed: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return listed.get(type(config.get_text_config()), None)


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model, which shares its parameters, or the model itself without a class for that."""
    kind = text_class_of(model.config) if has_towers(model.config) else None
    if kind is None:
        return model
    text = next((part for part in model.modules() if type(part) is kind), None) or _with_head(kind, model)
    text.config.architectures = [kind.__name__]
    text.generation_config = model.generation_config
    return text.train(model.training)


def _with_head(kind: type[PreTrainedModel], model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of class ``kind`` with the backbone and vocabulary head of a multimodal model."""
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


def modules_behind(model: PreTrainedModel, output: str) -> dict[str, nn.Module]:
    """Return the modules that produce an optional output of a model, such as ``attentions``, in order."""
    base: Any = backbone_of(model)
    spec = (base._can_record_outputs or {}).get(output, ())  # noqa: SLF001  no public name
    specs = spec if isinstance(spec, list | tuple) else [spec]
    kinds = tuple(getattr(recorder, "target_class", recorder) for recorder in specs)
    return {name: part for name, part in model.named_modules() if isinstance(part, kinds)}


def tower_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters outside of the language model by name; none of a model of text alone."""
    if not has_towers(model.config):
        return {}
    head: Any = model.get_output_embeddings()
    language = {*backbone_of(model).parameters(), *head.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in language}


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze everything outside of the language model, and warn of adapters there."""
    towers = tower_parameters(model)
    adapters = [name for name, parameter in towers.items() if parameter.requires_grad and ".lora_" in name]
    if adapters:
        rank_zero_warn(
            f"{len(adapters)} tensors of adapters on towers do not train, as {adapters[0]}: name the layers of the "
            "language model in target_modules"
        )
    for parameter in towers.values():
        parameter.requires_grad_(False)  # noqa: FBT003  a method of torch
