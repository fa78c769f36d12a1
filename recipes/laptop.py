"""A language model of 135 million parameters learns to add three numbers by GRPO, on two cores of a laptop.

    make model                    # once: SmolLM2-135M-Instruct into models/, 540 MB
    python recipes/laptop.py
    python recipes/laptop.py --seed 1
    python recipes/laptop.py --ckpt_path runs/addition/version_0/checkpoints/last.ckpt

Every option is a keyword of `main`; to change anything else, copy this file. The task is `addition_task.py`.
Source: Shao et al. 2024 (GRPO), arXiv:2402.03300.
"""

from typing import TYPE_CHECKING

from command_line import call

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def main(
    policy: str = "models/SmolLM2-135M-Instruct",
    rollouts: int = 32,
    seed: int = 0,
    devices: int = 1,
    strategy: str = "auto",
    ckpt_path: str | None = None,
) -> "Trainer":
    """Train on 8 responses to each of 8 prompts per rollout; print accuracy on held-out sums before and after.

    Args:
        policy: Folder of the model.
        rollouts: Number of rollouts, each with one optimizer step.
        seed: Random seed.
        devices: Number of processes.
        strategy: Strategy of Lightning, such as auto, ddp or fsdp2.
        ckpt_path: Checkpoint from which an interrupted run resumes.
    """
    from functools import partial  # imports inside, so that --help is fast
    from pathlib import Path

    from addition_task import addition_prompts, last_number
    from learning_report import report
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim import AdamW

    from lightning_rl import Evaluation, PromptDataModule, RLLightningModule, SamplingParams, warmup_then_linear
    from lightning_rl.reporting import RolloutSummary

    if not Path(policy).is_dir():
        raise SystemExit(f"expected the model in the folder {policy}, which does not exist: make model")
    if ckpt_path is not None and not Path(ckpt_path).exists():
        raise SystemExit(f"expected a checkpoint, got --ckpt_path {ckpt_path}, which does not exist")
    training, held_out = addition_prompts()
    module = RLLightningModule(
        policy=policy, rewards=last_number, advantages="grpo", group_size=8,
        sampling=SamplingParams(max_new_tokens=24), evaluation=Evaluation("sampled", held_out, samples=2),
        optimizer=partial(AdamW, lr=1e-5, weight_decay=0.0, fused=True),
        lr_scheduler=warmup_then_linear(0, rollouts), seed=seed,
    )  # fmt: skip
    data = PromptDataModule(training, prompts_per_rollout=8, validation=held_out, seed=seed)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=rollouts, num_sanity_val_steps=0,
        val_check_interval=8, check_val_every_n_epoch=None, logger=CSVLogger("runs", "addition"), log_every_n_steps=1,
        callbacks=[RolloutSummary(), ModelCheckpoint(every_n_train_steps=8, save_last=True)],
    )  # fmt: skip
    with report(trainer, module, data, rows=held_out, right=last_number.score, title="Adding three numbers"):
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


if __name__ == "__main__":
    call(main)
