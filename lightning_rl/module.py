"""RLLightningModule: a LightningModule whose hooks generate rollouts and train on them."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rl import setup_checks
from lightning_rl.advantages import Estimator, RowFunction
from lightning_rl.algorithm import Algorithm, needs
from lightning_rl.checkpointing import FaultTolerance, LostCodeError, OptimizerChange, restore_module, write_pretrained
from lightning_rl.configuration import BESIDE, configuration
from lightning_rl.corrections import Corrections, LossView, RLCallback, Stat
from lightning_rl.data import PromptDataModule, StepIndex, data_module_of, find_data_module
from lightning_rl.distributed import Parallel, parallel_of, process_count, process_maximum, unwrapped_name
from lightning_rl.environments import Conversations
from lightning_rl.environments.run_environments import EnvironmentSource
from lightning_rl.environments.tools import Tool
from lightning_rl.evaluation import Evaluation
from lightning_rl.evaluation.evaluation import evaluations_of
from lightning_rl.evaluation.evaluator import PREDICT, TEST, VAL, Evaluator
from lightning_rl.evaluation.generate import generate, sampling_for
from lightning_rl.evaluation.loader import EvaluationBatch, EvaluationLoader
from lightning_rl.evaluation.questions import with_eos
from lightning_rl.evaluation.records import Record
from lightning_rl.generation import Engine, SamplingParams, request_seed
from lightning_rl.generation.weights.weight_sync import WeightSync
from lightning_rl.losses import Critic, PolicyLoss
from lightning_rl.monitors import check_monitors, check_names, logs_itself, warn_without_validation
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder, fused_adamw
from lightning_rl.policy import ModelOptions, PolicyModel, make_plan
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import ModelSource, TokenizerSource
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.policy.run_models import RunModels
from lightning_rl.processes.timeouts import CLOCK
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.ahead import Ahead, remaining_steps, staleness
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.estimate_signal import check_domains, estimate_signal, exclude_rows
from lightning_rl.rollouts.failures import FOLDER
from lightning_rl.rollouts.first_sample import first_sample
from lightning_rl.rollouts.logprob_passes import add_logprobs, environment_logprob
from lightning_rl.rollouts.memory_estimate import checkpointing_that_fits, token_budget
from lightning_rl.rollouts.nonfinite import recording_nonfinite
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.rollouts.state import RunState, trainer_state
from lightning_rl.rollouts.step_metrics import StepMetrics, begin_trace
from lightning_rl.rollouts.zero_gradient import StopOnZeroGradient
from lightning_rl.run_checks import check_run, needed_extras, run_names
from lightning_rl.run_prompts import encode_prompts, is_chat
from lightning_rl.samples import Trajectory
from lightning_rl.serialization import describe
from lightning_rl.setup_checks import resolve_options
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm
from lightning_rl.update import StepGradient, accumulate_gradient
from lightning_rl.utils.arguments import refuse_other_names
from lightning_rl.utils.inspection import refuse_inspection
from lightning_rl.utils.library_hooks import LibraryHooks, check_overrides
from lightning_rl.utils.renamed import RENAMED
from lightning_rl.utils.seeding import seed_everything
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.template_date import TODAY, now, writes_date
from lightning_rl.utils.trainer import add_first, add_missing, callbacks_of, disable_bar, log_folder

EVALUATIONS = "validation", "test", "predict"


@LibraryHooks(
    rules={
        "configure_callbacks": "joined",
        **dict.fromkeys(
            ("setup", "configure_model", "on_fit_start", "on_train_start", "on_train_batch_start"), "before"
        ),
        **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "before"),
        **{f"on_{stage}_epoch_{end}": "before" for stage in EVALUATIONS for end in ("start", "end")},
        **dict.fromkeys(("on_before_optimizer_step", "teardown"), "after"),
        **dict.fromkeys(("training_step", *(f"{stage}_step" for stage in EVALUATIONS)), "required"),
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
        self.options = options = resolve_options(
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
        critic, conversations = options.critic, options.environment
        self.environment_factories = {} if conversations is None else conversations.factories
        self.environment_workers = None if conversations is None else conversations.pool()
        self.algorithm = Algorithm(loss=options.loss, advantages=options.advantages, reduction=options.reduction)
        if critic is not None:
            self.algorithm = self.algorithm.replace(value_loss=critic.loss)
        sources = {"policy": options.policy, "reference": options.reference, "critic": critic and critic.source}
        self.models = RunModels(sources=sources, temperature=options.sampling.temperature, options=options.model)
        self.policy: PolicyModel | None = None
        self.fault_tolerance, self.run = FaultTolerance(), RunState(ahead=Ahead(options.engine, options.max_staleness))
        evaluations = evaluations_of(options.evaluation)
        self.evaluator = Evaluator(evaluations, seed=options.seed, has_environments=conversations is not None)
        self._parallel: Parallel | None = None
        self.shows_sample = False
        self.lost_code: dict[str, str] = {}
        self.automatic_optimization = False

    # A rollout: sync, generate, reward, plan, log-probabilities, signal.

    @refuse_stop_iteration
    def begin_step(self, step_index: StepIndex) -> None:
        """Save the states of the corrections and seed the random number generators.

        The data module calls this method for each batch, before any hook.
        """
        self.run.begin_step()
        self.seed_generators(step_index)

    def seed_generators(self, step_index: StepIndex) -> None:
        """Seed every global generator from (run seed, rank, step), so that results do not depend on earlier draws."""
        seed_everything(request_seed(self.options.seed, self.parallel.rank, step_index.index), self.device)

    @override
    @refuse_stop_iteration
    def on_train_batch_start(self, batch: StepIndex, batch_idx: int) -> None:
        """Make the rollout for the step index, unless it is the current rollout or is skipped."""
        if self.skips(batch):
            self.run.skip_rollout(batch)
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
        number = step_index.rollout
        publish, show = partial(self.sync, number), self.show_sample
        groups = self.collector.collect(number, self.data_module, end=end, publish=publish, show=show)
        self.sleep_engine()  # frees memory for the log-probability passes
        current, stats = self.finish_rollout(groups.rollout, number)
        stats = {**groups.stats, **stats, **self.data_module.stats()}
        self.run.begin_rollout(current, step_index.index, stats, groups.logged)
        self.run.constant_calls = groups.constant_calls

    def finish_rollout(self, rollout: Rollout, number: int) -> tuple[CurrentRollout, dict[str, Stat]]:
        """Add plan, log-probabilities and advantages, and pass the rollout to observers; return it and its metrics."""
        run, policy, corrections = self.run, self.required_policy, self.run.corrections
        with run.times.phase("score"), self.trainer.precision_plugin.forward_context():
            rollout, stats = exclude_rows(rollout, corrections)
            plan_of = partial(
                make_plan,
                max_tokens_per_microbatch=run.max_tokens_per_microbatch,
                packed=run.options.packing,
                max_over_ranks=run.max_over_ranks,
            )
            plan = plan_of(rollout, minibatches=self.options.minibatches_per_rollout)
            if self.environment_factories:
                stats |= {"env/logprob": environment_logprob(rollout, policy, plan_of)}
            rollout, plan = rollout.to(self.device), plan.to(self.device)
            passes = {"old": run.needs.old_logprobs, "squares": run.needs.sum_pi_squared}
            passes |= {"rollout_as_old": run.needs.rollout_as_old, "loads": run.needs.expert_load}
            scorers, global_sum = (policy, self.models.reference, corrections), self.parallel.collectives.sum
            rollout = add_logprobs(rollout, plan, *scorers, **passes, global_sum=global_sum)
            if run.needs.expert_load:  # the layouts carry it
                plan = plan_of_rows(rollout.to("cpu"), plan.rows(), packed=run.options.packing).to(self.device)
        with run.times.phase("signal"):
            estimator = self.algorithm.advantages
            rollout, rewards, signal = estimate_signal(rollout, estimator, corrections, global_sum)
            check_domains(rollout, rewards.scores, estimator, corrections)
        current = CurrentRollout.of(number, rollout, plan)
        corrections.observe(rollout)
        return current, {**stats, **signal, **staleness(rollout, number), **corrections.rollout_metrics(rollout)}

    # An update: steps_per_rollout optimizer steps.

    @override
    @refuse_stop_iteration
    def training_step(self, batch: StepIndex, batch_idx: int) -> dict[str, Tensor]:
        """Take one optimizer step; skip it if the rollout is skipped, or if no rank has a token to train on."""
        run, parallel = self.run, self.parallel
        if self.skips(batch):
            run.end_step(batch, None)
            return {}
        current, optimizer = cast(CurrentRollout, run.progress.current), cast(LightningOptimizer, self.optimizers())
        current.check_edits()
        self.seed_generators(batch)
        tokens = int(parallel.collectives.sum(torch.tensor(current.plan.tokens(batch.step), device=self.device)))
        if tokens:
            with run.times.phase("update"):
                step = self._gradient(batch)
                if not self.models.stepped:
                    _warn_without_gradient(step)
                step.lr, step.tokens = float(optimizer.param_groups[0]["lr"]), tokens
                with (
                    recording_nonfinite(self.trainer, cast(CurrentRollout, run.progress.current), batch.step, step),
                    run.lost_updates.watch(self.required_policy.parameters(), step.lr),
                ):
                    step.norm = parallel.step(self.required_policy, optimizer, partial(run.accept, step))
            self.models.stepped = True
            if step.made and (scheduler := self.lr_schedulers()) is not None:
                cast(LRScheduler, scheduler).step()
        else:
            step = StepGradient(trace=begin_trace(run, batch, parallel))
        # Commit before the calls below, so that the checkpoint resumes with the next step if one of them raises.
        run.end_step(batch, step)
        outputs = step.outputs()
        if tokens:
            run.corrections.after_step(outputs)
            parallel.clear(optimizer)
        return outputs

    def _gradient(self, step_index: StepIndex) -> StepGradient:
        """Return the gradient of a step; repeat with half ``max_tokens_per_microbatch`` if a rank is out of memory.

        Raises:
            torch.OutOfMemoryError: If the step is out of memory again, or cannot be repeated; a note names the cure.
        """
        states = self.run.corrections.states() if self.parallel.repeats_steps else None
        try:
            gradient = self._accumulate(step_index, record_out_of_memory=states is not None)
            if states is not None and process_maximum(int(gradient.out_of_memory)):
                self.required_policy.zero_grad()
                self.run.halve_microbatches(step_index, states)
                self.seed_generators(step_index)
                gradient = self._accumulate(step_index)
        except torch.OutOfMemoryError as error:
            error.add_note(self.run.memory_note())
            raise
        return gradient

    def _accumulate(self, step_index: StepIndex, *, record_out_of_memory: bool = False) -> StepGradient:
        """Accumulate the gradient of a step over its microbatches."""
        parallel, policy, current = self.parallel, self.required_policy, cast(CurrentRollout, self.run.progress.current)
        return accumulate_gradient(
            current.rollout,
            current.plan.step(step_index.step),
            lambda microbatch: policy(microbatch.layout),
            self.algorithm,
            backward=lambda loss: self.manual_backward(loss * parallel.ranks),  # cancels the mean over ranks
            around=lambda last: parallel.accumulating(policy, last=last),
            collectives=parallel.collectives,
            trace=begin_trace(self.run, step_index, parallel),
            bitwise=self.run.needs.rollout_as_old and step_index.step == 0,
            record_out_of_memory=record_out_of_memory,
        )

    # Parts of a run.

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.options.steps_per_rollout

    @property
    def parallel(self) -> Parallel:
        """Parallelism of the trainer's strategy; without a trainer, that of a single device."""
        if self._trainer is None:
            return parallel_of(SingleDeviceStrategy(device=self.device))
        if self._parallel is None or self._parallel.strategy is not self.trainer.strategy:
            self._parallel = parallel_of(self.trainer.strategy)
        return self._parallel

    @property
    def data_module(self) -> PromptDataModule:
        """Data module of the trainer."""
        return data_module_of(self.trainer)

    @property
    def required_policy(self) -> PolicyModel:
        """Policy; raises RuntimeError if it has not been built."""
        if self.policy is None:
            raise RuntimeError("expected a policy, but configure_model has not run: fit or validate first")
        return self.policy

    @property
    def collector(self) -> Collector:
        """Collector that generates and scores samples, with the options of this run."""
        options, run, parallel, policy = self.options, self.run, self.parallel, self.required_policy
        return Collector(
            engine=options.engine,
            tokenizer=options.tokenizer,
            rewards=options.rewards,
            sampling=run.sampling,
            group_size=options.group_size,
            seed=options.seed,
            corrections=run.corrections,
            dtype=torch.promote_types(policy.model.dtype, torch.float32),
            forward_context=parallel.strategy.precision_plugin.forward_context,
            greedy_baseline=self.algorithm.advantages.needs_greedy,
            collectives=parallel.collectives,
            rank=parallel.rank,
            device=parallel.strategy.root_device,
            failed_folder=run.failed_folder,
            trainer_state=None if self._trainer is None else trainer_state(self.trainer),
            vocabulary=policy.vocabulary,
            environments=run.environments,
            needs_logprobs=run.needs.rollout_logprobs,
            mismatch_every_n_rollouts=options.mismatch_every_n_rollouts,
            ahead=run.ahead,
            skipped=self.fault_tolerance.skip_rollouts,
            phase=run.times.phase,
        )

    # The module as an object of PyTorch and Lightning.

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

    # Before a run.

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Check the Trainer's flags before Lightning does, and add those callbacks of the library that it lacks."""
        refuse_inspection(self)
        setup_checks.check_flags(self.trainer)
        # First, since a checkpoint that another callback saves in on_train_batch_end has to contain what they record.
        for kind in (StopOnZeroGradient, StepMetrics):
            add_first(self.trainer, kind)
        disable_bar(self.trainer)
        added, self.fault_tolerance = add_missing(self.trainer, FaultTolerance)
        self.fault_tolerance.attach(self.trainer, self.run, self.close_engine)
        return [*added]

    @override
    def setup(self, stage: str) -> None:
        """Collect the corrections among the callbacks, and check that options, callbacks and data are compatible."""
        if self.lost_code:
            raise LostCodeError(self.lost_code)
        self.parallel.check(self.options.max_grad_norm)
        setup_checks.check_changes(self.fault_tolerance.allow_config_changes, (*self.options, *BESIDE))
        if writes_date(self.options.tokenizer):
            TODAY.moment = self.parallel.collectives.objects(now())[0]
        callbacks = [callback for callback in callbacks_of(self.trainer) if isinstance(callback, RLCallback)]
        corrections = self.run.corrections = Corrections(callbacks, self.parallel.collectives)
        self.algorithm = self.algorithm.replace(corrections=corrections)
        needed = needed_extras(corrections, self.options.sampling).keys()
        # In evaluations too, although only training reads extras: to change them, vLLM has to be built again.
        self.options.engine.select_extras(self.options.engine.capabilities.extras & needed)
        prompts = self.data_module.prompts_per_rollout if stage == "fit" else None
        check_run(self.options, corrections, self.parallel, prompts_per_rollout=prompts)
        bitwise = self.models.options.bitwise and not self.options.max_staleness
        self.run.needs = needs(self.algorithm, steps_per_rollout=self.steps_per_rollout, rollout_as_old=bitwise)
        if stage == "fit":
            self.options.rewards.check_weights()
            self.evaluator.limit_validation(self.trainer, self.data_module)
            known, validates = not logs_itself(self.trainer, self), bool(self.trainer.limit_val_batches)
            names = run_names(self.options, corrections, validation=bool(self.data_module.validation))
            check_monitors(self.trainer, names, known=known, validates=validates)
        self.run.failed_folder = log_folder(self.trainer) / FOLDER
        if (data := find_data_module(self.trainer)) is not None:
            data.use_tokenizer(self.options.tokenizer)
        self.run.configuration = configuration(self.options, self.trainer)
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.run.configuration)

    @override
    def configure_model(self) -> None:
        """Build and shard policy and reference once, and check that the prompts fit the policy."""
        if self.models.without_trainer:
            # generate() started the engine on the policy itself; under this strategy it may need a replica.
            self._end_stage(self.options.engine.end_stage)
        data, sharded = find_data_module(self._trainer), self.parallel.sharded
        with torch.device("cpu"):  # Lightning sets the accelerator as default device; the strategy moves the model
            self.policy = self.models.build(
                self.policy,
                self.parallel,
                self.device_mesh,
                replica=self.options.engine.capabilities.shares_policy and (sharded or self.options.max_staleness > 0),
                reference=self.run.needs.ref_logprobs,
                data=None if data is None else data.fingerprint,
            )
            self._encode_prompts()
            self._build_environments(data)

    def _encode_prompts(self) -> None:
        """Encode the prompts of training and evaluation, and check that they fit the policy and the rewards."""
        data, models = find_data_module(self._trainer), (self.required_policy, self.models.reference)
        self.run.sampling = encode_prompts(self.options, self.evaluator, data, *models, self.trainer.state.fn)

    def _build_environments(self, data: PromptDataModule | None) -> None:
        """Build the environments for the policy; with data, check that its prompts and the chat template fit them."""
        if self.options.environment is not None:
            model, length = self.required_policy.model, self.options.engine.max_length
            close = with_eos(self.options.sampling, model, self.options.tokenizer).eos_token_ids or ()
            options: dict[str, Any] = {"data": data, "seed": self.options.seed, "workers": self.environment_workers}
            self.run.environments = self.options.environment.build(
                model, self.options.tokenizer, engine_length=length, close=close, **options
            )
            if data is not None:
                data.limit(self.run.environments.first_length)

    @override
    def configure_optimizers(self) -> Any:
        """Return one optimizer for policy and critic, with one parameter group each, and its scheduler."""
        groups = self.parallel.optimizer_groups(self.required_policy.parameter_groups())
        builders = self.options.optimizer, self.options.lr_scheduler
        names = {id(one): unwrapped_name(name) for name, one in self.required_policy.named_parameters()}
        built, self.run.optimizer = setup_checks.build_optimizers(
            *builders, groups, names, self.data_module.fit_steps()
        )
        return built

    def show_sample(self, samples: Sequence[Trajectory], number: int) -> None:
        """Print a prompt and a response of the first rollout of a fit, with its number, on rank zero.

        Control tokens are printed, too.
        """
        if self.shows_sample:
            lines = [
                f"{name} of rollout {number}, {text}" for name, text in first_sample(samples, self.options.tokenizer)
            ]
            uses_template = self.run.environments is not None or is_chat(self.data_module.first())
            if uses_template and writes_date(self.options.tokenizer):
                lines.append(f"the chat template writes the date of {TODAY.text('%Y-%m-%d')}, which checkpoints keep")
            self.shows_sample = False
            if lines:
                rank_zero_info("\n".join(lines))

    # The state of a fit, which checkpoints store between two optimizer steps.

    @override
    def on_fit_start(self) -> None:
        """Restore the rollout of a checkpoint, or discard the state of an earlier fit."""
        self.run.begin(self.parallel, self.data_module, self.models.options)
        if self.models.options.max_tokens_per_microbatch is None:
            self.run.use_default_budget(partial(token_budget, self))
        if self.models.options.activation_checkpointing is True:
            full = self.run.max_over_ranks([checkpointing_that_fits(self) == "full"])[0]
            mode: Checkpointing = "full" if full else "selective"
            self.models.checkpoint_activations(self.required_policy, mode)
            self.run.options = replace(self.run.options, activation_checkpointing=mode)
            rank_zero_info(f'activation_checkpointing="{mode}" (of "selective" and "full", by the estimate of memory)')
        self.shows_sample = True

    @override
    def on_train_start(self) -> None:
        """Store the state at the start for checkpoints, and warn if the fit ends before its first validation."""
        warn_without_validation(self.trainer)
        index = self.data_module.position.index
        if self.run.progress.origin is None:
            made = self.trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001  the axis of Lightning's rows
            self.run.progress = replace(self.run.progress, origin=index - made)
        self.run.commit(index, self.run.progress)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, and record that the weights are about to change."""
        if self.options.max_grad_norm is not None:
            self.parallel.clip(self.required_policy, optimizer, self.options.max_grad_norm)
        self.run.stepping = True

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's current rollout and those ahead, counters and unlogged metrics."""
        hurried = self.trainer.interrupted or bool(CLOCK.stopped_by)
        if hurried or not self.run.ahead.concurrent:
            self.run.ahead.drain(hurried=hurried)
        self.run.write_corrections(checkpoint.get("callbacks", {}))
        saved = checkpoint.pop(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if further := {name: value for name, value in saved.items() if name not in self.options}:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = further  # the options are in the configuration
        checkpoint["lightning_rl"] = self.run.state(self.parallel.collectives, self.models.reference)
        checkpoint["lightning_rl"]["engines"] = self.parallel.collectives.objects(self.options.engine.state_dict())
        if writes_date(self.options.tokenizer):
            checkpoint["lightning_rl"]["template_date"] = TODAY.moment

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load this rank's state for a fit; other stages use the weights alone."""
        state = setup_checks.check_checkpoint(checkpoint)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        setup_checks.check_whole_checkpoint(checkpoint)
        self.models.stepped = True
        if (moment := state.get("template_date")) is not None and writes_date(self.options.tokenizer):
            TODAY.moment = moment
            self._encode_prompts()
        self.run.load(state, self.parallel, self.models.reference, self.fault_tolerance.allow_config_changes)
        self.options.engine.load_state_dict(state["engines"][self.parallel.rank] if "engines" in state else {})
        changed = [path.partition(".")[2] for path, _, _ in self.run.changes if path.startswith("corrections.")]
        self.run.corrections.reset(checkpoint.get("callbacks", {}), changed)
        if self.trainer.strategy.restore_checkpoint_after_setup:
            self.on_fit_start()  # this strategy loads a checkpoint after on_fit_start

    def compare(self, saved: Mapping[str, Any]) -> OptimizerChange | None:
        """Compare the options in a checkpoint with those of the run; return the change of the optimizer, if any.

        The checkpoint connector calls this method before the states of the optimizer are loaded.

        Args:
            saved: State of the module in the checkpoint, with ``configuration`` and ``optimizer``.

        Raises:
            ValueError: If an option differs that ``allow_config_changes`` does not name.
        """
        allowed = self.fault_tolerance.allow_config_changes
        self.run.compare(saved, allowed)
        return self.run.optimizer_change(saved.get("optimizer"), allowed)

    def skips(self, step_index: StepIndex) -> bool:
        """Return True if the optimizer step is on a skipped rollout, or on the rest of a discarded one."""
        discarded = step_index.rollout == self.run.progress.discarded and step_index.step > 0
        return discarded or step_index.rollout in self.fault_tolerance.skip_rollouts

    # The engine.

    def sync(self, version: int) -> None:
        """Start the engine if needed, and send it the policy's weights under a version number. A collective.

        Waits for rollouts in progress first, unless the engine can receive weights while it generates.
        """
        if not (self.options.engine.capabilities.syncs_while_generating and version > self.options.engine.version):
            self.run.ahead.drain()
        weight_sync = self.weight_sync
        if not (self.run.engine_started and self.options.engine.started):
            weight_sync.start(self.options.tokenizer)
            self.run.engine_started = True
        weight_sync.send(version)

    @property
    def weight_sync(self) -> WeightSync:
        """Connection that sends the policy's weights to the engine."""
        return WeightSync(
            engine=self.options.engine,
            policy=self.required_policy,
            models=self.models,
            parallel=self.parallel,
            phase=self.run.times.phase,
        )

    def sleep_engine(self) -> None:
        """Put an engine that shares the trainer's device to sleep until the next sync, to free its memory."""
        if self.options.engine.capabilities.sleeps:
            self.options.engine.sleep()

    def close_engine(self) -> None:
        """Shut down the engine and the workers of rewards and environments; the next sync restarts them.

        At the end of a Trainer's stage, in contrast, a :class:`VLLMEngine` only sleeps, because it takes long to build.
        """
        self._end_stage(self.options.engine.close)

    def _end_stage(self, end_engine: Callable[[], None]) -> None:
        if self.options.engine.capabilities.concurrent:
            self.options.engine.close()  # cancels rollouts that will not be trained on
        workers = () if self.environment_workers is None else (self.environment_workers,)
        for part in (self.run.ahead, self.evaluator, self.options.rewards, *workers):
            part.close()
        end_engine()
        self.run.engine_started = False

    @override
    def teardown(self, stage: str) -> None:
        """Release the engine, and restore the Trainer's ``limit_val_batches``."""
        self._end_stage(self.options.engine.end_stage)
        self.evaluator.restore_limit(self.trainer)

    # Evaluation: validation, test and prediction.

    @override
    def val_dataloader(self) -> EvaluationLoader:
        """Return the validation loader; the data module's method of this name calls it."""
        return self.evaluator.loader(VAL, find_data_module(self._trainer))

    @override
    def test_dataloader(self) -> EvaluationLoader:
        """Return the test loader."""
        return self.evaluator.loader(TEST, find_data_module(self._trainer))

    @override
    def predict_dataloader(self) -> EvaluationLoader:
        """Return a loader of the data module's prompts, in order."""
        return self.evaluator.loader(PREDICT, self.data_module)

    @override
    def on_validation_epoch_start(self) -> None:
        """Send the weights to the engine after callbacks such as WeightAveraging have swapped their weights in."""
        self.evaluator.begin(self.trainer, find_data_module(self._trainer), self.parallel, self.device)
        self.sync(max(self.options.engine.version, 0))

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Generate and score samples for a batch of prompts."""
        self.evaluator.answer(batch, self.collector)

    test_step = validation_step

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Record]:
        """Return a greedy completion of each prompt of the batch, on every rank."""
        return self.evaluator.predict(batch, self.collector)

    @override
    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all ranks and write the samples; a prediction only writes ``completions.jsonl``."""
        logged = self.evaluator.end(self.trainer, self.log, self.run.failed_folder)
        if self.trainer.state.fn == TrainerFn.FITTING and not logs_itself(self.trainer, self):
            check_names(self.trainer, logged, evaluated=True)
        self.sleep_engine()

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
        if self.models.without_trainer and self.run.environments is None:
            self._build_environments(None)
        chosen = sampling_for(
            self.options.sampling, self.options.engine, samples=samples, sampling=sampling, temperature=temperature
        )
        self.sync(max(self.options.engine.version, 0))
        model = self.required_policy.model
        answers = generate(prompts, samples=samples, sampling=chosen, collector=self.collector, model=model)
        self.sleep_engine()
        return answers

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
        return restore_module(cls, checkpoint_path, map_location, kwargs, strict=strict is not False)


def _warn_without_gradient(step: StepGradient) -> None:
    if names := sorted({name for name, is_not_zero in step.untrained if is_not_zero}):
        warnings.warn(
            f"expected a gradient of {' and '.join(names)}, got none, so it trains nothing: compute it from "
            "view.logprobs without detach(), .data, .item() or no_grad",
            stacklevel=2,
        )
