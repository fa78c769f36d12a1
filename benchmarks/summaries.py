"""Held-out accuracy of a program that replaces its history by the policy's summary, with and without their training.

    python benchmarks/summaries.py
    python benchmarks/summaries.py --seeds 1

A first call shows a color and requests a summary. A second call, a new context, has the summary alone and requests the
color: reward 1 if the answer is the color. The policy of 0.1 million parameters was trained on demonstrations whose
answer is the color of the summary, and four of five summaries are a random one of 8 colors. Each seed trains twice: on
the tokens of both contexts, and with the tokens of the summaries masked out of the policy loss. The accuracy of sampled
answers, 0.2 to 0.31 before on seeds 0 to 4, has to be at least 0.85 with and at most 0.5 without the tokens of
summaries. Both contexts share all weights, so training on answers alone changes the summaries too. A large ``eps`` is
meant to keep these changes small, as AdamW enlarges small gradients; that it is the cause was not measured.

Source of the ablation: CompactionRL, arXiv:2607.05378.
"""

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import openai
import torch
from jaxtyping import Bool
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from measure import Report
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typing_extensions import override

from lightning_rl import Evaluation, PromptDataModule, RLCallback, RLLightningModule, SamplingParams
from lightning_rl.corrections import LossView
from lightning_rl.environments import Conversations, EnvironmentReward, PolicyEndpoint, Program
from lightning_rl.rollout import turn_numbers

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import tiny_gsm8k
import tiny_tools

COLORS, RANDOM = ("red", "green", "blue", "white", "black", "pink", "brown", "gray"), 0.8
MARKS = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = tiny_gsm8k.TEMPLATE
LESSONS, ROWS = 250, 64
ROLLOUTS, PROMPTS, SAMPLES, HELD_OUT = 14, 8, 8, 32
TRAINED, MASKED = 0.85, 0.5


async def agent(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """Show a color, replace the history by a summary of the policy, and request the color."""
    client = openai_client(model.url).with_options(api_key=model.key)

    async def answer(text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        said = await client.chat.completions.create(model=model.model, messages=messages)
        return said.choices[0].message.content or ""

    summary = await answer(f"shown {row['answer']} summary")
    return float(await answer(f"known {summary} color") == row["answer"])


@cache
def openai_client(url: str) -> openai.AsyncOpenAI:
    """Return a client whose connections all samples share."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="of a sample", max_retries=0)


class SummaryMask(RLCallback):
    """Mask on the policy loss of the first call's tokens, which are the summary."""

    name = "summary_mask"
    reads_at_loss = ("segments",)

    @override
    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        return turn_numbers(view).to(view.logprobs.device) != 1


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each color."""
    texts = [
        f"{left} {color}{right}" for color in COLORS for left, right in (("shown", " summary"), ("known", " color"))
    ]
    return tiny_gsm8k.trained_tokenizer([*texts, *COLORS] * 8, 384, MARKS, TEMPLATE)


def lessons(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield demonstrations: summaries, most of them random, and answers that are the color of the summary."""
    draw = Random(seed)
    for _ in range(LESSONS):
        talks = []
        for _ in range(ROWS // 2):
            color, known = draw.choice(COLORS), draw.choice(COLORS)
            summary = draw.choice(COLORS) if draw.random() < RANDOM else color
            talks.append([(f"<|user|>shown {color} summary<|end|><|assistant|>", False), (f"{summary}<|end|>", True)])
            talks.append([(f"<|user|>known {known} color<|end|><|assistant|>", False), (f"{known}<|end|>", True)])
        yield tiny_gsm8k.padded_batch([[(tokenizer()(text)["input_ids"], own) for text, own in talk] for talk in talks])


def policy(seed: int) -> PreTrainedModel:
    """Return a policy that has learned the demonstrations."""
    model = tiny_tools.untrained_policy(seed)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (1 - step / LESSONS)

    tiny_gsm8k.imitate(model, lessons(seed), learning_rate=5e-3, schedule=rate)
    return model


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with a color."""
    draw = Random(seed)
    colors = [draw.choice(COLORS) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"shown {color} summary"}], "answer": color} for color in colors]


def accuracy(seed: int, *, masked: bool, rollouts: int = ROLLOUTS) -> tuple[float, float]:
    """Return the accuracy of sampled answers to held-out rows before and after training."""
    module = RLLightningModule(
        policy=partial(policy, seed), tokenizer=tokenizer(), rewards=EnvironmentReward(),
        environment=Conversations(Program(agent), max_turns=2, max_turn_tokens=4), group_size=SAMPLES,
        evaluation=Evaluation("sampled", rows(HELD_OUT, 10_000), samples=4), sampling=SamplingParams(max_new_tokens=8),
        optimizer=partial(AdamW, lr=4e-3, eps=1e-3, weight_decay=0.0), seed=seed,
    )  # fmt: skip
    data = PromptDataModule(rows(rollouts * PROMPTS, seed), PROMPTS, seed=seed)
    trainer = Trainer(
        accelerator="cpu", max_steps=rollouts, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[SummaryMask()] if masked else [],
    )  # fmt: skip
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    (after,) = trainer.validate(module, data, verbose=False)
    return before["val/sampled/reward/task"], after["val/sampled/reward/task"]


def main(*, seeds: int = 5, rollouts: int = ROLLOUTS) -> None:
    """Train each seed twice, and print held-out accuracies."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    report, table = Report("summaries"), []
    for seed in range(seeds):
        for name, masked in (("trained", False), ("masked", True)):
            before, after = accuracy(seed, masked=masked, rollouts=rollouts)
            print(f"seed {seed}, summaries {name}: accuracy before={before:.3f} after={after:.3f}", flush=True)
            table.append((seed, name, before, after))
            if masked:
                report.bound(f"accuracy, seed {seed}, summaries masked", after, at_most=MASKED)
            else:
                report.floor(f"accuracy, seed {seed}, all contexts trained", after, at_least=TRAINED)
    report.rows("Held-out accuracy", ("seed", "summaries", "before", "after"), table)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
