"""Norms, rotary embeddings and gated feed-forwards of one model with the Triton kernels of liger-kernel.

Its losses are not used, as log-probabilities come from our head. liger-kernel patches the module of a model family
globally; these patches are undone, and only the model's own attention gets the rotary function.

Source: Hsu et al. 2024, arXiv:2410.10989.
"""

import importlib.util
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_rl.policy.text_model import modules_behind

LIGER = "liger_kernel"
REPLACED = ("rope", "rms_norm", "swiglu", "geglu")  # options of liger-kernel's functions, one function per family


def has_liger() -> bool:
    """Return True if liger-kernel is installed."""
    return importlib.util.find_spec(LIGER) is not None


def apply_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding and gated feed-forward of a model; weights and their names do not change.

    Raises:
        ValueError: If liger-kernel does not support the model.
    """
    from liger_kernel.transformers import monkey_patch

    families: dict[str, Callable[..., None]] = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in families:
        raise ValueError(
            f"expected a model that liger-kernel supports, got {kind}: leave liger= out; {sorted(families)}"
        )
    options = {name: known.default for name, known in inspect.signature(families[kind]).parameters.items()}
    del options["model"]
    attentions = modules_behind(model, "attentions").values()
    called: dict[str, Any] = inspect.unwrap(type(next(iter(attentions))).forward).__globals__
    before = dict(called)
    try:  # options that a family does not support are False by default
        families[kind](model=model, **{name: name in REPLACED and default for name, default in options.items()})
        after = dict(called)
    finally:
        called.update(before)
    changed = {name: value for name, value in after.items() if before.get(name) is not value}
    for attention in attentions:
        _replace_globals(attention, changed)


def _replace_globals(module: nn.Module, values: dict[str, Any]) -> None:
    """Replace global names in the forward of one module."""
    forward = inspect.unwrap(type(module).forward)
    values = {name: value for name, value in values.items() if name in forward.__code__.co_names}
    if values:
        names = {**forward.__globals__, **values}
        replaced = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        replaced.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(replaced, module)
