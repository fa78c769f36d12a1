"""Inspection: run a script up to its Trainer call, without training."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule

from lightning_rl.utils.trainer import callbacks_of

INSPECTED = "LIGHTNING_RL_INSPECTED"


class StopRecipe(Exception):  # noqa: N818
    """Exception that ends a script at its Trainer call.

    Args:
        module: Module that the script passed to its Trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__("the script reached its Trainer call during an inspection")
        self.module, self.callbacks = module, callbacks_of(module.trainer)


@contextmanager
def inspection() -> Iterator[None]:
    """End scripts inside of the context with :class:`StopRecipe` where a module would be trained or evaluated.

    Uses environment variables, which subprocesses of a Trainer inherit. ``LOCAL_RANK`` keeps a Trainer of several ranks
    from starting subprocesses.
    """
    added = {name: "0" for name in (INSPECTED, "LOCAL_RANK") if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def refuse_inspection(module: LightningModule) -> None:
    """Raise :class:`StopRecipe` inside of an :func:`inspection`, before any setup."""
    if INSPECTED in os.environ:
        stop = StopRecipe(module)
        vars(module.trainer)["callbacks"] = []  # otherwise on_exception would report a failed run
        raise stop
