"""Validation of the JSON of a recording.

A recording may come from an untrusted source. Invalid numbers, missing rows or a billion ranks are refused here with
the file and the entry, before they become a thread, a file name or an index.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_rl.recording.recorded_algorithm import PARTS
from lightning_rl.recording.serialize import NUMBER, from_json
from lightning_rl.rollout import FinishReason, Rollout
from lightning_rl.utils.arguments import check_bools, check_counts, check_numbers

FORMAT = 2
MAX_BYTES = 2**30  # maximum size of a JSON file
MAX_DEPTH = 64  # maximum nesting; recordings of this library have 9
MAX_RANKS, MAX_THREADS = 2**20, 2**12
ENTRIES = ("rollout", "rank", "ranks", "device", "threads", "versions", "options", "algorithm", "states", "plan")
ENTRIES += ("steps", "samples")
PASS = ("logprobs", "entropy", "values", "gradient")
MAX_ROLLOUT, MAX_ID = 2**53, 2**31 - 1
WHOLE, MASK, SMALL = (torch.int64,), (torch.bool,), (torch.uint8,)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ANY = (*WHOLE, *MASK, *SMALL, *REAL, torch.int8, torch.int16, torch.int32)
WHOLE_FIELDS = ("prompt_ids", "prompt_lengths", "response_ids", "response_lengths", "groups", "sample_ids")
TYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys((*WHOLE_FIELDS, "policy_version"), WHOLE),
    **dict.fromkeys(("action_mask", "trained", "rewarded", "valid_tokens"), MASK),
    **dict.fromkeys(("extras", "token_extras", "prompt_extras"), ANY),
    "finish": SMALL,
}
"""Dtypes of rollout fields by the stem of their names; all others are floats."""


def file_beside(path: str | Path, suffix: str) -> Path:
    """Return the file of a recording with another suffix in the same folder.

    Raises:
        ValueError: If it is not a file, or a link that leads out of the folder.
        FileNotFoundError: If it does not exist.
    """
    file = Path(path).with_suffix(suffix)
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError) as missing:  # also circular links and names that are too long
        got = "no such file" if isinstance(missing, FileNotFoundError) else getattr(missing, "strerror", None)
        cure = "a recording is a .json and a .safetensors of one name in one folder"
        raise FileNotFoundError(f"expected {file}, got {got or missing}: {cure}") from None
    if not target.is_file() or target.parent != file.parent.resolve():
        raise ValueError(f"expected a file of a recording, got {file}, which is not a file or a link out of its folder")
    return file


def read_header(path: Path) -> dict[str, Any]:
    """Return the checked JSON of a recording.

    Raises:
        ValueError: Naming the file and the entry.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes in {path}, got {path.stat().st_size}")
    try:
        text = path.read_text(encoding="utf-8")
        header = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole, object_pairs_hook=_unique
        )
    except RecursionError:
        raise ValueError(f"expected the JSON of a recording in {path}, got too deeply nested lists") from None
    except ValueError as wrong:  # also UTF-8 errors and numbers of too many digits
        raise ValueError(f"expected the JSON of a recording in {path}, got an invalid file: {wrong}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = header.get("format") if isinstance(header, dict) else f"a {type(header).__name__}"
        raise ValueError(f"expected a recording of format {FORMAT}, got {got!r:.80} in {path}")
    try:
        _check_depth(header)
        _check(header)
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise ValueError(f"expected a recording of RolloutRecorder, got {path}: {wrong}") from wrong
    return header


def check_tensors(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that tensors match the header: names, shapes, rows of the plan.

    Raises:
        ValueError: Naming the file and the entry.
    """
    try:
        response = tensors["rollout/response_ids"]
        rows, width = response.shape
        _check_types(tensors)
        _check_names(header, tensors, (rows, width))
        _check_values(rollout_of(tensors))
        planned = [row for step in header["plan"] for microbatch in step for row in microbatch]
        if any(row >= rows for row in planned) or len(set(planned)) < len(planned):
            raise ValueError(f"a plan that does not name each of the {rows} rows once")
    except KeyError as missing:
        raise ValueError(f"expected a tensor {missing} in {path}, got none") from None
    except (ValueError, TypeError, AttributeError, IndexError) as wrong:
        raise ValueError(f"expected the tensors of a recording in {path}, got {wrong}") from None


def rollout_of(tensors: Mapping[str, Tensor]) -> Rollout:
    """Return the rollout in the tensors of a recording."""
    fields = [name for name in tensors if name.startswith("rollout/")]
    return Rollout.from_state({name.removeprefix("rollout/"): tensors[name] for name in fields})


def _check_types(tensors: Mapping[str, Tensor]) -> None:
    """Check the dtypes: integers for ids, bool for masks, floats for all others."""
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        stem = rest.partition("/")[0]
        types = {"rollout": TYPES.get(stem, REAL), "sampled": MASK, "pass": REAL}.get(kind)
        if types is None:
            raise ValueError(f"the unknown tensor {name[:80]!r}")
        if tensor.dtype not in types:
            known = " or ".join(str(one).removeprefix("torch.") for one in types[-2:])
            raise ValueError(f"{name[:80]!r} of type {str(tensor.dtype).removeprefix('torch.')} instead of {known}")


def _check_values(rollout: Rollout) -> None:
    """Check the ranges of values that become an index or a length."""
    bounds = {
        "prompt_lengths": (1, rollout.prompt_ids.shape[1]),
        "response_lengths": (0, rollout.width),
        "prompt_ids": (0, MAX_ID),
        "response_ids": (0, MAX_ID),
        "sample_ids": (-1, MAX_ID**2),
        "groups": (-1, MAX_ID**2),
        "finish": (0, max(FinishReason)),
    }
    for name, figures in rollout.task_rewards.items():
        if figures.shape != rollout.rewards.shape:
            raise ValueError(f"task_rewards/{name[:80]} of shape {list(figures.shape)}")
    for name, (lowest, highest) in bounds.items():
        values: Tensor = getattr(rollout, name)
        if values.numel() and (int(values.min()) < lowest or int(values.max()) > highest):
            raise ValueError(f"{name} from {int(values.min())} to {int(values.max())} instead of {lowest} to {highest}")


def _check_names(header: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    passes = range(math.ceil(len(header["steps"]) / max(1, len(header["plan"]))))
    known = {f"pass/{number}/{name}" for number in passes for name in PASS}
    if tensors["sampled/scored"].shape != shape[:1]:
        raise ValueError(f"sampled/scored of shape {list(tensors['sampled/scored'].shape)}")
    for name, tensor in tensors.items():
        if name.startswith("pass/") and (name not in known or tensor.shape != shape or not tensor.is_floating_point()):
            raise ValueError(f"{name[:80]!r} of shape {list(tensor.shape)} and type {tensor.dtype}")
    for number, step in enumerate(header["steps"]):
        if step["states"] is None:
            continue
        for name, what in (("logprobs", "log-probabilities"), ("entropy", "entropy")):
            if f"pass/{number // len(header['plan'])}/{name}" not in tensors:
                raise ValueError(f"no {what} of step {number}")


def _check(header: Mapping[str, Any]) -> None:
    for name in ENTRIES:
        if name not in header:
            raise ValueError(f"no {name}")
    check_counts(0, rollout=header["rollout"], rank=header["rank"])
    check_numbers(at_most=MAX_ROLLOUT, rollout=header["rollout"])
    check_counts(1, ranks=header["ranks"], threads=header["threads"])
    check_numbers(at_most=MAX_RANKS, ranks=header["ranks"])
    check_numbers(at_most=MAX_THREADS, threads=header["threads"])
    check_numbers(at_most=header["ranks"] - 1, rank=header["rank"])
    check_bools(packing=header["options"]["packing"])
    for name in (header["device"], header["versions"]["torch"]):
        if not isinstance(name, str):
            raise ValueError(f"a {type(name).__name__} instead of a name")
    _check_algorithm(header["algorithm"])
    _check_plain(header["states"])
    _check_plan(header["plan"])
    _list(header["samples"])
    for step in _list(header["steps"]):
        _check_step(step)
        if step["states"] is not None and not header["plan"]:
            raise ValueError("steps without a plan")


def _check_algorithm(algorithm: Any) -> None:
    if not isinstance(algorithm, dict):
        raise ValueError(f"a {type(algorithm).__name__} as algorithm")
    for part in (*PARTS, "callbacks"):
        if part not in algorithm:
            raise ValueError(f"no {part} in the algorithm")


def _check_plan(plan: Any) -> None:
    for step in _list(plan):
        for microbatch in _list(step):
            for row in _list(microbatch):
                check_counts(0, row=row)


def _check_step(step: Mapping[str, Any]) -> None:
    check_numbers(finite=True, scale=step["scale"])
    if not isinstance(step["weights"], str):
        raise ValueError(f"a {type(step['weights']).__name__} as the hash of weights")
    norm = {} if step["grad_norm"] is None else {"grad_norm": step["grad_norm"]}  # None for a skipped step
    for name, part in {**step["parts"], **norm}.items():
        value = from_json(part)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"a {type(value).__name__} as {name[:80]}")
    _check_plain({} if step["states"] is None else step["states"])


def _check_plain(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that callback states are plain values."""
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, dict) and value.keys() != {NUMBER}:
                raise ValueError(f"a state of {name[:80]!r} with a nested value as {key[:80]!r}")


def _check_depth(header: Any) -> None:
    level, depth = [header], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"lists and objects nested more than {MAX_DEPTH} deep")
        nested = [value for value in level if isinstance(value, list | dict)]
        level = [item for value in nested for item in (value.values() if isinstance(value, dict) else value)]
        depth += 1


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a {type(value).__name__} instead of a list")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]}, which is too large")
    return number


def _whole(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**1023:  # too large for a float
        raise ValueError(f"the number {text[:40]}, which is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a duplicate name in one object")
    return entries
