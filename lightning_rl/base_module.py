"""BaseModule: parts of a run, and the hooks around its training: setup, checkpoints, engine, evaluation, export."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl import setup_checks
from lightning_rl.algorithm import Algorithm
from lightning_rl.checkpointing import FaultTolerance, LostCodeError, OptimizerChange, restore_module, write_pretrained
from lightning_rl.configuration import BESIDE, configuration
from lightning_rl.corrections import Corrections, RLCallback
from lightning_rl.data import PromptDataModule, StepIndex, data_module_of, find_data_module
from lightning_rl.distributed import Parallel, parallel_of, process_count, unwrapped_name
from lightning_rl.environments import Conversations
from lightning_rl.environments.outcome import REWARD_COLUMNS
from lightning_rl.environments.run_environments import RowCheck
from lightning_rl.evaluation.evaluation import evaluations_of
from lightning_rl.evaluation.evaluator import PREDICT, TEST, VAL, Evaluator
from lightning_rl.evaluation.generate import generate, sampling_for
from lightning_rl.evaluation.loader import EvaluationBatch, EvaluationLoader
from lightning_rl.evaluation.questions import Questions, with_eos
from lightning_rl.evaluation.records import Record
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.generation.weights.weight_sync import WeightSync
from lightning_rl.losses import Critic, ValueLoss
from lightning_rl.monitors import RunNames, check_monitors, check_names, logs_itself, warn_without_validation
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import max_prompt_length
from lightning_rl.policy.run_models import RunModels
from lightning_rl.processes.timeouts import CLOCK
from lightning_rl.rewards import Rewards
from lightning_rl.rewards.reward_failures import FOLDER
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.first_sample import first_sample
from lightning_rl.rollouts.generator import generates_concurrently
from lightning_rl.rollouts.memory_estimate import checkpointing_that_fits, token_budget
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.rollouts.state import RunState, trainer_state
from lightning_rl.rollouts.step_metrics import StepMetrics
from lightning_rl.rollouts.zero_gradient import StopOnZeroGradient
from lightning_rl.run_spec import RunSpec, check_run, needed_extras, needs
from lightning_rl.serialization import describe
from lightning_rl.utils.inspection import refuse_inspection
from lightning_rl.utils.library_hooks import check_overrides
from lightning_rl.utils.stop_iteration import refuse_stop_iteration
from lightning_rl.utils.template_date import TODAY, now, writes_date
from lightning_rl.utils.trainer import add_first, add_missing, callbacks_of, disable_bar, log_folder

PROMPTS_CHECKED = 32


class BaseModule(LightningModule):
    """Parts of a run, and every hook except those that generate rollouts and train on them.

    Args:
        arguments: Arguments of the constructor of :class:`RLLightningModule` by name, and ``self``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        check_overrides(self)
        given = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
        self.options = options = setup_checks.resolve_options(given)
        self.rewards: Rewards = options["rewards"]
        self.critic: Critic | None = options["critic"]
        self.engine: Engine = options["engine"]
        self.sampling: SamplingParams = options["sampling"]
        self.tokenizer: PreTrainedTokenizerBase | None = options["tokenizer"]
        self.group_size: int = options["group_size"]
        self.minibatches_per_rollout: int = options["minibatches_per_rollout"]
        self.epochs_per_rollout: int = options["epochs_per_rollout"]
        self.max_staleness: int = options["max_staleness"]
        self.mismatch_every_n_rollouts: int = options["mismatch_every_n_rollouts"]
        self.max_grad_norm: float | None = options["max_grad_norm"]
        self.seed: int = options["seed"]
        self.conversation_options: Conversations | None = options["environment"]
        self.environment_factories = {} if self.conversation_options is None else self.conversation_options.factories
        self.environment_workers = None if self.conversation_options is None else self.conversation_options.pool()
        parts = {name: options[name] for name in ("loss", "advantages", "reduction")}
        self.algorithm = Algorithm(**parts, value_loss=ValueLoss() if self.critic is None else self.critic.loss)
        sources = {"policy": options["policy"], "reference": options["reference"]}
        sources["critic"] = None if self.critic is None else self.critic.source
        self.models = RunModels(sources=sources, temperature=self.sampling.temperature, options=options["model"])
        self.policy: PolicyModel | None = None
        self.fault_tolerance, self.run = FaultTolerance(), RunState()
        evaluations = evaluations_of(options["evaluation"])
        self.evaluator = Evaluator(evaluations, seed=self.seed, has_environments=bool(self.environment_factories))
        self._parallel: Parallel | None = None
        self.shows_sample = False
        self.lost_code: dict[str, str] = {}

    # Parts of a run.

    @property
    def steps_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches_per_rollout * self.epochs_per_rollout

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
    def sampler(self) -> Sampler:
        """Sampler that generates and scores samples, with the options of this run."""
        return Sampler.of(self, None if self._trainer is None else trainer_state(self.trainer))

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
        self.parallel.check(self.max_grad_norm)
        setup_checks.check_changes(self.fault_tolerance.allow_config_changes, (*self.options, *BESIDE))
        if writes_date(self.tokenizer):
            TODAY.moment = self.parallel.collectives.objects(now())[0]
        callbacks = [callback for callback in callbacks_of(self.trainer) if isinstance(callback, RLCallback)]
        corrections = self.run.corrections = Corrections(callbacks, self.parallel.collectives)
        self.algorithm = self.algorithm.replace(corrections=corrections)
        needed = needed_extras(corrections, self.sampling).keys()
        # In evaluations too, although only training reads extras: to change them, vLLM has to be built again.
        self.engine.select_extras(self.engine.capabilities.extras & needed)
        check_run(RunSpec.of(self, fits=stage == "fit"))
        bitwise = self.models.options.bitwise and not self.max_staleness
        self.run.needs = needs(self.algorithm, steps_per_rollout=self.steps_per_rollout, rollout_as_old=bitwise)
        if stage == "fit":
            self.rewards.check_weights()
            self.evaluator.limit_validation(self.trainer, self.data_module)
            known, validates = not logs_itself(self.trainer, self), bool(self.trainer.limit_val_batches)
            check_monitors(self.trainer, self._run_names(), known=known, validates=validates)
        self.run.failed_folder = log_folder(self.trainer) / FOLDER
        if (data := find_data_module(self.trainer)) is not None:
            data.use_tokenizer(self.tokenizer)
        self.run.configuration = configuration(self, self.trainer)
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.run.configuration)

    @override
    def configure_model(self) -> None:
        """Build and shard policy and reference once, and check that the prompts fit the policy."""
        if self.models.without_trainer:
            # generate() started the engine on the policy itself; under this strategy it may need a replica.
            self._end_stage(self.engine.end_stage)
        data, sharded = find_data_module(self._trainer), self.parallel.sharded
        with torch.device("cpu"):  # Lightning sets the accelerator as default device; the strategy moves the model
            self.policy = self.models.build(
                self.policy,
                self.parallel,
                self.device_mesh,
                replica=self.engine.capabilities.shares_policy and (sharded or self.max_staleness > 0),
                reference=self.run.needs.ref_logprobs,
                data=None if data is None else data.fingerprint,
            )
            self._encode_prompts(self.policy, data)
            self._build_environments(data)

    def _run_names(self) -> RunNames:
        """Return the names of which the metrics of a fit consist."""
        evaluations = [one for one in self.evaluator.evaluations if "val" in one.stages]
        parts = {
            "environment": self.environment_factories,
            "critic": self.critic,
            "max_staleness": self.max_staleness,
            "validation": self.data_module.validation,
        }
        return RunNames(
            placeholders={
                "<function>": self.rewards.sources,
                "<callback>": [callback.name for callback in self.run.corrections.callbacks],
                "<name>": [evaluation.name for evaluation in evaluations],
            },
            lacking=[name for name, part in parts.items() if not part],
            shares=[f"val/{one.name}/{share}" for one in evaluations for share in one.shares],
            unlogged=self.run.corrections.unlogged_metrics(),
            rising=[name for name, (_, weight) in self.rewards.sources.items() if weight > 0],
        )

    def _encode_prompts(self, policy: PolicyModel, data: PromptDataModule | None) -> None:
        """Encode the prompts of training and evaluation, and check that they fit the policy."""
        sampling = self.run.sampling = with_eos(self.sampling, policy.model, self.tokenizer)
        check = RowCheck(tuple(self.environment_factories)) if self.environment_factories else None
        if data is not None:
            longest = max_prompt_length(policy.model, sampling.max_new_tokens)
            data.connect(self.tokenizer, longest, policy.vocabulary, check)
            for model in (policy, self.models.reference):
                if model is not None:
                    model.check_windows(data.max_prompt_length() + sampling.max_new_tokens)
        options: dict[str, Any] = {"sampling": sampling, "rewards": self.rewards, "check": check}
        evaluated = self.evaluator.encode(policy.model, self.tokenizer, **options)
        for one in (sampling, *(questions.sampling for questions in evaluated)):
            setup_checks.check_eos(frozenset(one.eos_token_ids or ()), policy.vocabulary)
        used = [(sampling, data.first(), data.template_options)] if data is not None else []
        used += [(questions.sampling, next(iter(questions.prompts), None), {}) for questions in evaluated]
        setup_checks.warn_of_eos(self.tokenizer, used)
        self._check_columns(data, evaluated)
        if data is not None:
            setup_checks.warn_of_prompts(data.prompts.examples(PROMPTS_CHECKED), self.tokenizer, sampling)

    def _check_columns(self, data: PromptDataModule | None, evaluated: Sequence[Questions]) -> None:
        """Check that the prompts of the stage, which are encoded, have the columns that the rewards read."""
        stage, environments = self.trainer.state.fn, REWARD_COLUMNS if self.environment_factories else ()
        used = [(f"evaluation {one.name}: ", one.rewards, one.columns) for one in evaluated]
        if data is not None and data.validation is not None:
            used.append(("validation=: ", self.rewards, data.validation.columns))
        used = [] if stage == TrainerFn.PREDICTING else used
        if data is not None and stage == TrainerFn.FITTING:
            used.append(("", self.rewards, data.prompts.columns))
        for where, rewards, columns in used:
            try:
                rewards.check_columns((*columns, *environments))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}{error}") from error

    def _build_environments(self, data: PromptDataModule | None) -> None:
        """Build the environments for the policy; with data, check that its prompts and the chat template fit them."""
        if self.conversation_options is not None:
            model, length = self.required_policy.model, self.engine.max_length
            close = with_eos(self.sampling, model, self.tokenizer).eos_token_ids or ()
            options: dict[str, Any] = {"data": data, "seed": self.seed, "workers": self.environment_workers}
            self.run.environments = self.conversation_options.build(
                model, self.tokenizer, engine_length=length, close=close, **options
            )
            if data is not None:
                data.limit(self.run.environments.first_length)

    @override
    def configure_optimizers(self) -> Any:
        """Return one optimizer for policy and critic, with one parameter group each, and its scheduler."""
        groups = self.parallel.optimizer_groups(self.required_policy.parameter_groups())
        builders = self.options["optimizer"], self.options["lr_scheduler"]
        names = {id(one): unwrapped_name(name) for name, one in self.required_policy.named_parameters()}
        built, self.run.optimizer = setup_checks.build_optimizers(
            *builders, groups, names, self.data_module.fit_steps()
        )
        return built

    def show_sample(self, rollout: Rollout, number: int) -> None:
        """Print a prompt and a response of the first rollout of a fit, with its number, on rank zero.

        Control tokens are printed, too.
        """
        if self.shows_sample:
            lines = [f"{name} of rollout {number}, {text}" for name, text in first_sample(rollout, self.tokenizer)]
            uses_template = self.run.environments is not None or setup_checks.is_chat(self.data_module.first())
            if uses_template and writes_date(self.tokenizer):
                lines.append(f"the chat template writes the date of {TODAY.text('%Y-%m-%d')}, which checkpoints keep")
            self.shows_sample = False
            if lines:
                rank_zero_info("\n".join(lines))

    # The state of a fit, which checkpoints store between two optimizer steps.

    @override
    def on_fit_start(self) -> None:
        """Restore the rollout of a checkpoint, or discard the state of an earlier fit."""
        self.run.begin(self.parallel, self.data_module, self.models.options, self.max_staleness)
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
        if self.max_grad_norm is not None:
            self.parallel.clip(self.required_policy, optimizer, self.max_grad_norm)
        self.run.stepping = True

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's current and prefetched rollouts, counters and unlogged metrics."""
        hurried = self.trainer.interrupted or bool(CLOCK.stopped_by)
        if hurried or not generates_concurrently(self.engine, self.max_staleness):
            self.run.prefetcher.drain(hurried=hurried)
        self.run.write_corrections(checkpoint.get("callbacks", {}))
        saved = checkpoint.pop(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if further := {name: value for name, value in saved.items() if name not in self.options}:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = further  # the options are in the configuration
        checkpoint["lightning_rl"] = self.run.state(self.parallel.collectives, self.models.reference)
        checkpoint["lightning_rl"]["engines"] = self.parallel.collectives.objects(self.engine.state_dict())
        if writes_date(self.tokenizer):
            checkpoint["lightning_rl"]["template_date"] = TODAY.moment

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load this rank's state for a fit; other stages use the weights alone."""
        state = setup_checks.check_checkpoint(checkpoint)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        setup_checks.check_whole_checkpoint(checkpoint)
        self.models.stepped = True
        if (moment := state.get("template_date")) is not None and writes_date(self.tokenizer):
            TODAY.moment = moment
            self._encode_prompts(self.required_policy, self.data_module)
        self.run.load(state, self.parallel, self.models.reference, self.fault_tolerance.allow_config_changes)
        self.engine.load_state_dict(state["engines"][self.parallel.rank] if "engines" in state else {})
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
        if not (self.engine.capabilities.syncs_while_generating and version > self.engine.version):
            self.run.prefetcher.drain()
        weight_sync = self.weight_sync
        if not (self.run.engine_started and self.engine.started):
            weight_sync.start(self.tokenizer)
            self.run.engine_started = True
        weight_sync.send(version)

    @property
    def weight_sync(self) -> WeightSync:
        """Connection that sends the policy's weights to the engine."""
        return WeightSync.of(self)

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
        workers = () if self.environment_workers is None else (self.environment_workers,)
        for part in (self.run.prefetcher, self.evaluator, self.rewards, *workers):
            part.close()
        end_engine()
        self.run.engine_started = False

    @override
    def teardown(self, stage: str) -> None:
        """Release the engine, and restore the Trainer's ``limit_val_batches``."""
        self._end_stage(self.engine.end_stage)
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
        self.sync(max(self.engine.version, 0))

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Generate and score samples for a batch of prompts."""
        self.evaluator.answer(batch, self.sampler)

    test_step = validation_step

    @override
    @refuse_stop_iteration
    @torch.no_grad()
    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Record]:
        """Return a greedy completion of each prompt of the batch, on every rank."""
        return self.evaluator.predict(batch, self.sampler)

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
        write_pretrained(Path(folder), weights, self.models.sources, self.tokenizer, writing=self.global_rank == 0)
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
