"""RLLightningModule: the stages of a rollout as hooks of a LightningModule, and nothing that bends the signal."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.advantages import Estimator, RowFunction, resolve_advantages
from lightning_rl.algorithm import Objective
from lightning_rl.checkpointing import Interrupts
from lightning_rl.compatibility import (
    check_coefficients,
    check_counts,
    check_entropy,
    check_estimator,
    check_flags,
    check_pipelining,
    check_positive,
    check_ratios,
    check_reads,
    check_sizes,
    check_whole,
    check_whole_rollouts,
    recorded_names,
)
from lightning_rl.corrections import Contributions, LossView, RLCallback
from lightning_rl.data import Prompt, Ticket, TicketLoader
from lightning_rl.generation import Engine, EngineError, TokenFilter, TransformersEngine, request_seed
from lightning_rl.inspection import stop_in_inspection
from lightning_rl.losses import DEFAULT_VALUE_LOSS, PolicyLoss, ValueFunction, resolve_loss
from lightning_rl.metrics import callbacks_of, global_values, log_for_monitors, log_row
from lightning_rl.optimizers import FUSED_ADAMW, OptimizerBuilder, SchedulerBuilder
from lightning_rl.policy import Microbatch, PolicyModel, Scorer
from lightning_rl.policy.build import (
    ModelSource,
    TokenizerSource,
    build_policy,
    build_reference,
    build_tokenizer,
    eos_ids_of,
    max_prompt_length,
)
from lightning_rl.policy.lora import AdapterOffScorer, adapters_of
from lightning_rl.rewards import Rewards, RewardSource
from lightning_rl.rollouts.held import Held
from lightning_rl.rollouts.prefetch import tickets_left
from lightning_rl.rollouts.sample import Drawer, dealt
from lightning_rl.rollouts.samples import Sampled
from lightning_rl.rollouts.state import RunState
from lightning_rl.run_module import RunModule
from lightning_rl.seeding import seed_everything
from lightning_rl.signal.reductions import Reduction, resolve_reduction
from lightning_rl.update import StepGradient, accumulated


class RLLightningModule(RunModule):
    """Trains a language model with reinforcement learning: one optimizer step per ``training_step``.

    A rollout is drawn in ``on_train_batch_start`` and serves ``steps_per_rollout`` = minibatches x epochs optimizer
    steps. Corrections are callbacks of the Trainer; without any, what is left is the chosen loss with the chosen
    estimator.

    Args:
        policy: name or path of a causal language model, or a callable that builds one.
        rewards: ``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, one or several,
            or a mapping from names to them, or to (reward, weight): 1 by default, 0 to log only.
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
        top_k: draw from this many of the likeliest tokens; 0 for all. With any of these three filters on, the engine
            records the tokens that it kept, and every log-probability and entropy is of the distribution over them.
        top_p: draw from the likeliest tokens up to this probability mass; 1 for all.
        min_p: leave out tokens below this share of the highest probability; 0 for none.
        max_new_tokens: most tokens of a response.
        eos_token_ids: ids that end a response; by default those of the generation config and of the tokenizer.
        stop: strings that end a response.
        token_budget: most tokens of a microbatch; changes memory and speed, never a result.
        packing: whether microbatches go through the model without padding.
        activation_checkpointing: keep only the inputs of the layers and run them again in the backward.
        max_staleness: how many rollouts are generated ahead, while the policy trains on an earlier one; 0 for none.
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
        rewards: RewardSource,
        *,
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
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_new_tokens: int = 256,
        eos_token_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        token_budget: int = 4096,
        packing: bool = True,
        activation_checkpointing: bool = False,
        max_staleness: int = 0,
        engine_logprobs: bool | None = None,
        entropy_coef: float = 0.0,
        value_coef: float = 1.0,
        value_loss: ValueFunction = DEFAULT_VALUE_LOSS,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        counts = {"group_size": group_size, "minibatches": minibatches, "epochs": epochs}
        check_counts(**counts, max_new_tokens=max_new_tokens, token_budget=token_budget)
        check_positive(temperature=temperature, max_grad_norm=max_grad_norm)
        check_coefficients(entropy_coef=entropy_coef, value_coef=value_coef)
        check_whole(max_staleness=max_staleness)
        if isinstance(value_loss, type) or not callable(value_loss):
            raise ValueError(f"expected value_loss to be a ValueLoss or a function, got {value_loss!r}")
        self.sources = {"policy": policy, "reference": reference, "critic": critic}
        self.rewards = Rewards(rewards)
        self.estimator, self.loss = resolve_advantages(advantages), resolve_loss(loss)
        self.reduction = resolve_reduction(reduction, max_new_tokens)
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.group_size, self.minibatches, self.epochs = group_size, minibatches, epochs
        self.temperature, self.max_new_tokens, self.stop = temperature, max_new_tokens, tuple(stop)
        self.keep = TokenFilter(top_k=top_k, top_p=top_p, min_p=min_p)
        self.eos_token_ids, self.max_staleness = eos_token_ids, max_staleness
        self.token_budget, self.packing, self.engine_logprobs = token_budget, packing, engine_logprobs
        self.entropy_coef, self.value_coef, self.value_loss = entropy_coef, value_coef, value_loss
        self.max_grad_norm, self.seed, self.activation_checkpointing = max_grad_norm, seed, activation_checkpointing
        self.tokenizer = build_tokenizer(tokenizer, policy)
        self.policy: PolicyModel | None = None
        self.engine, self.run = engine or TransformersEngine(), RunState()

    @property
    def steps_per_rollout(self) -> int:
        """K, the optimizer steps that a rollout serves."""
        return self.minibatches * self.epochs

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Adds what ends a run in order. Lightning's own checks come later, so flags are refused by our names here."""
        stop_in_inspection(self)
        check_flags(self.trainer)
        known = any(isinstance(callback, Interrupts) for callback in callbacks_of(self.trainer))
        return [] if known else [Interrupts(close=RLLightningModule.close_engine)]

    @override
    def setup(self, stage: str) -> None:
        """Finds the corrections among the trainer's callbacks and checks that everything fits together."""
        self.parallel.check(self.max_grad_norm)
        critic = self.sources["critic"] is not None
        corrections = [callback for callback in callbacks_of(self.trainer) if isinstance(callback, RLCallback)]
        contributions = self.run.contributions = Contributions(corrections)
        check_ratios(contributions, self.loss)
        check_entropy(contributions, self.entropy_coef)
        check_estimator(contributions, self.estimator, critic=critic, group_size=self.group_size)
        self.run.needs = check_reads(
            contributions, self.loss, self.estimator, engine=self.engine, engine_logprobs=self.engine_logprobs,
            critic=critic, steps_per_rollout=self.steps_per_rollout,
        )  # fmt: skip
        self.engine.record(frozenset())
        if stage == "fit":
            self.engine.record(recorded_names(contributions, self.engine, self.keep))
            check_pipelining(contributions, self.loss, engine=self.engine, max_staleness=self.max_staleness)
            prompts, ranks = self.prompt_stream.prompts_per_rollout, self.parallel.ranks
            check_sizes(prompts_per_rollout=prompts, minibatches=self.minibatches, world_size=ranks)

    @override
    def configure_model(self) -> None:
        """Builds policy and reference once, split over the ranks, and checks that the prompts fit the policy."""
        parallel = self.parallel
        with parallel.building():
            built = self._built_policy() if self.policy is None else None
            reference = self._built_reference(built)
        if built is not None:
            self.policy = cast(PolicyModel, parallel.shard(built, built.layers(), self.device_mesh))
        if reference is not None:
            reference.shard(lambda model, layers: parallel.shard_frozen(model, layers, self.device_mesh))
            self.run.reference = reference
        model = self.required_policy.model
        if self.run.needs.ref_logprobs and self.run.reference is None:
            self.run.reference = AdapterOffScorer(self.required_policy, model)
        self.run.eos_ids = eos_ids_of(model, self.tokenizer, self.eos_token_ids, self.stop)
        vocabulary = model.config.get_text_config().vocab_size
        self.prompt_stream.connect(self.tokenizer, max_prompt_length(model, self.max_new_tokens), vocabulary)

    def _built_policy(self) -> PolicyModel:
        built = build_policy(
            self.sources["policy"], self.sources["critic"], temperature=self.temperature, packed=self.packing,
            checkpointing=self.activation_checkpointing,
        )  # fmt: skip
        if (self.parallel.sharded or self.max_staleness) and isinstance(self.engine, TransformersEngine):
            replica = cast(PolicyModel, self.trainer.precision_plugin.convert_module(copy.deepcopy(built)))
            self.run.replica = replica.model.requires_grad_(requires_grad=False)
        return built

    def _built_reference(self, built: PolicyModel | None) -> Scorer | None:
        """A frozen model, if somebody needs one and the policy without its adapters is none."""
        source, policy = self.sources["reference"], built or self.required_policy
        known = self.run.reference is not None or (source is None and bool(adapters_of(policy.model)))
        if not self.run.needs.ref_logprobs or known:
            return None
        split = self.run.stepped or (built is None and self.parallel.sharded)
        frozen = build_reference(source, self.sources["policy"], None if split else policy.model, packed=self.packing)
        return Scorer(frozen, temperature=self.temperature, packed=self.packing)

    @override
    def configure_optimizers(self) -> Any:
        """One optimizer for policy and critic, one parameter group each."""
        optimizer = self._optimizer(self.parallel.optimizer_groups(self.required_policy.parameter_groups()))
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}

    @override
    def on_fit_start(self) -> None:
        """Continues a loaded rollout or drops a stale one."""
        self.begin()

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
        stream, cursor = self.prompt_stream, self.prompt_stream.cursor
        try:
            first = self._landed(batch.cycle) if self.max_staleness else None
            with self.run.times.phase("sync", self.device):
                self.sync(batch.cycle)
            collector, groups = self.collector(), stream.prompts_per_rollout // self.parallel.ranks
            self.run.held, stats = collector.collect(
                stream.take, groups, cycle=batch.cycle, rank=self.parallel.rank, first=first,
                meanwhile=lambda: self._send_ahead(collector.drawer, batch, batch_idx),
            )  # fmt: skip
        except EngineError:
            stream.give_back(batch, cursor)  # so that the checkpoint of Interrupts begins with this rollout
            raise
        self.run.ahead.collected(batch.cycle)
        self.rest()
        self.run.metrics.add("rollout", {**stats, **self.run.times.take()})
        log_for_monitors(self, global_values(stats, self.device))

    def _landed(self, cycle: int) -> Sampled | Sequence[Prompt] | None:
        """What was generated ahead for a rollout."""
        with self.run.times.phase("wait", self.device):
            if self.run.contributions.offering("keep_groups"):
                self.run.ahead.settle()  # groups that a filter drops are drawn again, so the engine has to be free
            return self.run.ahead.landed(cycle)

    def _send_ahead(self, drawer: Drawer, ticket: Ticket, batch_idx: int) -> None:
        """Has the next rollouts generated in the background, as far as the run is known to go."""
        stream, ranks = self.prompt_stream, self.parallel.ranks
        share, end = stream.prompts_per_rollout // ranks, ticket.index + tickets_left(self.trainer, batch_idx)
        for cycle in range(ticket.cycle + 1, ticket.cycle + 1 + self.max_staleness):
            if cycle not in self.run.ahead and cycle * self.steps_per_rollout < end:
                mine = dealt(stream.take(share * ranks), [share] * ranks)[self.parallel.rank]
                self.run.ahead.send(cycle, mine, drawer, self.device)

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
                norm, rate = self._stepped()
            self._measure(gradient, norm, rate, tokens)
            outputs |= {**gradient.parts, "optim/grad_norm": norm}
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
        parallel, policy = self.parallel, self.required_policy
        return accumulated(
            held.rollout,
            microbatches,
            policy,
            objective,
            global_sum=distributed.global_sum,
            global_concat=distributed.global_concat,
            around=lambda last: parallel.accumulating(policy, last=last),
            backward=lambda loss: self.manual_backward(
                loss * parallel.ranks
            ),  # the one place that cancels the mean over ranks
        )

    def _stepped(self) -> tuple[Tensor, float]:
        """Steps optimizer and scheduler, or neither if the gradient is not finite.

        Returns:
            The norm before clipping, and the learning rate of the step.
        """
        optimizer = cast(LightningOptimizer, self.optimizers())
        rate = optimizer.param_groups[0]["lr"]
        scheduler, skipped = cast(LRScheduler | None, self.lr_schedulers()), self.run.skipped
        norm = self.parallel.step(self.required_policy, optimizer, self.max_grad_norm, self.run.accepts)
        if scheduler is not None and skipped == self.run.skipped:
            scheduler.step()
        return norm, rate

    def _measure(self, gradient: StepGradient, norm: Tensor, rate: float, tokens: int) -> None:
        for stats in gradient.stats:
            self.run.metrics.add("microbatch", stats)
        measured = gradient.measured(
            self.parallel.ranks,
            norm=norm,
            optim__lr=rate,
            tokens_per_second=tokens / self.run.times.seconds(),
        )
        self.run.metrics.add("step", measured | self.run.times.take())

    def key_generators(self, ticket: Ticket) -> None:
        """Seeds every global generator from (run seed, rank, ticket), so that nobody else's draws change anything."""
        seed_everything(request_seed(self.seed, self.parallel.rank, ticket.index), self.device)
