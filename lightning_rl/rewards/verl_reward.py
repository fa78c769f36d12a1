"""Reward functions written for verl."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.text import texts_of


@dataclass(frozen=True, kw_only=True)
class VerlReward:
    """Reward function of verl, with the columns of verl's data.

    Args:
        compute_score: ``compute_score(data_source, solution_str, ground_truth, extra_info)``, which returns a number,
            or a mapping with a number as ``"score"``, whose other entries are logged with the samples.

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
        reward_model: Sequence[Mapping[str, Any]] | None = None,
        ground_truth: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
        log_extra: Callable[[str, Sequence[Any]], object] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the score of each completion."""
        texts = texts_of(completions)
        if reward_model is not None:
            ground_truth = [row["ground_truth"] for row in reward_model]
        if ground_truth is None:
            raise ValueError(
                "expected a column 'reward_model' with 'ground_truth', as in verl's data, or a column 'ground_truth', "
                f"got {sorted(columns)}: name one so, as in PromptDataModule(columns={{'ground_truth': ...}})"
            )
        nothing = [None] * len(texts)
        scores = [
            self.compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
            for source, text, truth, info in zip(
                data_source or nothing, texts, ground_truth, extra_info or nothing, strict=True
            )
        ]
        entries = [score if isinstance(score, Mapping) else {"score": score} for score in scores]
        if log_extra is not None:
            for name in sorted({name for entry in entries for name in entry} - {"score"}):
                log_extra(name, [entry.get(name) for entry in entries])
        return [entry["score"] for entry in entries]
