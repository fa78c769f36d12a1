"""Checks of subclasses of the library's corrections: what the parent documents, seen from outside."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_rl.audit.evidence import Evidence
from lightning_rl.callbacks import AdaptiveKL, EntropyBonus, NoEOSMask, OverlongPenalty
from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import PROMPT, FinishReason, Rollout
from lightning_rl.testing.properties.check import check
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.trainer import is_own

FAR = 100  # rows of a measurement
FEW, UPDATES, GAP = 4, 8, 3.0  # rows, updates and nats of a made-up measurement


@check(cure="keep what the parent documents, or derive from RLCallback", of_rows=False)
def parent_promises(evidence: Evidence) -> Iterator[Finding]:
    """A subclass of a correction of the library does what its parent documents.

    A NoEOSMask rejects truncated rows and no others, an OverlongPenalty counts no prompt. An AdaptiveKL and an
    EntropyBonus, also those of the library, move towards their targets, once for each measurement.
    """
    rows = evidence.rollout.sanitize()
    rows = rows.select(rows.real & ~rows.failed)
    for callback in evidence.algorithm.corrections.callbacks:
        if len(rows):
            yield from _controller_findings(callback, rows)
        if is_own(callback) or not len(rows):
            continue
        if isinstance(callback, NoEOSMask):
            yield from _mask_findings(callback, rows)
        if isinstance(callback, OverlongPenalty):
            longer = rows.map(lambda part, axis, _: torch.cat([part[:, :1], part], 1) if axis == PROMPT else part)
            longer = longer.replace(prompt_lengths=rows.prompt_lengths + 1)
            if not torch.equal(callback.reward_bonus(rows), callback.reward_bonus(longer)):
                expected, observed = "a penalty that does not depend on the length of the prompt", "one that does"
                yield Finding(culprit=f"callback {callback.name}.reward_bonus", expected=expected, observed=observed)


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


def _controller_findings(callback: RLCallback, rows: Rollout) -> Iterator[Finding]:
    """Yield a finding if a controller does not move its coefficient towards the target, or by more than one update."""
    trained = (rows.trained & rows.valid_tokens.any(-1)).nonzero()[:FEW, 0]
    if not isinstance(callback, AdaptiveKL | EntropyBonus) or not callback.target or not len(trained):
        return
    for far in (False, True):
        if isinstance(callback, AdaptiveKL):
            coef, observer = "beta", "observe"
            gap = max(GAP, 10 * callback.target) if far else callback.target / 10
            above, adapt, observe = _kl_updates(callback, rows.select(trained), gap)
        else:
            coef, observer, above = "coef", "after_step", not far
            adapt, observe = _entropy_updates(10 * callback.target if far else callback.target / 10)
        by_adapt, by_observer = _moves(callback, coef, adapt), _moves(callback, coef, observe)
        expected = (
            f"a coefficient that {'rises' if above else 'falls'} {'far above' if far else 'far below'} the target"
        )
        for method, last in (("adapt", by_adapt[-1]), (observer, by_observer[-1])):
            if last == 0 or (last > 0) != above:
                observed = "the opposite" if last else "none that changes"
                yield Finding(culprit=f"callback {callback.name}.{method}", expected=expected, observed=observed)
                return
        if abs(by_observer[0]) > 1.5 * abs(by_adapt[0]):
            observed = f"a move of {by_observer[0]:.3g} instead of {by_adapt[0]:.3g}"
            yield Finding(culprit=f"callback {callback.name}.{observer}", expected="one update", observed=observed)
            return


Update = Callable[[Any], None]


def _moves(callback: RLCallback, coef: str, update: Update) -> list[float]:
    """Return the first and the last change of a coefficient by repeated updates, which may be smoothed."""
    twin = copy.copy(callback)
    setattr(twin, coef, getattr(twin, coef) + 1.0)  # which has room to fall
    values = [float(getattr(twin, coef))]
    for _ in range(UPDATES):
        update(twin)
        values.append(float(getattr(twin, coef)))
    return [values[1] - values[0], values[-1] - values[-2]]


def _kl_updates(callback: AdaptiveKL, rows: Rollout, gap: float) -> tuple[bool, Update, Update]:
    """Return updates by a KL, and by rows in which the policy is ``gap`` nats above the reference at every token.

    First, True if this KL is above the target.
    """
    old = torch.where(rows.valid_tokens, -1.0, 0.0).to(rows.rewards.dtype)
    moved = rows.replace(old_logprobs=old, ref_logprobs=torch.where(rows.valid_tokens, old - gap, 0.0))
    kl = callback.estimator(old, old - gap)[rows.valid_tokens]
    measured, number = float(kl.double().mean()), len(rows)
    return measured > callback.target, lambda twin: twin.adapt(measured, number), lambda twin: twin.observe(moved)


def _entropy_updates(entropy: float) -> tuple[Update, Update]:
    """Return updates by the moments of an entropy, and by the outputs of a step with this entropy."""
    moments = torch.tensor([FAR, entropy, 0.0, entropy], dtype=torch.float64)
    outputs = {"policy/entropy": moments, "optim/grad_norm": torch.ones(()), "loss/total": torch.zeros(())}
    return lambda twin: twin.adapt(moments[None]), lambda twin: twin.after_step(outputs)
