"""Checks of sampled data: ids, ends, versions, samples and masks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.sampling_statistics import Pair
from lightning_rl.fields import Ragged
from lightning_rl.rollout import NO_PARENT, FinishReason, Rollout, turn_numbers
from lightning_rl.samples import PROMPT
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.row_changes import repeats_itself
from lightning_rl.utils.finding import Finding

GENERATE = "stage generate"
Array = NDArray[Any]


@check(culprit=GENERATE, cure="join completions and rows by sample id, and append environment tokens after the answer")
def trained_tokens(evidence: Evidence) -> Iterator[Finding]:
    """Tokens, log-probabilities, versions and finish reasons are those that the engine returned, turn by turn.

    Each turn continues the row or its rewritten context, and tokens that the engine did not sample do not train.
    """
    rollout, wrong = evidence.rollout.to("cpu"), defaultdict[str, list[int]](list)
    samples, rows, logprobs = evidence.turns, list[int](), list[Tensor]()
    wrong["completion of each request"] += evidence.swapped_samples
    silent = torch.ones_like(rollout.action_mask) if rollout.rollout_logprobs is None else rollout.rollout_logprobs == 0
    tokens, alone = _Tokens.of(rollout), (~(rollout.action_mask | silent).all(-1)).tolist()
    versions, actions, finishes = rollout.policy_version.numpy(), rollout.action_mask.numpy(), rollout.finish.tolist()
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        if not (turns := samples.get(sample)):
            continue
        if what := tokens.wrong(row, turns):
            wrong[what].append(sample)
        elif versions[row][actions[row]].tolist() != _versions_of(turns):
            wrong["versions"].append(sample)
        elif alone[row]:
            wrong["log-probabilities alone"].append(sample)
        elif all(completion.logprobs is not None for _, completion in turns):
            rows.append(row)
            logprobs += [completion.logprobs for _, completion in turns if completion.logprobs is not None]
        if not _may_end(FinishReason(finishes[row]), turns[-1][1].finish, has_turns=rollout.segments is not None):
            wrong["finish reason"].append(sample)
    if rollout.rollout_logprobs is not None and rows:
        places = rollout.action_mask[rows]
        ours, theirs = rollout.rollout_logprobs[rows][places].double(), torch.cat(logprobs).double().cpu()
        unequal = rollout.valid_tokens[rows][places] & ~torch.isclose(ours, theirs, rtol=1e-6, atol=1e-6)
        ids = rollout.sample_ids[rows][places.nonzero()[unequal, 0].unique()]
        wrong |= {"log-probabilities": ids.tolist()} if len(ids) else {}
    for what, ids in ((what, ids) for what, ids in wrong.items() if ids):
        yield Finding(
            expected=f"the {what} that the engine returned",
            observed=f"others in {len(ids)} rows",
            samples=ids[:4],
        )


class _Tokens(NamedTuple):
    """Fields of a rollout as arrays, for quick access by row."""

    prompts: Array
    responses: Array
    actions: Array
    turns: Array | None
    segments: Ragged | None
    prompt_lengths: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """Return the fields of a rollout on the CPU."""
        turns = None if rollout.segments is None else turn_numbers(rollout)
        return cls(
            rollout.prompt_ids.numpy(),
            rollout.response_ids.numpy(),
            rollout.action_mask.numpy(),
            None if turns is None else turns.numpy(),
            rollout.segments,
            rollout.prompt_lengths.tolist(),
            rollout.response_lengths.tolist(),
        )

    def wrong(self, row: int, turns: Sequence[Pair]) -> str:
        """Return the first field of a row that differs from the engine's turns; empty if none does."""
        prompt, length = self.prompt_lengths[row], self.lengths[row]
        ids = self.prompts[row, :prompt].tolist() + self.responses[row, :length].tolist()
        actions = self.actions[row].tolist()
        drawn = [False] * (prompt + len(actions))
        numbers = None if self.turns is None else self.turns[row, :length].tolist()
        known, end = _contexts(self.segments, row, ids, prompt), prompt
        context = ids[:prompt]  # of the last turn
        for number, (request, completion) in enumerate(turns, 1):
            context = known.get(number, context)
            begin = end + len(request.prefix_ids) - len(context)
            read, end = ids[end:begin], begin + len(completion.token_ids)
            drawn[begin:end] = [True] * (end - begin)
            if number > 1 and list(request.prefix_ids) != [*context, *read]:
                return "prefix of each turn"
            context = [*context, *read, *completion.token_ids]
            trains = len(ids) >= end and all(actions[begin - prompt : end - prompt])
            if trains and ids[begin:end] != list(completion.token_ids):
                return "token ids"
            if numbers is not None and any(other != number for other in numbers[begin - prompt : end - prompt]):
                return "turn of each token"
        if actions != drawn[prompt:]:
            return "sampled tokens as actions"
        return "" if len(ids) == end else "last token at the end of the row"


