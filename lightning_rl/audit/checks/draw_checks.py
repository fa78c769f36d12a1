r"""Statistical checks of samples: independent, from the assumed distribution, and for their own prompts.

Each check bounds the probability of its observation under a correct engine, and reports it below :data:`CHANCE`. Over
10,000 audited rollouts a false alarm of one of them has a probability of at most :math:`10^{-5}`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.prompt_watch import CONVERSATIONS
from lightning_rl.audit.sampling_statistics import (
    NOISE_RATIOS,
    SHARES,
    noise_ratios,
    repeat_ratios,
    trained_pairs,
    turns_of,
)
from lightning_rl.audit.token_bets import WAGERS
from lightning_rl.fields import concatenate_items
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Completion, Media, Request
from lightning_rl.samples.seeds import GREEDY
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import MIXED_UP, Skip
from lightning_rl.utils.finding import Finding

CHANCE = 1e-9  # of a false alarm in each check
NATS = -math.log(CHANCE)
CHANCE_OF_DATA, SEVERAL = 1e-6, 3  # for sets that are compared once per run; minimum number of shared prompts
LONG = 16  # tokens of a prompt that does not repeat by chance

ROWS = "stage generate, the prompts of its rows", "stage generate, the pictures of its rows"
OWN_PICTURES = "lay out each row with the pictures and token types of its requests, in order and unchanged"
NOTHING = "the engine returned no completions for this rollout"


@check(culprit="engine {engine}", cure="give every request its own random stream, and cache no completion")
def repeated_samples(evidence: Evidence) -> Iterator[Finding | Skip]:
    """No sample repeats another one of its prompt or of an earlier rollout, or its beginning, unless that is likely.

    No request repeats the seed of another one. No rollout repeats the noise of the one before: tokens at equal places
    of their batches are independent. Likelihood ratios are multiplied over samples and a few rollouts.
    """
    if again := _repeated_seeds(evidence):
        culprit, expected = "stage generate, the seeds of the requests", "another seed for every request of a run"
        yield Finding(culprit=culprit, expected=expected, observed=f"{len(again)} again", samples=again[:4])
        return
    noise = [noise_ratios(draws) for draws in (*(one.draws for one in evidence.earlier), evidence.draws)]
    if max(sum(parts) for parts in zip(*noise, strict=True)) > NATS + math.log(NOISE_RATIOS):
        expected = f"other noise in every rollout: by chance this happens once in {1 / CHANCE:.0e} rollouts"
        observed = "tokens that follow those at the same places of the batches of an earlier rollout"
        yield Finding(expected=expected, observed=observed, samples=[draw.sample for draw in evidence.draws[:4]])
        return
    repeats = evidence.sample_repeats
    if not any(sample.known for sample in repeats):
        yield Skip("the engine returns no log-probabilities" if evidence.batches else NOTHING)
        return
    for place, kind in enumerate(("of the same prompt", "of an earlier rollout")):
        recent = [*(rollout.repeated[place] for rollout in evidence.earlier), repeat_ratios(repeats)[place]]
        if max(sum(parts) for parts in zip(*recent, strict=True)) > NATS + math.log(len(SHARES)):
            found = sorted((sample for sample in repeats if sample.nats[place] > 0), key=lambda one: -one.nats[place])
            yield Finding(
                expected=f"independent samples: by chance this happens once in {1 / CHANCE:.0e} rollouts",
                observed=f"{len(found)} of {len(repeats)} that repeat one {kind}, token by token",
                samples=[sample.sample for sample in found[:4]],
            )


def _repeated_seeds(evidence: Evidence) -> list[int]:
    """Return the samples whose seeds repeat that of another request, if seeds of 31 bits would not by chance."""
    known, again = {seed for rollout in evidence.earlier for seed in rollout.seeds}, list[int]()
    pairs = trained_pairs(evidence.batches)
    for request, _ in pairs:
        if request.seed in known:
            again.append(request.sample_id)
        known.add(request.seed)
    expected = len(pairs) * max(len(known), 1) / 2.0**31
    return again if again and len(again) * (math.log(len(again) / expected) - 1) > NATS else []


@check(
    culprit="engine {engine}",
    expected="tokens drawn from the policy's probabilities",
    cure="look for a filter (top_k, top_p), a penalty, another temperature or greedy choices among the engine's "
    "defaults, and draw uniform numbers over all of [0, 1)",
)
def sample_likelihood(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Over all audits, sampled tokens are at uniform places of the policy's cumulative distribution.

    This holds in the order of the vocabulary and from the likeliest token on, at each place of the response. Tokens
    repeat earlier ones of their prompt and response with the policy's probability.
    """
    if not evidence.draws or evidence.swapped_samples:
        yield Skip(
            MIXED_UP if evidence.swapped_samples else "no fresh sample could be scored by the policy's plain forward"
        )
        return
    odds = evidence.odds
    if float(odds.max()) > NATS + math.log(len(WAGERS)):
        yield Finding(observed=f"tokens {WAGERS[int(odds.argmax())]}", samples=[draw.sample for draw in evidence.draws])


