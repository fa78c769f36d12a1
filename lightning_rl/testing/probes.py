"""Probes of contributions: extreme values, wider padding, and missing undeclared fields."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rl.corrections import CONTRIBUTIONS, MADE_AFTER, LossTerm, Stat
from lightning_rl.rollout import TOKEN, Rollout
from lightning_rl.testing.properties.case import SHOWN_A_ROLLOUT, SHOWN_A_VIEW, AlgorithmCase, CorrectionMethod
from lightning_rl.utils.finding import Finding

SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)  # values on both sides of any threshold
WIDER = (1, 99)  # added padding as a multiple of the width
OPTIONAL = ("rollout_logprobs", "ref_logprobs", "values", "returns")
MEANINGS = {
    "declared_reads": "A correction declares the fields that it reads in reads or reads_at_loss, so that a run can "
    "provide them, and reads none before it exists.",
    "padding_blindness": "A contribution does not depend on the width of the padding, for values of any size.",
}


def padding_blindness(case: AlgorithmCase) -> Iterator[Finding]:
    """Check that contributions for values of any size do not change with the width of the padding."""
    for contribution in case.contributions(*SHOWN_A_ROLLOUT, *SHOWN_A_VIEW):
        for scale in SCALES:
            rows = scale_values(_rows_for(case, contribution), scale)
            before = _tensors(contribution(rows))
            for times in WIDER:
                wider = contribution(rows.fit_width(rows.width * (1 + times)))
                if not all(map(_alike(rows), before, _tensors(wider))):
                    yield Finding(
                        check="padding_blindness",
                        culprit=str(contribution),
                        expected=f"the same contribution with {times} times the width added as padding",
                        observed=f"another one, for values of about {scale:g}",
                        cure="divide by valid_tokens.sum(-1), never by the width or with .mean(-1)",
                    )
                    return


def declared_reads(case: AlgorithmCase) -> Iterator[Finding]:
    """Check that contributions do not read undeclared fields."""
    for contribution in case.contributions(*SHOWN_A_ROLLOUT, *SHOWN_A_VIEW, "observe"):
        shown = _rows_for(case, contribution)
        for name in _optional_fields(contribution, shown):
            problem = _loss_of(contribution, shown, name)
            if not problem:
                continue
            attribute = "reads_at_loss" if contribution.method in SHOWN_A_VIEW else "reads"
            late = contribution.method in MADE_AFTER.get(name, ())
            cure = f'read "{name}" in a later method, such as rollout_metrics, observe or those at the loss'
            yield Finding(
                check="declared_reads",
                culprit=str(contribution),
                expected=f'"{name}" among its {attribute}, or a contribution that does not read it',
                observed=f"{problem} without it",
                cure=cure if late else f'declare it: {attribute} = ("{name}",)',
            )
            return


FURTHER: Mapping[str, Callable[[AlgorithmCase], Iterator[Finding]]] = {
    "declared_reads": declared_reads,
    "padding_blindness": padding_blindness,
}
"""Checks besides :data:`~lightning_rl.testing.properties.PROPERTIES`, by the name of the property."""


def scale_values(rows: Rollout, scale: float) -> Rollout:
    """Return a copy with other values at the valid tokens in all float token fields; entropies stay at least 0.

    Values are of size ``scale``, differ between fields, and depend on sample and position only.
    """
    position, number = torch.arange(rows.width), iter(range(1, 100))

    def rescale(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        if axis != TOKEN or not tensor.is_floating_point() or tensor.dim() > 2:
            return tensor
        seed = next(number)
        wave = torch.sin(seed + 3.0 * rows.sample_ids[:, None] + (1.0 + seed) * position).to(tensor.dtype)
        offset = 0.5 * (seed if seed % 2 else -seed)
        values = torch.where(rows.valid_tokens, (offset + 0.25 * wave) * scale, 0.0)
        return values.detach().requires_grad_(tensor.requires_grad)

    changed = rows.map(rescale)
    entropy = getattr(changed, "entropy", None)
    return changed if entropy is None else changed.replace(entropy=entropy.abs())


def _rows_for(case: AlgorithmCase, contribution: CorrectionMethod) -> Rollout:
    entropy_gradient = contribution.callback.trains_entropy
    if contribution.method in SHOWN_A_VIEW:
        return case.view(entropy_gradient=entropy_gradient).sanitize()
    return case.groups.sanitize()


def _optional_fields(contribution: CorrectionMethod, shown: Rollout) -> list[str]:
    """Return the undeclared fields that may be missing when the contribution is computed."""
    callback, method = contribution.callback, contribution.method
    declared = {*callback.reads, *callback.reads_at_loss, *callback.provides}
    declared |= {f"{field}/{name}" for field in ("token_extras", "prompt_extras") for name in callback.records}
    entries = [name for name, _ in shown.tensors() if "extras/" in name]
    optional = [*OPTIONAL, *entries, *([] if method in SHOWN_A_VIEW else ["old_logprobs"])]
    early = [name for name, methods in MADE_AFTER.items() if method in methods]
    return [*early, *(name for name in optional if name not in declared and name not in early)]


def _loss_of(contribution: CorrectionMethod, shown: Rollout, name: str) -> str:
    """Return the effect of a missing field on a contribution; empty for none."""
    field, _, key = name.partition("/")
    present = getattr(shown, field)
    if present is None:
        return ""
    rest = {other: tensor for other, tensor in present.items() if other != key} if key else None
    before = _tensors(contribution(shown))
    try:
        after = _tensors(contribution(shown.replace(**{field: rest})))
    except Exception as raised:  # noqa: BLE001  an error of user code is a finding
        return f"{type(raised).__name__}: {raised}"
    same = len(before) == len(after) and all(map(_alike(shown), before, after))
    return "" if same or not CONTRIBUTIONS[contribution.method].affects else "another contribution"


def _tensors(contribution: Any) -> list[Tensor]:
    if isinstance(contribution, LossTerm):
        return [contribution.per_token.detach() * contribution.coef]
    if isinstance(contribution, Mapping):
        return [stat.moments for stat in contribution.values() if isinstance(stat, Stat)]
    return [contribution.detach()] if isinstance(contribution, Tensor) else []


def _alike(rows: Rollout) -> Callable[[Tensor, Tensor], bool]:
    """Return a function that compares two contributions, at the valid tokens if they are token-wise."""
    valid = rows.valid_tokens

    def alike(first: Tensor, second: Tensor) -> bool:
        if first.shape == valid.shape and second.dim() == 2:
            first, second = first[valid], second[:, : rows.width][valid]
        return torch.allclose(first.double(), second.double(), rtol=1e-6, atol=1e-9, equal_nan=True)

    return alike