def _contexts(segments: Ragged | None, row: int, ids: list[int], prompt: int) -> dict[int, list[int]]:
    """Return the token ids that the first segment of each turn of a row follows, by the number of the turn."""
    tree = [] if segments is None else segments.of_row(row).tolist()
    ends = [prompt + begin for begin, _, _ in tree[1:]] + [len(ids)]
    paths, found, before = {PROMPT: ids[:prompt], NO_PARENT: list[int]()}, dict[int, list[int]](), None
    for place, ((begin, parent, number), end) in enumerate(zip(tree, ends, strict=False)):
        before = paths[parent] if before is None else before
        paths[place] = paths[parent] + ids[prompt + begin : end]
        if number > 0:
            found[number], before = before, None
    return found


def _versions_of(turns: Sequence[Pair]) -> list[int]:
    """Return the weight version of every sampled token of a sample."""
    return [
        version
        for _, completion in turns
        for version in completion.versions or (completion.version,) * len(completion.token_ids)
    ]


def _may_end(row: FinishReason, last: FinishReason, *, has_turns: bool) -> bool:
    """Return True if a row may have a finish reason after its last turn's; limits may end a conversation."""
    limits = () if last is FinishReason.ABORT else (FinishReason.LENGTH, FinishReason.TURNS)
    return row == last or (has_turns and row in (*limits, FinishReason.FAILED))


@check(culprit="engine {engine}", cure="pin the version before a request is sent")
def versions(evidence: Evidence) -> Iterator[Finding]:
    """Sampled tokens have the weight version of this rollout or an earlier one within the bound of staleness.

    Versions do not decrease along a response; other tokens have no version.
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
            culprit="" if bool((wrong | back).any()) else GENERATE,  # engines set no versions at other tokens
            expected=f"version {legal} at every sampled token",
            observed=f"{versions or 'versions at tokens that were not sampled'}",
            samples=rollout.sample_ids[places.any(-1)][:4].tolist(),
            positions=places.any(0).nonzero()[:4, 0].tolist(),
        )


@check(
    culprit=GENERATE,
    observed="something else",
    cure="keep all fields of a row together: select and concatenate whole rollouts",
)
def sample_conservation(evidence: Evidence) -> Iterator[Finding]:
    """Every sample occurs once, in a whole group and in that of its id; groups are lost only to filters."""
    rollout, size, wanted = evidence.rollout.to("cpu"), evidence.facts.group_size, evidence.facts.groups
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
    for one in filters:
        for drawn in evidence.rounds:
            allowed = evidence.algorithm.corrections.reward_mask(drawn)
            drawn = drawn.replace(rewarded=drawn.rewarded & allowed).sanitize()
            lost = drawn.groups[~one(drawn) & drawn.real] if repeats_itself(one, drawn) else drawn.groups[:0]
            if (used := torch.isin(groups, lost)).any():
                expected, observed = f"groups that {one} keeps", f"{len(groups[used].unique())} that it drops"
                yield Finding(expected=expected, observed=observed, samples=ids[used][:4].tolist())


@check(cure="derive each mask from the previous one")
def masks(evidence: Evidence) -> Iterator[Finding]:
    """``trained``: real rows without excluded ones; ``valid_tokens``: their sampled tokens; ``rewarded``: a subset."""
    rollout = evidence.rollout
    excluded, allowed = torch.zeros_like(rollout.trained), rollout.trained.clone()
    for contribution in evidence.contributions("exclude"):
        excluded = excluded | contribution(rollout)
    for contribution in evidence.contributions("reward_mask"):
        allowed = allowed & contribution(rollout)
    left = rollout.real & ~excluded & ~rollout.failed
    sampled = rollout.action_mask & rollout.trained[:, None]
    cases = [
        ("trained", "no row that a correction excludes", rollout.trained & excluded),
        ("trained", "every row that no correction excludes", left & ~rollout.trained),
        ("trained", "no row that the engine aborted or the environment failed", rollout.failed & rollout.trained),
        ("valid_tokens", "the sampled tokens of trained rows", (rollout.valid_tokens != sampled).any(-1)),
        ("rewarded", "only rows that every reward mask keeps", rollout.rewarded & ~allowed),
        ("rewarded", "no row that the engine aborted or the environment failed", rollout.failed & rollout.rewarded),
    ]
    for mask, expected, rows in cases:
        if rows.any():
            yield Finding(
                culprit=f"stage plan, mask {mask}",
                expected=expected,
                observed=f"{int(rows.sum())} others",
                samples=rollout.sample_ids[rows][:4].tolist(),
            )
