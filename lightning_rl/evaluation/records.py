"""Records of samples, one JSON line per prompt; docs/evaluation.md has the format."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.data import Prompt
from lightning_rl.rollout import FinishReason
from lightning_rl.utils.atomic_write import write_atomically
from lightning_rl.utils.terminal import dump_visible

Record = dict[str, Any]


def records_of(
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    finishes: Sequence[int],
    texts: Sequence[str],
    further: Mapping[str, Sequence[Any]],
) -> list[Record]:
    """Return a record for each prompt; samples are ordered by prompt, and ``further`` has entries of each."""
    size = len(texts) // max(len(prompts), 1)
    completions = [
        {
            "text": text,
            "finish": FinishReason(finish).name.lower(),
            "length": length,
            **{name: values[row] for name, values in further.items()},
        }
        for row, (text, finish, length) in enumerate(zip(texts, finishes, lengths, strict=True))
    ]
    return [
        {
            "index": prompt.index,
            "prompt": prompt.content,
            "columns": dict(prompt.columns),
            "completions": completions[place * size : (place + 1) * size],
        }
        for place, prompt in enumerate(prompts)
    ]


def number_or_none(value: float) -> float | None:
    """Return the number, or None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write one line per record atomically; values without a JSON form are written as strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(dump_visible(record, default=str) + "\n" for record in records)
    write_atomically(path, lambda part: part.write_text(lines, encoding="utf-8"))
