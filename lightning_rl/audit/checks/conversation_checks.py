"""Checks of conversations: turns and their seeds, calls and rewards, and what must not train."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isclose

import torch
from torch import Tensor

from lightning_rl.audit.audit_error import Skip, differences
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.checks.reward_checks import samples_of_calls
from lightning_rl.audit.checks.signal_checks import signal_rounding
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.recomputed_metrics import figure_of
from lightning_rl.audit.sampling_statistics import Pair, turns_of
from lightning_rl.audit.turn_boundaries import Seam
from lightning_rl.corrections import TOKEN_REWARDS
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.generation import request_seed, turn_seed
from lightning_rl.rollout import TOKEN, TURN_REWARDS, TURNS
from lightning_rl.utils.finding import Finding

ENVIRONMENT_REWARD = REWARD_COLUMNS[1]
LEAST_MOVES = 6  # rollouts
LEAST_NATS, SHARE = 1.0, 1 / 4  # for each word of an environment; of how far the policy's tokens moved


@check(
    culprit="stage draw, the turns of its conversations",
    cure="make the seed of a turn with turn_seed from that of the first one, and count turns from 0",
)
def turn_order(evidence: Evidence) -> Iterator[Finding]:
    """The turns of a conversation are numbered from 0 on, and each is drawn with the seed of its (rollout, sample,
    turn), so that no driver and no order of environments changes a token; that of the first turn is the one of an
    answer that nobody answers.
    """
    wrong, seed = defaultdict[str, list[int]](list), evidence.facts.seed
    for sample, turns in turns_of(evidence.batches).items():
        first = turns[0][0].seed
        if [request.turn for request, _ in turns] != list(range(len(turns))):
            wrong["turns 0, 1, 2, ... of each sample"].append(sample)
        elif any(request.seed != turn_seed(first, request.turn) for request, _ in turns):
            wrong["the seed of its sample and turn at every request"].append(sample)
        elif seed is not None and first != request_seed(seed, evidence.number, sample):
            wrong["the seed of its run, rollout and sample at every first request"].append(sample)
    for expected, samples in wrong.items():
        yield Finding(expected=expected, observed=f"{len(samples)} others", samples=samples[:4])


@check(
    culprit="stage draw, the rewards of turns",
    cure="put the reward of a turn at its last drawn token, and add up what the environment gave",
)
def turn_rewards(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Each turn's reward lies at the last token that was drawn in it, and the rewards of a row's turns add up to what
    the rewards are told that its environment gave.
    """
    rollout = evidence.rollout
    if TURN_REWARDS not in rollout.token_extras:
        return
    values, numbers = rollout.token_extras[TURN_REWARDS], rollout.token_extras[TURNS]
    last = (numbers > 0) & (numbers != numbers.roll(-1, -1))
    last[:, -1] |= numbers[:, -1] > 0
    astray = ((values != 0) & ~(last & rollout.action_mask)).any(-1)
    if astray.any():
        yield Finding(
            expected="rewards at the last drawn token of a turn",
            observed=f"others in {int(astray.sum())} rows",
            samples=rollout.sample_ids[astray][:4].tolist(),
        )
    given = _environment_rewards(evidence)
    sums = zip(rollout.sample_ids.tolist(), values.double().sum(-1).tolist(), strict=True)
    wrong = [
        sample
        for sample, total in sums
        if sample in given and not isclose(given[sample], total, abs_tol=1e-5, rel_tol=1e-5)
    ]
    if wrong:
        yield Finding(
            expected="rewards of turns that add up to the environment's",
            observed=f"another sum in {len(wrong)} rows",
            samples=wrong[:4],
        )
    if not given:
        yield Skip("no reward function was told what the environment gave")


def _environment_rewards(evidence: Evidence) -> dict[int, float]:
    """What rewards are told that the environment gave, by sample."""
    given: dict[int, float] = {}
    for call, samples in zip(evidence.calls, samples_of_calls(evidence.batches, evidence.calls), strict=True):
        values = call.columns.get(ENVIRONMENT_REWARD, ())
        given |= {sample: 0.0 if value is None else value for sample, value in zip(samples, values, strict=False)}
    return given