@check(
    cure="request the whole prompt of the row, encoded once, and edit no prompt afterwards",
)
def prompt_source(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The prompt of a request equals those of the training data at its place, of the rewards and of the row."""
    turns = turns_of([trained_pairs(evidence.batches)])
    asked = {sample: pairs[0][0].prefix_ids for sample, pairs in turns.items()}
    if not asked:
        yield Skip(NOTHING)  # of a rollout that was sampled before a resume, the rows are compared below
    rollout = evidence.rollout
    trained = {
        sample: tuple(ids[:length])
        for sample, ids, length in zip(
            rollout.sample_ids.tolist(), rollout.prompt_ids.tolist(), rollout.prompt_lengths.tolist(), strict=True
        )
    }
    requests = f"{evidence.facts.data}stage generate, the prompts of the requests"
    sources: list[tuple[str, str, Mapping[int, tuple[int, ...]]]] = [
        (ROWS[0], "the prompt of the request in the trained row", trained),
        (
            requests,
            "the prompt of the training data at its place of the stream",
            {sample: prompt.token_ids for sample, prompt in evidence.stream_prompts.items()},
        ),
        (
            f"{requests}, or a reward that edits them",
            "the whole prompt that the rewards get",
            evidence.reward_prompts,
        ),
    ]
    if rollout.segments is not None:  # an environment may change the beginning
        del sources[1:]
    for culprit, expected, prompts in sources:
        wrong = [sample for sample, ids in asked.items() if sample in prompts and prompts[sample] != ids]
        if wrong:
            shorter = sum(len(asked[sample]) < len(prompts[sample]) for sample in wrong)
            observed = f"{len(wrong)} others" + (f", {shorter} of which are shorter" if shorter else "")
            yield Finding(culprit=culprit, expected=expected, observed=observed, samples=wrong[:4])
            return
    pictures = {sample: pairs[0][0].media for sample, pairs in turns.items()}
    last = {sample: pairs[-1][0].media for sample, pairs in turns.items() if _is_one_context(pairs)}
    changed = any(places for _, places in evidence.strange_pictures.values())  # see picture_source
    stream = {} if rollout.segments is not None or changed else evidence.stream_prompts
    rows, place = ROWS[1], "the pictures of the training data at its place"
    for culprit, expected, wrong in (
        (rows, "the pictures of the request in the trained row", _others_in_rows(rollout, pictures)),
        (rows, "the pictures of the last request in the trained row, in order", _others_in_replies(rollout, last)),
        (rows, "the token types of the last request in the trained row", _other_types(rollout, last)),
        (
            "stage generate, the greedy requests of the baseline",
            place,
            _other_greedy(evidence) if stream else [],
        ),
        (rows, place, _others_in_rows(rollout, {sample: prompt.media for sample, prompt in stream.items()})),
        (
            requests,
            place,
            [each for each in pictures if each in stream and _key(pictures[each]) != _key(stream[each].media)],
        ),
    ):
        if wrong:
            cure, observed = OWN_PICTURES * (culprit == rows), f"others in {len(wrong)}"
            yield Finding(culprit=culprit, expected=expected, observed=observed, cure=cure, samples=wrong[:4])
            return


def has_other_rows(evidence: Evidence) -> bool:
    """Return True if rows are not those of their requests, so that log-probabilities of both differ."""
    return any(finding.culprit in ROWS for finding in prompt_source.violations(evidence))


def _key(media: Media | None) -> int:
    return 0 if media is None else media.key


def _others_in_rows(rollout: Rollout, pictures: Mapping[int, Media | None]) -> list[int]:
    """Return the samples whose rows have other arguments of the model for pictures than their requests."""
    wrong = list[int]()
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        kept = {name: part for name, items in rollout.prompt_items.items() if len(part := items.of_row(row))}
        if sample in pictures and _differ(pictures[sample], kept):
            wrong.append(sample)
    return wrong


def _is_one_context(pairs: Sequence[tuple[Request, Completion]]) -> bool:
    """Return True if each request of a conversation continues the one before and its answer."""
    whole = [(request.prefix_ids, (*request.prefix_ids, *answer.token_ids)) for request, answer in pairs]
    return all(one[0][: len(before[1])] == before[1] for before, one in pairwise(whole))


def _others_in_replies(rollout: Rollout, pictures: Mapping[int, Media | None]) -> list[int]:
    """Return the samples whose rows have other arguments for all their pictures than these."""
    wrong = list[int]()
    for row, sample in enumerate(rollout.sample_ids.tolist() if rollout.response_items else ()):
        fields = rollout.prompt_items, rollout.response_items
        parts = {name: [each[name].of_row(row) for each in fields if name in each] for each in fields for name in each}
        kept = {name: whole for name, part in parts.items() if len(whole := concatenate_items(part))}
        if sample in pictures and _differ(pictures[sample], kept):
            wrong.append(sample)
    return wrong


def _other_types(rollout: Rollout, pictures: Mapping[int, Media | None]) -> list[int]:
    """Return the samples of one context whose rows have other token types than these, such as the kind of a token."""
    wrong = list[int]()
    for row, sample in enumerate(rollout.sample_ids.tolist()):
        media, prompt = pictures.get(sample), int(rollout.prompt_lengths[row])
        for name, asked in {} if media is None else media.types.items():
            parts = [each.get(name) for each in (rollout.prompt_types, rollout.response_types)]
            known = zip(parts, (prompt, len(asked) - prompt), strict=True)
            ours = [asked.new_zeros(end) if part is None else part[row, :end].cpu() for part, end in known]
            if not torch.equal(torch.cat(ours), asked):
                wrong.append(sample)
    return [*dict.fromkeys(wrong)]


def _other_greedy(evidence: Evidence) -> list[int]:
    """Return the samples of the greedy baseline whose requests are not those of the prompts at their places."""
    prompts = {prompt.index: prompt for prompt in evidence.stream_prompts.values()}
    asked = [request for batch in evidence.batches for request, _ in batch if request.sample_id >= GREEDY]
    own = {each.sample_id: prompts.get(each.sample_id - GREEDY) for each in asked}
    return [
        each.sample_id
        for each in asked
        if (prompt := own[each.sample_id]) is not None
        and (prompt.token_ids != each.prefix_ids or _key(prompt.media) != _key(each.media))
    ]


def _differ(media: Media | None, kept: Mapping[str, Tensor]) -> bool:
    """Return True if arguments of the model for pictures are not those in a row, which may be padded."""
    asked = {} if media is None else media.items
    return asked.keys() != kept.keys() or any(
        len(part) != len(asked[name]) or bool(part[tuple(map(slice, asked[name].shape))].ne(asked[name]).any())
        for name, part in kept.items()
    )


@check(
    culprit="{data}the pictures of its prompts",
    expected="the pictures in the columns of the row, in order, as Pillow reads them in RGB",
    cure="read each picture of a row once, in the order of the columns",
    of_rows=False,
)
def picture_source(evidence: Evidence) -> Iterator[Finding | Skip]:
    """A few prompts of the training data and of each evaluation have the pictures of their rows.

    Their token ids and arguments of the model are those that the processor, with its options at the start of the fit,
    makes of these. So are the arguments for the pictures of a few conversations.
    """
    if not evidence.strange_pictures:
        yield Skip("no prompt has pictures")
    outputs: dict[str, Any] = {
        "culprit": f"{evidence.facts.data}the processor of pictures, or the library's call of it",
        "expected": "the outputs of the processor for the text and the pictures alone, as at the start of the fit",
        "cure": "call the processor once for each prompt, with its pictures as they are, and change no output and no "
        "option of the processor; a processor changes no picture at random",
    }
    for name, (others, strange) in evidence.strange_pictures.items():
        places, texts = (others, {}) if others else ([*strange], outputs)
        if places:
            samples = places if name == CONVERSATIONS else list[int]()
            if name == "the training data":
                samples = [each for each, prompt in evidence.stream_prompts.items() if prompt.index in places]
            what = "others" if others else f"other {strange[places[0]]}"
            observed = f"{what} in {'sample' if name == CONVERSATIONS else 'prompt'} {places[0]} of {name}"
            yield Finding(observed=observed, samples=samples[:4], **texts)


@check(
    culprit="{data}stage generate, the cursor of the prompts",
    expected="samples that are in no earlier rollout",
    cure="advance the cursor with every prompt, and save it with the run",
)
def prompt_cursor(evidence: Evidence) -> Iterator[Finding]:
    """The stream of prompts advances.

    No sample id repeats one of an earlier rollout, no pass contains a row more often than the data, and no prompt is on
    two ranks. Without filters of groups, every rollout contains the prompts that follow those of the one before. Passes
    over shuffled data have different orders.
    """
    ids, repeats = set(evidence.rollout.sample_ids.tolist()), evidence.repeats
    for rollout in evidence.earlier:
        again = sorted(ids.intersection(rollout.samples))
        if again and rollout.number != evidence.number:
            yield Finding(observed=f"{len(again)} of rollout {rollout.number}", samples=again[:4])
            return
    if repeats is not None and repeats.shared:
        yield Finding(
            culprit="stage generate, the prompts of each rank",
            expected="different prompts on every rank",
            observed=f"{repeats.shared} prompts on several ranks",
            samples=repeats.samples,
            cure="split the prompts of a rollout over the ranks",
        )
    elif repeats is not None and repeats.strayed:
        yield Finding(
            expected="the prompts that follow those of the rollout before",
            observed=f"{repeats.strayed} prompts left out, repeated or of another rollout",
            samples=repeats.samples,
        )
    elif repeats is not None and repeats.again and (repeats.own_order or repeats.nats > NATS):
        yield Finding(
            expected="no row more often in a pass than in the data",
            observed=f"{repeats.again} rows that this pass has drawn before",
            samples=repeats.samples,
        )
    elif repeats is not None and repeats.order_nats > NATS:
        expected, observed = "another order in every pass over shuffled data", "that of the pass before, or of the data"
        yield Finding(expected=expected, observed=observed, samples=repeats.samples)


@check(
    culprit="the data, prompts of the validation set",
    expected="prompts outside of every validation set",
    cure="leave the rows of the validation set out of the training data",
)
def held_out_prompts(evidence: Evidence) -> Iterator[Finding]:
    """No prompt of the validation set or of an evaluation trains.

    Reported are prompts of at least 16 tokens, and shorter ones if the overlap exceeds chance or covers the whole set.
    """
    held = evidence.held_out
    if held is None:
        return
    trained, samples = held.trained, list(held.samples)
    culprit = f"the data, prompts of evaluation {held.name}" if held.name else ""
    if samples and (held.longest >= LONG or (trained == held.number and held.number > 1)):
        observed = f"{trained} of {held.number} so far"
        yield Finding(culprit=culprit, observed=observed, samples=samples[:4])
    elif held.shared >= SEVERAL and (held.shared == held.number or held.chance < CHANCE_OF_DATA):
        observed = f"{held.shared} of {held.number} in the training data"
        yield Finding(culprit=culprit, observed=observed, samples=samples[:4])
