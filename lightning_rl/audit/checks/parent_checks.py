"""Checks of subclasses of the library's corrections: what the parent documents, seen from outside."""

import copy
from collections.abc import Iterator

import torch

from lightning_rl.audit.checks.check import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import AdaptiveKL, EntropyBonus, NoEOSMask, OverlongPenalty
from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import PROMPT, FinishReason, Rollout
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.trainer import is_own

FAR = 100  # rows of a measurement


@check(cure="keep what the parent documents, or derive from RLCallback", of_rows=False)
def parent_promises(evidence: Evidence) -> Iterator[Finding]:
    """A subclass of a correction of the library does what its parent documents.

    A NoEOSMask rejects truncated rows and no others, an OverlongPenalty counts no prompt, an AdaptiveKL and an
    EntropyBonus move towards their targets.
    """
    rows = evidence.rollout.sanitize()
    rows = rows.select(rows.real & ~rows.failed)
    for callback in evidence.algorithm.corrections.callbacks:
        if is_own(callback) or not len(rows):
            continue
        if isinstance(callback, NoEOSMask):
            yield from _mask_findings(callback, rows)
        if isinstance(callback, OverlongPenalty):
            longer = rows.map(lambda part, axes, _: torch.cat([part[:, :1], part], 1) if axes == PROMPT else part)
            longer = longer.replace(prompt_lengths=rows.prompt_lengths + 1)
            if not torch.equal(callback.reward_bonus(rows), callback.reward_bonus(longer)):
                expected, observed = "a penalty that does not depend on the length of the prompt", "one that does"
                yield Finding(culprit=f"callback {callback.name}.reward_bonus", expected=expected, observed=observed)
        yield from _controller_findings(callback)


def _mask_findings(callback: NoEOSMask, rows: Rollout) -> Iterator[Finding]:
    for reason, word in ((FinishReason.LENGTH, "truncated"), (FinishReason.STOP, "finished")):
        made_up = rows.replace(finish=torch.full_like(rows.finish, reason))
        cuts = reason == FinishReason.LENGTH
        for method, kept in (("reward_mask", callback.reward_mask(made_up)), ("exclude", ~callback.exclude(made_up))):
            rejects = cuts and (method == "reward_mask" or callback.action == "drop_tokens")
            if bool((kept == rejects).any()):
                expected = f"{'no' if rejects else 'every'} {word} row to be kept"
                yield Finding(culprit=f"callback {callback.name}.{method}", expected=expected)
                return


def _controller_findings(callback: RLCallback) -> Iterator[Finding]:
    """Yield a finding if the coefficient of a controller moves away from the target."""
    if not isinstance(callback, AdaptiveKL | EntropyBonus) or not callback.target:
        return
    for factor in (0.5, 1.5):
        twin, measured = copy.copy(callback), factor * callback.target
        if isinstance(twin, AdaptiveKL):
            before, wanted = twin.beta, factor > 1
            twin.adapt(measured, FAR)
            after = twin.beta
        else:
            before, wanted = twin.coef, factor < 1
            twin.adapt(torch.tensor([[FAR, measured, 0.0, measured]], dtype=torch.float64))
            after = twin.coef
        if after != before and (after > before) != wanted:
            word = "rises" if wanted else "falls"
            expected = f"a coefficient that {word} at {factor:g} times the target"
            yield Finding(culprit=f"callback {callback.name}.adapt", expected=expected, observed="the opposite")
            return