@check(
    culprit="stage draw, the tool calls of answers",
    expected="no tool call of an answer that was cut off",
    cure="parse nothing in an answer that ended for its length: half a call is no call",
)
def cut_calls(evidence: Evidence) -> Iterator[Finding]:
    """No tool call is read in an answer that a limit of tokens cut off, so none is made."""
    cut = [one.sample for one in evidence.told if one.calls_when_cut]
    if cut:
        yield Finding(observed=f"some in {len(cut)} conversations", samples=cut[:4])


@check(
    culprit="estimator {estimator}",
    expected="statistics over samples, each counted once",
    cure="compare samples by their whole reward: neither turns nor further rows of a sample are samples",
)
def sample_weights(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Statistics of a group count a sample once, whatever its turns or rows: with all of its tokens in one turn, and
    without its further rows, a row has the same advantage, unless turns or tokens are the steps of the estimator.
    """
    groups, estimator = evidence.groups, evidence.algorithm.advantages
    if TURNS not in groups.token_extras:
        return
    if estimator.per_token:
        yield Skip("the estimator's steps are turns or tokens")
        return
    turns = groups.token_extras[TURNS]
    one = groups.replace(token_extras={**groups.token_extras, TURNS: (turns > 0).to(turns.dtype)})
    changed = differences(evidence.advantages_of(one), evidence.advantages, groups.sample_ids)
    yield from (replace(finding, observed="others where turns are joined") for finding in changed)
    ids = groups.sample_ids.tolist()
    first = torch.tensor([place for place, sample in enumerate(ids) if sample not in ids[:place]], dtype=torch.int64)
    if len(first) < len(ids):
        alone, kept = evidence.advantages_of(groups.select(first)), evidence.advantages[first]
        changed = differences(alone, kept, groups.sample_ids[first])
        yield from (replace(finding, observed="others where a sample has one row") for finding in changed)


@check(
    culprit="stage update, or whoever else trains what environments say",
    expected="words of environments that get no likelier by themselves",
    cure="train the tokens of action_mask alone, in every loss and every forward",
    of_step=True,
)
def environment_moves(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What environments say is read and not trained: over the last audited rollouts the updates do not make it
    likelier, beyond what the policy draws, by a nat and by a quarter of how far the log-odds of that move.
    """
    if TURNS not in evidence.rollout.token_extras:
        return
    moves = evidence.moves
    if len(moves) < LEAST_MOVES:
        yield Skip(f"{len(moves)} rollouts of {LEAST_MOVES} with words of environments were looked at")
        return
    risen, size = sum(move.said - max(move.drawn, 0.0) for move in moves), sum(move.size for move in moves)
    if risen > max(LEAST_NATS, SHARE * size):
        yield Finding(
            observed=f"{risen:.3g} nats more for each of their tokens in {len(moves)} rollouts, in which tokens of the "
            f"policy moved by {size:.3g} in log-odds"
        )


@check(
    culprit="stage draw, what a bridge writes between two turns of a conversation",
    cure="put what the template writes around the messages behind the answer, whole, and its closing token once",
)
def written_replies(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What stands between two answers is, token by token, what the chat template writes around the messages that the
    conversation has there: the answer is closed once, and no blank, word or result of a tool is lost, added or another.
    """
    silent = [seam for seam in evidence.seams if not seam.template]
    if silent:
        yield Skip("the chat template does not tell what it writes behind an answer")
    wrong = defaultdict[str, list[Seam]](list)
    for seam in evidence.seams:
        if seam.template and seam.written not in _forms_of(seam):
            wrong[_slip_of(seam)].append(seam)
    for observed, seams in wrong.items():
        yield Finding(
            expected=f"{list(_forms_of(seams[0])[0][:24])} behind the answer of turn {seams[0].turn}",
            observed=f"{observed} behind {len(seams)} of {len(evidence.seams)} answers: {list(seams[0].written[:24])}",
            samples=[seam.sample for seam in seams][:4],
        )


@check(
    culprit="stage draw, what a conversation begins with",
    cure="render the messages and the schemas of the tools by the template, whole, and no word of theirs as a control "
    "token",
)
def written_prompts(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What the policy reads before its first answer, and where a context is rewritten, is token by token what the chat
    template writes for the messages that the conversation has there and for the tools of its environment: no message,
    schema or head of an answer is lost, and no word became a control token.
    """
    if any(not context.template for context in evidence.contexts):
        yield Skip("the chat template refuses what some conversations begin with")
    wrong = [one for one in evidence.contexts if one.template and one.read != one.template]
    if wrong:
        first = wrong[0]
        pairs = zip(first.read, first.template, strict=False)
        alike = next((place for place, (read, right) in enumerate(pairs) if read != right), None)
        place = min(len(first.read), len(first.template)) if alike is None else alike
        yield Finding(
            expected=f"{list(first.template[place : place + 16])} at token {place} of {len(first.template)} in turn "
            f"{first.turn}",
            observed=f"{list(first.read[place : place + 16])} of {len(first.read)}; {len(wrong)} of "
            f"{len(evidence.contexts)} contexts are others",
            samples=[one.sample for one in wrong][:4],
        )


def _forms_of(seam: Seam) -> list[tuple[int, ...]]:
    """What may stand behind an answer; where the head of a speaker closes it, the right one may follow a wrong one."""
    whole, rest = seam.template, seam.template[1:]
    if seam.drawn < 0:
        return [whole]
    return [rest, whole] if seam.opens and seam.drawn != whole[0] else [rest]


def _slip_of(seam: Seam) -> str:
    right, wrong = _forms_of(seam)[0], seam.written
    if wrong == (seam.template if seam.drawn >= 0 else (seam.template[0], *seam.template)):
        return "a second token that closes it"
    if seam.drawn < 0 and wrong == right[1:]:
        return "no token that closes it"
    return "fewer tokens" if len(wrong) < len(right) else "more tokens" if len(wrong) > len(right) else "other tokens"


@check(
    culprit="stage draw, the request of a conversation's turn",
    cure="ask for what is left of max_new_tokens, of max_turn_tokens and of the context, and for max_turns at most",
)
def turn_limits(evidence: Evidence) -> Iterator[Finding]:
    """A turn may draw what is left of the tokens of its conversation, at most what a turn may draw and what fits into
    the context; words of the environment count for the context alone. No conversation has more turns than it may, and
    none ends for want of room while there is some.
    """
    facts, wrong = evidence.facts, defaultdict[str, list[int]](list)
    if not facts.max_turns:
        return
    for sample, turns in turns_of(evidence.batches).items():
        if len(turns) > facts.max_turns:
            wrong[f"at most {facts.max_turns} turns of a conversation"].append(sample)
        elif any(request.sampling.max_new_tokens != room for (request, _), room in _rooms(turns, facts)):
            wrong["requests for what is left of the tokens of each conversation, turn and context"].append(sample)
    if early := [one.sample for one in evidence.told if one.cut_early]:
        wrong["another answer where there is room for one"] = early
    for expected, samples in wrong.items():
        yield Finding(expected=expected, observed=f"others in {len(samples)} conversations", samples=samples[:4])


def _rooms(turns: Sequence[Pair], facts: RunFacts) -> Iterator[tuple[Pair, int]]:
    """Each turn with how many tokens it may draw."""
    left = facts.max_new_tokens
    for request, completion in turns:
        yield (request, completion), min(left, facts.max_turn_tokens, facts.max_length - len(request.prefix_ids))
        left -= len(completion.token_ids)


@check(
    culprit="stage draw, what a reward is told of a conversation",
    cure="show rewards every message of the conversation, and the tokens of its last answer",
)
def told_rewards(evidence: Evidence) -> Iterator[Finding]:
    """Rewards judge a conversation by the tokens of its last answer alone, in which no word of the environment looks
    like an answer, and are shown every answer of it.
    """
    cases = {
        "the token ids of the last answer as a completion": [
            one.sample for one in evidence.told if not one.judges_last
        ],
        "a message of the policy for each of its turns": [
            one.sample for one in evidence.told if 0 <= one.answers < one.turns
        ],
    }
    for expected, samples in cases.items():
        if samples:
            yield Finding(expected=expected, observed=f"others in {len(samples)} conversations", samples=samples[:4])


@check(
    cure="make an environment for each conversation, with no state but its own and what is random from the seed "
    "of reset; where it is meant: replayable = False",
)
def environment_replays(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Messages of an environment follow from row, seed and answers alone.

    Conversations that are held again are the recorded ones, alone and beside others in another order.
    """
    for replay in evidence.replays:
        if replay.reason:
            yield Skip(replay.reason)
        elif replay.moving:
            yield Finding(
                culprit=f"environment {replay.environment}",
                expected="the same conversation for a row, a seed and answers, whichever others there are",
                observed=f"other {replay.moving} when it is held again",
                samples=replay.samples[:4],
            )
        elif replay.others:
            kinds = dict.fromkeys(what for _, what in replay.others)
            yield Finding(
                culprit="stage draw, the turns of conversations and their calls of tools, rows and seeds",
                expected=f"the conversation that {replay.environment} holds with this row, seed and answers",
                observed=f"others in {len(replay.others)} of {len(replay.samples)}: {', '.join(kinds)}",
                cure="give every environment the row and the seed of its own sample, each answer once and at its turn, "
                "and every result of a tool to the call that asked for it",
                samples=[sample for sample, _ in replay.others][:4],
            )


@check(
    culprit="metric env/logprob",
    cure="score the tokens of the response that the policy did not draw, under the policy of this rollout",
    of_step=True,
)
def environment_logprob(evidence: Evidence) -> Iterator[Finding | Skip]:
    """``env/logprob`` is what the policy makes of the words of environments, and of no token that it drew itself."""
    step, truth = evidence.step, evidence.words_logprob
    if step is None or "env/logprob" not in step.logged:
        return
    if truth is None:
        yield Skip("environments say nothing in the rows that are scored, or too much")
        return
    count, logged = figure_of(step.logged["env/logprob"], "mean")
    if count and abs(logged - truth) > evidence.facts.tolerance:
        yield Finding(expected=f"{truth:.6g} nats", observed=f"{logged:.6g}")


@check(
    culprit="estimator {estimator}",
    expected="the same advantages at what the policy drew, however long the environment speaks",
    observed="others where the environment's words are left out",
    cure="step over valid tokens alone: they, and no others, are time steps and share rewards",
)
def silent_environments(evidence: Evidence) -> Iterator[Finding | Skip]:
    """What an environment says is no time step and earns nothing: without its words between them, what the policy drew
    has the same advantages.
    """
    groups = evidence.groups
    if TURNS not in groups.token_extras or not bool((groups.token_extras[TURNS] > 0).any()):
        return
    if evidence.contributions("reward_bonus", *TOKEN_REWARDS):
        yield Skip("corrections that reward rows may look at what environments say")
        return
    order = (~groups.action_mask).to(torch.int8).argsort(dim=-1, stable=True)
    alone = groups.map(lambda tensor, axes, _: _along(tensor, order) if axes == TOKEN else tensor)
    alone = alone.replace(response_lengths=groups.action_mask.sum(-1).to(groups.response_lengths.dtype))
    theirs = torch.zeros_like(evidence.advantages).scatter(1, order, evidence.advantages_of(alone))
    valid, atol = groups.valid_tokens, signal_rounding(groups, groups, evidence.advantages)
    ours, theirs = (torch.where(valid, one, 0.0) for one in (evidence.advantages, theirs))
    yield from differences(ours, theirs, groups.sample_ids, atol=atol)


def _along(tensor: Tensor, order: Tensor) -> Tensor:
    """A tensor [B, T, ...] with the tokens of each row in another order."""
    return tensor[torch.arange(len(order), device=order.device)[:, None], order]
