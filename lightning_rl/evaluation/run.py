"""EvaluationRun: one validation or test from the first batch to metrics and files; predictions."""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rl.data import Prompt
from lightning_rl.distributed import Collectives, failing_together
from lightning_rl.evaluation.answer_extraction import ExtractedAnswers, read_answers, report_answers
from lightning_rl.evaluation.estimators import majority
from lightning_rl.evaluation.loader import EvaluationBatch
from lightning_rl.evaluation.questions import Questions
from lightning_rl.evaluation.records import Record, number_or_none, records_of, write_records
from lightning_rl.evaluation.tally import COLUMNS, Tally
from lightning_rl.generation import EngineError
from lightning_rl.rewards.correctness import deciding_scores
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import Sampled
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.failures import FailureReport
from lightning_rl.samples import RewardCall, Trajectory

BOUND = re.compile(r"@\d+_(low|high)$")  # bounds of intervals, NaN where their metric is
NOT_SHOWN = frozenset({"reward/missing", "length/truncated"})  # metrics not logged for validation prompts


class EvaluationRun:
    """All evaluations of one validation or test.

    Args:
        questions: Evaluations to run.
        stage: ``"val"`` or ``"test"``, the prefix of the metrics.
        collectives: Collectives over the ranks.
        rank: Rank of this process.
        device: Device of the tallies, for collectives.
        seed: Seed of the run.
        has_environments: True if the samples use environments, whose failures are counted.
    """

    def __init__(
        self,
        questions: Sequence[Questions],
        stage: str,
        *,
        collectives: Collectives,
        rank: int,
        device: torch.device,
        seed: int,
        has_environments: bool = False,
    ) -> None:
        self.questions, self.stage, self.seed, self.has_environments = tuple(questions), stage, seed, has_environments
        self.collectives, self.rank = collectives, rank
        self.tallies = [Tally(len(q.prompts), tuple(q.rewards.by_name), collectives).to(device) for q in questions]
        self.places = [{prompt.index: place for place, prompt in enumerate(q.prompts)} for q in questions]
        self.records: list[list[Record]] = [[] for _ in questions]
        self.failures = [FailureReport(q.rewards) for q in questions]
        self.unread: list[list[ExtractedAnswers]] = [[] for _ in questions]
        self.samples: list[Sequence[Trajectory]] = [() for _ in questions]
        self.calls: list[Sequence[RewardCall]] = [() for _ in questions]
        self.extremes = [(math.inf, -math.inf) for _ in questions]

    def answer(self, batch: EvaluationBatch, collector: Collector) -> None:
        """Generate this rank's share of a batch in one call of the engine, score it, and update the tallies."""
        shares = [part[self.rank :: self.collectives.ranks] for part in batch.parts]
        wanted = [
            questions.open(prompts if self.collectives.generates else [], self.seed, number)
            for number, (questions, prompts) in enumerate(zip(self.questions, shares, strict=True))
        ]
        with failing_together("generation", EngineError):
            made = iter(collector.sample(list(chain.from_iterable(wanted))).trajectories)
        for number, (questions, prompts) in enumerate(zip(self.questions, shares, strict=True)):
            samples = list(islice(made, len(wanted[number])))
            rollout, calls, failed = collector.reward(Sampled(samples), questions.rewards)
            self.samples[number], self.calls[number] = samples, calls
            self.failures[number].add(samples, calls, failed)
            texts = collector.collectives.share(collector.texts([each.answer for each in samples]))
            self._count(number, prompts, rollout, self.collectives.share(failed), texts)

    def _count(
        self, number: int, prompts: Sequence[Prompt], rollout: Rollout, failed: Bool[Tensor, " B"], texts: Sequence[str]
    ) -> None:
        """Fill the rows of some prompts in the tally, and store their samples."""
        questions, evaluation = self.questions[number], self.questions[number].evaluation
        extract = None if evaluation is None else evaluation.answer
        answers = read_answers(extract, texts)
        self.unread[number] += [answers] if answers.cause else []
        correct, by = (1.0, None) if evaluation is None else (evaluation.correct, evaluation.correct_by)
        scores = deciding_scores(rollout, by).masked_fill(~rollout.rewarded, torch.nan)
        solved = scores >= correct
        low, high = self.extremes[number]
        decided = scores[~scores.isnan()].tolist()
        self.extremes[number] = min([low, *decided]), max([high, *decided])
        places = torch.tensor([self.places[number][prompt.index] for prompt in prompts], dtype=torch.int64)
        self.tallies[number].update(
            places, table_rows(rollout, failed, ~scores.isnan(), solved, answers, questions.samples)
        )
        if self.keeps(questions):
            further = {**_reward_entries(rollout), "solved": solved.tolist()}
            further |= {} if extract is None else {"answer": answers.values}
            lengths, finishes = rollout.sampled_lengths.tolist(), rollout.finish.tolist()
            self.records[number] += records_of(prompts, lengths, finishes, texts, further)

    def keeps(self, questions: Questions) -> bool:
        """Return True if the samples of an evaluation are saved."""
        return questions.evaluation is None or questions.evaluation.save

    def figures(self) -> dict[str, float]:
        """Return all metrics by full name, over all ranks. A collective."""
        figures: dict[str, float] = {}
        for questions, tally in zip(self.questions, self.tallies, strict=True):
            evaluation = questions.evaluation
            if evaluation is None:
                values = tally.figures(pass_at=(), samples=1, votes=False)
                figures |= {f"{self.stage}/{name}": value for name, value in values.items() if name not in NOT_SHOWN}
            else:
                pass_at, votes = cast(Sequence[int], evaluation.pass_at), evaluation.answer is not None
                values = tally.figures(pass_at=pass_at, samples=questions.samples, votes=votes)
                figures |= {f"{self.stage}/{questions.name}/{name}": value for name, value in values.items()}
        return figures | (self._failures() if self.has_environments else {})

    def _failures(self) -> dict[str, float]:
        """Return the number of failed conversations of each evaluation, over all ranks. A collective."""
        broken = [failures.failed_conversations for failures in self.failures]
        counts = [sum(rank) for rank in zip(*self.collectives.objects(broken), strict=True)]
        heads = [self.stage if q.evaluation is None else f"{self.stage}/{q.name}" for q in self.questions]
        return {f"{head}/env/failed": float(count) for head, count in zip(heads, counts, strict=True)}

    def idle_thresholds(self) -> dict[str, str]:
        """Return a warning for each evaluation with different scores that ``correct`` does not divide. A collective."""
        warned = dict[str, str]()
        every_rank = zip(*self.collectives.objects(self.extremes), strict=True)
        for questions, extremes in zip(self.questions, every_rank, strict=True):
            low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
            evaluation = questions.evaluation
            if evaluation is not None and low < high and not low < evaluation.correct <= high:
                solved, cure = ("every", "raise") if evaluation.correct <= low else ("no", "lower")
                warned[evaluation.name] = (
                    f"expected some samples of evaluation {evaluation.name!r} to be solved and others not, got "
                    f"{solved} sample with a score of at least correct={evaluation.correct:g}: {cure} correct= if the "
                    f"scores, {low:g} to {high:g}, have another scale"
                )
        return warned

    @property
    def on_the_bar(self) -> frozenset[str]:
        """Metrics for the progress bar, one per evaluation."""
        names = [
            "reward/task" if q.evaluation is None else f"{q.name}/pass@{cast(Sequence[int], q.evaluation.pass_at)[0]}"
            for q in self.questions
        ]
        return frozenset(f"{self.stage}/{name}" for name in names)

    def report(self, folder: Path | None, file: str) -> None:
        """Warn once per evaluation of samples on which rewards, ``answer=`` or environments failed.

        Samples with failed rewards or environments are written to ``<name>-<file>-rank-<r>.jsonl`` in the folder.
        """
        for questions, failures, unread in zip(self.questions, self.failures, self.unread, strict=True):
            failures.write(folder, f"{questions.name}-{file}-rank-{self.rank}.jsonl")
            number = sum(answers.read.count(False) for answers in unread)
            report_answers(questions.name, number, unread[0].cause if unread else "")

    def write(self, folder: Path, file: str, *, writing: bool) -> None:
        """Write ``<folder>/<name>/<file>.jsonl`` for each evaluation that saves its samples. A collective."""
        for questions, mine in zip(self.questions, self.records, strict=True):
            records = [record for part in self.collectives.objects(mine) for record in part]
            if self.keeps(questions) and writing:
                place = folder / questions.name / f"{file}.jsonl"
                write_records(place, sorted(records, key=lambda record: record["index"]))


