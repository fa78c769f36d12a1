"""Trajectories in checkpoints: a few flat tensors and one JSON text, which load under ``weights_only=True``."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from lightning_rl.samples.completion import FinishReason, Request
from lightning_rl.samples.failure import Failure
from lightning_rl.samples.media import Media
from lightning_rl.samples.prompt import Prompt
from lightning_rl.samples.sampling_params import SamplingParams
from lightning_rl.samples.trajectory import Segment, Trajectory

PLACE = "__tensor__"
"""Key of the entry that stands for the next values of a flat tensor, with their number."""


def state_of_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return tensors by name and a JSON text; prompts by their index, messages without a JSON form as strings."""
    parts = dict[str, list[Tensor]]()

    def replace_tensor(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return dict(value) if isinstance(value, Mapping) else str(value)
        name = f"{value.dtype} {list(value.shape[1:])}"
        parts.setdefault(name, []).append(value)
        return {PLACE: name, "length": len(value)}

    text = json.dumps(list(map(_record, trajectories)), default=replace_tensor)
    return {"text": text, **{name: torch.cat(tensors) for name, tensors in parts.items()}}


def trajectories_of_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Restore the trajectories of ``prompts`` from :func:`state_of_trajectories`.

    Raises:
        ValueError: If the samples began with other pictures than those of their row.
    """
    ends, by_index = Counter[str](), {prompt.index: prompt for prompt in prompts}

    def restore_tensor(value: dict[str, Any]) -> Any:
        if PLACE not in value:
            return value
        name, length = value[PLACE], value["length"]
        ends[name] += length
        return state[name][ends[name] - length : ends[name]]

    records = json.loads(state["text"], object_hook=restore_tensor)
    return [_trajectory(record, by_index[record["prompt"]]) for record in records]


def _values(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _record(trajectory: Trajectory) -> dict[str, Any]:
    """Return plain values and tensors."""
    request = trajectory.request
    ids = {"prefix_ids": torch.tensor(request.prefix_ids), "sampling": asdict(request.sampling)}
    segments = [
        {
            **_values(segment),
            "token_ids": torch.tensor(segment.token_ids, dtype=torch.int64),
            "versions": torch.tensor(segment.versions, dtype=torch.int64),
            "media": None if segment.media is None else segment.media.state(),
        }
        for segment in trajectory.segments
    ]
    return {
        **_values(trajectory),
        "prompt": trajectory.prompt.index,
        "request": {**_values(request), **ids, "media": _media_of(trajectory)},
        "segments": segments,
        "messages": json.dumps([dict(message) for message in trajectory.messages], default=str),
        "metrics": {name: float(value) for name, value in trajectory.metrics.items()},
        "failure": None if trajectory.failure is None else _values(trajectory.failure),
    }


def _media_of(trajectory: Trajectory) -> dict[str, Any] | int | None:
    """Return plain values and tensors of the pictures of the first prefix; for those of the row, their key."""
    media = trajectory.request.media
    of_row = media is trajectory.prompt.media
    return None if media is None else media.key if of_row else media.state()


def _restore_media(state: dict[str, Any] | int | None, prompt: Prompt) -> Media | None:
    """Invert :func:`_media_of`; raise ValueError if the row has other pictures."""
    if not isinstance(state, int):
        return None if state is None else Media.of_state(state)
    if prompt.media is None or prompt.media.key != state:
        raise ValueError(
            f"expected the pictures of the checkpoint's samples in prompt {prompt.index}, got "
            f"{'none' if prompt.media is None else 'others'}: resume with the rows of the run"
        )
    return prompt.media


def _trajectory(record: dict[str, Any], prompt: Prompt) -> Trajectory:
    """Invert :func:`_record`."""
    known: dict[str, Any] = record["request"]
    known |= {"prefix_ids": tuple(known["prefix_ids"].tolist()), "sampling": SamplingParams(**known["sampling"])}
    known["media"] = _restore_media(known.get("media"), prompt)
    failure: Any = record["failure"]
    restored: dict[str, Any] = {
        "prompt": prompt,
        "request": Request(**known),
        "segments": tuple(map(_segment, record["segments"])),
        "finish": FinishReason(record["finish"]),
        "messages": tuple(json.loads(record["messages"])),
        "failure": None if failure is None else Failure(**failure | {"rows": ()}),
    }
    return Trajectory(**{**record, **restored})


def _segment(record: dict[str, Any]) -> Segment:
    finish, ids, versions = (record[name] for name in ("finish", "token_ids", "versions"))
    restored: dict[str, Any] = {"token_ids": tuple(ids.tolist()), "versions": tuple(versions.tolist())}
    restored["media"] = record.get("media") and Media.of_state(record["media"])
    restored["finish"] = None if finish is None else FinishReason(finish)
    return Segment(**{**record, **restored})
