"""RLLightningModule: a LightningModule whose hooks generate rollouts and train on them."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rl.advantages import Estimator, RowFunction
from lightning_rl.base_module import BaseModule
from lightning_rl.corrections import LossView, Stat
from lightning_rl.data import StepIndex
from lightning_rl.distributed import process_maximum
from lightning_rl.environments import Conversations
from lightning_rl.environments.run_environments import EnvironmentSource
from lightning_rl.environments.tools import Tool
from lightning_rl.evaluation import Evaluation
from lightning_rl.generation import Engine, SamplingParams, request_seed
from lightning_rl.losses import Critic, PolicyLoss
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder, fused_adamw
from lightning_rl.policy import ModelOptions, make_plan
from lightning_rl.policy.build import ModelSource, TokenizerSource
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.estimate_signal import check_domains, estimate_signal, exclude_rows
from lightning_rl.rollouts.generator import RolloutGenerator
from lightning_rl.rollouts.logprob_passes import add_logprobs, environment_logprob
from lightning_rl.rollouts.nonfinite import recording_nonfinite
from lightning_rl.rollouts.prefetch import remaining_steps
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.rollouts.sample import staleness
from lightning_rl.rollouts.step_metrics import begin_trace
from lightning_rl.signal.reductions import Reduction, SequenceSumNorm
from lightning_rl.update import StepGradient, accumulate_gradient
from lightning_rl.utils.arguments import refuse_other_names
from lightning_rl.utils.library_hooks import LibraryHooks
from lightning_rl.utils.renamed import RENAMED
from lightning_rl.utils.seeding import seed_everything
from lightning_rl.utils.stop_iteration import refuse_stop_iteration

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
class RLLightningModule(BaseModule):
    """Trains a language model with reinforcement learning: one optimizer step per ``training_step``.

    A rollout is used for ``steps_per_rollout`` = minibatches_per_rollout x epochs_per_rollout optimizer steps.
    ``on_train_batch_start`` prepares it before the first of these steps. Corrections are callbacks of the Trainer.

    ``Trainer.fit`` calls ``configure_callbacks``, ``setup``, ``configure_model``, ``configure_optimizers``,
    ``on_fit_start`` and ``on_train_start``. For each optimizer step, the data module calls ``begin_step``, and the
    Trainer calls ``on_train_batch_start`` and ``training_step``. At the end of the fit, the Trainer calls ``teardown``.
    This class defines the hooks of each step. Its base class :class:`BaseModule` defines all other hooks, including
    those of evaluation and checkpoints.

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
        options: Constructor arguments by name; strings such as ``"grpo"`` are replaced by objects.

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
        super().__init__(locals())  # locals() holds only self and the arguments at this point
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
        seed_everything(request_seed(self.seed, self.parallel.rank, step_index.index), self.device)

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
        generator = RolloutGenerator.of(self, number, end)
        ahead = generator.sync()
        samples = generator.generate(ahead)
        self.show_sample(samples.rows, number)
        groups = generator.reward(samples)
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
            plan = plan_of(rollout, minibatches=self.minibatches_per_rollout)
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


def _warn_without_gradient(step: StepGradient) -> None:
    if names := sorted({name for name, is_not_zero in step.untrained if is_not_zero}):
        warnings.warn(
            f"expected a gradient of {' and '.join(names)}, got none, so it trains nothing: compute it from "
            "view.logprobs without detach(), .data, .item() or no_grad",
            stacklevel=2,
        )