def warn_of_nan(figures: Mapping[str, float]) -> None:
    """Warn once of metrics that are NaN, because callbacks may monitor them."""
    unmeasured = [name for name, value in figures.items() if math.isnan(value) and not BOUND.search(name)]
    if unmeasured:
        warnings.warn(
            f"expected a value for each metric, got NaN for {', '.join(unmeasured)}: too few samples have a reward "
            "or an answer (see reward/missing, reward/failed, answer/failed). ModelCheckpoint ranks NaN last; "
            "EarlyStopping ends the run, unless check_finite=False",
            stacklevel=2,
        )


def table_rows(
    rollout: Rollout,
    failed: Bool[Tensor, " B"],
    decided: Bool[Tensor, " B"],
    solved: Bool[Tensor, " B"],
    answers: ExtractedAnswers,
    samples: int,
) -> Float[Tensor, "P C"]:
    """Return the rows of a :class:`Tally` for some prompts, whose samples are adjacent in the rollout."""
    rewarded, right = rollout.rewarded, solved.tolist()
    read = answers.values
    votes = [majority(read[at : at + samples], right[at : at + samples]) for at in range(0, len(right), samples)]
    per_sample = {
        "samples": torch.ones_like(rewarded),
        "rewarded": rewarded,
        "failed": failed,
        "decided": decided,
        "solved": solved,
        "answered": torch.tensor(answers.read, dtype=torch.bool),
        "length": rollout.sampled_lengths,
        "truncated": rollout.truncated,
        "task": torch.where(rewarded, rollout.rewards, 0.0),
    }
    for name, raw in rollout.rewards_by_function.items():
        values = raw.masked_fill(rollout.failed, torch.nan)
        per_sample |= {f"{name}/value": values.nan_to_num(0.0), f"{name}/count": ~values.isnan()}
    columns = {name: values.double().reshape(len(votes), samples).sum(-1) for name, values in per_sample.items()}
    columns["vote"] = torch.tensor(votes, dtype=torch.float64)
    rewards = [name for name in columns if name not in COLUMNS]
    return torch.stack([columns[name].cpu() for name in (*COLUMNS, *rewards)], -1)


