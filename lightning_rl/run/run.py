"""Run: the typed parts of a module in one stage of its Trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainerState

from lightning_rl.algorithm import Algorithm, Needs, needs
from lightning_rl.checkpointing import ConfiguredOptimizer, FaultTolerance, OptimizerChange, new_run
from lightning_rl.checkpointing.optimizer_options import option_changes, rate_changes
from lightning_rl.configuration import Change, check_resume, configuration, refuse_differences, warn_of_versions
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.data import PromptDataModule, StepIndex, data_module_of, find_data_module
from lightning_rl.distributed import Parallel, parallel_of
from lightning_rl.environments.run_environments import Environments
from lightning_rl.environments.workers import WorkerPool
from lightning_rl.evaluation.evaluation import evaluations_of
from lightning_rl.evaluation.evaluator import Evaluator
from lightning_rl.evaluation.generate import generate, sampling_for
from lightning_rl.evaluation.questions import with_eos
from lightning_rl.generation import SamplingParams, request_seed
from lightning_rl.generation.weights.weight_sync import WeightSync
from lightning_rl.metrics import MetricLog, PhaseTimes
from lightning_rl.monitors import check_monitors, logs_itself
from lightning_rl.options import Options
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.processor import processor_of
from lightning_rl.policy.run_models import RunModels
from lightning_rl.processes.timeouts import CLOCK
from lightning_rl.rollout import ROLES
from lightning_rl.rollouts.ahead import Ahead
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.failures import FOLDER
from lightning_rl.rollouts.progress import Progress
from lightning_rl.rollouts.step_log import StepLog
from lightning_rl.run_checks import check_run, needed_extras, run_names
from lightning_rl.setup_checks import warn_of_broken_properties
from lightning_rl.utils.renamed import Moved
from lightning_rl.utils.seeding import seed_everything
from lightning_rl.utils.template_date import TODAY, writes_date
from lightning_rl.utils.tracing import RolloutSpans
from lightning_rl.utils.trainer import callbacks_of, log_folder

PartT = TypeVar("PartT")
OF_UPDATES = {"optimizer", "lr_scheduler", "max_grad_norm", "max_staleness"}  # rollouts stay valid if these change


@dataclass(slots=True, kw_only=True)
class Run:
    """Parts of one stage of the Trainer, kept outside of the module tree so that they are neither sharded nor moved.

    The run of a module before its first stage generates without a Trainer. The next stage reuses all parts that
    :meth:`build` does not replace.

    Args:
        options: Arguments of the module.
        models: Models and their options.
        algorithm: Algorithm with the corrections among the Trainer's callbacks.
        evaluator: Evaluations of the module.
        parallel: Parallelism of the strategy.
        workers: Processes of the environments; None without.
        fault_tolerance: The Trainer's callback.
        needs: Optional rollout fields that are read.
        configuration: Options, callbacks and data in plain values.
        failed_folder: Folder for samples with failed rewards.
        sampling: Sampling parameters of the module, with the ids that end a response.
        environments: Environments of the samples; None for single-turn completions.
        engine_started: True once the engine can load weights.
        ahead: Rollouts that are generated ahead.
        progress: State between two optimizer steps.
        log: Metrics that have not been logged yet.
        optimizer: Optimizer as configured, in a fit.
        loaded: This rank's part of a checkpoint, until fit starts.
        changes: Allowed differences between the configuration of the loaded checkpoint and that of the run.

    Attributes:
        built_policy: Policy of the module, from ``configure_model`` on.
    """

    options: Options
    models: RunModels
    algorithm: Algorithm
    evaluator: Evaluator
    parallel: Parallel
    workers: WorkerPool | None
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    needs: Needs = field(default_factory=Needs)
    configuration: dict[str, Any] = field(default_factory=dict)
    failed_folder: Path | None = None
    built_policy: PolicyModel | None = field(init=False, repr=False, default=None)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    environments: Environments | None = None
    engine_started: bool = False
    ahead: Ahead = field(default_factory=Ahead)
    progress: Progress = field(default_factory=Progress)
    log: StepLog = field(default_factory=StepLog)
    optimizer: ConfiguredOptimizer | None = None
    loaded: Mapping[str, Any] | None = None
    changes: Sequence[Change] = ()

    current, skipped = Moved("progress.current"), Moved("progress.skipped")

    @classmethod
    def of(cls, options: Options, device: torch.device) -> "Run":
        """Return the run of a new module on a device, without a Trainer."""
        critic, conversations = options.critic, options.environment
        algorithm = Algorithm(loss=options.loss, advantages=options.advantages, reduction=options.reduction)
        sources = {"policy": options.policy, "reference": options.reference, "critic": critic and critic.source}
        evaluations, has_environments = evaluations_of(options.evaluation), conversations is not None
        return cls(
            options=options,
            models=RunModels(
                sources=sources,
                temperature=options.sampling.temperature,
                options=options.model,
                processor=processor_of(options.tokenizer),
            ),
            algorithm=algorithm if critic is None else algorithm.replace(value_loss=critic.loss),
            evaluator=Evaluator(evaluations, seed=options.seed, has_environments=has_environments),
            parallel=parallel_of(SingleDeviceStrategy(device=device)),
            workers=None if conversations is None else conversations.pool(),
            ahead=Ahead(options.engine, options.max_staleness),
        )

    def build(self, trainer: Trainer, *, fits: bool) -> "Run":
        """Return the run of a stage, after a check that options, callbacks and data are compatible.

        Args:
            trainer: Trainer of the stage.
            fits: True for a fit.

        Raises:
            ValueError: If options, callbacks and data are not compatible.
        """
        options, parallel, data = self.options, self.parallel, find_data_module(trainer)
        callbacks = [callback for callback in callbacks_of(trainer) if isinstance(callback, RLCallback)]
        corrections = Corrections(callbacks, parallel.collectives)
        algorithm = self.algorithm.replace(corrections=corrections)
        needed = needed_extras(corrections, options.sampling).keys()
        # In evaluations too, although only training reads extras: to change them, vLLM has to be built again.
        options.engine.select_extras(options.engine.capabilities.extras & needed)
        prompts = data_module_of(trainer).prompts_per_rollout if fits else None
        check_run(options, corrections, parallel, prompts_per_rollout=prompts)
        bitwise = self.models.options.bitwise and not options.max_staleness
        if data is not None and fits:
            warn_of_broken_properties(algorithm)
            options.rewards.check_weights()
            self.evaluator.limit_validation(trainer, data)
            known, validates = not logs_itself(trainer, trainer.lightning_module), bool(trainer.limit_val_batches)
            names = run_names(options, corrections, validation=bool(data.validation))
            check_monitors(trainer, names, known=known, validates=validates)
        if data is not None:
            options.rewards.check_workers()
            data.use_tokenizer(options.tokenizer)
            data.chooser = corrections.chooser
        return replace(
            self,
            algorithm=algorithm,
            needs=needs(algorithm, steps_per_rollout=options.steps_per_rollout, rollout_as_old=bitwise),
            configuration=configuration(options, trainer),
            failed_folder=log_folder(trainer) / FOLDER,
        )

    @property
    def corrections(self) -> Corrections:
        """Corrections among the callbacks."""
        return self.algorithm.corrections

    @property
    def metrics(self) -> MetricLog:
        """Metrics that have not been logged yet."""
        return self.log.metrics

    @property
    def device(self) -> torch.device:
        """Device of the policy on this rank."""
        return self.parallel.strategy.root_device

    @property
    def trainer(self) -> Trainer:
        """Trainer of the stage; raises RuntimeError before the first one."""
        return require_part(self.parallel.strategy.lightning_module, "Trainer", "setup").trainer

    @property
    def policy(self) -> PolicyModel:
        """Policy of the module; raises RuntimeError before it is built."""
        return require_part(self.built_policy, "policy", "configure_model")

    @property
    def data(self) -> PromptDataModule:
        """Data module of the Trainer."""
        return data_module_of(self.trainer)

    def skips(self, step_index: StepIndex) -> bool:
        """Return True if the optimizer step is on a skipped rollout, or on the rest of a discarded one."""
        discarded = step_index.rollout == self.progress.discarded and step_index.step > 0
        return discarded or step_index.rollout in self.fault_tolerance.skip_rollouts

    def seed(self, step_index: StepIndex) -> None:
        """Seed every global generator from (run seed, rank, step), so that results do not depend on earlier draws."""
        seed_everything(request_seed(self.options.seed, self.parallel.rank, step_index.index), self.device)

    # Parts that need the policy.

    def build_models(self, policy: PolicyModel | None, mesh: DeviceMesh | None) -> PolicyModel:
        """Build and shard policy and reference, those that are missing; return the policy.

        Args:
            policy: Policy, if there is one.
            mesh: Devices of the strategy.
        """
        engine, data = self.options.engine, find_data_module(self.trainer)
        if self.models.without_trainer:
            # generate() started the engine on the policy itself; under this strategy it may need a replica.
            self.end_stage(engine.end_stage)
        shared = engine.capabilities.shares_policy
        self.built_policy = self.models.build(
            policy,
            self.parallel,
            mesh,
            replica=shared and (self.parallel.sharded or self.options.max_staleness > 0),
            reference=self.needs.ref_logprobs,
            data=None if data is None else data.fingerprint,
        )
        return self.built_policy

    def build_environments(self, data: PromptDataModule | None) -> None:
        """Build the environments for the policy; with data, check that its prompts and the chat template fit them."""
        options, model = self.options, self.policy.model
        if options.environment is not None:
            self.environments = options.environment.build(
                model,
                options.tokenizer,
                engine_length=options.engine.max_length,
                close=with_eos(options.sampling, model, options.tokenizer).eos_token_ids or (),
                data=data,
                seed=options.seed,
                workers=self.workers,
            )
            if data is not None:
                data.limit(self.environments.first_length)

    @property
    def collector(self) -> Collector:
        """Collector that generates and scores samples."""
        options, has_trainer = self.options, self.parallel.strategy.lightning_module is not None
        return Collector(
            engine=options.engine,
            tokenizer=options.tokenizer,
            rewards=options.rewards,
            sampling=self.sampling,
            group_size=options.group_size,
            seed=options.seed,
            corrections=self.corrections,
            dtype=torch.promote_types(self.policy.model.dtype, torch.float32),
            forward_context=self.parallel.strategy.precision_plugin.forward_context,
            greedy_baseline=self.algorithm.advantages.needs_greedy,
            collectives=self.parallel.collectives,
            rank=self.parallel.rank,
            device=self.device,
            failed_folder=self.failed_folder,
            trainer_state=trainer_state(self.trainer) if has_trainer else None,
            vocabulary=self.policy.vocabulary,
            environments=self.environments,
            needs_logprobs=self.needs.rollout_logprobs,
            needs_roles=f"token_extras/{ROLES}" in self.algorithm.advantages.reads,
            mismatch_every_n_rollouts=options.mismatch_every_n_rollouts,
            ahead=self.ahead,
            skipped=self.fault_tolerance.skip_rollouts,
            phase=self.log.times.phase,
            model=self.policy.model.config.name_or_path or "",
        )

    def generate(
        self, prompts: Any, *, samples: int | None, sampling: SamplingParams | None, temperature: float | None
    ) -> Any:
        """Answer prompts, as :meth:`RLLightningModule.generate`."""
        if self.models.without_trainer and self.environments is None:
            self.build_environments(None)
        engine, further = self.options.engine, {"samples": samples, "sampling": sampling, "temperature": temperature}
        chosen = sampling_for(self.options.sampling, engine, **further)
        self.sync()
        answers = generate(prompts, samples=samples, sampling=chosen, collector=self.collector, model=self.policy.model)
        self.sleep_engine()
        return answers

    # The engine.

    @property
    def weights(self) -> WeightSync:
        """Connection that sends the policy's weights to the engine."""
        return WeightSync(
            engine=self.options.engine,
            policy=self.policy,
            models=self.models,
            parallel=self.parallel,
            phase=self.log.times.phase,
        )

    def sync(self, version: int | None = None) -> None:
        """Start the engine if needed, and send it the policy's weights. A collective.

        Waits for rollouts in progress first, unless the engine can receive weights while it generates.

        Args:
            version: Version number of the weights; None for that of the engine.
        """
        engine, weights = self.options.engine, self.weights
        version = max(engine.version, 0) if version is None else version
        if not (engine.capabilities.syncs_while_generating and version > engine.version):
            self.ahead.drain()
        if not (self.engine_started and engine.started):
            weights.start(self.options.tokenizer)
            self.engine_started = True
        weights.send(version)

    def sleep_engine(self) -> None:
        """Put an engine that shares the trainer's device to sleep until the next sync, to free its memory."""
        if self.options.engine.capabilities.sleeps:
            self.options.engine.sleep()

    def end_stage(self, end_engine: Callable[[], None]) -> None:
        """End the engine and the workers of rewards and environments; the next sync restarts them."""
        if self.options.engine.capabilities.concurrent:
            self.options.engine.close()  # cancels rollouts that will not be trained on
        workers = () if self.workers is None else (self.workers,)
        for part in (self.ahead, self.evaluator, self.options.rewards, *workers):
            part.close()
        end_engine()
        self.engine_started = False

    # The state of a fit, which checkpoints store between two optimizer steps.

    def begin_fit(self) -> None:
        """Start a fit from the loaded checkpoint, or drop the rollout of an earlier fit.

        Raises:
            ValueError: If the checkpoint has more rollouts ahead than ``max_staleness``.
        """
        device, collectives, data = self.device, self.parallel.collectives, self.data
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            self.changes = ()
            data.start_rollout()
        self.ahead.close()
        self.ahead.spans = RolloutSpans(self.parallel.rank)
        self.log = StepLog(metrics=MetricLog(device, collectives), times=PhaseTimes(device))
        self.progress = Progress(
            name=(loaded and loaded["run"]) or new_run(),
            corrections=self.corrections,
            ahead=self.ahead,
            options=self.models.options,
            max_over_ranks=partial(collectives.maximum, device=device),
        )
        self.progress.data, self.fault_tolerance.progress = data, self.progress
        if loaded is not None:
            changed, ahead = self.changed_names - OF_UPDATES, loaded["prefetched"]
            if changed:  # the rows of the samples may be gone
                ahead = [{**each, "samples": None} for each in ahead]
            self.metrics.load(loaded["metrics"])
            self.progress.load({**loaded, "prefetched": ahead}, device)
            if changed:
                same_number = all(path != "data.prompts_per_rollout" for path, _, _ in self.changes)
                self.progress.discard_samples(changed, keep_prompts=same_number)
            if self.progress.current is not None and self.models.processor is not None:
                self.models.processor.check_rows(self.progress.current.rollout)
            self.ahead.load(self.progress.prefetched)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's state to a checkpoint, in values that load under ``weights_only=True``. A collective."""
        options, collectives, reference = self.options, self.parallel.collectives, self.models.reference
        hurried = self.trainer.interrupted or bool(CLOCK.stopped_by)
        if hurried or not self.ahead.concurrent:
            self.ahead.drain(hurried=hurried)
        self.progress.write_corrections(checkpoint.get("callbacks", {}))
        if fits := bool(self.trainer.optimizers):  # the data of a later evaluation may be other ones
            data = self.progress.data
            checkpoint[type(data).__qualname__] = data.state_dict()
        state = checkpoint["lightning_rl"] = {
            "run": self.progress.name,
            "fits": fits,
            "configuration": self.configuration,
            "optimizer": None if self.optimizer is None else self.optimizer.description,
            "ranks": collectives.objects({**self.progress.state(), "metrics": self.metrics.state()}),
            "reference_hash": None if reference is None else reference.fingerprint,
            "engines": collectives.objects(options.engine.state_dict()),
        }
        if writes_date(options.tokenizer):
            state["template_date"] = TODAY.moment

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of a checkpoint.

        Raises:
            ValueError: If the checkpoint has other options, another number of ranks or another reference.
        """
        state = checkpoint["lightning_rl"]
        self.models.stepped = True
        self._compare(state)
        warn_of_versions(state["configuration"], self.configuration)
        ranks, saved, reference = state["ranks"], state["reference_hash"], self.models.reference
        fingerprint, world_size = None if reference is None else reference.fingerprint, self.parallel.ranks
        if len(ranks) != world_size:
            raise ValueError(
                f"expected a checkpoint of {world_size} ranks, got one of {len(ranks)}: resume with as many devices"
            )
        if fingerprint is not None and saved is not None and saved != fingerprint:
            raise ValueError(
                f"expected the reference of the checkpoint ({saved}), got another one ({fingerprint}): pass the "
                "reference= and policy= that the run began with"
            )
        recorded = state["configuration"]["module"]["model"]["init_args"]["max_tokens_per_microbatch"]
        mine = ranks[self.parallel.rank]
        version = state["configuration"]["versions"]["lightning_rl"]
        budget = mine["budget"] or (recorded, recorded)
        self.loaded = {**mine, "budget": budget, "version": version, "run": state["run"]}
        self.options.engine.load_state_dict(state["engines"][self.parallel.rank] if "engines" in state else {})
        changed = [path.partition(".")[2] for path, _, _ in self.changes if path.startswith("corrections.")]
        rows = checkpoint.get(type(self.data).__qualname__, {})
        if any(path.startswith("data.prompts.") for path, _, _ in self.changes):  # rows have other numbers
            changed += [callback.name for callback in self.corrections.contributors("choose_rows")]
            rows = {}
        self.data.load_rows(rows)  # prompts of rollouts ahead need them, before some strategies restore data modules
        self.corrections.reset(checkpoint.get("callbacks", {}), changed)

    def compare(self, saved: Mapping[str, Any]) -> OptimizerChange | None:
        """Compare the options in a checkpoint with those of the run; return the change of the optimizer, if any.

        Args:
            saved: State of the module in the checkpoint, with ``configuration`` and ``optimizer``.

        Raises:
            ValueError: If an option differs that ``allow_config_changes`` does not name, or if the checkpoint does not
                describe its optimizer, which changed.
        """
        self._compare(saved)
        changed, now = self.changed_names & {"optimizer", "lr_scheduler"}, cast(ConfiguredOptimizer, self.optimizer)
        before: Mapping[str, Any] | None = saved.get("optimizer")
        if before is None:
            if changed:
                raise ValueError(
                    "expected a checkpoint that states the options of its optimizer, got one of an earlier version: "
                    f"resume without a change of {' and '.join(sorted(changed))}, or start a new run from its weights"
                )
            return None
        differences, other_rates = option_changes(before, now.description), rate_changes(before, now.description)
        refuse_differences([*differences, *other_rates], self.fault_tolerance.allow_config_changes)
        paths = [path for path, _, _ in differences]
        return OptimizerChange.of(before, now, paths, schedule="lr_scheduler" in changed or bool(other_rates))

    def _compare(self, saved: Mapping[str, Any]) -> None:
        """Compare the configuration in a checkpoint with that of the run."""
        self.corrections.states()  # of before the load
        allowed = self.fault_tolerance.allow_config_changes
        self.changes = check_resume(saved["configuration"], self.configuration, allowed)

    @property
    def changed_names(self) -> set[str]:
        """Names of the options that differ from the checkpoint."""
        return {path.partition(".")[0] for path, _, _ in self.changes}


def require_part(part: PartT | None, name: str, hook: str) -> PartT:
    """Return a part that a hook of the module builds."""
    if part is None:
        raise RuntimeError(
            f"expected a run with a {name}, got one before {hook}: call fit, validate, test or "
            "predict of a Trainer first"
        )
    return part


def run_of(trainer: Trainer) -> Run:
    """Return the run of a Trainer's module."""
    return cast(Any, trainer.lightning_module).run


def trainer_state(trainer: Trainer) -> TrainerState:
    """Return the progress of a fit as a ``TrainerState``, for reward functions written for TRL."""
    batches, passed = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
    share = passed / batches if 0 < batches < math.inf else 0.0
    return TrainerState(
        global_step=trainer.global_step, max_steps=trainer.max_steps, epoch=trainer.current_epoch + min(share, 1.0)
    )
