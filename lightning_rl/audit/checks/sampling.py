"""Checks of what was drawn: ids, ends, versions, samples, masks."""

import torch

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding, differing
from lightning_rl.rollout import Finish

DRAW = "stage draw"


@check("sampled_is_trained")
def sampled_is_trained(evidence: Evidence) -> list[Finding]:
    """The tokens, log-probabilities and finish reasons that train are those that the engine returned, row by row."""
    rollout, wrong = evidence.rollout.to("cpu"), dict[str, list[int]]()
    ids, actions, finish = rollout.response_ids.tolist(), rollout.action_mask.tolist(), rollout.finish.tolist()
    lengths, kept, theirs = rollout.response_lengths.tolist(), [], []
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        if sample not in evidence.drawn:
            continue
        completion, length = evidence.drawn[sample][1], lengths[row]
        number = len(completion.token_ids)
        if actions[row] != [*[True] * number, *[False] * (len(actions[row]) - number)]:
            wrong.setdefault("sampled tokens as actions", []).append(sample)
        if ids[row][:length] != list(completion.token_ids):
            wrong.setdefault("token ids", []).append(sample)
        elif completion.logprobs is not None:
            kept.append(row)
            theirs.append(completion.logprobs)
        if finish[row] != int(completion.finish):
            wrong.setdefault("finish reason", []).append(sample)
    if rollout.rollout_logprobs is not None and kept:
        given = torch.nn.utils.rnn.pad_sequence(theirs, batch_first=True).double().cpu()
        ours, valid = (part[kept, : given.shape[1]] for part in (rollout.rollout_logprobs, rollout.valid_tokens))
        apart = (valid & ~torch.isclose(ours.double(), given, rtol=1e-6, atol=1e-6)).any(-1)
        wrong |= {"log-probabilities": rollout.sample_ids[kept][apart].tolist()} if apart.any() else {}
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
    rollout, eos = evidence.rollout, evidence.subject.facts.eos_ids
    lengths, found = rollout.response_lengths, []
    position = torch.arange(rollout.width, device=lengths.device)
    is_eos = torch.isin(rollout.response_ids, torch.tensor(sorted(eos) or [-1], device=lengths.device))
    inside = rollout.real[:, None] & (position < lengths[:, None] - 1) & rollout.action_mask
    last = is_eos.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] & (lengths > 0)
    stopped, cut = rollout.finish == Finish.STOP, rollout.finish == Finish.LENGTH
    cases = {
        "no EOS before the end of a response": (is_eos & inside).any(-1),
        "an EOS at the end of a response that stopped": rollout.real
        & stopped
        & ~last
        & (not evidence.subject.facts.stop_strings),
        "no EOS at the end of a response that was cut off": rollout.real & cut & last,
        "all allowed tokens in a response that was cut off": (
            rollout.real & cut & (lengths < evidence.subject.facts.max_new_tokens)
        ),
    }
    for expected, rows in cases.items():
        if rows.any():
            found.append(
                Finding(
                    check="ends", culprit=f"engine {evidence.subject.facts.engine}", expected=expected,
                    observed=f"{int(rows.sum())} rows without", samples=rollout.sample_ids[rows][:4].tolist(),
                    cure="take the finish reason from the engine, and keep the sampled EOS in the response",
                )
            )  # fmt: skip
    return found


@check("versions")
def versions(evidence: Evidence) -> list[Finding]:
    """Every token was drawn with the weights of this rollout's sync, or with earlier ones within the bound of staleness
    and none after newer ones; nothing else carries a version.
    """
    rollout, most = evidence.rollout, evidence.subject.facts.max_staleness
    age = evidence.cycle - rollout.policy_version
    wrong = rollout.action_mask & ((age < 0) | (age > most) | (rollout.policy_version < 0))
    stray = ~rollout.action_mask & (rollout.policy_version != -1)
    so_far = torch.where(rollout.action_mask, rollout.policy_version, -1).cummax(-1).values
    back = rollout.action_mask & (rollout.policy_version < so_far)
    places = wrong | stray | back
    rows = places.any(-1)
    if not rows.any():
        return []
    seen = sorted(set(rollout.policy_version[wrong | back].tolist())) or "versions at tokens that were not sampled"
    bound = " to ".join(map(str, sorted({max(evidence.cycle - most, 0), evidence.cycle})))
    return [
        Finding(
            check="versions", culprit=f"engine {evidence.subject.facts.engine}",
            expected=f"version {bound} at every sampled token", observed=f"{seen}",
            samples=rollout.sample_ids[rows][:4].tolist(), positions=places.any(0).nonzero()[:4, 0].tolist(),
            cure="pin the version before a request is sent",
        )
    ]  # fmt: skip


@check("sample_conservation")
def sample_conservation(evidence: Evidence) -> list[Finding]:
    """Every sample is there once, in a whole group, and belongs to the prompt that its identity names; no group is lost
    but those that a correction filters.
    """
    rollout, size = evidence.rollout, evidence.subject.facts.group_size
    wanted, filters = evidence.subject.facts.groups, evidence.subject.contributions.contributors("keep_groups")
    ids, groups = rollout.sample_ids[rollout.real], rollout.groups[rollout.real]
    counts = torch.unique(groups, return_counts=True)[1]
    problems = {
        "each sample once": len(ids.unique()) != len(ids),
        f"{size} samples in every group": bool((counts != size).any()),
        "the group that a sample's identity names": bool((ids // size != groups).any()),
        f"{wanted} groups": len(counts) > wanted or (len(counts) < wanted and not filters),
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
    """``trained``: the real rows that nobody excludes; ``valid_tokens``: their sampled tokens; ``rewarded``: a part."""
    rollout, excluded = evidence.rollout, torch.zeros_like(evidence.rollout.trained)
    found = []
    for callback in evidence.subject.contributions.contributors("exclude"):
        excluded = excluded | callback.exclude(rollout)
    if (rollout.trained & excluded).any():
        found.append(("trained", "no row that a correction excludes", rollout.trained & excluded))
    left = rollout.real & ~excluded & (rollout.finish != Finish.ABORT) & ~rollout.trained
    if left.any():
        found.append(("trained", "every row that no correction excludes", left))
    if not torch.equal(rollout.valid_tokens, rollout.action_mask & rollout.trained[:, None]):
        rows = (rollout.valid_tokens != (rollout.action_mask & rollout.trained[:, None])).any(-1)
        found.append(("valid_tokens", "the sampled tokens of trained rows", rows))
    allowed = rollout.trained.clone()
    for callback in evidence.subject.contributions.contributors("reward_mask"):
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
