"""A GRPO step without the library: what its computation costs at least, on transformers and PyTorch alone.

Decoding has a KV cache, prefills a prompt once for its group and drops finished rows. The update has packed sequences
with a group's prompt once (the library's layouts and attention; transformers has neither), a vocabulary head in chunks
whose gradient follows at once, and a fused AdamW. Nothing is checked, logged or corrected.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from transformers import DynamicCache, PreTrainedModel

from lightning_rl import Rollout
from lightning_rl.policy import Microbatch, make_plan
from lightning_rl.policy.packing import PACKED_ATTENTION, packed_attention

CHUNK = 2**25  # logits of a chunk
CLIP = 0.2


class Drawn(NamedTuple):
    """Sampled tokens and their log-probabilities, a row for each response."""

    responses: list[list[int]]
    logprobs: list[list[float]]


@torch.no_grad()
def decode(
    model: Any, prompts: Sequence[Sequence[int]], group: int, *, lengths: Sequence[int], longest: int, eos: int
) -> Drawn:
    """Sample ``group`` responses to each prompt.

    Args:
        model: policy, a causal model of transformers.
        prompts: token ids.
        group: responses of a prompt.
        lengths: tokens of each response; empty if they end with the EOS token.
        longest: most tokens of a response.
        eos: token id.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.arange(width) >= width - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    cache = DynamicCache()
    inputs = {"attention_mask": mask.long(), "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits = model(ids, **inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(group)
    logits, mask = logits.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
    rows, position = torch.arange(len(logits)), mask.sum(-1)
    limits = torch.tensor(lengths or [longest] * len(rows))
    drawn = Drawn([[] for _ in rows], [[] for _ in rows])
    for step in range(1, longest + 1):
        scores = logits.log_softmax(-1)
        if lengths:
            scores[:, eos] = -torch.inf
        tokens = torch.multinomial(scores.exp(), 1)
        ends = limits[rows] == step
        if lengths:
            tokens[ends] = eos
        else:
            ends |= tokens[:, 0] == eos
        chosen = logits.log_softmax(-1).gather(1, tokens) if lengths else scores.gather(1, tokens)
        for row, token, logprob in zip(rows.tolist(), tokens[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            drawn.responses[row].append(token)
            drawn.logprobs[row].append(logprob)
        if bool(ends.all()):
            break
        if bool(ends.any()):
            keep = (~ends).nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows, tokens, mask, position = rows[keep], tokens[keep], mask[keep], position[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        inputs = {"attention_mask": mask.long(), "position_ids": position[:, None]}
        logits = model(tokens, **inputs, past_key_values=cache).logits[:, -1]
        position = position + 1
    return drawn


def rollout_of(prompts: Sequence[Sequence[int]], drawn: Drawn, rewards: Tensor, group: int) -> Rollout:
    """Return the responses with the advantages of GRPO."""
    repeated = [list(prompt) for prompt in prompts for _ in range(group)]
    rollout = Rollout.of_samples(repeated, drawn.responses, groups=[row // group for row in range(len(repeated))])
    logprobs = torch.zeros(rollout.response_ids.shape)
    for row, values in enumerate(drawn.logprobs):
        logprobs[row, : len(values)] = torch.tensor(values)
    grouped = rewards.view(-1, group)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    return rollout.replace(old_logprobs=logprobs, advantages=advantages.view(-1, 1).expand_as(logprobs).contiguous())


def microbatches_of(rollout: Rollout, max_tokens: int) -> tuple[Microbatch, ...]:
    """Return the microbatches of one optimizer step."""
    return make_plan(rollout, minibatches=1, max_tokens_per_microbatch=max_tokens).step(0)


def prepare(model: PreTrainedModel) -> AdamW:
    """Let a model read packed sequences, and return its optimizer."""
    model.set_attn_implementation(PACKED_ATTENTION)
    return AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)


def add_gradient(model: Any, rollout: Rollout, microbatches: Sequence[Microbatch]) -> int:
    """Add the gradient of a clipped loss, averaged over tokens; return the number of tokens."""
    total, worked = int(rollout.valid_tokens.sum()), 0
    old, advantages = rollout.require("old_logprobs"), rollout.require("advantages")
    for microbatch in microbatches:
        layout = microbatch.layout
        rows = microbatch.index[layout.rows]
        with packed_attention(layout) as arguments:
            options = {"position_ids": layout.position_ids} if layout.lengths else {}
            hidden = model.model(input_ids=layout.input_ids, use_cache=False, **options, **arguments).last_hidden_state
        read = hidden.flatten(0, 1)[layout.source]
        leaf = read.detach().requires_grad_()
        old_logprobs, advantage = old[rows, layout.columns], advantages[rows, layout.columns]
        for part in torch.arange(len(leaf)).split(max(1, CHUNK // model.config.vocab_size)):
            scores = functional.linear(leaf[part], model.lm_head.weight)
            logprobs = -functional.cross_entropy(scores, layout.targets[part], reduction="none")
            ratio = (logprobs - old_logprobs[part]).exp()
            clipped = torch.minimum(ratio * advantage[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[part])
            (-clipped.sum() / total).backward()
        read.backward(leaf.grad)
        worked += len(leaf)
    return worked


def step(model: torch.nn.Module, optimizer: AdamW) -> None:
    """Make an optimizer step with the gradient's norm clipped to 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
