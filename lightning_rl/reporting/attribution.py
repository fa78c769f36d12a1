"""Attribution of each token of a recorded rollout to the ledger stage that removed it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import ReplayCorrections
from lightning_rl.distributed import Collectives
from lightning_rl.distributed.threaded_ranks import ThreadedRanks
from lightning_rl.recording import Recording, Replayed, replay
from lightning_rl.recording.accounting import SCORED, Charges, signal_charges, update_charges
from lightning_rl.recording.recompute import load_states
from lightning_rl.rollout import Rollout

OUTSIDE, UNKNOWN = "environment", "not known"
REFUSED = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError, NotImplementedError)


@dataclass(slots=True)
class Attribution:
    """Stage that removed each token of a rollout.

    Attributes:
        stages: Names of the stages; the empty name first, for tokens that train.
        taken: For each pass over the rollout, the index into ``stages`` of each token, [B, T].
        clipped: For each pass, tokens with an advantage but without gradient of the policy loss, [B, T]; empty if
            unknown.
        reason: Reason why masks, weights and clip could not be distinguished, or an empty string.
    """

    stages: list[str] = field(default_factory=lambda: [""])
    taken: list[UInt8[Tensor, "B T"]] = field(default_factory=list)
    clipped: list[Bool[Tensor, "B T"]] = field(default_factory=list)
    reason: str = ""

    def number(self, stage: str) -> int:
        """Return the index of a stage; a new stage is added."""
        if stage not in self.stages:
            self.stages.append(stage)
        return self.stages.index(stage)

    def note(self, table: Tensor, lost: dict[str, Tensor], rows: Tensor | None = None) -> None:
        """Write the stages of removed tokens into a table [B, T], or into its rows [b] that ``lost`` covers."""
        for stage, tokens in lost.items():
            part = table if rows is None else table[rows, : tokens.shape[1]]
            part = torch.where(tokens & (part == 0), self.number(stage), part)
            if rows is None:
                table.copy_(part)
            else:
                table[rows, : tokens.shape[1]] = part


def attribute(recordings: Sequence[Recording], algorithms: Sequence[Algorithm] | None = None) -> list[Attribution]:
    """Charge each token of a rollout to the first stage that removes it, like the ledger.

    The recorded algorithm is rebuilt. If a part of it is user code, a token with an advantage and without a gradient is
    charged to "not known".

    Args:
        recordings: Recordings of all ranks.
        algorithms: One algorithm per rank, instead of the recorded ones.

    Returns:
        One attribution per recording.
    """
    try:
        chosen = [recording.algorithm() for recording in recordings] if algorithms is None else list(algorithms)
        ranks = ThreadedRanks(len(recordings))
        replayed = replay(recordings, chosen)
        jobs = [partial(_attribute_rank, *each, ranks) for each in zip(recordings, chosen, replayed, strict=True)]
        return ranks.run(jobs, threads=recordings[0].header["threads"])
    except REFUSED as refused:  # user code, or invalid numbers
        return [_without_algorithm(recording, str(refused)) for recording in recordings]


def _attribute_rank(
    recording: Recording, algorithm: Algorithm, replayed: Replayed, collectives: Collectives
) -> Attribution:
    algorithm = algorithm.replace(corrections=ReplayCorrections(algorithm.corrections.callbacks, collectives))
    load_states(algorithm, recording.header["states"])
    rollout, attribution = recording.rollout, Attribution()
    before = _before_masks(recording, rollout, algorithm)
    base = _outside(rollout, attribution)
    attribution.note(base, signal_charges(rollout, before, algorithm.corrections).lost)
    for number, step in enumerate(recording.header["steps"]):
        if number % recording.minibatches == 0:
            attribution.taken.append(base.clone())
            attribution.clipped.append(torch.zeros_like(rollout.valid_tokens))
        if step["states"] is None:
            continue
        load_states(algorithm, step["states"])
        for view in replayed.views[number]:
            rows = (view.sample_ids[:, None] == rollout.sample_ids).int().argmax(-1)[view.real]
            charges = update_charges(view, algorithm.corrections, algorithm.loss)
            if len(rows):
                lost = {stage: tokens[view.real] for stage, tokens in charges.lost.items()}
                attribution.note(attribution.taken[-1], lost, rows)
                alone = update_charges(view, ReplayCorrections([]), algorithm.loss).lost["clip"]
                attribution.clipped[-1][rows, : view.width] = alone[view.real]
    attribution.taken = attribution.taken or [base]
    return attribution


def _before_masks(recording: Recording, rollout: Rollout, algorithm: Algorithm) -> Rollout:
    """Return the rows as scored, with the mask of each correction."""
    scored = recording.tensors["sampled/scored"]
    nothing = {"valid_tokens": rollout.action_mask, "advantages": None, "returns": None}
    sampled = rollout.replace(trained=rollout.real & ~rollout.failed, rewarded=scored, **nothing)
    masks = {SCORED: scored}
    for callback in algorithm.corrections.contributors("reward_mask"):
        masks[f"ledger/{callback.name}.reward_mask"] = callback.reward_mask(sampled)
    return sampled.replace(extras={**rollout.extras, **masks})


def _without_algorithm(recording: Recording, reason: str) -> Attribution:
    rollout, attribution = recording.rollout, Attribution(reason=reason)
    base, charges = _outside(rollout, attribution), Charges.of(rollout)
    charges.take_rows("aborted", rollout.failed)
    charges.take_rows("excluded", ~rollout.trained)
    if rollout.advantages is not None:
        charges.weigh("zero_advantage", rollout.advantages != 0)
    attribution.note(base, charges.lost)
    for number in range(0, max(1, len(recording.header["steps"])), max(1, recording.minibatches)):
        table = base.clone()
        gradient = recording.of_step(number, "gradient") if recording.minibatches else None
        if gradient is not None:
            attribution.note(table, {UNKNOWN: rollout.valid_tokens & (gradient == 0)})
        attribution.taken.append(table)
    return attribution


def _outside(rollout: Rollout, attribution: Attribution) -> Tensor:
    """Return a table in which tokens that the policy did not sample are already charged."""
    table = torch.zeros(rollout.response_ids.shape, dtype=torch.uint8)
    inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
    attribution.note(table, {OUTSIDE: inside & ~rollout.action_mask})
    return table
