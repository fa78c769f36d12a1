"""Table of the check that recomputes each logged metric, or of the reason why none does."""

import re
from collections.abc import Mapping

RECOMPUTED = "logged_metrics"

NO_CLOCK = "not covered: seconds cannot be measured again"
ONLY_TRAINING = "not covered: the audit checks training only"
COVERAGE: Mapping[str, str] = {
    "reward_metric/<figure>": "not covered: only the reward function that logs it defines it",
    **{f"env/{name}": RECOMPUTED for name in ("reward", "turns", "tokens", "failed", "cut_by_turns", "cut_by_tokens")},
    "env/logprob": "environment_logprob",
    "env/<figure>": "not covered: environments compute it, and no check recomputes it",
    "prompts/dropped": "not covered: counted by the data module, before any rollout",
    "optim/skipped": "not covered: counts over the whole run, while the audit checks single rollouts",
    "tokens_per_second": NO_CLOCK,
    "time/<phase>": NO_CLOCK,
    "trainer/idle": NO_CLOCK,
    "in_flight/<figure>": "not covered: a momentary state cannot be measured again",
    "val/<figure>": ONLY_TRAINING,
    "test/<figure>": ONLY_TRAINING,
    "signal_audit/<figure>": "not covered: logged by the audit itself",
    "rollout": RECOMPUTED,
    "<group>/<figure>": RECOMPUTED,
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
