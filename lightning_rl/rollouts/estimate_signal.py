"""Estimation of the advantage of every token from rewards and log-probabilities."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.advantages import Estimator, RewardSignal
from lightning_rl.corrections import REWARDS, Corrections, Stat
from lightning_rl.rollout import GREEDY_SCORE, ROLES, SUM_PI_SQUARED, TURN_REWARDS, Rollout, attempts_of, turn_numbers
from lightning_rl.signal.masked import GlobalSum, group_index, local_sum
from lightning_rl.signal.shaped_rewards import shaped_rewards
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.naming import in_words


def estimate_signal(
    rollout: Rollout, estimator: Estimator, corrections: Corrections, global_sum: GlobalSum = local_sum
) -> tuple[Rollout, RewardSignal, dict[str, Stat]]:
    """Return the results of :func:`estimate_advantages`, and metrics of rewards and advantages."""
    rollout, rewards, stats = estimate_advantages(rollout, estimator, corrections, global_sum)
    stats = reward_metrics(rollout, rewards.scores, rewards.shaped) | stats
    if rewards.greedy is not None:
        stats["reward/greedy"] = Stat.of(rewards.greedy, rollout.rewarded)
    advantage = Stat.of(rollout.require("advantages"), rollout.valid_tokens)
    stats |= {"advantage/mean": advantage, "advantage/std": advantage.std(), "advantage/max": advantage.maximum()}
    return rollout, rewards, stats


def estimate_advantages(
    rollout: Rollout, estimator: Estimator, corrections: Corrections, global_sum: GlobalSum = local_sum
) -> tuple[Rollout, RewardSignal, dict[str, Stat]]:
    """Estimate the advantage of every token from rewards, bonuses and token rewards.

    Args:
        rollout: Planned rollout with log-probabilities; ``trained``, ``rewarded`` and ``valid_tokens`` are final.
        estimator: Advantage estimator.
        corrections: Callbacks; used for provided fields, bonuses and token rewards.
        global_sum: Sums tensors over the ranks.

    Returns:
        Rollout with ``advantages``, and ``returns`` from a token estimator; the input of the estimator; and metrics of
        token rewards.

    Raises:
        ValueError: If a reward or an advantage is not finite, with the id of the sample; or if the advantages are not a
            float tensor [B, T] without gradient.
    """
    rollout = corrections.provide(rollout).sanitize()
    scores = corrections.scores(rollout)
    token_rewards, stats = corrections.token_reward(rollout)
    earned = rollout.token_extras.get(TURN_REWARDS) if estimator.turn_rewards else None
    if earned is not None:
        earned = torch.where(rollout.rewarded[:, None], earned, 0.0)
    shaped = shaped_rewards(scores, token_rewards, rollout.valid_tokens, earned)
    giving = [callback.name for callback in corrections.contributors(*REWARDS)]
    cause = f"look at {in_words(REWARDS)} of {in_words(giving)}" if giving else "look at the turn rewards"
    _check_finite("rewards", shaped, rollout, cause)  # before normalization spreads it to other samples
    rewards = RewardSignal(
        scores=scores,
        rewarded=rollout.rewarded,
        groups=rollout.groups,
        valid_tokens=rollout.valid_tokens,
        token_rewards=torch.zeros_like(shaped) if token_rewards is None else token_rewards,
        shaped=shaped,
        values=rollout.values,
        greedy=rollout.extras.get(GREEDY_SCORE),
        turns=None if rollout.segments is None else turn_numbers(rollout),
        turn_rewards=earned,
        roles=rollout.token_extras.get(ROLES),
        attempts=attempts_of(rollout) if ROLES in rollout.token_extras else None,
        old_logprobs=rollout.old_logprobs,
        rollout_logprobs=rollout.rollout_logprobs,
        sum_pi_squared=rollout.token_extras.get(SUM_PI_SQUARED),
        global_sum=global_sum,
    )
    who = f"the estimator {estimator.name}"
    own = rewards.clone()  # edits by the estimator change nothing that is logged
    advantages, returns = corrections.call(who, estimator, own, shown=own.tensors)
    _check_advantages(who, advantages, rollout)
    cause = "its rewards are finite, so look at the estimator, and at the values or log-probabilities that it reads"
    _check_finite(f"advantages from {who}", advantages, rollout, cause)
    return rollout.replace(advantages=advantages, returns=returns), rewards, stats


def check_domains(rollout: Rollout, scores: Tensor, estimator: Estimator, corrections: Corrections) -> None:
    """Check that rewards and scores are in the domains of corrections and estimator.

    Raises:
        ValueError: If a rewarded row's raw reward or score is not, with the id of the sample.
    """
    domains = [(type(callback).__name__, callback.domain, rollout.rewards) for callback in corrections.callbacks]
    of_scores = estimator.domain
    replacing = corrections.contributors("replace_reward")
    if of_scores is not None and replacing:
        cure = f"remove {type(replacing[0]).__name__}, which replaces the rewards, or use GRPO"
        of_scores = replace(of_scores, cure=cure)
    for who, domain, rewards in [*domains, (f"the estimator {estimator.name}", of_scores, scores)]:
        if domain is not None:
            domain.check(who, rewards, rollout.rewarded, rollout.sample_ids)


def exclude_rows(rollout: Rollout, corrections: Corrections) -> tuple[Rollout, dict[str, Stat]]:
    """Drop the rows that corrections exclude from ``trained``, ``valid_tokens`` and ``rewarded``."""
    excluded, stats = corrections.exclude(rollout)
    trained = rollout.trained & rollout.real & ~excluded
    valid = rollout.action_mask & trained[:, None]
    return rollout.replace(trained=trained, valid_tokens=valid, rewarded=rollout.rewarded & trained), stats


def reward_metrics(rollout: Rollout, scores: Tensor, shaped: Tensor) -> dict[str, Stat]:
    """Return metrics of rewards over rewarded rows, of lengths over real rows, and of groups without variance."""
    rewarded, real = rollout.rewarded, rollout.real
    stats = {"reward/task": Stat.of(rollout.rewards, rewarded)}
    for name, raw in rollout.rewards_by_function.items():
        stats[f"reward/{name}"] = Stat.of(raw, rewarded & ~raw.isnan())
    stats |= Stat.many({"reward/shaped": shaped.sum(-1), "reward/missing": ~rewarded}, rollout.trained)
    lengths = Stat.many({"length/mean": rollout.sampled_lengths, "length/truncated": rollout.truncated}, real)
    stats |= {"length/mean": lengths["length/mean"], "length/max": lengths["length/mean"].maximum()}
    stats["length/truncated"] = lengths["length/truncated"]
    groups = group_statistics(scores, rollout.groups, rewarded)
    first = rewarded & _first_of_group(rollout.groups, rewarded)
    stats["groups/zero_variance"] = Stat.of(~groups.spread, first)
    return stats


def _first_of_group(groups: Tensor, population: Tensor) -> Tensor:
    index, number = group_index(groups)
    place = torch.arange(len(groups), device=groups.device)
    candidates = torch.where(population, place, len(groups))
    first = torch.full_like(groups, len(groups))[:number].scatter_reduce_(0, index, candidates, "amin")
    return place == first[index]


def _check_advantages(who: str, advantages: Tensor, rollout: Rollout) -> None:
    shape = rollout.response_ids.shape
    if not isinstance(advantages, Tensor) or advantages.shape != shape or not advantages.is_floating_point():
        tensor = isinstance(advantages, Tensor)
        got = f"{advantages.dtype} {list(advantages.shape)}" if tensor else type(advantages).__name__
        raise ValueError(f"expected {who} to return a float tensor {list(shape)}, got {got}")
    if advantages.requires_grad:
        raise ValueError(f"expected advantages from {who} without gradient, got one: detach the tensors that it reads")


def _check_finite(what: str, values: Tensor, rollout: Rollout, cure: str) -> None:
    if torch.isfinite(values).all():
        return
    row, position = (~torch.isfinite(values)).nonzero()[0].tolist()
    value, sample = float(values[row, position]), int(rollout.sample_ids[row])
    raise ValueError(f"expected finite {what}, got {value} for sample {sample} at position {position}: {cure}")
