"""RLLightningModule: the stages of a rollout as hooks of a LightningModule, and nothing that bends the signal."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.advantages import Estimator, RowFunction, resolve_advantages
from lightning_rl.data import PromptBatch, PromptDataModule, Ticket, TicketLoader, prompt_stream_of
from lightning_rl.generation import Engine, TransformersEngine, request_seed
from lightning_rl.hooks import Contributions, LossView, RLCallback
from lightning_rl.losses import DEFAULT_VALUE_LOSS, PolicyLoss, ValueFunction, resolve_loss
from lightning_rl.metrics import RunningStats, callbacks_of, global_values, log_monitored, log_row
from lightning_rl.objective import Objective
from lightning_rl.policy import Microbatch, PolicyModel, Scorer
from lightning_rl.policy.build import (
    ModelSource,
    TokenizerSource,
    build_policy,
    build_reference,
    build_tokenizer,
    eos_ids_of,
    longest_prompt,
)
from lightning_rl.rewards import Reward, Rewards
from lightning_rl.schedules import FUSED_ADAMW, OptimizerBuilder, SchedulerBuilder
from lightning_rl.signal.reductions import Reduction, resolve_reduction
from lightning_rl.stages.checks import (
    check_entropy,
    check_estimator,
    check_positive,
    check_ratios,
    check_reads,
    check_sizes,
    check_whole_rollouts,
)
from lightning_rl.stages.collect import Collector
from lightning_rl.stages.draw import Drawer
from lightning_rl.stages.generators import seed_everything
from lightning_rl.stages.held import Held
from lightning_rl.stages.run_state import RunState
from lightning_rl.stages.signal import validation_metrics
from lightning_rl.stages.update import StepGradient, accumulated

# Lightning advises to save the weights from before the optimizer step, which is not what a checkpoint is for here.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")


class RLLightningModule(LightningModule):
    """Trains a language model with reinforcement learning: one optimizer step per ``training_step``.

    A rollout is drawn in ``on_train_batch_start`` and serves ``steps_per_rollout`` = minibatches x epochs optimizer
    steps. Corrections are callbacks of the Trainer; without any, what is left is the chosen loss with the chosen
    estimator.

    Args:
        policy: name or path of a causal language model, or a callable that builds one.
        rewards: ``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, one or several,
            or a mapping from names to them.
        reward_weights: what each reward is multiplied with; 1 by default, 0 to log only.
        advantages: an Estimator, a function of (scores, groups, rewarded), or a known name.
        loss: a PolicyLoss, a function of a LossView, or a known name.
        reduction: how tokens are weighed: a function or a known name.
        reference: the frozen policy that corrections compare with; by default a copy of the policy before its first
            step, made only if something reads ``ref_logprobs``.
        critic: None, ``"shared"`` for a value head on the policy's hidden states, or a model like ``policy``.
        engine: generates; by default the policy itself through transformers.
        tokenizer: by default the one that lies beside a policy given by name.
        optimizer: from a list of parameter groups to an optimizer; fused AdamW with lr 1e-6 by default.
        lr_scheduler: from the optimizer to a scheduler that counts optimizer steps, such as ``warmup_then_linear``.
        group_size: samples of each prompt.
        minibatches: optimizer steps per pass over a rollout; a group is never split.
        epochs: passes over a rollout.
        temperature: of sampling and of every log-probability, above 0.
        max_new_tokens: most tokens of a response.
        eos_token_ids: ids that end a response; by default those of the generation config and of the tokenizer.
        stop: strings that end a response.
        token_budget: most tokens of a microbatch; changes memory and speed, never a result.
        packing: whether microbatches go through the model without padding.
        engine_logprobs: whether the engine returns log-probabilities; None for when something reads them.
        entropy_coef: what the entropy bonus is multiplied with.
        value_coef: what the critic's loss is multiplied with.
        value_loss: of the critic at each token: a ValueLoss or a function (values, old_values, returns) -> [b, T].
        max_grad_norm: what the gradient norm is clipped to; None for no clipping.
        seed: of the run; every random number follows from it.

    Raises:
        ValueError: at construction if an argument is out of range or a name unknown; at setup if arguments, callbacks
            or data do not fit together. The message says what to change.
    """

    def __init__(
        self,
        policy: ModelSource,
        rewards: Reward | Sequence[Reward] | Mapping[str, Reward],
        *,
        reward_weights: Sequence[float] | None = None,
        advantages: Estimator | RowFunction | str = "grpo",
        loss: PolicyLoss | Callable[[LossView], Tensor] | str = "ppo",
        reduction: Reduction | str = "token_mean",
        reference: ModelSource | None = None,
        critic: ModelSource | None = None,
        engine: Engine | None = None,
        tokenizer: TokenizerSource | None = None,
        optimizer: OptimizerBuilder = FUSED_ADAMW,
        lr_scheduler: SchedulerBuilder | None = None,
        group_size: int = 8,
        minibatches: int = 1,
        epochs: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int = 256,
        eos_token_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        token_budget: int = 4096,
        packing: bool = True,
        engine_logprobs: bool | None = None,
        entropy_coef: float = 0.0,
        value_coef: float = 1.0,
        value_loss: ValueFunction = DEFAULT_VALUE_LOSS,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        numbers = {"group_size": group_size, "minibatches": minibatches, "epochs": epochs, "temperature": temperature}
        numbers |= {"max_new_tokens": max_new_tokens, "token_budget": token_budget}
        check_positive(**numbers, max_grad_norm=max_grad_norm)
        self._sources = {"policy": policy, "reference": reference, "critic": critic}
        self.rewards = Rewards([rewards] if callable(rewards) else rewards, reward_weights)
        self.estimator, self.loss = resolve_advantages(advantages), resolve_loss(loss)
        self.reduction = resolve_reduction(reduction, max_new_tokens)
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.group_size, self.minibatches, self.epochs = group_size, minibatches, epochs
        self.temperature, self.max_new_tokens, self.stop = temperature, max_new_tokens, tuple(stop)
        self.eos_token_ids = eos_token_ids
        self.token_budget, self.packing, self.engine_logprobs = token_budget, packing, engine_logprobs
        self.entropy_coef, self.value_coef, self.value_loss = entropy_coef, value_coef, value_loss
        self.max_grad_norm, self.seed = max_grad_norm, seed
        self.tokenizer = build_tokenizer(tokenizer, policy)
        self.policy: PolicyModel | None = None
        self.engine = engine or TransformersEngine()
        self.run = RunState()

    @property
    def steps_per_rollout(self) -> int:
        """K, the optimizer steps that a rollout serves."""
        return self.minibatches * self.epochs

    @property
    def prompt_stream(self) -> PromptDataModule:
        """The trainer's data module."""
        return prompt_stream_of(self.trainer)

    @override
    def setup(self, stage: str) -> None:
        """Finds the corrections among the trainer's callbacks and checks that everything fits together."""
        distributed.check_support(self.trainer.strategy)
        critic = self._sources["critic"] is not None
        corrections = [callback for callback in callbacks_of(self.trainer) if isinstance(callback, RLCallback)]
        contributions = self.run.contributions = Contributions(corrections)
        check_ratios(contributions, self.loss)
        check_entropy(contributions, self.entropy_coef)
        check_estimator(contributions, self.estimator, critic=critic, group_size=self.group_size)
        self.run.needs = check_reads(
            contributions, self.loss, self.estimator, engine=self.engine, engine_logprobs=self.engine_logprobs,
            critic=critic, steps_per_rollout=self.steps_per_rollout,
        )  # fmt: skip
        if stage == "fit":
            prompts, world = self.prompt_stream.prompts_per_rollout, self.trainer.world_size
            check_sizes(prompts_per_rollout=prompts, minibatches=self.minibatches, world_size=world)

    @override
    def configure_model(self) -> None:
        """Builds policy and reference once, and checks that the prompts fit the policy."""
        if self.policy is None:
            policy, critic = self._sources["policy"], self._sources["critic"]
            self.policy = build_policy(policy, critic, temperature=self.temperature, packed=self.packing)
        model, vocabulary = self.policy.model, self.policy.model.config.get_text_config().vocab_size
        if self.run.needs.ref_logprobs and self.run.reference is None:
            unmoved = None if self.run.stepped else model
            frozen = build_reference(self._sources["reference"], self._sources["policy"], unmoved, packed=self.packing)
            frozen = cast(PreTrainedModel, self.trainer.precision_plugin.convert_module(frozen))
            self.run.reference = Scorer(frozen, temperature=self.temperature, packed=self.packing)
        self.run.eos_ids = eos_ids_of(model, self.tokenizer, self.eos_token_ids, self.stop)
        self.prompt_stream.connect(self.tokenizer, longest_prompt(model, self.max_new_tokens), vocabulary)

    @override
    def configure_optimizers(self) -> Any:
        """One optimizer for policy and critic, one parameter group each."""
        optimizer = self._optimizer(self._policy.parameter_groups())
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}

    @override
    def on_fit_start(self) -> None:
        """Continues a loaded rollout or drops a stale one."""
        self.run.begin(self.device, packed=self.packing)

    @override
    def on_train_start(self) -> None:
        """Checks that an epoch of tickets holds whole rollouts."""
        check_whole_rollouts(len(cast(TicketLoader, self.trainer.train_dataloader)), self.steps_per_rollout)

    @override
    def on_train_batch_start(self, batch: Ticket, batch_idx: int) -> None:
        """Draws the rollout that the ticket belongs to, unless it is held already."""
        self.run.times.start()
        if self.run.held is not None and self.run.held.cycle == batch.cycle:
            return
        if batch.step != 0:
            where = f"step {batch.step} of rollout {batch.cycle}"
            raise RuntimeError(f"{where} begins without its rollout: resume from a checkpoint, or start a new fit")
        with self.run.times.phase("sync", self.device):
            self._sync(batch.cycle)
        stream, collect = self.prompt_stream, self._collector().collect
        groups = stream.prompts_per_rollout // self.trainer.world_size
        self.run.held, stats = collect(stream.take, groups, cycle=batch.cycle, rank=self.global_rank)
        self.run.metrics.add("rollout", {**stats, **self.run.times.taken()})
        log_monitored(self, global_values(stats, self.device))

    @override
    def training_step(self, batch: Ticket, batch_idx: int) -> dict[str, Tensor]:
        """Makes exactly one optimizer step, or skips it on all ranks; returns what callbacks may want to know."""
        held = self.run.held
        if held is None:
            raise RuntimeError(f"expected a rollout for step {batch.step} of cycle {batch.cycle}, got none")
        held.check_untouched()
        self.key_generators(batch)
        microbatches = held.plan.step(batch.step)
        tokens = sum(len(microbatch.layout.targets) for microbatch in microbatches)
        tokens = int(distributed.global_sum(torch.tensor(tokens, device=self.device)))
        outputs: dict[str, Tensor] = {}
        if tokens:
            with self.run.times.phase("update", self.device):
                gradient = self._accumulated(held, microbatches)
                norm = self._stepped()
            self._measure(gradient, norm, tokens)
            outputs |= {"policy/entropy": gradient.joint("policy/entropy")} if torch.isfinite(norm) else {}
        else:
            self.run.skipped += 1
        self.run.count(held.cycle)
        if batch.step == self.steps_per_rollout - 1:
            self.run.held = None  # before on_train_batch_end, where checkpoints are written
        log_row(self, self.run.metrics, batch.index)
        return outputs

    def _accumulated(self, held: Held, microbatches: tuple[Microbatch, ...]) -> StepGradient:
        objective = Objective(
            loss=self.loss,
            reduction=self.reduction,
            contributions=self.run.contributions,
            entropy_coef=self.entropy_coef,
            value_coef=self.value_coef,
            value_loss=self.value_loss,
        )
        world, strategy = self.trainer.world_size, self.trainer.strategy
        return accumulated(
            held.rollout,
            microbatches,
            self._policy,
            objective,
            global_sum=distributed.global_sum,
            global_concat=distributed.global_concat,
            around=lambda last: distributed.accumulating(strategy, last=last),
            backward=lambda loss: self.manual_backward(loss * world),  # the one place that cancels the mean over ranks
        )

    def _stepped(self) -> Tensor:
        """Steps optimizer and scheduler, or neither if the gradient is not finite; returns the norm before clipping."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        scheduler = cast(LRScheduler | None, self.lr_schedulers())
        norm = distributed.clipped_gradient_norm(self._policy, self.max_grad_norm)
        if self.run.accepts(norm):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        optimizer.zero_grad()
        return norm

    def _measure(self, gradient: StepGradient, norm: Tensor, tokens: int) -> None:
        for stats in gradient.stats:
            self.run.metrics.add("microbatch", stats)
        optimizer = cast(LightningOptimizer, self.optimizers())
        measured = gradient.measured(
            self.trainer.world_size,
            norm=norm,
            optim__lr=optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens / self.run.times.elapsed(),
        )
        self.run.metrics.add("step", measured | self.run.times.taken())

    def key_generators(self, ticket: Ticket) -> None:
        """Seeds every global generator from (run seed, rank, ticket), so that nobody else's draws change anything."""
        seed_everything(request_seed(self.seed, self.global_rank, ticket.index), self.device)

    @override
    def on_validation_start(self) -> None:
        """Gives the engine the weights that are evaluated."""
        self.run.validation = RunningStats().to(self.device)
        self._sync(max(self.engine.version, 0))

    @override
    @torch.no_grad()
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Scores one greedy completion of each prompt."""
        mine = batch.prompts[self.global_rank :: self.trainer.world_size]
        rollout = self._collector().drawer.sample(mine, 0, group_size=1, temperature=0.0)
        self.run.validation.update(validation_metrics(rollout))

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs what the validation found, over all ranks."""
        for name, value in self.run.validation.figures().items():
            self.log(name, value, prog_bar=name == "val/reward/task", batch_size=1)

    def complete(self, prompts: Sequence[Any], *, temperature: float = 0.0) -> list[str]:
        """The policy's answer to each prompt, in any form that PromptDataModule takes; greedy by default."""
        self._sync(max(self.engine.version, 0))
        stream = PromptDataModule(list(prompts), 1, shuffle=False)
        stream.connect(self.tokenizer, None)
        drawer = self._collector().drawer
        completions = drawer.completed(drawer.requests(stream.take(len(prompts)), 0, 1, temperature))
        return [drawer.text(completion.token_ids) for completion in completions]

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds every rank's rollout in progress, counters and unlogged metrics."""
        reference = self.run.reference
        checkpoint["lightning_rl"] = {
            "ranks": distributed.gathered_objects(self.run.state()),
            "reference_hash": None if reference is None else reference.fingerprint,
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's part, which comes to life when fit starts; elsewhere only the weights count."""
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        self.run.load(checkpoint["lightning_rl"], rank=self.global_rank, world_size=self.trainer.world_size)

    @override
    def teardown(self, stage: str) -> None:
        """Closes the engine."""
        self.engine.close()
        self.run.engine_started = False

    @property
    def _policy(self) -> PolicyModel:
        if self.policy is None:
            raise RuntimeError("expected a policy, but configure_model has not run: fit or validate first")
        return self.policy

    def _sync(self, version: int) -> None:
        if not self.run.engine_started:
            self.engine.start(self._policy.model, self.tokenizer)
            self.run.engine_started = True
        self.engine.load_weights(distributed.full_parameters(self._policy.model), version)

    def _collector(self) -> Collector:
        run, precise = self.run, self.trainer.precision_plugin.forward_context
        drawer = Drawer(
            engine=self.engine,
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            contributions=run.contributions,
            group_size=self.group_size,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            eos_ids=run.eos_ids,
            stop=self.stop,
            seed=self.seed,
            logprobs=run.needs.rollout_logprobs,
            dtype=torch.promote_types(self._policy.model.dtype, torch.float32),
            generating=precise,
            greedy_baseline=self.estimator.needs_greedy,
        )
        return Collector(
            drawer=drawer,
            policy=self._policy,
            reference=run.reference,
            estimator=self.estimator,
            contributions=run.contributions,
            old=run.needs.old_logprobs,
            minibatches=self.minibatches,
            token_budget=self.token_budget,
            packed=self.packing,
            precise=precise,
            times=run.times,
            device=self.device,
        )
