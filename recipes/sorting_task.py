"""Sorting short lists of digits: the quickstart's task, tokenizer, reward and warm-started policy.

A prompt is a list of 4 to 8 digits, ``3 1 4 1 5 >``; the only correct response is ``1 1 3 4 5 <eos>``. The policy is
warm-started on mostly wrong targets: greedy decoding mostly fails, but samples are correct often enough to learn from.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from random import Random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ("<pad>", "<eos>", ">", *"0123456789", "<unused-13>", "<unused-14>", "<unused-15>")
IDS = {word: index for index, word in enumerate(WORDS)}
PAD, EOS = IDS["<pad>"], IDS["<eos>"]

HELD_OUT_SEED = 10_000
WARM_START_SEED = 20_000
WARM_START_STEPS = 130
WARM_START_LISTS = 128
WARM_START_NOISE = 0.7


def sorting_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the task: one id per word, 16 ids, no BOS; an unknown word raises."""
    tokenizer = Tokenizer(WordLevel(IDS))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", unk_token=None
    )


def sorting_prompts(count: int, *, seed: int, exclude: Iterable[dict[str, str]] = ()) -> list[dict[str, str]]:
    """Sample ``count`` lists to sort, with repetition.

    Args:
        count: Number of lists.
        seed: Seed of a local generator.
        exclude: Rows whose prompts are skipped, such as :func:`held_out_prompts`.

    Returns:
        One row per list, with the columns ``prompt`` and ``answer``.
    """
    generator = Random(seed)
    excluded = {row["prompt"] for row in exclude}
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        digits = generator.choices("0123456789", k=generator.randint(4, 8))
        prompt = " ".join([*digits, ">"])
        if prompt not in excluded:
            rows.append({"prompt": prompt, "answer": " ".join(sorted(digits))})
    return rows


def held_out_prompts(count: int = 256) -> list[dict[str, str]]:
    """Return ``count`` distinct lists, always the same, to exclude from training and to measure accuracy on."""
    distinct = {row["prompt"]: row for row in sorting_prompts(2 * count, seed=HELD_OUT_SEED)}
    return list(distinct.values())[:count]


def exactly_sorted(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of a reward
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **columns: object,  # noqa: ARG001 - the signature of a reward
) -> list[float]:
    """Return 1 for the sorted list followed by EOS and nothing else, and 0 otherwise.

    Ids are compared too, because decoding skips EOS and padding tokens between digits.
    """
    return [
        float(text == target and list(ids) == [IDS[word] for word in [*target.split(), "<eos>"]])
        for text, ids, target in zip(completions, completion_ids, answer, strict=True)
    ]


def bubble_pass(words: Sequence[str]) -> list[str]:
    """Return the list after one pass of bubble sort."""
    passed = list(words)
    for left in range(len(passed) - 1):
        passed[left : left + 2] = sorted(passed[left : left + 2])
    return passed


def warm_start_batches(seed: int) -> Iterator[list[Tensor]]:
    """Yield ids of prompt and target for each step, one tensor per list length, so that no row needs padding.

    A target is half sorted with probability ``WARM_START_NOISE``, else sorted. Held-out lists are excluded.
    """
    noise = Random(seed)
    rows = sorting_prompts(WARM_START_STEPS * WARM_START_LISTS, seed=WARM_START_SEED + seed, exclude=held_out_prompts())
    for first in range(0, len(rows), WARM_START_LISTS):
        examples: defaultdict[int, list[list[int]]] = defaultdict(list)
        for row in rows[first : first + WARM_START_LISTS]:
            prompt, target = row["prompt"].split(), row["answer"].split()
            if noise.random() < WARM_START_NOISE:
                target = bubble_pass(prompt[:-1])
            examples[len(prompt)].append([IDS[word] for word in [*prompt, *target, "<eos>"]])
        yield [torch.tensor(of_one_length) for of_one_length in examples.values()]


def untrained_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a randomly initialized Qwen2 of 0.9 million parameters; global random generators are unchanged."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def warm_started_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a copy of :func:`warm_started`, which is cached."""
    return copy.deepcopy(warm_started(seed))


@cache
def warm_started(seed: int) -> Qwen2ForCausalLM:
    """Return a small policy that has learned to sort badly, in about 25 CPU seconds.

    It prefers the half sorted list: greedy accuracy is about one in four, and rewards differ within a group from the
    first step. Loss: mean negative log-likelihood over target tokens, with EOS. Deterministic for a seed and number of
    threads.

    Args:
        seed: Seed of the weights, the lists and the noise.
    """
    policy = untrained_policy(seed)
    optimizer = AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / WARM_START_STEPS))
    for batch in warm_start_batches(seed):
        target_tokens = sum(ids.numel() // 2 for ids in batch)
        optimizer.zero_grad()
        for ids in batch:
            target = ids[:, ids.shape[1] // 2 :]  # prompt and target have the same length
            output = policy(input_ids=ids[:, :-1], logits_to_keep=target.shape[1], use_cache=False)
            loss = cross_entropy(output.logits.flatten(0, 1), target.flatten(), reduction="sum") / target_tokens
            loss.backward()
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return policy
