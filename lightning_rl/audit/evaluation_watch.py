"""Evaluations during a fit: requests against prompts, rewards called again, metrics recomputed from the rewards."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch

from lightning_rl.audit.picture_rows import is_same
from lightning_rl.audit.reward_repeats import RewardReply, RewardWatch
from lightning_rl.evaluation.questions import Questions
from lightning_rl.rewards import RewardCall
from lightning_rl.samples import Trajectory
from lightning_rl.utils.finding import Finding

Values = Sequence[float | None]


class EvaluationWatch:
    """Follows the evaluations of a run that are named in ``evaluation=``."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Questions, dict[str, list[float | None]]]] = {}
        self._latest: dict[str, RewardCall] = {}
        self._rewards: dict[str, RewardWatch] = {}
        self._wrong: list[Finding] = []

    def begin(self) -> None:
        """Forget the values of an earlier validation."""
        self._values = {}

    def note_batch(self, batch: Iterable[tuple[Questions, Sequence[Trajectory], Sequence[RewardCall]]]) -> None:
        """Compare the requests of a batch with its prompts, and record its reward calls."""
        for questions, samples, calls in batch:
            self._wrong += _other_requests(questions, samples)
            if questions.evaluation is None:
                continue
            _, values = self._values.setdefault(questions.name, (questions, {}))
            for call in calls:
                values.setdefault(call.name, []).extend(call.values)
                if questions.evaluation.rewards is not None:
                    name = f"{call.name} of evaluation {questions.name}"
                    self._latest[name] = call._replace(name=name)
                    self._rewards.setdefault(name, RewardWatch({name: call.function}))

    def end(self, logged: Mapping[str, float]) -> None:
        """Compare the metrics of a finished validation with its rewards."""
        for questions, values in self._values.values():
            self._wrong += _wrong_figures(questions, values, logged)

    def take(self) -> list[Finding]:
        """Return the findings since the last call."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def ask(self) -> list[RewardReply]:
        """Call the rewards of evaluations again on the rows of their latest call."""
        latest, self._latest = self._latest, {}
        return [reply for name, call in latest.items() for reply in self._rewards[name].ask([call], [[]])]


def _other_requests(questions: Questions, samples: Sequence[Trajectory]) -> Iterator[Finding]:
    """Yield a finding if requests of an evaluation have other tokens or pictures than their prompts."""
    pairs = [(each.prompt.index, each.request, each.prompt) for each in samples]
    wrong = [
        index
        for index, asked, prompt in pairs
        if asked.prefix_ids != prompt.token_ids or not is_same(asked.media, prompt.media)
    ]
    if wrong:
        yield Finding(
            check="logged_evaluations",
            culprit=f"the requests of evaluation {questions.name}",
            expected="the tokens and pictures of the prompt in each request",
            observed=f"others in {len(wrong)} of {len(pairs)}, such as that of prompt {wrong[0]}",
            cure="request each prompt of an evaluation with its own tokens and pictures",
        )


def _wrong_figures(
    questions: Questions, values: Mapping[str, Values], logged: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield a finding for each metric of an evaluation that its rewards do not have."""
    evaluation, rewards, number = questions.evaluation, questions.rewards, len(questions.prompts) * questions.samples
    if evaluation is None:
        return
    if questions.samples == 1 and evaluation.sampling is None and questions.sampling.temperature:
        yield Finding(
            check="logged_evaluations",
            culprit=f"sampling of evaluation {questions.name}",
            expected="a greedy answer, as there is one sample per prompt",
            observed=f"a temperature of {questions.sampling.temperature:g}",
            cure="set the temperature to 0, or pass sampling= to the evaluation",
        )
    columns = list(values.values())
    failed = any(value is not None and not math.isfinite(value) for column in columns for value in column)
    if failed or not columns or any(len(column) != number for column in columns):
        return
    weights = [rewards.weights.get(name, 0.0) for name in values]
    totals, scores = list[float](), list[float | None]()
    by = list(values).index(evaluation.correct_by) if evaluation.correct_by else None
    for row in zip(*columns, strict=True):
        known = [(value, weight) for value, weight in zip(row, weights, strict=True) if value is not None and weight]
        totals += [sum(value * weight for value, weight in known)] if known else []
        score = row[by] if by is not None else next((value for value in row if value is not None), None)
        scores.append(score if known else None)
    head = f"val/{questions.name}"
    if not totals or abs(logged.get(f"{head}/reward/missing", math.nan) - (1 - len(totals) / number)) > 1e-6:
        return  # the engine failed on some samples
    figures = {"reward/task": sum(totals) / len(totals)}
    size = questions.samples
    groups = [[one for one in scores[at : at + size] if one is not None] for at in range(0, number, size)]
    counts = [(len(group), sum(score >= evaluation.correct for score in group)) for group in groups]
    for k in cast(Sequence[int], evaluation.pass_at):
        shares = [1 - math.comb(n - solved, k) / math.comb(n, k) for n, solved in counts if n >= k]
        if shares:
            figures[f"pass@{k}"] = sum(shares) / len(shares)
    for name, figure in figures.items():
        ours = logged.get(f"{head}/{name}", figure)
        if not torch.isclose(torch.tensor(ours), torch.tensor(figure), rtol=1e-4, atol=1e-5):
            yield Finding(
                check="logged_evaluations",
                culprit=f"metric {head}/{name}",
                expected=f"{figure:.6g}, from the values of the rewards",
                observed=f"{ours:.6g}",
                cure="count samples as solved from correct= on, and leave those without a reward out of the mean",
            )
