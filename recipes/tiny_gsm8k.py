"""Small stand-in for a chat model on GSM8K: bundled rows, a tokenizer and a warm-started policy.

The rows are the first 1,000 of the training split and 200 of the test split (``data/gsm8k``, with its license). The
policy has half a million parameters and was trained on the last lines of the answers: it mostly writes ``#### `` and a
random number, enough for the reward to rise.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).parent / "data" / "gsm8k"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY, END, IGNORED = 1024, 0, -100
WARM_START_STEPS, WARM_START_ROWS = 50, 32


def bundled_rows(split: str) -> list[dict[str, str]]:
    """Return the bundled rows of a split, ``"train"`` or ``"test"``, with ``question`` and ``answer``."""
    return [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 1,024 tokens, trained on the bundled training rows."""
    texts = (text for row in bundled_rows("train") for text in row.values())
    return trained_tokenizer(texts, VOCABULARY, SPECIAL, TEMPLATE)


def trained_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str], template: str, *, whole_numbers: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a chat template.

    Args:
        texts: Texts to train on.
        vocabulary: Maximum number of tokens.
        special: Special tokens; the first one is EOS.
        template: Chat template.
        whole_numbers: True if a number may be one token, False for one token per digit.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=not whole_numbers)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[END], pad_token=special[END])
    wrapped.chat_template = template
    return wrapped


def warm_started_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a copy of :func:`warm_started`, which is cached."""
    return copy.deepcopy(warm_started(seed))


@cache
def warm_started(seed: int) -> Qwen2ForCausalLM:
    """Return a policy that has mostly learned the format of an answer from the bundled training rows."""
    model = untrained_policy(seed)
    imitate(model, warm_start_batches(seed), learning_rate=2e-3)
    return model


def imitate(
    model: PreTrainedModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    learning_rate: float,
    schedule: Callable[[int], float] = lambda _: 1.0,
) -> None:
    """Train a model on target tokens with AdamW.

    Args:
        model: Model, modified in place.
        batches: Token ids and labels of each step, both of shape [B, S].
        learning_rate: Learning rate before the schedule.
        schedule: Factor of the learning rate for a step.
    """
    optimizer = AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rates = LambdaLR(optimizer, schedule)
    for ids, labels in batches:
        logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()


def untrained_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2; global random generators are unchanged."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=3,
        intermediate_size=288,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_start_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids of question and last line of the answer for each step, and labels on the last line only."""
    tokenizer, draw, examples = tiny_tokenizer(), Random(seed), list[tuple[list[int], list[int]]]()
    for row in bundled_rows("train"):
        chat = [{"role": "user", "content": row["question"]}]
        question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        line = row["answer"].splitlines()[-1] + SPECIAL[END]
        examples.append((tokenizer(str(question))["input_ids"], tokenizer(line)["input_ids"]))
    for _ in range(WARM_START_STEPS):
        drawn = draw.sample(examples, WARM_START_ROWS)
        yield padded_batch([[(question, False), (line, True)] for question, line in drawn])


def padded_batch(rows: Iterable[Iterable[tuple[list[int], bool]]]) -> tuple[Tensor, Tensor]:
    """Return padded token ids and labels of rows; each part of a row has a flag for the loss."""
    ids, labels = list[Tensor](), list[Tensor]()
    for parts in map(list, rows):
        ids.append(torch.tensor([token for part, _ in parts for token in part]))
        labels.append(torch.tensor([token if counts else IGNORED for part, counts in parts for token in part]))
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)
