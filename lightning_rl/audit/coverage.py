"""Coverage: which check recomputes each metric that a run logs, and why nobody does where nobody does."""

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
    "reward_metric/<figure>": "not covered: a reward function noted it, and only the function knows what it means",
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
    "env/<figure>": "not covered: environments count for themselves, and no check asks them again",
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
    "optim/skipped": "not covered: a count over the whole run, of which the audit sees single rollouts",
    "rollout": RECOMPUTED,
    "tokens_per_second": "not covered: seconds cannot be measured again",
    "time/<phase>": "not covered: seconds cannot be measured again",
    "trainer/idle": "not covered: seconds cannot be measured again",
    "in_flight/<figure>": "not covered: what was in flight at some moment cannot be seen again",
    "val/<figure>": "not covered: the audit looks at training alone",
    "test/<figure>": "not covered: the audit looks at training alone",
    "signal_audit/<figure>": "not covered: the audit's own",
    "<callback>/<figure>": RECOMPUTED,
}
"""For each metric its check, or why it is not covered; the first pattern that fits counts."""


def check_of_metric(metric: str) -> str:
    """The check that recomputes a metric, or ``"not covered: ..."``.

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
