"""Checks of what was sampled: ids, ends, versions, samples, masks."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import differences
from lightning_rl.finding import Finding
from lightning_rl.rollout import Finish

DRAW = "stage draw"


@check(culprit=DRAW, cure="join completions and rows by sample id")
def trained_tokens(evidence: Evidence) -> Iterator[Finding]:
    """The tokens, log-probabilities and finish reasons that train are those that the engine returned, row by row."""
    rollout, wrong = evidence.rollout.to("cpu"), defaultdict[str, list[int]](list)
    completions = {request.sample_id: completion for batch in evidence.batches for request, completion in batch}
    ids, actions, finish = (part.tolist() for part in (rollout.response_ids, rollout.action_mask, rollout.finish))
    rows, logprobs = list[int](), list[Tensor]()
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        completion = completions.get(sample)
        if completion is None:
            continue
        sampled = [token for token, action in zip(ids[row], actions[row], strict=True) if action]
        if len(sampled) != len(completion.token_ids):
            wrong["sampled tokens as actions"].append(sample)
        elif sampled != list(completion.token_ids):
            wrong["token ids"].append(sample)
        elif completion.logprobs is not None:
            rows.append(row)
            logprobs.append(completion.logprobs)
        if finish[row] != int(completion.finish):
            wrong["finish reason"].append(sample)
    if rollout.rollout_logprobs is not None and rows:
        places = rollout.action_mask[rows]
        ours, theirs = rollout.rollout_logprobs[rows][places].double(), torch.cat(logprobs).double().cpu()
        unequal = rollout.valid_tokens[rows][places] & ~torch.isclose(ours, theirs, rtol=1e-6, atol=1e-6)
        samples = rollout.sample_ids[rows][places.nonzero()[unequal, 0].unique()]
        wrong |= {"log-probabilities": samples.tolist()} if len(samples) else {}
    for what, samples in wrong.items():
        yield Finding(
            expected=f"the {what} that the engine returned",
            observed=f"others in {len(samples)} rows",
            samples=samples[:4],
        )


@check(
    culprit="engine {engine}", cure="take the finish reason from the engine, and keep the sampled EOS in the response"
)
def ends(evidence: Evidence) -> Iterator[Finding]:
    """A response that stopped ends with an EOS id or stop string and holds no EOS before; one that was cut off has all
    the tokens that were allowed.
    """
    rollout, facts = evidence.rollout, evidence.facts
    lengths, real = rollout.response_lengths, rollout.real
    position = torch.arange(rollout.width, device=lengths.device)
    is_eos = torch.isin(rollout.response_ids, torch.tensor(sorted(facts.eos_ids) or [-1], device=lengths.device))
    inside = real[:, None] & (position < lengths[:, None] - 1) & rollout.action_mask
    last = is_eos.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0] & (lengths > 0)
    stopped, cut_off = real & (rollout.finish == Finish.STOP), real & (rollout.finish == Finish.LENGTH)
    cases = {
        "no EOS before the end of a response": (is_eos & inside).any(-1),
        "an EOS at the end of a response that stopped": stopped & ~last & (not facts.stop_strings),
        "no EOS at the end of a response that was cut off": cut_off & last,
        "all allowed tokens in a response that was cut off": cut_off & (lengths < facts.max_new_tokens),
    }
    for expected, rows in cases.items():
        if rows.any():
            samples = rollout.sample_ids[rows][:4].tolist()
            yield Finding(expected=expected, observed=f"{int(rows.sum())} rows without", samples=samples)


@check(culprit="engine {engine}", cure="pin the version before a request is sent")
def versions(evidence: Evidence) -> Iterator[Finding]:
    """Every token was drawn with the weights of this rollout's sync, or with earlier ones within the bound of staleness
    and none after newer ones; nothing else carries a version.
    """
    rollout, bound = evidence.rollout, evidence.facts.max_staleness
    actions, age = rollout.action_mask, evidence.number - rollout.policy_version
    wrong = actions & ((age < 0) | (age > bound) | (rollout.policy_version < 0))
    stray = ~actions & (rollout.policy_version != -1)
    newest = torch.where(actions, rollout.policy_version, -1).cummax(-1).values
    back = actions & (rollout.policy_version < newest)
    places = wrong | stray | back
    if places.any():
        versions = sorted(set(rollout.policy_version[wrong | back].tolist()))
        legal = " to ".join(map(str, sorted({max(evidence.number - bound, 0), evidence.number})))
        yield Finding(
            expected=f"version {legal} at every sampled token",
            observed=f"{versions or 'versions at tokens that were not sampled'}",
            samples=rollout.sample_ids[places.any(-1)][:4].tolist(),
            positions=places.any(0).nonzero()[:4, 0].tolist(),
        )


@check(
    culprit=DRAW,
    observed="something else",
    cure="keep all fields of a row together: select and concatenate whole rollouts",
)
def sample_conservation(evidence: Evidence) -> Iterator[Finding]:
    """Every sample is there once, in a whole group, and belongs to the prompt that its identity names; no group is lost
    but those that a correction filters.
    """
    rollout, size, wanted = evidence.rollout, evidence.facts.group_size, evidence.facts.groups
    ids, groups = rollout.sample_ids[rollout.real], rollout.groups[rollout.real]
    counts, filters = torch.unique(groups, return_counts=True)[1], evidence.contributions("keep_groups")
    problems = {
        "each sample once": len(ids.unique()) != len(ids),
        f"{size} samples in every group": bool((counts != size).any()),
        "the group that a sample's identity names": bool((ids // size != groups).any()),
        f"{wanted} groups": len(counts) > wanted or (len(counts) < wanted and not filters),
    }
    for expected, violated in problems.items():
        if violated:
            yield Finding(expected=expected, samples=ids[:4].tolist())


@check(cure="derive each mask from the one before")
def masks(evidence: Evidence) -> Iterator[Finding]:
    """``trained``: the real rows that nobody excludes; ``valid_tokens``: their sampled tokens; ``rewarded``: a part."""
    rollout = evidence.rollout
    excluded, allowed = torch.zeros_like(rollout.trained), rollout.trained.clone()
    for contribution in evidence.contributions("exclude"):
        excluded = excluded | contribution(rollout)
    for contribution in evidence.contributions("reward_mask"):
        allowed = allowed & contribution(rollout)
    left = rollout.real & ~excluded & (rollout.finish != Finish.ABORT)
    sampled = rollout.action_mask & rollout.trained[:, None]
    cases = [
        ("trained", "no row that a correction excludes", rollout.trained & excluded),
        ("trained", "every row that no correction excludes", left & ~rollout.trained),
        ("valid_tokens", "the sampled tokens of trained rows", (rollout.valid_tokens != sampled).any(-1)),
        ("rewarded", "only rows that every reward mask keeps", rollout.rewarded & ~allowed),
    ]
    for mask, expected, rows in cases:
        if rows.any():
            yield Finding(
                culprit=f"stage plan, mask {mask}",
                expected=expected,
                observed=f"{int(rows.sum())} others",
                samples=rollout.sample_ids[rows][:4].tolist(),
            )


@check(expected="finite numbers", observed="NaN or infinity", cure="look at whoever provides this field")
def finite(evidence: Evidence) -> Iterator[Finding]:
    """Every number at a valid token is finite."""
    rollout, valid = evidence.rollout, evidence.rollout.valid_tokens
    for name, tensor in rollout.tensors():
        if tensor.is_floating_point() and tensor.shape[:2] == valid.shape:
            wrong = valid & ~torch.isfinite(tensor.reshape(*valid.shape, -1)).all(-1)
            yield from differences(wrong, torch.zeros_like(wrong), rollout.sample_ids, culprit=f"field {name}")
