"""A vision-language model learns to name the color of a square in a picture, on a laptop.

    python recipes/vision.py --tiny --seed 1

Every option is a keyword of `main`; to change anything else, copy this file. The task is `vision_task.py`.
"""

from typing import TYPE_CHECKING, Any

from command_line import call

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def main(
    policy: str = "Qwen/Qwen2.5-VL-3B-Instruct",
    rollouts: int = 40,
    prompts: int = 16,
    learning_rate: float = 1e-6,
    seed: int = 0,
    accelerator: str = "auto",
) -> "Trainer":
    """Train on 8 answers to each picture of a rollout; print greedy accuracy on held-out pictures before and after.

    Args:
        policy: Name or folder of a vision-language model; ``tiny`` for a random one of the task.
        rollouts: Number of rollouts.
        prompts: Number of pictures per rollout.
        learning_rate: Learning rate of AdamW.
        seed: Random seed.
        accelerator: Accelerator of Lightning: auto, cpu or gpu.
    """
    from functools import partial  # imports inside, so that --help is fast
    from operator import eq

    import vision_task as task
    from learning_report import report
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim import AdamW
    from transformers import AutoProcessor

    from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams, warmup_then_linear
    from lightning_rl.reporting import RolloutSummary, RunReport

    small = policy == "tiny"
    held_out = task.color_rows(128, seed=10_000)
    module = RLLightningModule(
        policy=partial(task.warm_started_policy, seed) if small else policy,
        tokenizer=task.color_processor() if small else AutoProcessor.from_pretrained(policy),
        rewards=task.color_named,
        sampling=SamplingParams(max_new_tokens=4),
        optimizer=partial(AdamW, lr=learning_rate, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(min(10, rollouts // 2), rollouts),
        seed=seed,
    )
    data = PromptDataModule(task.color_rows(rollouts * prompts, seed=seed), prompts, validation=held_out, seed=seed)
    trainer = Trainer(
        accelerator=accelerator, max_epochs=1, num_sanity_val_steps=0, log_every_n_steps=1,
        logger=CSVLogger("runs", "vision"), val_check_interval=min(10, rollouts),
        callbacks=[RolloutSummary(), RunReport()],
    )  # fmt: skip
    with report(trainer, module, data, rows=held_out, right=eq, title="Colors"):
        trainer.fit(module, data)
    return trainer


def tiny() -> dict[str, Any]:
    """Return the options of ``--tiny``."""
    return {"policy": "tiny", "rollouts": 120, "prompts": 32, "learning_rate": 1e-3, "accelerator": "cpu"}


if __name__ == "__main__":
    call(main, tiny)
