"""A golden case: one recorded call, with its inputs and what came out."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One recorded output and how closely it has to be met."""

    value: np.ndarray
    rtol: float
    atol: float
    where: np.ndarray | None  # positions that count; None for all


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded call. Inputs are new tensors at every access, so that nothing leaks from one call to the next."""

    id: str
    topic: str
    peer: str
    function: str
    algorithm: str
    variant: str
    params: Mapping[str, Any]
    implicit: Mapping[str, Any]
    tags: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]
    outputs: Mapping[str, Field]

    def __contains__(self, name: str) -> bool:
        """Return True if there is an input of this name."""
        return name in self.arrays

    def __getitem__(self, name: str) -> Tensor:
        """An input, a new tensor each time."""
        return torch.from_numpy(self.arrays[name].copy())

    def mask(self, name: str = "mask") -> Tensor:
        """An input as bool."""
        return self[name].bool()

    def ids(self, name: str = "group") -> Tensor:
        """An input as int64."""
        return self[name].long()

    def calls(self, *names: str) -> bool:
        """Return True if the recorded function, its class or its file has one of these names."""
        return not set(names).isdisjoint(re.findall(r"\w+", self.function))

    @property
    def from_pull_request(self) -> bool:
        """True if the case records a pull request."""
        return any(tag.startswith("pr") and tag[2:].isdigit() for tag in self.tags)


def read_folder(folder: Path) -> Iterator[Case]:
    """Every case of every topic that the folder has, in the order of the manifests."""
    for manifest in sorted(folder.glob("*/manifest.json")):
        yield from _read_topic(manifest)


def _read_topic(manifest: Path) -> Iterator[Case]:
    content = json.loads(manifest.read_text())
    inputs, outputs = _arrays(manifest.parent / "inputs.npz"), _arrays(manifest.parent / "outputs.npz")
    for entry in content["cases"]:
        given = {name: inputs[spec["key"]] for name, spec in entry["inputs"].items()}
        found = {name: outputs[spec["key"]] for name, spec in entry["outputs"].items()}
        yield Case(
            id=entry["id"],
            topic=content.get("topic", manifest.parent.name),
            peer=entry["peer"],
            function=entry["function"],
            algorithm=entry["algorithm"],
            variant=entry.get("variant") or "",
            params=entry.get("params") or {},
            implicit=entry.get("implicit") or {},
            tags=tuple(entry.get("tags") or ()),
            arrays=given,
            outputs={name: _field(spec, name, given, found) for name, spec in entry["outputs"].items()},
        )


def _field(
    spec: Mapping[str, Any], name: str, given: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> Field:
    where = spec.get("compare_on")
    chosen = None if where is None else (given[where] if where in given else found[where]).astype(bool)
    return Field(value=found[name], rtol=spec.get("rtol", 0.0), atol=spec.get("atol", 0.0), where=chosen)


def _arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
