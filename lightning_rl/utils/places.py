"""Places: the argument to which an object belongs, by the module that defines its class or function."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lightning_rl.utils.naming import name_of

MODULE = " of RLLightningModule"
PLACES = {
    "lightning_rl.advantages": f"advantages={MODULE}",
    "lightning_rl.data": "datamodule= of Trainer.fit",
    "lightning_rl.environments": f"environment={MODULE}",
    "lightning_rl.environments.outcome": f"rewards={MODULE}",
    "lightning_rl.evaluation": f"evaluation={MODULE}",
    "lightning_rl.generation": f"engine={MODULE}",
    "lightning_rl.samples.sampling_params": f"sampling={MODULE}",
    "lightning_rl.losses": f"loss={MODULE}",
    "lightning_rl.losses.critic": f"critic={MODULE}",
    "lightning_rl.losses.value": "loss= of Critic",
    "lightning_rl.optimizers": f"optimizer={MODULE}",
    "lightning_rl.optimizers.WarmupThenLinear": f"lr_scheduler={MODULE}",
    "lightning_rl.optimizers.warmup_then_linear": f"lr_scheduler={MODULE}",
    "lightning_rl.presets": f"**preset.options{MODULE}",
    "lightning_rl.policy.model_options": f"model={MODULE}",
    "lightning_rl.rewards": f"rewards={MODULE}",
    "lightning_rl.signal.reductions": f"reduction={MODULE}",
    "lightning.pytorch.callbacks": "callbacks= of Trainer",
    "lightning.pytorch.core.datamodule": "datamodule= of Trainer.fit",
    "lightning.pytorch.loggers": "logger= of Trainer",
    "lightning.pytorch.strategies": "strategy= of Trainer",
    "torch.optim": f"optimizer={MODULE}",
    "torch.optim.lr_scheduler": f"lr_scheduler={MODULE}",
    "transformers.tokenization_utils_base": f"tokenizer={MODULE}",
}
"""Argument by the beginning of an import path; the longest one that fits counts, first for the class itself."""


def place_of(part: Any) -> str | None:
    """Return the argument to which an object, a class or a function belongs; None if it may be anything.

    Example:
        >>> from torch.optim import AdamW
        >>> place_of(partial(AdamW, lr=1e-6)), place_of(print)
        ('optimizer= of RLLightningModule', None)
    """
    while isinstance(part, partial):
        part = part.func
    if inspect.isroutine(part):
        kinds: tuple[Any, ...] = () if hasattr(part, "__self__") else (part,)
    else:
        kinds = (part if isinstance(part, type) else type(part)).__mro__
    for kind in kinds:
        path = f"{kind.__module__}.{kind.__qualname__}"
        while path:
            if path in PLACES:
                return PLACES[path]
            path = path.rpartition(".")[0]
    return None


def check_place(argument: str, value: Any) -> None:
    """Raise ValueError if a value, or an item of a list or mapping, belongs to another argument.

    Args:
        argument: Argument that gets the value, as in ``PLACES``.
        value: Value of the argument.
    """
    for part in _parts(value):
        place = place_of(part)
        if place is not None and place != argument:
            raise ValueError(f"expected another object as {argument}, got {name_of(part)}: pass it as {place}")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    else:
        yield value
