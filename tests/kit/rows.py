"""Rows: every logged figure of a run, step by step."""

from typing import Any

from typing_extensions import override

from lightning_rl import RLCallback
from lightning_rl.metrics import is_of_the_clock

SIGNS = {"reference_kl/positive"}
"""Shares of signs: of differences that are 0 but for rounding they say nothing, so no two ways to compute agree."""


class Rows(RLCallback):
    """Keeps every logged figure that does not measure time, over all ranks."""

    name = "rows"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        values = pl_module.run.metrics.values()
        self.rows.append({key: value for key, value in values.items() if not is_of_the_clock(key)})
