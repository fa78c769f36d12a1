"""Names of metrics as paths: a logger with a file for each metric cannot hold one that is the folder of another."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from typing_extensions import override


def folders(names: Iterable[str]) -> set[str]:
    """Names that are the folder of another one.

    Example:
        >>> folders(["a", "a/b", "a_b/c", "d/e"])
        {'a'}
    """
    known = set(names)
    parents = {name[:place] for name in known for place, letter in enumerate(name) if letter == "/"}
    return known & parents


def noting_reward(completions: Any, log_metric: Any, **_: Any) -> list[float]:
    """Reward by the length of a completion, which logs a metric and others in a folder, as a judge does."""
    log_metric("share", 1.0)
    log_metric("failed", 0.0)
    log_metric("judge/failed", 0.1)
    return [float(len(text)) for text in completions]


class Names(Logger):
    """Logger that keeps the name of every metric."""

    name, version = "names", 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen |= set(metrics)

    @override
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass


class Rows(Logger):
    """A logger that stores every row."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    @override
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        pass
