"""Inspection: a tool takes what a script gives to its Trainer, and nothing of the run begins."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule

from lightning_rl.metrics import callbacks_of

INSPECTED = "LIGHTNING_RL_INSPECTED"


class StopRecipe(Exception):  # noqa: N818
    """Ends a script where a tool has seen enough of it.

    Args:
        module: that the script gave to its Trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__("a tool has seen enough")
        self.module, self.callbacks = module, callbacks_of(module.trainer)


@contextmanager
def inspection() -> Iterator[None]:
    """Inside, a script ends with :class:`StopRecipe` where its module would be trained or evaluated.

    Said in the environment, so that processes which a Trainer starts know it too. A Trainer of several ranks starts
    none if it finds the number of its own rank there.
    """
    added = {name: "0" for name in (INSPECTED, "LOCAL_RANK") if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def stop_in_inspection(module: LightningModule) -> None:
    """Raises :class:`StopRecipe` inside of an :func:`inspection`, before anything has been set up."""
    if INSPECTED in os.environ:
        stop = StopRecipe(module)
        vars(module.trainer)["callbacks"] = []  # none of them is to take this for a failure of the run
        raise stop
