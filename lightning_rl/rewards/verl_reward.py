"""Reward functions written for verl."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.text import texts_of
from lightning_rl.rewards.values import values_of
from lightning_rl.utils.keys import hide_secrets
from lightning_rl.utils.naming import name_of


@dataclass(frozen=True, kw_only=True)
class VerlReward:
    """Reward function of verl, with the columns of verl's data.

    Args:
        compute_score: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, which returns a number,
            or a mapping with a number as ``"score"``, whose other entries are logged with the samples. A row for which
            it raises or returns another value gets NaN, is left out of training and is counted as failed; a warning
            shows the first, and the file of failed samples has each as ``reason``. A row without a ground truth gets
            None.

    Raises:
        ValueError: In the first call, if the data have neither ``reward_model`` nor ``ground_truth``.

    Example:
        >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        ...     return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
        >>> VerlReward(compute_score=compute_score)(["?"], ["4"], reward_model=[{"ground_truth": "4"}])
        [1.0]
    """

    compute_score: Callable[..., Any]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        data_source: Sequence[Any] | None = None,
        reward_model: Sequence[Any] | None = None,
        ground_truth: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        log_extra: Callable[[str, Sequence[Any]], object] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the score of each completion."""
        texts = texts_of(completions)
        if reward_model is None and ground_truth is None:
            raise ValueError(
                "expected a column 'reward_model' with 'ground_truth', as in verl's data, or a column 'ground_truth', "
                f"got {sorted(columns)}: name one so, as in PromptDataModule(columns={{'ground_truth': ...}})"
            )
        if reward_model is None:
            reward_model = [{"ground_truth": truth} for truth in ground_truth or ()]
        nothing = [None] * len(texts)
        rows = zip(texts, reward_model, data_source or nothing, extra_info or nothing, strict=True)
        entries = [self._entry(*row) for row in rows]
        if log_extra is not None:
            for name in sorted({name for entry in entries for name in entry} - {"score"}):
                log_extra(name, [entry.get(name) for entry in entries])
        if failed := [entry["reason"] for entry in entries if math.isnan(entry["score"] or 0)]:
            warnings.warn(
                f"{name_of(self.compute_score)} failed on {len(failed)} of {len(texts)} completions, whose rows get no "
                f"reward. First cause: {failed[0]}",
                stacklevel=2,
            )
        return [entry["score"] for entry in entries]

    def _entry(self, text: str, model: Any, source: Any, info: Any) -> dict[str, Any]:
        """Return the score of a completion with further entries; NaN with the reason if there is none."""
        if model is None or (isinstance(model, Mapping) and model.get("ground_truth", "") is None):
            return {"score": None}
        try:
            if not isinstance(model, Mapping) or "ground_truth" not in model:
                raise ValueError(f"expected a mapping with 'ground_truth', got {model!r:.200}: correct 'reward_model'")
            truth = model["ground_truth"]
            score = self.compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
            entry = score if isinstance(score, Mapping) else {"score": score}
            (value,) = values_of([entry["score"]], 1)
            if value is None or not math.isfinite(value):
                raise ValueError(f"expected a finite score, got {value}")
        except Exception as error:  # noqa: BLE001  the boundary to foreign code
            return {"score": math.nan, "reason": hide_secrets(repr(error))}
        return {**entry, "score": value}
