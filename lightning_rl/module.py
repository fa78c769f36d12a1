"""RLLightningModule: the training loop over rollouts, as hooks of a LightningModule."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rl import setup_checks
from lightning_rl.advantages import Estimator, RowFunction, resolve_advantages
from lightning_rl.algorithm import Algorithm
from lightning_rl.checkpointing import (
    FaultTolerance,
    protect_checkpoints,
    protect_resume,
    restore_module,
    write_pretrained,
)
from lightning_rl.configuration import BESIDE, check_resume, configuration
from lightning_rl.corrections import Corrections, LossView, RLCallback, Stat, StepTrace
from lightning_rl.data import PromptDataModule, StepIndex, StepLoader, prompt_stream_of
from lightning_rl.distributed import Parallel, check_process_group, parallel_of, process_count, process_maximum
from lightning_rl.environments import Conversations
from lightning_rl.environments.parsing import AnswerParser
from lightning_rl.environments.run_environments import Environments, EnvironmentSource, RowCheck
from lightning_rl.environments.tools import Tool
from lightning_rl.evaluation import Evaluation
from lightning_rl.evaluation.evaluation import evaluations_of
from lightning_rl.evaluation.evaluator import Evaluator
from lightning_rl.evaluation.generate import generate, sampling_for
from lightning_rl.evaluation.loader import EvaluationBatch, EvaluationLoader
from lightning_rl.evaluation.questions import with_eos
from lightning_rl.evaluation.records import Record
from lightning_rl.generation import Engine, SamplingParams, TransformersEngine, request_seed
from lightning_rl.generation.weights.weight_sync import WeightSync
from lightning_rl.losses import Critic, PolicyLoss, ValueLoss, resolve_loss
from lightning_rl.metrics import global_values, log_for_monitors
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder, fused_adamw, step_or_leave
from lightning_rl.policy import Microbatch, ModelOptions, PolicyModel, make_plan
from lightning_rl.policy.build import (
    ModelSource,
    TokenizerSource,
    build_tokenizer,
    max_prompt_length,
)
from lightning_rl.policy.memory import resident_bytes
from lightning_rl.policy.run_models import RunModels
from lightning_rl.processes.timeouts import CLOCK
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.rewards.reward_failures import FOLDER
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.rollouts.logprob_passes import add_logprobs, environment_logprob
from lightning_rl.rollouts.loop import Ahead, RolloutLoop, Synchronous, generates_concurrently
from lightning_rl.rollouts.nonfinite import NONFINITE, record_nonfinite
from lightning_rl.rollouts.prefetch import remaining_tickets
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.rollouts.sample import Sampler, staleness
from lightning_rl.rollouts.state import RunState, trainer_state
from lightning_rl.rollouts.step_metrics import StepMetrics, begin_trace
from lightning_rl.rollouts.zero_gradient import StopOnZeroGradient, row_counts
from lightning_rl.run_spec import RunSpec, check_run, needed_extras, needs
from lightning_rl.serialization import import_by_name
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm, resolve_reduction
from lightning_rl.update import MadeStep, StepGradient, accumulate_gradient
from lightning_rl.utils.arguments import check_counts, check_numbers, refuse_old_names
from lightning_rl.utils.inspection import stop_in_inspection
from lightning_rl.utils.renamed import RENAMED
from lightning_rl.utils.seeding import seed_everything
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.trainer import add_first, add_missing, callbacks_of

# Lightning warns of checkpoints that are saved after the optimizer step; resuming here relies on them.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
# The default log_every_n_steps=50 logs one row per rollout here.
warnings.filterwarnings("ignore", message=r"The number of training batches .* log_every_n_steps=50")

# Evaluation metrics are reduced over ranks before they are logged, so sync_dist is not needed.
warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\('(val|test)/.*sync_dist=True")


class RLLightningModule(LightningModule):
    """Trains a language model with reinforcement learning: one optimizer step per ``training_step``.

    ``on_train_batch_start`` generates a rollout, which is used for ``steps_per_rollout`` =
    minibatches_per_rollout x epochs_per_rollout optimizer steps. Corrections are callbacks of the Trainer.

    Args:
        policy: Name or path of a causal language model, or a callable that builds one.
        rewards: Reward function, list of functions, or mapping from name to function or ``(function, weight)``. Each
            function has the form ``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``.
            A function of weight 0 is only logged. :class:`Rewards` adds a timeout and a limit of failures.
        advantages: Advantage estimator: an :class:`Estimator`, a function of (scores, groups, rewarded), or a name in
            ``lightning_rl.advantages.ESTIMATORS``.
        loss: Policy loss: a :class:`PolicyLoss`, a function of a :class:`LossView`, or a name in
            ``lightning_rl.losses.LOSSES``.
        reduction: Average of per-token losses: a function, or a name in ``lightning_rl.signal.reductions.REDUCTIONS``.
        reference: Frozen policy for callbacks that read ``ref_logprobs``, in any form that ``policy`` takes. Default:
            a copy of the initial policy, created only if a callback reads ``ref_logprobs``.
        critic: ``"shared"`` for a value head on the policy's hidden states, or a separate model in any form that
            ``policy`` takes; either may be in a :class:`Critic`, which also sets the loss. None for no critic.
        engine: Engine that generates; by default the policy itself through transformers.
        sampling: Sampling parameters for training. Log-probabilities are computed at its temperature. With ``top_k``,
            ``top_p`` or ``min_p`` they are renormalized over the tokens kept by the filter.
        tokenizer: Tokenizer; by default the one of ``policy``, if that is a name or path.
        optimizer: Callable that takes parameter groups and returns an optimizer; by default fused AdamW with lr 1e-6.
        lr_scheduler: Callable that takes the optimizer and returns a scheduler that counts optimizer steps, such as
            ``warmup_then_linear(5, 100)``.
        environment: Class or function that creates an ``Environment`` for each multi-turn conversation, a mapping from
            names to such factories, or a list of functions that the policy may call. :class:`Conversations` adds
            limits, subprocesses and a parser of tool calls.
        evaluation: ``Evaluation`` or list of them, run in addition to the data module's validation prompts.
        group_size: Number of samples per prompt.
        minibatches_per_rollout: Number of optimizer steps per pass over a rollout; a group is never split.
        epochs_per_rollout: Number of passes over a rollout.
        max_staleness: Maximum number of rollouts generated ahead of training; 0 is synchronous.
        max_grad_norm: Maximum gradient norm; None for no clipping.
        model: Memory, kernels and compilation of policy, critic and reference.
        seed: Seed of all random numbers of the run.

    Attributes:
        options: Constructor arguments by name; strings such as ``"grpo"`` are replaced by objects.

    Raises:
        ValueError: At construction if an argument is out of range or a name unknown; at setup if arguments, callbacks
            or data do not fit together.
    """

    @refuse_old_names(**RENAMED)
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
        optimizer: OptimizerBuilder = fused_adamw,
        lr_scheduler: SchedulerBuilder | None = None,
        max_grad_norm: float | None = 1.0,
        model: ModelOptions = ModelOptions(),  # noqa: B008  frozen
        seed: int = 0,
    ) -> None:
        options = dict(locals())  # must come first, so that locals() holds only the arguments
        super().__init__()
        self.automatic_optimization = False
        check_counts(1, group_size=group_size, minibatches_per_rollout=minibatches_per_rollout)
        check_counts(1, epochs_per_rollout=epochs_per_rollout)
        check_counts(0, max_staleness=max_staleness, seed=seed)
        check_numbers(above=0, finite=True, optional=True, max_grad_norm=max_grad_norm)
        setup_checks.check_parts(engine=engine, sampling=sampling, model=model)
        setup_checks.check_builders(optimizer=optimizer, lr_scheduler=lr_scheduler)
        self.rewards, self.critic, self.model_options = Rewards.of(rewards), Critic.of(critic), model
        self.conversation_options = Conversations.of(environment)
        self.sources = {
            "policy": import_by_name(policy=policy),
            "reference": import_by_name(reference=reference),
            "critic": None if self.critic is None else import_by_name(critic=self.critic.source),
        }
        setup_checks.check_sources(**self.sources)
        if self.critic is not None:
            self.critic = replace(self.critic, source=self.sources["critic"])
        if self.conversation_options is not None:
            self.conversation_options = self.conversation_options.resolve()
            setup_checks.check_turn_tokens(self.conversation_options.max_turn_tokens, sampling.max_new_tokens)
        self.environments = {} if self.conversation_options is None else self.conversation_options.factories
        self._parse: AnswerParser | None = None
        self._schemas: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        self.environment_workers = None if self.conversation_options is None else self.conversation_options.pool()
        setup_checks.check_rewards(self.rewards.by_name.values(), environments=bool(self.environments))
        self.estimator = resolve_advantages(import_by_name(advantages=advantages))
        self.loss = resolve_loss(import_by_name(loss=loss))
        self.reduction = resolve_reduction(import_by_name(reduction=reduction), sampling.max_new_tokens)
        self._optimizer, self._lr_scheduler, self.max_grad_norm = optimizer, lr_scheduler, max_grad_norm
        self.group_size, self.minibatches_per_rollout = group_size, minibatches_per_rollout
        self.epochs_per_rollout, self.max_staleness = epochs_per_rollout, max_staleness
        self.sampling, self.seed = sampling, seed
        self.evaluations = evaluations_of(evaluation)
        self.fault_tolerance = FaultTolerance()
        self.tokenizer = build_tokenizer(tokenizer, self.sources["policy"])
        self.policy: PolicyModel | None = None
        self.engine, self.run = engine or TransformersEngine(), RunState()
        self._parallel: Parallel | None = None
        self.evaluator = Evaluator(self.evaluations, seed=seed, environments=bool(self.environments))
        options |= {"engine": self.engine, "tokenizer": self.tokenizer, "rewards": self.rewards}
        options |= {"advantages": self.estimator, "loss": self.loss, "reduction": self.reduction}
        options |= {**self.sources, "critic": self.critic, "environment": self.conversation_options}
        self.options = {name: value for name, value in options.items() if name not in ("self", "__class__")}

    # Parts of a run.

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches_per_rollout * self.epochs_per_rollout

    @property
    def algorithm(self) -> Algorithm:
        """Loss, estimator, reduction and corrections of the run."""
        return Algorithm(
            loss=self.loss,
            advantages=self.estimator,
            reduction=self.reduction,
            corrections=self.run.corrections,
            value_loss=ValueLoss() if self.critic is None else self.critic.loss,
        )

    @property
    def parallel(self) -> Parallel:
        """Parallelism of the trainer's strategy; without a trainer, that of a single device."""
        if self._trainer is None:
            return parallel_of(SingleDeviceStrategy(device=self.device))
        if self._parallel is None or self._parallel.strategy is not self.trainer.strategy:
            self._parallel = parallel_of(self.trainer.strategy)
        return self._parallel

    @property
    def prompt_stream(self) -> PromptDataModule:
        """Data module of the trainer."""
        return prompt_stream_of(self.trainer)

    @property
    def _data(self) -> PromptDataModule | None:
        """Data module of the trainer; None without a trainer, or outside of a fit if it has none."""
        if self._trainer is None:
            return None
        fits = self.trainer.state.fn == TrainerFn.FITTING
        return self.prompt_stream if fits or self.trainer.datamodule is not None else None  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def required_policy(self) -> PolicyModel:
        """Policy; raises RuntimeError if it has not been built."""
        if self.policy is None:
            raise RuntimeError("expected a policy, but configure_model has not run: fit or validate first")
        return self.policy

    @property
    def _folder(self) -> Path:
        """Log folder of the run."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    @property
    def models(self) -> RunModels:
        """Builder of the models, with the options of this run."""
        return RunModels(sources=self.sources, temperature=self.sampling.temperature, options=self.model_options)

    @property
    def sampler(self) -> Sampler:
        """Sampler that generates and scores samples, with the options of this run."""
        return Sampler(
            engine=self.engine,
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            sampling=self.run.sampling,
            group_size=self.group_size,
            seed=self.seed,
            corrections=self.run.corrections,
            dtype=torch.promote_types(self.required_policy.model.dtype, torch.float32),
            forward_context=self.parallel.strategy.precision_plugin.forward_context,
            greedy_baseline=self.estimator.needs_greedy,
            collectives=self.parallel.collectives,
            failed_folder=self.run.failed_folder,
            trainer_state=None if self._trainer is None else trainer_state(self.trainer),
            vocabulary=self.required_policy.model.config.get_text_config().vocab_size,
            environments=self._conversations,
        )

    @property
    def _conversations(self) -> Environments | None:
        """Environments, with the options of this run; None if there are none."""
        if self.conversation_options is None:
            return None
        lengths = [max_prompt_length(self.required_policy.model, 0), self.engine.max_length]
        length = min((limit for limit in lengths if limit is not None), default=None)
        vocabulary = self.required_policy.model.config.get_text_config().vocab_size
        return Environments(
            factories=self.environments,
            limits=replace(self.conversation_options.limits, length=length, vocabulary=vocabulary),
            tokenizer=self.tokenizer,
            close=frozenset(self.run.sampling.eos_token_ids or ()),
            template_options={} if self._data is None else self._data.template_options,
            parse=self._parse,
            schemas=self._schemas,
            seed=self.seed,
            workers=self.environment_workers,
            max_failure_rate=self.conversation_options.max_failure_rate,
        )

    # Before a run.

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Check the Trainer's flags before Lightning does; add the callbacks of every run that it lacks."""
        stop_in_inspection(self)
        setup_checks.check_flags(self.trainer)
        # First, so that a checkpoint that another callback saves after a step contains what these two add after it.
        for kind in (StopOnZeroGradient, StepMetrics):
            add_first(self.trainer, kind)
        added, self.fault_tolerance = add_missing(self.trainer, FaultTolerance)
        self.fault_tolerance.attach(self.trainer)
        return [*added]

    @override
    def setup(self, stage: str) -> None:
        """Collect the corrections among the callbacks, and check that options, callbacks and data are compatible."""
        self.parallel.check(self.max_grad_norm)
        setup_checks.check_changes(self.fault_tolerance.allow_config_changes, (*self.options, *BESIDE))
        protect_checkpoints(self.trainer.strategy, self.fault_tolerance.on_checkpoint_error)
        protect_resume(self.trainer)
        callbacks = [callback for callback in callbacks_of(self.trainer) if isinstance(callback, RLCallback)]
        corrections = self.run.corrections = Corrections(callbacks, self.parallel.collectives)
        needed = needed_extras(corrections, self.sampling).keys()
        # An evaluation records the extras of training too: vLLM would have to be built again for other extras.
        self.engine.select_extras(self.engine.capabilities.extras & needed)
        check_run(RunSpec.of(self, fits=stage == "fit"))
        self.run.needs = needs(self.algorithm, steps_per_rollout=self.steps_per_rollout)
        if stage == "fit":
            self.rewards.check_weights()
            self.evaluator.limit_validation(self.trainer, self.prompt_stream)
        self.run.failed_folder = self._folder / FOLDER
        self.run.configuration = configuration(self, self.trainer)
        self.save_hyperparameters(self.run.configuration)

    @override
    def configure_model(self) -> None:
        """Build and shard policy and reference once, and check that the prompts fit the policy."""
        with torch.device("cpu"):  # Lightning sets the accelerator as default device; the strategy moves the model
            self._build_models()
            self._encode_prompts()

    def _build_models(self) -> None:
        """Build and shard the models that are missing; a policy that was built without a Trainer is only sharded."""
        run, parallel = self.run, self.parallel
        if alone := run.built_alone:
            self._end_stage(self.engine.end_stage)  # generate() started it on the policy; it may need a replica now
            run.built_alone = False
        built = self.models.build(
            parallel,
            self.device_mesh,
            policy=self.policy,
            alone=alone,
            replica=self.engine.capabilities.shares_policy and (parallel.sharded or self.max_staleness > 0),
            reference=run.needs.ref_logprobs and run.reference is None,
            stepped=run.stepped,
            convert=self.trainer.precision_plugin.convert_module,
            data=None if self._data is None else self._data.fingerprint,
        )
        self.policy = built.policy
        run.replica = run.replica if built.replica is None else built.replica
        run.reference = run.reference if built.reference is None else built.reference

    def _encode_prompts(self) -> None:
        """Encode the prompts of training and evaluation, and check that they fit the policy and the environments."""
        model, run = self.required_policy.model, self.run
        run.sampling = with_eos(self.sampling, model, self.tokenizer)
        vocabulary = model.config.get_text_config().vocab_size
        check = RowCheck(tuple(self.environments)) if self.environments else None
        if self._data is not None:
            longest = max_prompt_length(model, self.sampling.max_new_tokens)
            self._data.connect(self.tokenizer, longest, vocabulary, check)
        evaluated = self.evaluator.encode(
            model, self.tokenizer, sampling=run.sampling, rewards=self.rewards, check=check
        )
        if self.conversation_options is not None and (environments := self._conversations) is not None:
            first = None if self._data is None else self._data.first()
            checked = environments.check(self.conversation_options.tool_parser, first)
            self._parse, self._schemas = checked.parse, checked.schemas
        for sampling in (run.sampling, *evaluated):
            setup_checks.check_eos(frozenset(sampling.eos_token_ids or ()), vocabulary)

    @override
    def configure_optimizers(self) -> Any:
        """Return one optimizer for policy and critic, with one parameter group each, and its scheduler."""
        groups = self.required_policy.parameter_groups()
        setup_checks.check_trainable(groups)
        optimizer = setup_checks.build_optimizer(self._optimizer, self.parallel.optimizer_groups(groups))
        if self._lr_scheduler is None:
            return optimizer
        scheduler = self._lr_scheduler(optimizer)
        setup_checks.check_scheduler(scheduler)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @override
    def on_fit_start(self) -> None:
        """Restore the rollout of a checkpoint, or discard the state of an earlier fit."""
        self._restore_or_reset()

    def _restore_or_reset(self) -> None:
        """Restore the state of a checkpoint, or discard the state of an earlier fit."""
        self.run.begin(
            self.device,
            packed=self.model_options.packing,
            at=self.prompt_stream.at,
            max_staleness=self.max_staleness,
            collectives=self.parallel.collectives,
        )

    @override
    def on_train_start(self) -> None:
        """Check that an epoch has whole rollouts; step the scheduler if the checkpoint is from just before its step."""
        loader = cast(StepLoader, self.trainer.train_dataloader)
        setup_checks.check_whole_rollouts(len(loader), self.steps_per_rollout)
        with warnings.catch_warnings():
            # PyTorch warns, because the optimizer stepped in the run that saved the checkpoint, not in this one
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            if self.run.progress.schedule_behind:
                self._step_scheduler()
        self.run.commit(self.prompt_stream, loader.index, current=self.run.current)

    # A rollout: sync, sample, plan, log-probabilities, signal.

    @refuse_stop_iteration
    def begin_step(self, step_index: StepIndex) -> None:
        """Save the states of the corrections and seed the generators; the data module calls it first for each batch."""
        self.run.begin_step(step_index)
        self.seed_generators(step_index)

    @override
    @refuse_stop_iteration
    def on_train_batch_start(self, batch: StepIndex, batch_idx: int) -> None:
        """Generate and score the rollout of the step index, unless it is the current one."""
        if self.skips(batch.rollout):
            self._skip_rollout(batch)
            return
        if self.run.current is not None and self.run.current.number == batch.rollout:
            return
        if batch.step != 0:
            raise RuntimeError(
                f"expected step 0 of rollout {batch.rollout} first, got step {batch.step}: resume from a checkpoint "
                "or start a new fit"
            )
        loop, end = self.rollout_loop, (batch.index + remaining_tickets(self.trainer, batch_idx))
        in_flight = loop.in_flight(batch.rollout)
        rollout, sampled, noted = loop.sample(batch.rollout, end / self.steps_per_rollout)
        self.sleep_engine()  # frees memory for the log-probability passes
        current, stats = self._finish(rollout, batch.rollout)
        times = {**in_flight, **self.run.times.take(), "trainer/idle": self.run.times.idle()}
        stats = {**sampled, **stats, **self.prompt_stream.stats(), **times}
        shown = {**stats, **noted, **row_counts(current.rollout)}
        self.run.rollout_figures = global_values(shown, self.device, self.parallel.collectives)
        log_for_monitors(self, self.run.rollout_figures)
        self.run.begin_rollout(current, stats, noted)
        self.run.commit(self.prompt_stream, batch.index, current=current, corrections=self.run.corrections.states())

    def skips(self, number: int) -> bool:
        """Return True if a rollout is to be skipped."""
        return number in self.fault_tolerance.skip_rollouts

    def _skip_rollout(self, step_index: StepIndex) -> None:
        """Drop a rollout, but take its prompts from the stream, so that those of later rollouts do not change."""
        number, begun = step_index.rollout, self.run.current is not None
        self.run.current = None
        if step_index.step == 0:
            rank_zero_info(f"rollout {number} is skipped (skip_rollouts)")
            if not begun:
                self.rollout_loop.skip(number)
        self.run.prefetcher.drop(number)

    @property
    def rollout_loop(self) -> RolloutLoop:
        """Loop that generates the rollouts, when needed or ahead."""
        parts: dict[str, Any] = {
            "sampler": self.sampler,
            "stream": self.prompt_stream,
            "rank": self.parallel.rank,
            "ranks": self.parallel.ranks,
            "sync": self.sync,
            "phase": self.run.times.phase,
        }
        if not self.max_staleness:
            return Synchronous(**parts)
        return Ahead(
            **parts,
            prefetcher=self.run.prefetcher,
            max_staleness=self.max_staleness,
            skipped=self.fault_tolerance.skip_rollouts,
            device=self.device,
        )

    def _finish(self, rollout: Rollout, number: int) -> tuple[CurrentRollout, dict[str, Stat]]:
        """Add plan, log-probabilities and signal to a rollout, and pass it to the observers."""
        corrections, collectives = self.run.corrections, self.parallel.collectives
        with self.run.times.phase("score"), self.trainer.precision_plugin.forward_context():
            rollout, excluded = exclude_rows(rollout, corrections)
            plan_of = partial(
                make_plan,
                max_tokens_per_microbatch=self.run.max_tokens_per_microbatch(
                    self.model_options.max_tokens_per_microbatch
                ),
                packed=self.model_options.packing,
                max_over_ranks=self._max_over_ranks,
            )
            plan = plan_of(rollout, minibatches=self.minibatches_per_rollout)
            if self.environments:
                excluded |= {"env/logprob": environment_logprob(rollout, self.required_policy, plan_of)}
            rollout, plan = rollout.to(self.device), plan.to(self.device)
            needs = self.run.needs
            passes = {"old": needs.old_logprobs, "squares": needs.sum_pi_squared}
            rollout = add_logprobs(rollout, plan, self.required_policy, self.run.reference, corrections, **passes)
        with self.run.times.phase("signal"):
            rollout, _, signal = estimate_signal(rollout, self.estimator, corrections, collectives.sum)
        current = CurrentRollout.of(number, rollout, plan)
        corrections.observe(rollout)
        measured = corrections.rollout_metrics(rollout)
        return current, {**excluded, **signal, **staleness(rollout, number), **measured}

    # An update: steps_per_rollout optimizer steps.

    @override
    @refuse_stop_iteration
    def training_step(self, batch: StepIndex, batch_idx: int) -> dict[str, Tensor]:
        """Make one optimizer step, or skip it on all ranks if no rank has a token to train on."""
        run, last = self.run, batch.step == self.steps_per_rollout - 1
        if self.skips(batch.rollout):
            run.skipped += 1
            run.commit(self.prompt_stream, batch.index + 1, current=None)
            return {}
        if run.current is None:
            raise RuntimeError(f"expected a rollout for step {batch.step} of rollout {batch.rollout}, got none")
        run.current.check_edits()
        self.seed_generators(batch)
        tokens = self._count_tokens(run.current.plan.step(batch.step))
        trace, skipped = self._trace(batch), run.skipped
        run.made = MadeStep(trace=trace)
        if tokens:
            with run.times.phase("update"):
                gradient, trace = self._gradient(batch, trace)
                norm, rates = self._step_optimizer(gradient, batch)
            run.made = MadeStep(trace=trace, gradient=gradient, norm=norm, rates=rates, tokens=tokens)
        else:
            run.skipped += 1
        behind = self._lr_scheduler is not None and run.skipped == skipped
        # From here on the step counts, even if a call below fails. StepMetrics drops the rollout after its last step.
        run.commit(self.prompt_stream, batch.index + 1, current=None if last else run.current, schedule_behind=behind)
        outputs = run.made.outputs()
        if tokens:
            run.corrections.after_step(outputs)
            if behind:
                self._step_scheduler()
            self.parallel.clear(cast(LightningOptimizer, self.optimizers()))
        return outputs

    def _count_tokens(self, microbatches: Sequence[Microbatch]) -> int:
        """Return the number of tokens that all ranks train on."""
        tokens = sum(len(microbatch.layout.targets) for microbatch in microbatches)
        return int(self.parallel.collectives.sum(torch.tensor(tokens, device=self.device)))

    def seed_generators(self, step_index: StepIndex) -> None:
        """Seed every global generator from (run seed, rank, step), so that results do not depend on earlier draws."""
        seed_everything(request_seed(self.seed, self.parallel.rank, step_index.index), self.device)

    def _trace(self, step_index: StepIndex) -> StepTrace | None:
        """Return a trace of this optimizer step for observers, or None."""
        return begin_trace(self.run, step_index, self.parallel.ranks * self.parallel.loss_scale)

    def _gradient(self, step_index: StepIndex, trace: StepTrace | None) -> tuple[StepGradient, StepTrace | None]:
        """Return the gradient of a step; if memory runs out on any rank, repeat it with half the token budget."""
        repeats = self.parallel.repeats_steps
        states = self.run.corrections.states() if repeats else {}
        gradient = self._accumulate(step_index, trace, notices_exhaustion=repeats)
        if not repeats or not process_maximum(int(gradient.exhausted)):
            return gradient, trace
        current = cast(CurrentRollout, self.run.current)
        self.required_policy.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.run.corrections.restore(states)
        budget = self.run.halve(self.model_options.max_tokens_per_microbatch)
        self.run.current = current.divide(
            budget, packed=self.model_options.packing, max_over_ranks=self._max_over_ranks
        )
        rank_zero_warn(
            f"out of memory in step {step_index.step} of rollout {step_index.rollout}: the step is repeated with "
            f"max_tokens_per_microbatch={budget}; pass this value to ModelOptions"
        )
        self.seed_generators(step_index)
        trace = self._trace(step_index)
        return self._accumulate(step_index, trace), trace

    def _accumulate(
        self, step_index: StepIndex, trace: StepTrace | None, *, notices_exhaustion: bool = False
    ) -> StepGradient:
        parallel, policy, current = self.parallel, self.required_policy, cast(CurrentRollout, self.run.current)
        return accumulate_gradient(
            current.rollout,
            current.plan.step(step_index.step),
            lambda microbatch: policy(microbatch.layout),
            self.algorithm,
            backward=lambda loss: self.manual_backward(loss * parallel.ranks),  # cancels the mean over ranks
            around=lambda last: parallel.accumulating(policy, last=last),
            collectives=parallel.collectives,
            trace=trace,
            notices_exhaustion=notices_exhaustion,
        )

    def _max_over_ranks(self, counts: Sequence[int]) -> list[int]:
        return self.parallel.collectives.maximum(counts, self.device)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the weights are about to change."""
        self.run.stepping = True

    def _step_optimizer(self, gradient: StepGradient, step_index: StepIndex) -> tuple[Tensor, list[float]]:
        """Step the optimizer, unless the gradient is not finite.

        Returns:
            Gradient norm before clipping, and learning rate of each parameter group.
        """
        optimizer = cast(LightningOptimizer, self.optimizers())
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        try:
            norm = self.parallel.step(self.required_policy, optimizer, self.max_grad_norm, self.run.accept)
        except FloatingPointError as stop:
            current = cast(CurrentRollout, self.run.current)
            where = record_nonfinite(self._folder / NONFINITE, current, step_index.step, gradient, self.parallel.rank)
            raise FloatingPointError(f"{stop}; {where}") from stop
        return norm, rates

    def _step_scheduler(self) -> None:
        step_or_leave(cast(LRScheduler, self.lr_schedulers()))
        self.run.progress = replace(self.run.progress, schedule_behind=False)

    # The engine and its weights: it starts in the first sync, sleeps after sampling, and ends in teardown.

    def sync(self, version: int) -> None:
        """Start the engine if needed, and send it the policy's weights under a version number. A collective.

        Waits for rollouts in progress first, unless the engine can receive weights while it generates.
        """
        if not (self.engine.capabilities.syncs_while_generating and version > self.engine.version):
            self.run.prefetcher.drain()
        weight_sync = self.weight_sync
        if not (self.run.engine_started and self.engine.started):
            check_process_group(1 if self._trainer is None else self.trainer.world_size)
            weight_sync.start(self.tokenizer, device=self.device, resident=self.resident_bytes)
            self.run.engine_started = True
        weight_sync.send(version)

    @property
    def weight_sync(self) -> WeightSync:
        """Connection that sends the policy's weights to the engine."""
        return WeightSync(
            engine=self.engine,
            policy=self.required_policy,
            parallel=self.parallel,
            replica=self.run.replica,
            packed=self.model_options.packing,
            context=self._canary_context,
        )

    @property
    def resident_bytes(self) -> float:
        """Bytes that this rank holds during generation, optimizer states included."""
        fits = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        optimizer = self.trainer.optimizers[0] if fits else None
        copies = self.parallel.copies_gradients
        return resident_bytes(self.required_policy, self.run.reference, optimizer, copies_gradients=copies)

    @contextmanager
    def _canary_context(self) -> Iterator[None]:
        with self.run.times.phase("canary"), self.parallel.strategy.precision_plugin.forward_context():
            yield

    def sleep_engine(self) -> None:
        """Put an engine that shares the trainer's device to sleep until the next sync, to free its memory."""
        if self.engine.capabilities.sleeps:
            self.engine.sleep()

    def close_engine(self) -> None:
        """Shut down the engine and the workers of rewards and environments; the next sync restarts them.

        At the end of a Trainer's stage, in contrast, a :class:`VLLMEngine` only sleeps, because it takes long to build.
        """
        self._end_stage(self.engine.close)

    def _end_stage(self, end_engine: Callable[[], None]) -> None:
        if self.engine.capabilities.concurrent:
            self.engine.close()  # cancels rollouts that will not be trained on
        self.run.prefetcher.close()
        self.evaluator.close()
        self.rewards.close()
        if self.environment_workers is not None:
            self.environment_workers.close()
        end_engine()
        self.run.engine_started = False

    @override
    def teardown(self, stage: str) -> None:
        """Release the engine, and restore the Trainer's ``limit_val_batches``."""
        self._end_stage(self.engine.end_stage)
        self.evaluator.restore_limit(self.trainer)

    # Evaluation, answers, export.

    @override
    def val_dataloader(self) -> EvaluationLoader:
        """Return the validation loader; the data module's method of this name calls it."""
        return self.evaluator.loader("val", self._data)

    @override
    def test_dataloader(self) -> EvaluationLoader:
        """Return the test loader."""
        return self.evaluator.loader("test", self._data)

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """Return a loader of the data module's prompts, in order."""
        return EvaluationLoader([self.prompt_stream.prediction_prompts()], self.prompt_stream.validation_batch_size)

    @override
    def on_validation_epoch_start(self) -> None:
        """Send the weights to the engine; callbacks such as WeightAveraging have put theirs into the policy before."""
        self._begin_evaluation("val")

    @override
    def on_test_epoch_start(self) -> None:
        """Send the weights to the engine."""
        self._begin_evaluation("test")

    def _begin_evaluation(self, stage: str) -> None:
        self.evaluator.begin(stage, self._data, self.parallel, self.device)
        self.sync(max(self.engine.version, 0))

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Generate and score samples for a batch of prompts."""
        self.evaluator.answer(batch, self.sampler)

    test_step = validation_step

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all ranks, and write the samples."""
        self.evaluator.end(self.trainer, self.log, self._folder / "evaluations", self.run.failed_folder)
        self.sleep_engine()

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_predict_epoch_start(self) -> None:
        """Send the weights to the engine."""
        self.sync(max(self.engine.version, 0))

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Record]:
        """Return a greedy completion of each prompt of the batch, on every rank."""
        return self.evaluator.predict(batch, self.sampler, self.parallel.rank)

    @override
    def on_predict_epoch_end(self) -> None:
        """Write ``completions.jsonl`` to the logger's folder, or to ``default_root_dir`` without a logger."""
        self.evaluator.write_predictions(self._folder / "completions.jsonl", writing=self.trainer.is_global_zero)
        self.sleep_engine()

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
        if self.policy is None and self._trainer is None:
            self.policy, self.run.built_alone = self.models.build_policy(), True
        chosen = sampling_for(self.sampling, self.engine, samples=samples, sampling=sampling, temperature=temperature)
        self.sync(max(self.engine.version, 0))
        model = self.required_policy.model
        answers = generate(prompts, samples=samples, sampling=chosen, sampler=self.sampler, model=model)
        self.sleep_engine()
        return answers

    def save_pretrained(self, folder: str | Path) -> None:
        """Write policy and tokenizer to a Hugging Face folder, and a separate critic to ``folder/critic``.

        Must be called on every rank; rank 0 writes. Adapters are merged into the weights. With ``critic="shared"``, the
        value head is written to ``folder/critic/value_head.safetensors``.
        """
        weights = self.parallel.full_parameters(self.required_policy)
        write_pretrained(Path(folder), weights, self.sources, self.tokenizer, writing=self.global_rank == 0)
        if process_count() > 1:
            dist.barrier()

    # Checkpoints.

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
    ) -> "RLLightningModule":
        """Return a module with the weights and options of a checkpoint, for export, evaluation or a new run.

        Args:
            checkpoint_path: Path of a checkpoint file of any strategy; consolidate a sharded checkpoint first.
            map_location: Device to load the weights to.
            hparams_file: Must be None, because the checkpoint contains the options.
            strict: If False, accept missing or unexpected weights.
            weights_only: Ignored; the checkpoint is always loaded with ``weights_only=True``.
            kwargs: Constructor arguments that replace those of the run. Required for your own functions and classes,
                which a checkpoint does not contain.

        Raises:
            ValueError: If an argument must be passed in ``kwargs``, or the file is not a checkpoint.
        """
        del weights_only
        if hparams_file is not None:
            raise ValueError(f"expected hparams_file=None, got {hparams_file}: pass options as keyword arguments")
        return restore_module(cls, checkpoint_path, map_location, kwargs, strict=strict is not False)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's current and prefetched rollouts, counters and unlogged metrics."""
        hurried = self.trainer.interrupted or bool(CLOCK.stopped_by)
        if hurried or not generates_concurrently(self.engine, self.max_staleness):
            self.run.prefetcher.drain(hurried=hurried)
        reference = self.run.reference
        # Remove the configuration from the hyperparameters: LightningCLI would pass it to the constructor.
        hparams = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        for name in self.run.configuration.keys() & hparams.keys():
            del hparams[name]
        self.run.write_corrections(checkpoint.get("callbacks", {}))
        checkpoint["lightning_rl"] = {
            "run": self.run.name,
            "configuration": self.run.configuration,
            "ranks": self.parallel.collectives.objects(self.run.state()),
            "reference_hash": None if reference is None else reference.fingerprint,
        }

    def note_error(self, error: BaseException) -> str | None:
        """Prepare the checkpoint that is saved after an error; return None, or the reason if it cannot be saved."""
        if self.policy is not None:
            self.policy.zero_grad()  # a partial gradient would enter a later fit
        self.run.note_error(error)
        counts: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        if self.run.made_step and counts.current.processed < counts.current.started:
            counts.increment_processed()  # the step is complete, but Lightning has not counted its batch
        return self.run.save_problem

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load this rank's state for a fit; other stages use the weights alone."""
        if self._trainer is None:
            return
        state = setup_checks.check_checkpoint(checkpoint)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        setup_checks.check_whole_checkpoint(checkpoint)
        states = {callback.name: callback.state_dict() for callback in self.run.corrections.callbacks}
        check_resume(state["configuration"], self.run.configuration, self.fault_tolerance.allow_config_changes, states)
        self.run.load(state, rank=self.parallel.rank, world_size=self.parallel.ranks)
        if self.trainer.strategy.restore_checkpoint_after_setup:
            self._restore_or_reset()  # this strategy loads a checkpoint after on_fit_start
