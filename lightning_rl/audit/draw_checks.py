"""Checks of what was drawn: ids, ends, versions, samples, masks."""

import torch

from lightning_rl.audit.checks import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding, differing
from lightning_rl.rollout import Finish

DRAW = "stage draw"


@check("sampled_is_trained")
def sampled_is_trained(evidence: Evidence) -> list[Finding]:
    """The token ids, log-probabilities and finish reasons that train are those that the engine returned, row by row."""
    rollout, wrong = evidence.rollout, dict[str, list[int]]()
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        if sample not in evidence.drawn:
            continue
        completion, length = evidence.drawn[sample][1], int(rollout.response_lengths[row])
        if tuple(rollout.response_ids[row, :length].tolist()) != tuple(completion.token_ids):
            wrong.setdefault("token ids", []).append(sample)
        if int(rollout.finish[row]) != int(completion.finish):
            wrong.setdefault("finish reason", []).append(sample)
        if rollout.rollout_logprobs is not None and completion.logprobs is not None:
            kept = rollout.valid_tokens[row, :length].cpu()
            ours, theirs = rollout.rollout_logprobs[row, :length].cpu()[kept], completion.logprobs[kept]
            if not torch.allclose(ours.double(), theirs.double(), rtol=1e-6, atol=1e-6):
                wrong.setdefault("log-probabilities", []).append(sample)
    return [
        Finding(
            check="sampled_is_trained", culprit=DRAW, expected=f"the {what} that the engine returned",
            observed=f"others in {len(samples)} rows", cure="join completions and rows by sample id",
            samples=samples[:4],
        )
        for what, samples in wrong.items()
    ]  # fmt: skip


@check("ends")
def ends(evidence: Evidence) -> list[Finding]:
    """A response that stopped ends with an EOS id or stop string and holds no EOS before; one that was cut off has all
    the tokens that were allowed.
    """
    rollout, eos = evidence.rollout, evidence.module.run.eos_ids
    lengths, found = rollout.response_lengths, []
    position = torch.arange(rollout.width, device=lengths.device)
    is_eos = torch.isin(rollout.response_ids, torch.tensor(sorted(eos) or [-1], device=lengths.device))
    inside = rollout.real[:, None] & (position < lengths[:, None] - 1) & rollout.action_mask
    last = is_eos.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] & (lengths > 0)
    stopped, cut = rollout.finish == Finish.STOP, rollout.finish == Finish.LENGTH
    cases = {
        "no EOS before the end of a response": (is_eos & inside).any(-1),
        "an EOS at the end of a response that stopped": rollout.real & stopped & ~last & (not evidence.module.stop),
        "no EOS at the end of a response that was cut off": rollout.real & cut & last,
        "all allowed tokens in a response that was cut off": (
            rollout.real & cut & (lengths < evidence.module.max_new_tokens)
        ),
    }
    for expected, rows in cases.items():
        if rows.any():
            found.append(
                Finding(
                    check="ends", culprit=f"engine {type(evidence.module.engine).__name__}", expected=expected,
                    observed=f"{int(rows.sum())} rows without", samples=rollout.sample_ids[rows][:4].tolist(),
                    cure="take the finish reason from the engine, and keep the sampled EOS in the response",
                )
            )  # fmt: skip
    return found


@check("versions")
def versions(evidence: Evidence) -> list[Finding]:
    """Every token was drawn with the weights of this rollout's sync, or of one that ``max_staleness`` allows; nothing
    else carries a version.
    """
    rollout, oldest = evidence.rollout, max(evidence.cycle - evidence.module.max_staleness, 0)
    age = evidence.cycle - rollout.policy_version
    wrong = rollout.action_mask & ((age < 0) | (rollout.policy_version < oldest))
    allowed = " to ".join(map(str, sorted({oldest, evidence.cycle})))
    stray = ~rollout.action_mask & (rollout.policy_version != -1)
    rows = (wrong | stray).any(-1)
    if not rows.any():
        return []
    seen = sorted(set(rollout.policy_version[wrong].tolist())) or "versions at tokens that were not sampled"
    return [
        Finding(
            check="versions", culprit=f"engine {type(evidence.module.engine).__name__}",
            expected=f"version {allowed} at every sampled token", observed=f"{seen}",
            samples=rollout.sample_ids[rows][:4].tolist(), cure="pin the version before a request is sent",
        )
    ]  # fmt: skip


@check("sample_conservation")
def sample_conservation(evidence: Evidence) -> list[Finding]:
    """Every sample is there once, in a whole group, and belongs to the prompt that its identity names."""
    rollout, size = evidence.rollout, evidence.module.group_size
    ids, groups = rollout.sample_ids[rollout.real], rollout.groups[rollout.real]
    counts = torch.unique(groups, return_counts=True)[1]
    problems = {
        "each sample once": len(ids.unique()) != len(ids),
        f"{size} samples in every group": bool((counts != size).any()),
        "the group that a sample's identity names": bool((ids // size != groups).any()),
    }
    return [
        Finding(
            check="sample_conservation", culprit=DRAW, expected=expected, observed="something else",
            samples=ids[:4].tolist(), cure="keep all fields of a row together: select and concatenate whole rollouts",
        )
        for expected, violated in problems.items()
        if violated
    ]  # fmt: skip


@check("masks")
def masks(evidence: Evidence) -> list[Finding]:
    """``trained``: real rows that nobody excludes; ``valid_tokens``: their sampled tokens; ``rewarded``: a part."""
    rollout, excluded = evidence.rollout, torch.zeros_like(evidence.rollout.trained)
    found = []
    for callback in evidence.contributions.offering("exclude"):
        excluded = excluded | callback.exclude(rollout)
    if (rollout.trained & excluded).any():
        found.append(("trained", "no row that a correction excludes", rollout.trained & excluded))
    if not torch.equal(rollout.valid_tokens, rollout.action_mask & rollout.trained[:, None]):
        rows = (rollout.valid_tokens != (rollout.action_mask & rollout.trained[:, None])).any(-1)
        found.append(("valid_tokens", "the sampled tokens of trained rows", rows))
    allowed = rollout.trained.clone()
    for callback in evidence.contributions.offering("reward_mask"):
        allowed = allowed & callback.reward_mask(rollout)
    if (rollout.rewarded & ~allowed).any():
        found.append(("rewarded", "only rows that every reward mask keeps", rollout.rewarded & ~allowed))
    return [
        Finding(
            check="masks", culprit=f"stage plan, mask {name}", expected=expected, observed=f"{int(rows.sum())} others",
            samples=rollout.sample_ids[rows][:4].tolist(), cure="derive each mask from the one before",
        )
        for name, expected, rows in found
    ]  # fmt: skip


@check("finite")
def finite(evidence: Evidence) -> list[Finding]:
    """Every number at a valid token is finite."""
    rollout, found = evidence.rollout, []
    for name, tensor in rollout.tensors():
        if not tensor.is_floating_point() or tensor.shape[:2] != rollout.valid_tokens.shape:
            continue
        samples, positions = differing(
            torch.where(rollout.valid_tokens, (~torch.isfinite(tensor.reshape(*tensor.shape[:2], -1)).all(-1)), 0.0),
            torch.zeros_like(rollout.valid_tokens), rollout.sample_ids,
        )  # fmt: skip
        if samples:
            found.append(
                Finding(
                    check="finite", culprit=f"field {name}", expected="finite numbers", observed="NaN or infinity",
                    samples=samples, positions=positions, cure="look at whoever provides this field",
                )
            )  # fmt: skip
    return found
