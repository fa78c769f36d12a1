"""RLLightningModule: a LightningModule whose hooks generate rollouts and train on them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rl import setup_checks
from lightning_rl.advantages import Estimator, RowFunction
from lightning_rl.algorithm import Algorithm
from lightning_rl.checkpointing import (
    KEPT,
    FaultTolerance,
    LostCodeError,
    keep_arguments,
    restore_module,
    write_pretrained,
)
from lightning_rl.configuration import BESIDE
from lightning_rl.corrections import LossView
from lightning_rl.data import PromptDataModule, StepIndex, data_module_of, find_data_module
from lightning_rl.distributed import Parallel, parallel_of, process_count, unwrapped_name
from lightning_rl.environments import Conversations
from lightning_rl.environments.run_environments import EnvironmentSource
from lightning_rl.environments.tools import Tool
from lightning_rl.evaluation import Evaluation
from lightning_rl.evaluation.evaluator import PREDICT, TEST, VAL
from lightning_rl.evaluation.loader import EvaluationBatch, EvaluationLoader
from lightning_rl.evaluation.records import Record
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.losses import Critic, PolicyLoss
from lightning_rl.monitors import check_names, logs_itself, warn_without_validation
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder, fused_adamw
from lightning_rl.options import Options
from lightning_rl.policy import ModelOptions, PolicyModel
from lightning_rl.policy.build import ModelSource, TokenizerSource
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.rollouts.ahead import remaining_steps
from lightning_rl.run.memory_estimate import fit_memory
from lightning_rl.run.prompts import encode_prompts
from lightning_rl.run.run import Run, require_part
from lightning_rl.run.step_metrics import StepMetrics
from lightning_rl.run.training import finish_rollout, show_sample, take_step
from lightning_rl.run.zero_gradient import StopOnZeroGradient
from lightning_rl.serialization import describe
from lightning_rl.setup_checks import resolve_options
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm
from lightning_rl.utils.arguments import refuse_other_names
from lightning_rl.utils.inspection import refuse_inspection
from lightning_rl.utils.library_hooks import LibraryHooks, check_overrides
from lightning_rl.utils.renamed import MOVED, RENAMED
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.template_date import TODAY, now, writes_date
from lightning_rl.utils.trainer import add_first, add_missing, disable_bar

EVALUATIONS = "validation", "test", "predict"
OWN_NAMES = {**dict.fromkeys({*Options.__slots__, "options"} - {"policy"}, ()), "run": Run}
"""Names of attributes that a user may not set, with the type of the values that the library sets."""


@LibraryHooks(
    rules={
        "configure_callbacks": "joined",
        **dict.fromkeys(
            ("setup", "configure_model", "on_fit_start", "on_train_start", "on_train_batch_start"), "before"
        ),
        **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "before"),
        **{f"on_{stage}_epoch_{end}": "before" for stage in EVALUATIONS for end in ("start", "end")},
        **dict.fromkeys(("on_before_optimizer_step", "teardown"), "after"),
        **dict.fromkeys(("backward", "training_step", *(f"{stage}_step" for stage in EVALUATIONS)), "required"),
    },
    refused={
        **dict.fromkeys(("configure_optimizers", "lr_scheduler_step"), "pass optimizer= and lr_scheduler="),
        **dict.fromkeys(
            ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"), "use on_before_optimizer_step"
        ),
        "configure_gradient_clipping": "pass max_grad_norm=",
        "forward": "give it another name; generate() answers prompts",
        "train_dataloader": "pass prompts to PromptDataModule",
        **dict.fromkeys(("val_dataloader", "test_dataloader"), "pass validation= of PromptDataModule, or evaluation="),
        "predict_dataloader": "pass prompts to PromptDataModule",
    },
    constructor=keep_arguments,
)
class RLLightningModule(LightningModule):
    """Trains a language model with reinforcement learning: one optimizer step per ``training_step``.

    A rollout is used for ``steps_per_rollout`` = minibatches_per_rollout x epochs_per_rollout optimizer steps.
    ``on_train_batch_start`` prepares it before the first of these steps. Corrections are callbacks of the Trainer.

    ``Trainer.fit`` calls ``configure_callbacks``, ``setup``, ``configure_model``, ``configure_optimizers``,
    ``on_fit_start`` and ``on_train_start``. For each optimizer step, the data module calls ``begin_step``, and the
    Trainer calls ``on_train_batch_start`` and ``training_step``. At the end of the fit, the Trainer calls ``teardown``.

    Args:
        policy: Name or path of a causal language model, or a callable that builds one.
        rewards: Reward function ``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, a
            list of them, or a mapping from name to function or ``(function, weight)``; or :class:`Rewards`.
        advantages: Estimator, name in ``ESTIMATORS``, or function (scores, groups, rewarded) -> advantages, each [B].
        loss: Policy loss, name in ``LOSSES``, or ``function(LossView) -> Tensor`` that returns losses of shape [B, T].
        reduction: Name in ``REDUCTIONS``, or function that returns the weight of each token, shape [B, T].
        reference: Frozen policy for ``ref_logprobs``; by default the initial policy if a callback reads them.
        critic: ``"shared"`` for a value head on the policy, or a separate model, or a :class:`Critic` with its loss.
        engine: Engine that generates; by default the policy itself through transformers.
        sampling: Sampling parameters for training. Log-probabilities are computed at the sampling temperature.
        tokenizer: Tokenizer; by default the one of ``policy`` if ``policy`` is a name or path.
        optimizer: Function that builds an optimizer from parameter groups; by default fused AdamW with lr 1e-6.
        lr_scheduler: Function that builds a scheduler from the optimizer; the scheduler counts optimizer steps.
        environment: A class or function that creates an ``Environment``, a mapping from names to such classes or
            functions, or a list of tools. Wrap any of these in :class:`Conversations` to set limits.
        evaluation: One or several ``Evaluation``, run in addition to the data module's validation prompts.
        group_size: Number of samples per prompt.
        minibatches_per_rollout: Number of optimizer steps per pass over a rollout. A group is never split.
        epochs_per_rollout: Number of passes over a rollout.
        max_staleness: Maximum number of rollouts generated ahead of training; 0 to generate each one when needed.
        mismatch_every_n_rollouts: Interval of the rollouts in which ``kl/rollout`` is computed. In the others, the
            engine is asked for log-probabilities only if something else reads them.
        max_grad_norm: Maximum gradient norm; None for no clipping.
        model: Memory, kernels and compilation of policy, critic and reference.
        seed: Seed of all random numbers of the run.

    Attributes:
        options: Constructor arguments as attributes, and as a mapping by name; strings such as ``"grpo"`` are replaced
            by objects.

    Raises:
        ValueError: At construction if an argument is out of range or a name unknown; at setup if arguments, callbacks
            or data do not fit together.
    """

    @refuse_other_names("RLLightningModule", **RENAMED)
    def __init__(
        self,
        policy: ModelSource,
        rewards: Rewards | RewardSource,
        *,
        advantages: Estimator | RowFunction | str = "grpo",
        loss: PolicyLoss | Callable[[LossView], Tensor] | str = "ppo",
        reduction: str | SequenceSumNorm | Reduction = "token_mean",
        reference: ModelSource | None = None,
        critic: Critic | ModelSource | None = None,
        tokenizer: TokenizerSource | None = None,
        engine: Engine | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        environment: Conversations | EnvironmentSource | Sequence[Tool] | None = None,
        evaluation: Evaluation | Sequence[Evaluation] = (),
        group_size: int = 8,
        minibatches_per_rollout: int = 1,
        epochs_per_rollout: int = 1,
        max_staleness: int = 0,
        mismatch_every_n_rollouts: int = 1,
        optimizer: OptimizerBuilder = fused_adamw,
        lr_scheduler: SchedulerBuilder | None = None,
        max_grad_norm: float | None = 1.0,
        model: ModelOptions = ModelOptions(),  # noqa: B008  frozen
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_overrides(self)
        options = resolve_options(
            policy=policy,
            rewards=rewards,
            advantages=advantages,
            loss=loss,
            reduction=reduction,
            reference=reference,
            critic=critic,
            tokenizer=tokenizer,
            engine=engine,
            sampling=sampling,
            environment=environment,
            evaluation=evaluation,
            group_size=group_size,
            minibatches_per_rollout=minibatches_per_rollout,
            epochs_per_rollout=epochs_per_rollout,
            max_staleness=max_staleness,
            mismatch_every_n_rollouts=mismatch_every_n_rollouts,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_grad_norm=max_grad_norm,
            model=model,
            seed=seed,
        )
        self.policy: PolicyModel | None = None
        self.run = Run.of(options, self.device)
        self.models = self.run.models
        self.lost_code: dict[str, str] = {}
        self.automatic_optimization = False

    # Before a stage of the Trainer.

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Check the Trainer's flags before Lightning does, and add those callbacks of the library that it lacks."""
        refuse_inspection(self)
        setup_checks.check_flags(self.trainer)
        # First, since a checkpoint that another callback saves in on_train_batch_end has to contain what they record.
        for kind in (StopOnZeroGradient, StepMetrics):
            add_first(self.trainer, kind)
        disable_bar(self.trainer)
        added, self.run.fault_tolerance = add_missing(self.trainer, FaultTolerance)
        self.run.fault_tolerance.attach(self.trainer, self.close_engine)
        return [*added]

    @override
    def setup(self, stage: str) -> None:
        """Collect the corrections among the callbacks, and check that options, callbacks and data are compatible."""
        if self.lost_code:
            raise LostCodeError(self.lost_code)
        parallel = self.run.parallel = self.parallel
        parallel.check(self.options.max_grad_norm)
        setup_checks.check_changes(self.run.fault_tolerance.allow_config_changes, (*self.options, *BESIDE))
        if writes_date(self.options.tokenizer):
            TODAY.moment = parallel.collectives.objects(now())[0]
        self.run = self.run.build(self.trainer, fits=stage == "fit")
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.run.configuration)

    @override
    def configure_model(self) -> None:
        """Build and shard policy and reference once, and check that the prompts fit the policy."""
        self.run.parallel = self.parallel
        with torch.device("cpu"):  # Lightning sets the accelerator as default device; the strategy moves the model
            self.policy = self.run.build_models(self.policy, self.device_mesh)
            self.run.sampling = encode_prompts(self.run)
            self.run.build_environments(find_data_module(self._trainer))

    @override
    def configure_optimizers(self) -> Any:
        """Return one optimizer for policy and critic, with one parameter group each, and its scheduler."""
        groups = self.parallel.optimizer_groups(self.required_policy.parameter_groups())
        names = {id(one): unwrapped_name(name) for name, one in self.required_policy.named_parameters()}
        builders, steps = (self.options.optimizer, self.options.lr_scheduler), self.data_module.fit_steps()
        built, self.run.optimizer = setup_checks.build_optimizers(*builders, groups, names, steps)
        return built

    @override
    def on_fit_start(self) -> None:
        """Restore the rollout of a checkpoint, or discard the state of an earlier fit."""
        self.run.begin_fit()
        fit_memory(self.run)

    @override
    def on_train_start(self) -> None:
        """Store the state at the start for checkpoints, and warn if the fit ends before its first validation."""
        warn_without_validation(self.trainer)
        index, progress = self.data_module.position.index, self.run.progress
        if progress.origin is None:
            made = self.trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001  the axis of Lightning's rows
            progress.origin = index - made
        progress.commit(index)

    # A rollout: sync, generate, reward, plan, log-probabilities, signal.

    @refuse_stop_iteration
    def begin_step(self, step_index: StepIndex) -> None:
        """Save the states of the corrections and seed the random number generators.

        The data module calls this method for each batch, before any hook.
        """
        self.run.progress.begin_step()
        self.run.seed(step_index)

    @override
    @refuse_stop_iteration
    def on_train_batch_start(self, batch: StepIndex, batch_idx: int) -> None:
        """Make the rollout for the step index, unless it is the current rollout or is skipped."""
        if self.run.skips(batch):
            self.run.progress.skip_rollout(batch)
        elif self.run.progress.lacks_rollout(batch):
            end = (batch.index + remaining_steps(self.trainer, batch_idx)) / self.steps_per_rollout
            self.make_rollout(batch, end)

    def make_rollout(self, step_index: StepIndex, end: float) -> None:
        """Sync the weights, generate and reward samples, and estimate their advantages; the rollout becomes current.

        Args:
            step_index: First optimizer step on the rollout.
            end: Point at which the fit ends, counted in rollouts from the start of the run: 2.5 is the middle of the
                third rollout. Infinity if unknown.
        """
        run, number = self.run, step_index.rollout
        publish, show = partial(run.sync, number), partial(show_sample, run)
        with run.ahead.spans.of(number).current():
            groups = run.collector.collect(number, run.data, end=end, publish=publish, show=show)
            run.sleep_engine()  # frees memory for the log-probability passes
            current, stats = finish_rollout(run, groups.rollout, number)
        run.log.begin_rollout(current.rollout, {**groups.stats, **stats, **run.data.stats()}, groups.logged)
        run.log.constant_calls = groups.constant_calls
        run.progress.begin_rollout(current, step_index.index)

    # An update: steps_per_rollout optimizer steps.

    @override
    @refuse_stop_iteration
    def training_step(self, batch: StepIndex, batch_idx: int) -> dict[str, Tensor]:
        """Take one optimizer step; skip it if the rollout is skipped, or if no rank has a token to train on."""
        run = self.run
        if run.skips(batch):
            run.log.step = None
            run.progress.end_step(batch.index, made=None, keeps_rollout=False)
            return {}
        optimizer = cast(LightningOptimizer, self.optimizers())
        step = take_step(run, batch, optimizer, self.manual_backward)
        if step.made and (scheduler := self.lr_schedulers()) is not None:
            cast(LRScheduler, scheduler).step()
        # Commit before the calls below, so that the checkpoint resumes with the next step if one of them raises.
        run.log.step = step
        run.progress.end_step(batch.index, made=step.made)
        outputs = step.outputs()
        if step.tokens:
            run.corrections.after_step(outputs)
            run.parallel.clear(optimizer)
        return outputs

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, and record that the weights are about to change."""
        if self.options.max_grad_norm is not None:
            self.parallel.clip(self.required_policy, optimizer, self.options.max_grad_norm)
        self.run.progress.stepping = True

    # Checkpoints, which store the state of a fit between two optimizer steps.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's current and prefetched rollouts, counters and unlogged metrics."""
        saved = checkpoint.pop(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if further := {name: value for name, value in saved.items() if name not in self.options}:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = further  # the options are in the configuration
        self.run.save(checkpoint)
        if KEPT in vars(self):
            checkpoint["lightning_rl"][KEPT] = vars(self)[KEPT]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load this rank's state for a fit; other stages use the weights alone."""
        state = setup_checks.check_checkpoint(checkpoint)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        setup_checks.check_whole_checkpoint(checkpoint)
        if (moment := state.get("template_date")) is not None and writes_date(self.options.tokenizer):
            TODAY.moment = moment
            self.run.sampling = encode_prompts(self.run)
        self.run.load(checkpoint)
        if self.trainer.strategy.restore_checkpoint_after_setup:
            self.on_fit_start()  # this strategy loads a checkpoint after on_fit_start

    # The end of a stage.

    def close_engine(self) -> None:
        """Shut down the engine and the workers of rewards and environments; the next sync restarts them.

        At the end of a Trainer's stage, in contrast, a :class:`VLLMEngine` only sleeps, because it takes long to build.
        """
        self.run.end_stage(self.options.engine.close)

    @override
    def teardown(self, stage: str) -> None:
        """Release the engine, and restore the Trainer's ``limit_val_batches``."""
        self.run.end_stage(self.options.engine.end_stage)
        self.run.evaluator.restore_limit(self.trainer)

    # Evaluation: validation, test and prediction.

    @override
    def val_dataloader(self) -> EvaluationLoader:
        """Return the validation loader; the data module's method of this name calls it."""
        return self.run.evaluator.loader(VAL, find_data_module(self._trainer))

    @override
    def test_dataloader(self) -> EvaluationLoader:
        """Return the test loader."""
        return self.run.evaluator.loader(TEST, find_data_module(self._trainer))

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """Return a loader of the data module's prompts, in order."""
        return self.run.evaluator.loader(PREDICT, self.data_module)

    @override
    def on_validation_epoch_start(self) -> None:
        """Send the weights to the engine after callbacks such as WeightAveraging have swapped their weights in."""
        self.run.evaluator.begin(self.trainer, find_data_module(self._trainer), self.parallel, self.device)
        self.run.sync()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Generate and score samples for a batch of prompts."""
        self.run.evaluator.answer(batch, self.run.collector)

    test_step = validation_step

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Record]:
        """Return a greedy completion of each prompt of the batch, on every rank."""
        return self.run.evaluator.predict(batch, self.run.collector)

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all ranks and write the samples; a prediction only writes ``completions.jsonl``."""
        logged = self.run.evaluator.end(self.trainer, self.log, self.run.failed_folder)
        if self.trainer.state.fn == TrainerFn.FITTING and not logs_itself(self.trainer, self):
            check_names(self.trainer, logged, evaluated=True)
        self.run.sleep_engine()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Use without a Trainer, and export.

    def generate(
        self,
        prompts: Any,
        *,
        samples: int | None = None,
        sampling: SamplingParams | None = None,
        temperature: float | None = None,
    ) -> Any:
        """Generate answers to one or several prompts; works without a Trainer.

        Seeds depend on the run's seed, the index of the prompt and the index of the sample, so equal calls return
        equal texts.

        Args:
            prompts: One prompt (a text, chat messages, token ids, or a row with ``"prompt"``), or a sequence of them.
            samples: Number of answers per prompt; None for one answer that is returned without a list.
            sampling: Sampling parameters; by default those of training with temperature 0.
            temperature: Sampling temperature, 0 by default; not together with ``sampling``.

        Returns:
            Text for one prompt, list of texts for several; with ``samples``, a list of texts per prompt.

        Raises:
            ValueError: If a prompt is too long for the model, or if ``samples`` > 1 and the temperature is 0.
        """
        if lost := {name: what for name, what in self.lost_code.items() if name in ("engine", "environment")}:
            raise LostCodeError(lost)
        if self.policy is None and self._trainer is None:
            self.policy, self.models.without_trainer = self.models.build_policy(), True
        self.run.parallel, self.run.built_policy = self.parallel, self.required_policy
        return self.run.generate(prompts, samples=samples, sampling=sampling, temperature=temperature)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write policy and tokenizer to a Hugging Face folder, and a separate critic to ``folder/critic``.

        Must be called on every rank; rank 0 writes. Adapters are merged into the weights. With ``critic="shared"``, the
        value head is written to ``folder/critic/value_head.safetensors``.
        """
        weights = self.parallel.full_parameters(self.required_policy)
        write_pretrained(
            Path(folder), weights, self.models.sources, self.options.tokenizer, writing=self.global_rank == 0
        )
        if process_count() > 1:
            dist.barrier()

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = "cpu",
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a module with the weights and options of a checkpoint, for export, evaluation or a new run.

        Args:
            checkpoint_path: Path of a checkpoint file of any strategy; consolidate a sharded checkpoint first.
            map_location: Device to load the weights to.
            hparams_file: Must be None, because the checkpoint contains the options.
            strict: If False, accept missing or unexpected weights.
            weights_only: Ignored; the checkpoint is always loaded with ``weights_only=True``.
            kwargs: Constructor arguments that replace those of the run; required for your own functions and classes:
                those of policy, critic and tokenizer here, and the others for a run with the module.

        Raises:
            ValueError: If an argument must be passed in ``kwargs``, or the file is not a checkpoint.
        """
        del weights_only
        if hparams_file is not None:
            raise ValueError(f"expected hparams_file=None, got {hparams_file}: pass options as keyword arguments")
        own = cls.__init__ is not RLLightningModule.__init__
        return restore_module(cls, checkpoint_path, map_location, kwargs, strict=strict is not False, own=own)

    # Parts of a run.

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm with the corrections among the callbacks, from setup on."""
        return self.run.algorithm

    @property
    def options(self) -> Options:
        """Constructor arguments; strings such as ``"grpo"`` are replaced by objects."""
        return self.run.options

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.options.steps_per_rollout

    @property
    def parallel(self) -> Parallel:
        """Parallelism of the trainer's strategy; without a trainer, that of a single device."""
        if self._trainer is None:
            return parallel_of(SingleDeviceStrategy(device=self.device))
        strategy, parallel = self.trainer.strategy, self.run.parallel
        return parallel if parallel.strategy is strategy else parallel_of(strategy)

    @property
    def data_module(self) -> PromptDataModule:
        """Data module of the trainer."""
        return data_module_of(self.trainer)

    @property
    def required_policy(self) -> PolicyModel:
        """Policy; raises RuntimeError if it has not been built."""
        return require_part(self.policy, "policy", "configure_model")

    @property
    @override
    def hparams(self) -> Any:
        """Options as plain values, and those of a subclass that calls ``save_hyperparameters``."""
        if not hasattr(self, "_hparams"):
            self._hparams = AttributeDict(cast(dict[str, Any], describe(self.options)))
        return self._hparams

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters; before the policy is built, an optimizer of them would be empty.

        Raises:
            ValueError: If there is neither a policy nor a Trainer.
        """
        if self.policy is None and self._trainer is None:
            raise ValueError(
                "expected parameters of a policy, which is built at setup, got a module without one: pass a function "
                "as optimizer= of RLLightningModule, such as partial(AdamW, lr=1e-6), or --model.optimizer (and "
                "--model.lr_scheduler) instead of --optimizer to LightningCLI"
            )
        return super().parameters(recurse)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError with the methods to call."""
        raise NotImplementedError(
            "expected a call of generate(prompts), which returns answers, or of policy.model(input_ids), which returns "
            "logits, got a call of the module: call one of them"
        )

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; a policy that has not been built is built first."""
        if self.policy is None:
            self.policy = self.models.build_policy()
            self.models.without_trainer = self.models.stepped = True
        return super().load_state_dict(state_dict, strict, assign)

    @override
    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return a parameter, buffer or module; the error of an option, or of a former attribute, names its place."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            place = f"options.{name}" if name in Options.__slots__ else MOVED.get(name)
            if place is None:
                raise
            raise AttributeError(f"expected module.{place}, got module.{name}: read it there") from None

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            AttributeError: If an option or the run has the name, because nothing would read the value.
        """
        if name in OWN_NAMES and not isinstance(value, OWN_NAMES[name]):
            raise AttributeError(
                f'expected another name than "{name}" for an attribute of {type(self).__name__}, got that of '
                f"{'the run' if name == 'run' else 'an option'}: pass options to the constructor, read them from "
                "module.options, and rename an attribute of your own"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy without the Trainer."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError, because the engine and the state of a run belong to one process."""
        raise TypeError(
            "expected a module that stays in its process, got an attempt to pickle it, as torch.save and "
            'strategy="ddp_spawn" make: write its weights with trainer.save_checkpoint or save_pretrained, and use '
            'strategy="ddp"'
        )
