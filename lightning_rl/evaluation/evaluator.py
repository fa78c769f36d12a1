"""Evaluator: the evaluations of a module in the validation, test and prediction of a Trainer."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.data import PromptDataModule
from lightning_rl.data.row_schema import ColumnCheck
from lightning_rl.distributed import Parallel
from lightning_rl.evaluation.evaluation import Evaluation
from lightning_rl.evaluation.loader import EvaluationBatch, EvaluationLoader
from lightning_rl.evaluation.questions import Questions, questions_of
from lightning_rl.evaluation.records import Record, write_records
from lightning_rl.evaluation.run import EvaluationRun, predict, warn_of_nan
from lightning_rl.generation import SamplingParams
from lightning_rl.rewards import RewardCall, Rewards
from lightning_rl.rollouts.collector import Collector
from lightning_rl.samples import Trajectory
from lightning_rl.utils.tracing import Span
from lightning_rl.utils.trainer import log_folder

BATCH_SIZE = 256  # used if there is no data module
# Metrics are reduced over ranks before they are logged, so sync_dist is not needed.
warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\('(val|test)/.*sync_dist=True")
VAL, TEST, PREDICT = "val", "test", "predict"


class Evaluator:
    """Evaluations of a module.

    Args:
        evaluations: Evaluations, run in addition to the validation prompts of the data module.
        seed: Seed of the run.
        has_environments: True if the samples use environments.
    """

    def __init__(self, evaluations: Sequence[Evaluation], *, seed: int, has_environments: bool) -> None:
        self.evaluations, self.seed, self.has_environments = tuple(evaluations), seed, has_environments
        self._questions: tuple[Questions, ...] = ()
        self._greedy: Questions | None = None
        self._run: EvaluationRun | None = None
        self._predictions: list[Record] = []
        self._rank = 0
        self._val_limit: int | float | None = None
        self._warned = set[str]()

    def encode(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sampling: SamplingParams,
        rewards: Rewards,
        check: ColumnCheck | None,
    ) -> Sequence[Questions]:
        """Encode the prompts of all evaluations, and return the questions of each.

        Args:
            model: Model of the policy.
            tokenizer: Tokenizer of the policy.
            sampling: Sampling parameters for training, the default.
            rewards: Rewards of training, the default.
            check: Raises for a row whose columns do not fit the run.
        """
        self._greedy = Questions(
            evaluation=None, prompts=(), sampling=replace(sampling, temperature=0.0), rewards=rewards
        )
        options = {"model": model, "tokenizer": tokenizer, "sampling": sampling, "rewards": rewards, "check": check}
        self._questions = tuple(questions_of(evaluation, **options) for evaluation in self.evaluations)
        return self._questions

    @property
    def greedy(self) -> Questions:
        """Questions without prompts that sample one greedy answer, with the rewards of training."""
        if self._greedy is None:
            raise RuntimeError("expected encode first: fit or validate the module")
        return self._greedy

    def questions(self, stage: str, data: PromptDataModule | None) -> list[Questions]:
        """Return the validation prompts of the data module and the evaluations of a stage, ``"val"`` or ``"test"``."""
        default = replace(self.greedy, prompts=tuple(() if data is None else data.validation_prompts()))
        further = [q for q in self._questions if q.evaluation is not None and stage in q.evaluation.stages]
        return [*([default] if default.prompts else []), *further]

    def limit_validation(self, trainer: Trainer, data: PromptDataModule) -> None:
        """Disable validation in a fit with nothing to evaluate; Lightning would warn about an empty loader."""
        evaluates = data.validation is not None or any("val" in e.stages for e in self.evaluations)
        if not evaluates:
            self._val_limit, trainer.limit_val_batches = trainer.limit_val_batches, 0

    def restore_limit(self, trainer: Trainer) -> None:
        """Restore the Trainer's ``limit_val_batches``."""
        if self._val_limit is not None:
            trainer.limit_val_batches, self._val_limit = self._val_limit, None

    def loader(self, stage: str, data: PromptDataModule | None) -> EvaluationLoader:
        """Return the loader of ``"val"``, ``"test"`` or ``"predict"``, which has the data module's prompts in order.

        Raises:
            ValueError: If there is nothing to evaluate.
        """
        if stage == PREDICT and data is not None:
            return EvaluationLoader([data.prediction_prompts()], data.validation_batch_size)
        prompts = [questions.prompts for questions in self.questions(stage, data)]
        if not prompts:
            raise ValueError(
                f'expected prompts to evaluate in stage "{stage}", got none: pass validation= to PromptDataModule, or '
                "evaluation=Evaluation(...) to RLLightningModule"
            )
        return EvaluationLoader(prompts, BATCH_SIZE if data is None else data.validation_batch_size)

    def begin(self, trainer: Trainer, data: PromptDataModule | None, parallel: Parallel, device: torch.device) -> None:
        """Begin the evaluations of the Trainer's stage."""
        self._predictions, self._rank = [], parallel.rank
        if trainer.predicting:
            return
        stage = TEST if trainer.testing else VAL
        self._run = EvaluationRun(
            self.questions(stage, data),
            stage,
            collectives=parallel.collectives,
            rank=parallel.rank,
            device=device,
            seed=self.seed,
            has_environments=self.has_environments,
        )

    def answer(self, batch: EvaluationBatch, collector: Collector) -> None:
        """Generate and score the samples of a batch."""
        EvaluationBatch.check(batch)
        with Span("evaluate", {"lightning_rl.stage": self._active.stage}):
            self._active.answer(batch, collector)

    def predict(self, batch: EvaluationBatch, collector: Collector) -> list[Record]:
        """Return a greedy completion of each prompt of a batch, the same on every rank. A collective."""
        EvaluationBatch.check(batch)
        with Span("evaluate", {"lightning_rl.stage": PREDICT}):
            records = predict(self.greedy, batch, collector, rank=self._rank, seed=self.seed)
        self._predictions += records
        return records

    @property
    def latest_batch(self) -> list[tuple[Questions, Sequence[Trajectory], Sequence[RewardCall]]]:
        """Questions of the current validation or test with their samples and reward calls in the latest batch."""
        run = self._active
        return list(zip(run.questions, run.samples, run.calls, strict=True))

    @property
    def _active(self) -> EvaluationRun:
        if self._run is None:
            raise RuntimeError("expected on_validation_epoch_start or on_test_epoch_start first, got a batch")
        return self._run

    def end(self, trainer: Trainer, log: Callable[..., None], failed_folder: Path | None) -> frozenset[str]:
        """Log the metrics over all ranks and write the samples; return their names. A collective.

        A prediction only writes ``completions.jsonl``.

        Args:
            trainer: Trainer of the stage.
            log: ``LightningModule.log``.
            failed_folder: Folder for samples with failed rewards.
        """
        folder = log_folder(trainer)
        if trainer.predicting:
            if trainer.is_global_zero:
                write_records(folder / "completions.jsonl", self._predictions)
            return frozenset()
        run, self._run = self._active, None
        figures = run.figures()
        for name, value in figures.items():
            exact = torch.tensor(value, dtype=torch.float64)  # Lightning converts numbers to float32
            log(name, exact, prog_bar=name in run.on_the_bar, batch_size=1)
        fitting = trainer.state.fn == TrainerFn.FITTING
        file = f"step_{trainer.global_step:06d}" if fitting else {"val": "validate"}.get(run.stage, run.stage)
        run.report(failed_folder, file)
        warn_of_nan(figures)
        for name, text in run.idle_thresholds().items():
            if name not in self._warned:
                rank_zero_warn(text)
            self._warned.add(name)
        if trainer.loggers and not trainer.sanity_checking:
            run.write(folder / "evaluations", file, writing=trainer.is_global_zero)
        return frozenset(figures)

    def close(self) -> None:
        """Close the rewards of the evaluations."""
        for questions in self._questions:
            questions.rewards.close()
