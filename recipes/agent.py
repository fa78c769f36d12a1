"""GRPO over several turns: a small language model learns to query its environment, in two minutes on a laptop.

    python recipes/agent.py
    python recipes/agent.py --tiny
    python recipes/agent.py --engine vllm --devices 2 --strategy fsdp2
    python recipes/train.py fit --config recipes/yaml/agent.yaml

A conversation has up to 7 turns; tokens of the environment are part of the row and are not trained. The task is
`trail_task.py`; docs/environments.md shows how to write an environment.
"""

from typing import TYPE_CHECKING, Literal

from command_line import call

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def main(
    engine: Literal["transformers", "vllm"] = "transformers",
    rollouts: int = 30,
    warm_start: int = 180,
    max_staleness: int = 0,
    seed: int = 0,
    accelerator: str = "cpu",
    devices: int = 1,
    strategy: str = "auto",
) -> "Trainer":
    """Train on rollouts of 16 conversations for each of 16 trails; print greedy success on held-out ones.

    Args:
        engine: Engine that generates: the policy itself, or vLLM.
        rollouts: Number of rollouts.
        warm_start: Number of supervised steps before training.
        max_staleness: Number of rollouts generated ahead; lowers the learning rate.
        seed: Random seed.
        accelerator: Accelerator of Lightning: cpu or gpu.
        devices: Number of devices.
        strategy: Strategy of Lightning, such as auto, ddp or fsdp2.
    """
    from functools import partial  # imports inside, so that --help is fast

    import trail_task as task
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim import AdamW

    from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams, VLLMEngine, warmup_then_linear
    from lightning_rl.callbacks import TruncatedIS
    from lightning_rl.environments import Conversations, EnvironmentReward

    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed, warm_start), tokenizer=task.trail_tokenizer(),
        environment=Conversations(task.Trail, max_turns=7, max_turn_tokens=6), rewards=EnvironmentReward(),
        engine=VLLMEngine() if engine == "vllm" else None, group_size=16, advantages="grpo",
        sampling=SamplingParams(max_new_tokens=40, eos_token_ids=task.ENDS),
        optimizer=partial(AdamW, lr=5e-4 / (1 + max_staleness), weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(min(5, rollouts // 2), rollouts), max_staleness=max_staleness, seed=seed,
    )  # fmt: skip
    rows = task.trails(rollouts * 16, seed=seed, exclude=task.held_out_trails())
    data = PromptDataModule(rows, prompts_per_rollout=16, validation=task.held_out_trails(), seed=seed)
    trainer = Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, max_epochs=1, num_sanity_val_steps=0,
        val_check_interval=min(10, rollouts), logger=CSVLogger("runs", "agent"),
        callbacks=[TruncatedIS()] if max_staleness else [],
    )  # fmt: skip
    before = trainer.validate(module, data, verbose=False)[0]["val/reward/task"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["val/reward/task"]
    folder = trainer.log_dir  # a collective
    if trainer.is_global_zero:
        print(f"metrics: {folder}\nsuccess before={before:.3f} after={after:.3f}")  # noqa: T201
    return trainer


if __name__ == "__main__":
    call(main, lambda: {"rollouts": 3, "warm_start": 30})
