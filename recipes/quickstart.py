"""A small language model learns to sort digits by reinforcement learning, in a few minutes on a laptop.

    python recipes/quickstart.py
    python recipes/quickstart.py --algorithm ppo --engine vllm --seed 1
    python recipes/quickstart.py --devices 2 --strategy fsdp2 --max_staleness 1

Every option is a keyword of `main`; to change anything else, copy this file. The task is `sorting_task.py`.
"""

from typing import TYPE_CHECKING, Any, Literal

from command_line import call

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def main(
    algorithm: Literal["grpo", "ppo"] = "grpo",
    engine: Literal["transformers", "vllm"] = "transformers",
    updates: int = 1,
    rollouts: int = 50,
    max_staleness: int = 0,
    seed: int = 0,
    accelerator: str = "cpu",
    devices: int = 1,
    strategy: str = "auto",
) -> "Trainer":
    """Train on rollouts of 256 responses; print greedy accuracy on held-out lists before and after.

    Args:
        algorithm: GRPO with 8 responses to each of 32 prompts, or PPO with one response to each of 256.
        engine: Engine that generates: the policy itself, or vLLM.
        updates: Number of optimizer steps per rollout.
        rollouts: Number of rollouts.
        max_staleness: Number of rollouts generated ahead.
        seed: Random seed.
        accelerator: Accelerator of Lightning: cpu or gpu.
        devices: Number of devices.
        strategy: Strategy of Lightning, such as auto, ddp or fsdp2.
    """
    from functools import partial  # imports inside, so that --help is fast
    from operator import eq

    import sorting_task as task
    from learning_report import report
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim import AdamW

    from lightning_rl import (
        GAE,
        GRPO,
        PromptDataModule,
        RLLightningModule,
        SamplingParams,
        VLLMEngine,
        warmup_then_linear,
    )
    from lightning_rl.callbacks import NoEOSMask, TruncatedIS
    from lightning_rl.reporting import RolloutSummary

    critic: dict[str, Any] = {"advantages": GAE(), "critic": "shared", "group_size": 1}  # on the policy's hidden states
    options: dict[str, Any] = critic if algorithm == "ppo" else {"advantages": GRPO(), "group_size": 8}
    prompts, held_out = 256 // options["group_size"], task.held_out_prompts()
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed), tokenizer=task.sorting_tokenizer(), rewards=task.exactly_sorted,
        engine=VLLMEngine() if engine == "vllm" else None, sampling=SamplingParams(max_new_tokens=12),
        minibatches_per_rollout=updates,
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(min(5, rollouts // 2) * updates, rollouts * updates),
        max_staleness=max_staleness, seed=seed, **options,
    )  # fmt: skip
    rows = task.sorting_prompts(rollouts * prompts, seed=seed, exclude=held_out)
    data = PromptDataModule(rows, prompts, validation=held_out, seed=seed)
    trainer = Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, max_epochs=1, num_sanity_val_steps=0,
        logger=CSVLogger("runs", "sorting"), log_every_n_steps=1, val_check_interval=min(5, rollouts) * updates,
        callbacks=[NoEOSMask(), RolloutSummary(), *([TruncatedIS()] if max_staleness else [])],
    )  # fmt: skip
    with report(trainer, module, data, rows=held_out, right=eq, title="Sorting"):
        trainer.fit(module, data)
    return trainer


if __name__ == "__main__":
    call(main)
