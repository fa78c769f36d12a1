"""Check of evaluations: their estimators by definition."""

import math
from collections.abc import Iterator

import torch

from lightning_rl.audit.evidence import Evidence
from lightning_rl.evaluation.tally import COLUMNS, Tally
from lightning_rl.testing.properties.check import check
from lightning_rl.utils.finding import Finding


@check(expected="the share of solved draws among all draws of k samples", cure="1 - C(n - c, k) / C(n, k)")
def evaluation_figures(evidence: Evidence) -> Iterator[Finding]:
    """``pass@k`` of an evaluation is its unbiased estimator, for every number of solved samples."""
    for name, samples, pass_at in evidence.facts.evaluations:
        tally, numbers = Tally(samples + 1, ()), range(samples + 1)
        rows = [[samples, samples, 0, samples, solved, *[0] * (len(COLUMNS) - 5)] for solved in numbers]
        tally.update(torch.arange(samples + 1), torch.tensor(rows, dtype=torch.float64))
        figures = tally.figures(pass_at=pass_at, samples=samples, votes=False)
        for k in pass_at:
            exact = 1 - sum(math.comb(samples - solved, k) for solved in numbers) / math.comb(samples, k) / (
                samples + 1
            )
            if not math.isclose(figures[f"pass@{k}"], exact, rel_tol=1e-9):
                observed = f"{figures[f'pass@{k}']:.4g} instead of {exact:.4g} on average over all numbers"
                yield Finding(culprit=f"pass@{k} of evaluation {name}", observed=observed)
