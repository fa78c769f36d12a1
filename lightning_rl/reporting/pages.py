"""Pages: one recorded rollout as a compressed block of numbers and texts, which a browser reads without copying.

A block is the gzip of: the length of a JSON header in 4 bytes (little-endian), the header padded with spaces to a
multiple of 8 bytes, then the arrays, each padded to 8 bytes. The header holds the type, offset behind the header and
length of each array. Tokens of all samples are concatenated without padding.
"""

import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import OUTPUTS
from lightning_rl.fields import fields_of
from lightning_rl.policy.plan import row_of
from lightning_rl.recording import Recording
from lightning_rl.reporting.attribution import Attribution, attribute
from lightning_rl.rollout import FinishReason, Rollout, turn_numbers

LEVEL = 6  # of gzip: higher levels take longer and save little on floats
PER_TOKEN = tuple(spec.name for spec in fields_of(Rollout) if spec.shown)
OF_PASS = (*(spec.output for spec in OUTPUTS if spec.shown), "gradient")
KINDS = {torch.float32: "f4", torch.float64: "f8", torch.int32: "i4", torch.uint8: "u1", torch.int16: "i2"}


def page_of(recordings: Sequence[Recording], algorithms: Sequence[Algorithm] | None = None) -> bytes:
    """Return the block of a rollout.

    Args:
        recordings: Recordings of all available ranks.
        algorithms: One algorithm per recording, instead of the recorded ones.
    """
    attributions = attribute(recordings, algorithms)
    stages = list(dict.fromkeys(stage for each in attributions for stage in each.stages))
    arrays = _Arrays()
    ids = [_ids_of(recording) for recording in recordings]
    numbers = torch.cat([part for prompt, response in ids for part in (prompt, response)]).unique()
    texts = {key: text for recording in recordings for key, text in _texts(recording).items()}
    arrays.add("prompt", [torch.searchsorted(numbers, prompt).int() for prompt, _ in ids])
    arrays.add("response", [torch.searchsorted(numbers, response).int() for _, response in ids])
    for recording, attribution in zip(recordings, attributions, strict=True):
        _add_tokens(arrays, recording, attribution, stages)
    samples: list[dict[str, Any]] = []
    for recording in recordings:
        samples += _samples(recording)
    first = recordings[0].header
    header = {
        "rollout": first["rollout"],
        "ranks": first["ranks"],
        "missing_ranks": first["ranks"] - len(recordings),
        "device": first["device"],
        "precision": first.get("precision"),
        "minibatches": recordings[0].minibatches,
        "steps": [_step(step) for step in first["steps"]],
        "stages": stages,
        "reason": next((each.reason for each in attributions if each.reason), ""),
        "ids": numbers.tolist(),
        "texts": [texts.get(str(number)) for number in numbers.tolist()],
        "samples": samples,
        "pictures": {group: urls for each in recordings for group, urls in each.header.get("pictures", {}).items()},
    }
    return arrays.block(header)


