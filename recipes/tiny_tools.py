"""Small stand-in for a chat model with a calculator: calculations of GSM8K, and a policy that mostly guesses.

The rows are the calculations with two integers in the bundled solutions of GSM8K, such as ``<<48/2=24>>``. The policy
has 0.1 million parameters and was trained on demonstrations: most answer with a random number, the others call the tool
and copy its result.
"""

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from random import Random

import tiny_gsm8k
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SUM = re.compile(r"<<([0-9]{1,2})([-+*/])([0-9]{1,2})=([0-9]{1,2})>>")
SPECIAL = ["<|end|>", "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for tool in tools or [] %}<|tools|>{{ tool['function']['name'] }}<|end|>{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY, ROWS = 512, 32
LESSONS = ((260, 0.0), (40, 0.7))  # number of steps, and share of demonstrations that guess

Part = tuple[str, bool]
"""Text of a conversation, and True if the policy writes it."""


def calculations(split: str) -> list[dict[str, str]]:
    """Return the distinct calculations of a split with their results; the test split has none of the training split."""
    known = {row["question"] for row in calculations("train")} if split == "test" else set[str]()
    rows: dict[str, dict[str, str]] = {}
    for row in tiny_gsm8k.bundled_rows(split):
        for left, operation, right, result in SUM.findall(row["answer"]):
            question = f"What is {left} {operation} {right}?"
            rows[question] = {"question": question, "answer": f"#### {result}"}
    return [row for question, row in rows.items() if question not in known]


def demonstration(row: dict[str, str], guess: str | None) -> list[Part]:
    """Return a conversation about a calculation: a guess, or a tool call, its result and the answer."""
    left, operation, right = row["question"][8:-1].split()
    question = f"<|tools|>calculate<|end|><|user|>{row['question']}<|end|><|assistant|>"
    if guess is not None:
        return [(question, False), (f"{guess}<|end|>", True)]
    arguments = {"a": int(left), "operation": operation, "b": int(right)}
    call = json.dumps({"name": "calculate", "arguments": arguments})
    result = row["answer"].removeprefix("#### ")
    return [
        (question, False),
        (f"<tool_call>{call}</tool_call><|end|>", True),
        (f"<|tool|>{result}<|end|><|assistant|>", False),
        (f"{row['answer']}<|end|>", True),
    ]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the demonstrations."""
    texts = (part for row in calculations("train") for part, _ in demonstration(row, None))
    return tiny_gsm8k.trained_tokenizer(texts, VOCABULARY, SPECIAL, TEMPLATE, whole_numbers=True)


def warm_started_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a copy of :func:`warm_started`, which is cached."""
    return copy.deepcopy(warm_started(seed))


@cache
def warm_started(seed: int) -> Qwen2ForCausalLM:
    """Return a policy that has learned to call the tool and to guess, and guesses in seven of ten cases."""
    model, steps = untrained_policy(seed), sum(steps for steps, _ in LESSONS)

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (1 - step / steps)

    tiny_gsm8k.imitate(model, warm_start_batches(seed), learning_rate=5e-3, schedule=schedule)
    return model


def untrained_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2; global random generators are unchanged."""
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        initializer_range=0.05,  # learns to copy faster than with 0.02
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tiny_gsm8k.END,
        pad_token_id=tiny_gsm8k.END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_start_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids of demonstrations for each step, and labels on the policy's tokens only."""
    tokenizer, draw, rows = tiny_tokenizer(), Random(seed), calculations("train")
    for guessing in (share for steps, share in LESSONS for _ in range(steps)):
        guesses = [draw.choice(rows)["answer"] if draw.random() < guessing else None for _ in range(ROWS)]
        talks = [demonstration(draw.choice(rows), guess) for guess in guesses]
        yield tiny_gsm8k.padded_batch([[(tokenizer(text)["input_ids"], own) for text, own in talk] for talk in talks])
