"""Trajectories in checkpoints: a few flat tensors and one JSON text, which load under ``weights_only=True``."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_rl.samples.completion import FinishReason, Request
from lightning_rl.samples.prompt import Prompt
from lightning_rl.samples.reward_call import Failure
from lightning_rl.samples.sampling_params import SamplingParams
from lightning_rl.samples.trajectory import Segment, Trajectory

PLAIN = ("messages", "opening", "metrics", "environment", "environment_reward", "seconds", "baseline")


def state_of_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return tensors by name and a JSON text; prompts by their index, messages without a JSON form as strings."""
    parts = dict[str, list[Tensor]]()

    def append(name: str, values: Tensor | Sequence[int]) -> int:
        """Append values to a flat tensor and return their number."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
        parts.setdefault(name, []).append(tensor)
        return len(tensor)

    records, samplings = list[dict[str, Any]](), dict[SamplingParams, int]()
    for each in trajectories:
        request = each.request
        segments = [
            {
                "ids": append("ids", segment.token_ids),
                "parent": segment.parent,
                "sampled": segment.sampled,
                "logprobs": None if segment.logprobs is None else append("logprobs", segment.logprobs),
                "versions": append("versions", segment.versions),
                "finish": segment.finish,
                "reward": segment.reward,
                "extras": {name: append(f"extra {name}", values) for name, values in segment.extras.items()},
            }
            for segment in each.segments
        ]
        record = {
            **{name: getattr(each, name) for name in PLAIN},
            "messages": [dict(message) for message in each.messages],
            "metrics": {name: float(value) for name, value in each.metrics.items()},
            "prompt": each.prompt.index,
            "request": [append("prefix", request.prefix_ids), request.sample_id, request.seed, request.rollout],
            "sampling": samplings.setdefault(request.sampling, len(samplings)),
            "segments": segments,
            "finish": each.finish,
            "failure": None if each.failure is None else [each.failure.cause, each.failure.traceback],
            "extras": {name: append(f"prompt {name}", values) for name, values in each.prompt_extras.items()},
        }
        records.append(record)
    text = json.dumps({"samples": records, "sampling": list(map(asdict, samplings))}, default=str)
    return {"text": text, **{name: torch.cat(tensors) for name, tensors in parts.items()}}


def trajectories_of_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Restore the trajectories of ``prompts`` from :func:`state_of_trajectories`."""
    places, by_index = Counter[str](), {prompt.index: prompt for prompt in prompts}

    def take(name: str, number: int) -> Tensor:
        """Return the next values of a flat tensor."""
        places[name] += number
        return state[name][places[name] - number : places[name]]

    def segment(known: Mapping[str, Any]) -> Segment:
        return Segment(
            token_ids=tuple(take("ids", known["ids"]).tolist()),
            parent=known["parent"],
            sampled=known["sampled"],
            logprobs=None if known["logprobs"] is None else take("logprobs", known["logprobs"]),
            versions=tuple(take("versions", known["versions"]).tolist()),
            finish=None if known["finish"] is None else FinishReason(known["finish"]),
            reward=known["reward"],
            extras={name: take(f"extra {name}", number) for name, number in known["extras"].items()},
        )

    text = json.loads(state["text"])
    samplings = [SamplingParams(**options) for options in text["sampling"]]
    found = list[Trajectory]()
    for known in text["samples"]:
        prefix, sample, seed, rollout = known["request"]
        request = Request(
            prefix_ids=tuple(take("prefix", prefix).tolist()),
            sample_id=sample,
            seed=seed,
            sampling=samplings[known["sampling"]],
            rollout=rollout,
        )
        plain: dict[str, Any] = {name: known[name] for name in PLAIN} | {"messages": tuple(known["messages"])}
        trajectory = Trajectory(
            **plain,
            prompt=by_index[known["prompt"]],
            request=request,
            segments=tuple(map(segment, known["segments"])),
            finish=FinishReason(known["finish"]),
            failure=None if known["failure"] is None else Failure((), *known["failure"]),
            prompt_extras={name: take(f"prompt {name}", number) for name, number in known["extras"].items()},
        )
        found.append(trajectory)
    return found
