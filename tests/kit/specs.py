"""Checks of :mod:`lightning_rl.run_spec`, one at a time."""

from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch.strategies import SingleDeviceStrategy

from kit.support import an_algorithm
from lightning_rl import FakeEngine, RLCallback
from lightning_rl.distributed import Parallel
from lightning_rl.run_spec import Problems, RunSpec


def spec_of(*callbacks: RLCallback, loss: Any = None, advantages: Any = "grpo", **given: Any) -> RunSpec:
    """A run on the CPU with an engine that can do everything."""
    parallel = Parallel(SingleDeviceStrategy(cast(Any, "cpu")))
    options: dict[str, Any] = {"engine": FakeEngine(lambda _: []), "parallel": parallel, **given}
    return RunSpec(algorithm=an_algorithm(callbacks, loss=loss, advantages=advantages), **options)


def check(check: Callable[[RunSpec], Problems], *callbacks: RLCallback, **given: Any) -> None:
    """Raise ValueError with the problems that a check finds."""
    if problems := list(check(spec_of(*callbacks, **given))):
        raise ValueError("\n".join(problems))
