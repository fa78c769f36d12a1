"""Samples until a tiny policy sorts lists of ten levels, with prompts drawn uniformly and by ``Curriculum("level")``.

    python benchmarks/curriculum.py
    python benchmarks/curriculum.py --seeds [0]

The level of a list is its length, from 1 to 10. The policy is warm-started on sorted lists up to level 8, and mostly on
one pass of bubble sort above, so that most prompts are too easy. Samples are counted until the greedy accuracy on 200
held-out lists, equally many of each level, is .9.
"""

import copy
import logging
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, Trainer
from measure import Report
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

from lightning_rl import PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.callbacks import Curriculum

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import sorting_task as task

DIGITS, LEVELS, EASY = "01234567", 10, 8
WARM_START, SORTED = 1500, 0.1  # supervised steps, and share of sorted targets above the easy levels
GOAL, PROMPTS, GROUP = 0.9, 10, 8  # accuracy, prompts per rollout, samples per prompt


def lists(number: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of lists, level after level."""
    draw, rows = Random(seed), []
    for place in range(number):
        digits = draw.choices(DIGITS, k=1 + place % LEVELS)
        rows.append({"prompt": " ".join([*digits, ">"]), "answer": " ".join(sorted(digits)), "level": len(digits)})
    return rows


def warm_started(seed: int) -> Qwen2ForCausalLM:
    """Return a policy that sorts most lists up to level 8, and few of the others."""
    config = Qwen2Config(
        vocab_size=len(task.WORDS), hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=4, bos_token_id=None, eos_token_id=task.EOS, pad_token_id=task.PAD,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    optimizer, draw = AdamW(model.parameters(), lr=2e-3, weight_decay=0.0), Random(1000 + seed)
    for _ in range(WARM_START):
        level, batch = 1 + draw.randrange(LEVELS), []
        for _ in range(64):
            digits = draw.choices(DIGITS, k=level)
            target = sorted(digits) if level <= EASY or draw.random() < SORTED else task.bubble_pass(digits)
            batch.append([task.IDS[word] for word in [*digits, ">", *target, "<eos>"]])
        ids = torch.tensor(batch)
        logits = model(input_ids=ids[:, :-1], logits_to_keep=level + 1, use_cache=False).logits
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), ids[:, level + 1 :].flatten()).backward()
        optimizer.step()
    return model


class Goal(Callback):
    """End of the fit at the goal."""

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = bool(trainer.callback_metrics["val/reward/task"] >= GOAL)


def samples(policy: Qwen2ForCausalLM, seed: int, rollouts: int, *callbacks: Callback) -> int:
    """Return the number of samples until the goal, or that of all rollouts."""
    module = RLLightningModule(
        policy=partial(copy.deepcopy, policy), tokenizer=task.sorting_tokenizer(), rewards=task.exactly_sorted,
        group_size=GROUP, sampling=SamplingParams(max_new_tokens=LEVELS + 2), seed=seed,
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.0),
    )  # fmt: skip
    data = PromptDataModule(lists(4000, seed), PROMPTS, validation=lists(200, 99), seed=seed, epoch_length=rollouts)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, val_check_interval=2, callbacks=[Goal(), *callbacks],
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer.global_step * PROMPTS * GROUP


def main(seeds: Sequence[int] = (0, 1, 2, 3, 4), rollouts: int = 400) -> None:
    """Print the numbers of samples of each seed, and their ratio over all seeds.

    Args:
        seeds: Random seeds.
        rollouts: Maximum number of rollouts.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    report, rows = Report("curriculum"), list[tuple[int, int, int]]()
    for seed in seeds:
        policy = warm_started(seed)
        rows.append((seed, samples(policy, seed, rollouts), samples(policy, seed, rollouts, Curriculum("level"))))
    uniform, chosen = (sum(row[place] for row in rows) for place in (1, 2))
    report.rows(f"samples to {GOAL}", ("seed", "uniform", "curriculum"), rows)
    report.floor("samples of uniform prompts, of those of a curriculum", uniform / chosen, at_least=1.5)
    report.finish()


if __name__ == "__main__":
    auto_cli(main)