def summary_of(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the entry of a rollout in the list: number, size, optimizer steps and prompts."""
    rollouts = [recording.rollout for recording in recordings]
    keys = {_key(rollout, int(row)) for rollout in rollouts for row in rollout.real.nonzero()[:, 0]}
    return {
        "rollout": recordings[0].header["rollout"],
        "samples": sum(int(rollout.real.sum()) for rollout in rollouts),
        "tokens": sum(int(rollout.response_lengths.sum()) for rollout in rollouts),
        "step_indices": [step["step_index"] for step in recordings[0].header["steps"]],
        "prompts": sorted(keys),
    }


class _Arrays:
    """Arrays built part by part, and their bytes."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, name: str, parts: Sequence[Tensor]) -> None:
        self._parts.setdefault(name, []).extend(parts)

    def block(self, header: dict[str, Any]) -> bytes:
        places, chunks, offset = {}, [], 0
        for name, parts in self._parts.items():
            joined = torch.cat(parts)
            data = joined.contiguous().numpy().tobytes()
            places[name] = [KINDS[joined.dtype], offset, len(joined)]
            chunks.append(data + bytes(-len(data) % 8))
            offset += len(chunks[-1])
        text = json.dumps({**header, "arrays": places}, allow_nan=False, ensure_ascii=False).encode()
        text += b" " * (-(len(text) + 4) % 8)
        block = len(text).to_bytes(4, "little") + text + b"".join(chunks)
        return gzip.compress(block, LEVEL, mtime=0)


def _add_tokens(arrays: _Arrays, recording: Recording, attribution: Attribution, stages: Sequence[str]) -> None:
    rollout = recording.rollout
    _, inside = _places(rollout)
    for name in PER_TOKEN:
        values = getattr(rollout, name)
        if values is not None:
            arrays.add(name, [_plain(values[inside])])
    arrays.add("action", [rollout.action_mask[inside].to(torch.uint8)])
    arrays.add("valid", [rollout.valid_tokens[inside].to(torch.uint8)])
    arrays.add("version", [rollout.policy_version[inside].int()])
    if rollout.segments is not None:
        arrays.add("turn", [turn_numbers(rollout)[inside].to(torch.int16)])
    own = torch.tensor([stages.index(stage) for stage in attribution.stages], dtype=torch.uint8)
    for number, taken in enumerate(attribution.taken):
        arrays.add(f"{number}/taken", [own[taken[inside].long()]])
        if attribution.clipped:
            arrays.add(f"{number}/clipped", [attribution.clipped[number][inside].to(torch.uint8)])
        for name in OF_PASS:
            values = recording.tensors.get(f"pass/{number}/{name}")
            if values is not None:
                arrays.add(f"{number}/{name}", [_plain(values[inside])])


def _samples(recording: Recording) -> list[dict[str, Any]]:
    rollout, samples = recording.rollout, recording.header["samples"]
    steps = {
        row_of(entry): number
        for number, step in enumerate(recording.header["plan"])
        for microbatch in step
        for entry in microbatch
    }
    return [
        {
            "id": int(rollout.sample_ids[row]),
            "group": int(rollout.groups[row]),
            "rank": recording.header["rank"],
            "minibatch": steps.get(row),
            "finish": FinishReason(int(rollout.finish[row])).name.lower(),
            "reward": _number(rollout.rewards[row]) if bool(rollout.rewarded[row]) else None,
            "scored": bool(recording.tensors["sampled/scored"][row]),
            "trained": bool(rollout.trained[row]),
            "rewards": {name: _number(values[row]) for name, values in rollout.rewards_by_function.items()},
            "prompt": [int(rollout.prompt_lengths[row]), _key(rollout, row)],
            "text": _text(samples[row].get("prompt")) if row < len(samples) else None,
            "tokens": int(rollout.response_lengths[row]),
            "drawn": int(rollout.sampled_lengths[row]),
        }
        for row in range(len(rollout))
        if bool(rollout.real[row])
    ]


def _step(step: dict[str, Any]) -> dict[str, Any]:
    parts = {name: _finite(part) for name, part in step["parts"].items()}
    norm = None if step["grad_norm"] is None else _finite(step["grad_norm"])
    return {
        "step_index": step["step_index"],
        "made": step["made"],
        "weights": step["weights"],
        "parts": parts,
        "norm": norm,
    }


def _ids_of(recording: Recording) -> tuple[Tensor, Tensor]:
    rollout = recording.rollout
    prompts, responses = _places(rollout)
    return rollout.prompt_ids[prompts], rollout.response_ids[responses]


def _places(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return the masks of prompt tokens [B, P] and response tokens [B, T]."""
    prompts = torch.arange(rollout.prompt_ids.shape[1]) < rollout.prompt_lengths[:, None]
    responses = torch.arange(rollout.width) < rollout.response_lengths[:, None]
    return prompts & rollout.real[:, None], responses & rollout.real[:, None]


def _texts(recording: Recording) -> dict[str, str]:
    texts = recording.header.get("tokens")
    return {key: text for key, text in texts.items() if isinstance(text, str)} if isinstance(texts, dict) else {}


def _key(rollout: Rollout, row: int) -> str:
    """Return a key that is equal for equal prompts in any rollout."""
    ids = rollout.prompt_ids[row, : rollout.prompt_lengths[row]].tolist()
    digest = hashlib.sha256(json.dumps(ids).encode())
    for items in rollout.prompt_items.values():  # prompts of the same ids differ by their pictures
        digest.update(items.of_row(row).numpy().tobytes())
    return digest.hexdigest()[:12]


def _plain(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _number(value: Tensor) -> float | None:
    return _finite(float(value))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
