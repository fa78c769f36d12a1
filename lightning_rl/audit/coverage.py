"""Table of the check that recomputes each logged metric, or of the reason why none does."""

import re
from collections.abc import Mapping

RECOMPUTED = "logged_metrics"

COVERAGE: Mapping[str, str] = {
    "engine/aborted": RECOMPUTED,
    "reward/failed": RECOMPUTED,
    "reward/task": RECOMPUTED,
    "reward/<function>": RECOMPUTED,
    "reward/shaped": RECOMPUTED,
    "reward/missing": RECOMPUTED,
    "reward/greedy": RECOMPUTED,
    "reward_failed/<function>": RECOMPUTED,
    "reward_metric/<figure>": "not covered: only the reward function that logs it defines it",
    "advantage/<figure>": RECOMPUTED,
    "length/<figure>": RECOMPUTED,
    "staleness/<figure>": RECOMPUTED,
    "groups/zero_variance": RECOMPUTED,
    "groups/<number>": RECOMPUTED,
    "env/turns": RECOMPUTED,
    "env/tokens": RECOMPUTED,
    "env/failed": RECOMPUTED,
    "env/cut_by_turns": RECOMPUTED,
    "env/cut_by_tokens": RECOMPUTED,
    "env/reward": RECOMPUTED,
    "env/logprob": "environment_logprob",
    "env/<figure>": "not covered: environments compute it, and no check recomputes it",
    "prompts/dropped": "not covered: counted by the data module, before any rollout",
    "kl/ref": RECOMPUTED,
    "kl/rollout": RECOMPUTED,
    "kl/old": RECOMPUTED,
    "kl/penalty": RECOMPUTED,
    "policy/<figure>": RECOMPUTED,
    "value/error": RECOMPUTED,
    "loss/<part>": RECOMPUTED,
    "optim/grad_norm": RECOMPUTED,
    "optim/lr": RECOMPUTED,
    "optim/skipped": "not covered: counts over the whole run, while the audit checks single rollouts",
    "rollout": RECOMPUTED,
    "tokens_per_second": "not covered: seconds cannot be measured again",
    "time/<phase>": "not covered: seconds cannot be measured again",
    "trainer/idle": "not covered: seconds cannot be measured again",
    "in_flight/<figure>": "not covered: a momentary state cannot be measured again",
    "val/<figure>": "not covered: the audit checks training only",
    "test/<figure>": "not covered: the audit checks training only",
    "signal_audit/<figure>": "not covered: logged by the audit itself",
    "<callback>/<figure>": RECOMPUTED,
}
"""Check of each metric, or the reason why there is none; the first matching pattern applies."""


def check_of_metric(metric: str) -> str:
    """Return the name of the check that recomputes a metric, or ``"not covered: ..."``.

    Example:
        >>> check_of_metric("kl/ref"), check_of_metric("time/sync")
        ('logged_metrics', 'not covered: seconds cannot be measured again')
    """
    return next(
        (check for pattern, check in COVERAGE.items() if _matches(pattern, metric)),
        "not covered: neither the core nor a callback logs under this name",
    )


def _matches(pattern: str, metric: str) -> bool:
    literal = re.escape(pattern).replace("<figure>", ".+")
    return re.fullmatch(re.sub(r"<\w+>", "[^/]+", literal), metric) is not None