def _reward_entries(rollout: Rollout) -> dict[str, list[Any]]:
    """Return total and single rewards of each sample as entries of records."""
    total = torch.where(rollout.rewarded, rollout.rewards.double(), torch.nan).tolist()
    rewards = {name: raw.masked_fill(rollout.failed, torch.nan) for name, raw in rollout.rewards_by_function.items()}
    named = {name: list(map(number_or_none, values.tolist())) for name, values in rewards.items()}
    parts = [{name: values[row] for name, values in named.items()} for row in range(len(total))]
    return {"reward": list(map(number_or_none, total)), "rewards": parts}


def predict(
    questions: Questions, batch: EvaluationBatch, collector: Collector, *, rank: int, seed: int
) -> list[Record]:
    """Return a record with completions for each prompt of a batch, in the same order on every rank. A collective."""
    collectives = collector.collectives
    prompts = batch.parts[0][rank :: collectives.ranks]
    with failing_together("generation", EngineError):
        samples = collector.sample(questions.open(prompts if collectives.generates else [], seed, 0)).trajectories
    texts = collector.texts([each.answer for each in samples])
    lengths, finishes = [each.sampled_length for each in samples], [each.finish for each in samples]
    mine = records_of(prompts, *collectives.share((lengths, finishes, texts)), {})
    return sorted((record for part in collectives.objects(mine) for record in part), key=lambda record: record["index"])
