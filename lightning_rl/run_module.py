"""RunModule: what a run can do besides training steps: evaluate, answer, save, resume and export."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl import distributed
from lightning_rl.advantages import Estimator
from lightning_rl.data import PromptBatch, PromptDataModule, prompt_stream_of
from lightning_rl.distributed import Parallel
from lightning_rl.generation import Engine, Sampling
from lightning_rl.generation.weights.sync import synchronize
from lightning_rl.metrics import RunningStats
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.build import ModelSource, build_model
from lightning_rl.policy.lora import merged, unwrapped
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.collect import Collector
from lightning_rl.rollouts.sample import Drawer
from lightning_rl.rollouts.signal import validation_metrics
from lightning_rl.rollouts.state import RunState

# Lightning advises to save the weights from before the optimizer step, which is not what a checkpoint is for here.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")


class RunModule(LightningModule):
    """Everything of :class:`lightning_rl.RLLightningModule` that no optimizer step needs."""

    rewards: Rewards
    estimator: Estimator
    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    policy: PolicyModel | None
    run: RunState
    group_size: int
    minibatches: int
    max_staleness: int
    temperature: float
    keep: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]
    token_budget: int
    packing: bool
    seed: int
    sources: dict[str, Any]

    @property
    def prompt_stream(self) -> PromptDataModule:
        """The trainer's data module."""
        return prompt_stream_of(self.trainer)

    @property
    def parallel(self) -> Parallel:
        """What the loop asks of the trainer's strategy."""
        return distributed.parallel_of(self.trainer.strategy)

    @override
    def on_validation_start(self) -> None:
        """Gives the engine the weights that are evaluated."""
        self.run.validation = RunningStats().to(self.device)
        self.sync(max(self.engine.version, 0))

    @override
    @torch.no_grad()
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Scores one greedy completion of each prompt."""
        mine = batch.prompts[self.parallel.rank :: self.parallel.ranks]
        rollout = self.collector().drawer.sample(mine, 0, group_size=1, temperature=0.0)
        self.run.validation.update(validation_metrics(rollout))

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs what the validation found, over all ranks."""
        for name, value in self.run.validation.figures().items():
            self.log(name, value, prog_bar=name == "val/reward/task", batch_size=1)
        self.rest()

    def complete(self, prompts: Sequence[Any], *, temperature: float = 0.0) -> list[str]:
        """The policy's answer to each prompt, in any form that PromptDataModule takes; greedy by default."""
        self.sync(max(self.engine.version, 0))
        stream = PromptDataModule(list(prompts), 1, shuffle=False)
        stream.connect(self.tokenizer, None)
        drawer = self.collector().drawer
        taken = stream.take(len(prompts)) if distributed.draws() else []
        completions = drawer.completed(drawer.requests(taken, 0, 1, temperature))
        self.rest()
        return distributed.from_drawing([drawer.text(completion.token_ids) for completion in completions])

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the policy to a Hugging Face folder, and a critic of its own to ``folder/critic``, from any strategy.

        Every rank calls it; rank 0 writes. Adapters are merged into the weights, and the tokenizer lies beside them.
        The value head, which no Hugging Face class has, is ``folder/critic/value_head.safetensors``.
        """
        weights: dict[str, Tensor] = {}
        for name, weight in self.parallel.full_parameters(self.required_policy):
            if self.global_rank == 0:
                weights[name] = weight.cpu().clone()
        if self.global_rank == 0:
            self._write(Path(folder), weights)
        if distributed.world_size() > 1:
            dist.barrier()

    def _write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        parts = {"model": (folder, "policy"), "critic": (folder / "critic", "critic")}
        for prefix, (place, source) in parts.items():
            own = {name.removeprefix(f"{prefix}."): w for name, w in weights.items() if name.startswith(f"{prefix}.")}
            if own:
                built = build_model(cast(ModelSource, self.sources[source]))
                _load(unwrapped(built) if prefix == "model" else built.base_model, own)
                merged(built).save_pretrained(place)
        if "value_head.weight" in weights:
            (folder / "critic").mkdir(parents=True, exist_ok=True)
            save_file({"weight": weights["value_head.weight"]}, folder / "critic" / "value_head.safetensors")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds every rank's rollout in progress, those in flight, counters and unlogged metrics."""
        self.run.ahead.settle()
        reference = self.run.reference
        checkpoint["lightning_rl"] = {
            "ranks": distributed.global_objects(self.run.state()),
            "reference_hash": None if reference is None else reference.fingerprint,
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's part, which comes to life when fit starts; elsewhere only the weights count."""
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        self.run.load(checkpoint["lightning_rl"], rank=self.parallel.rank, world_size=self.parallel.ranks)
        if self.trainer.strategy.restore_checkpoint_after_setup:
            self.begin()  # on_fit_start has been

    def begin(self) -> None:
        """Continues a loaded run or drops what an earlier fit left behind."""
        self.run.begin(self.device, packed=self.packing, at=self.prompt_stream.at, max_staleness=self.max_staleness)

    @override
    def teardown(self, stage: str) -> None:
        """Closes the engine."""
        self.close_engine()

    def close_engine(self) -> None:
        """Ends what generates and gives its memory back; the next sync starts it again."""
        self.run.ahead.close()
        self.engine.close()
        self.run.engine_started = False

    @property
    def required_policy(self) -> PolicyModel:
        """The policy.

        Raises:
            RuntimeError: if nothing has been built yet.
        """
        if self.policy is None:
            raise RuntimeError("expected a policy, but configure_model has not run: fit or validate first")
        return self.policy

    def sync(self, version: int) -> None:
        """Gives the engine the policy's weights under a version number. Every rank takes part.

        Rollouts in flight are waited for, or their tokens would come from other weights than their version says.
        """
        if not (self.engine.capabilities.syncs_while_generating and version > self.engine.version):
            self.run.ahead.settle()
        if not self.run.engine_started:
            if distributed.world_size() != self.trainer.world_size:
                raise RuntimeError(
                    f"expected the trainer's process group of {self.trainer.world_size} ranks, got one of "
                    f"{distributed.world_size()}: something made a group first, such as an engine built by hand"
                )
            if self.run.replica is not None:
                nn.Module.to(self.run.replica, self.device)
            self.engine.start(self.run.replica or self.required_policy.model, self.tokenizer)
            self.run.engine_started = True
            self.engine.expect(self._policy_weights())
        synchronize(
            self.engine, self._policy_weights(), version, self.required_policy, packed=self.packing,
            context=self._watching,
        )  # fmt: skip

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with self.run.times.phase("canary", self.device), self.trainer.precision_plugin.forward_context():
            yield

    def rest(self) -> None:
        """Lets an engine that shares the device with the trainer give its memory back until the next sync."""
        if self.engine.capabilities.sleeps:
            self.engine.sleep()

    def _policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.parallel.full_parameters(self.required_policy):
            if name.startswith("model."):
                yield name.removeprefix("model."), weight
            del weight  # or it would be held while the next one is gathered

    def collector(self) -> Collector:
        """What makes rollouts, with the options of this run."""
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
            dtype=torch.promote_types(self.required_policy.model.dtype, torch.float32),
            generating=precise,
            greedy_baseline=self.estimator.needs_greedy,
            keep=self.keep,
        )
        return Collector(
            drawer=drawer,
            policy=self.required_policy,
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
            max_staleness=self.max_staleness,
        )


def _load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
