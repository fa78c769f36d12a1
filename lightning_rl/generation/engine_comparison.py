"""Comparison of engine and trainer on the same tokens: log-probabilities, distributions and values of modules."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_rl.generation.engine import Engine
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.batch_invariance import BatchInvariance, is_batch_invariant
from lightning_rl.policy.compilation import has_compilation
from lightning_rl.policy.expert_routes import count_experts, count_unvisited_experts
from lightning_rl.policy.logprobs import logprobs_of
from lightning_rl.policy.model import head_of, logit_divisor, unscaled_logits
from lightning_rl.policy.module_values import (
    Compared,
    Event,
    ModuleValues,
    TokenPosition,
    first_difference,
    positions_of,
    record_modules,
    rounding_of,
)
from lightning_rl.policy.text_model import backbone_of
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS, Rollout
from lightning_rl.samples import Completion, Request, SamplingParams

DISTRIBUTION = frozenset((TOP_IDS, TOP_LOGPROBS))  # extras that the engine has to record
LOCATED = 4  # rows with the largest differences, of which the values of modules are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """Differences of engine and trainer over sampled tokens.

    Attributes:
        tokens: Number of tokens.
        largest: Largest difference of log-probabilities of sampled tokens, in nats.
        kl: Mean KL(engine || trainer) over the vocabulary, in nats; None if unknown.
        largest_kl: Largest KL of a token.
        module: First module whose outputs differ though its inputs agree; None if there is none, if no log-probability
            differs, or if the engine's modules cannot be recorded.
        rounded: True if rounding explains its difference.
        unvisited: Number of experts that no token visits, by router, where there are any.
    """

    tokens: int
    largest: float
    kl: float | None
    largest_kl: float | None
    module: str | None = None
    rounded: bool = False
    unvisited: Mapping[str, int] = field(default_factory=dict)


@torch.no_grad()
def compare(
    policy: PolicyModel,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    rows: int | None = None,
    cached: bool = True,
) -> Consistency:
    """Sample from a synced engine, and compare its distributions and the values of its modules with the policy's.

    Modules are compared over the rows with the largest differences.

    Args:
        policy: Policy of the trainer.
        engine: Engine with the same weights, which records the extras :data:`DISTRIBUTION` of all tokens.
        prompts: Token ids of the prompts. Two responses are sampled to each, one if ``rows`` is 1.
        new_tokens: Number of tokens of a response.
        rows: Number of requests that are generated together; by default all.
        cached: True to compare with the log-probabilities of generation, False with those of ``engine.score`` (at
            temperature 1).
    """
    samples = 1 if rows == 1 else 2
    requests = _requests([prompt for prompt in prompts for _ in range(samples)], policy.temperature, new_tokens)
    completions = _generate(engine, requests, rows)
    rollout = _rollout(requests, completions, samples=samples)
    with count_experts(policy.model) as counts:
        outputs = policy(pack(rollout, packed=policy.packed).to(policy.model.device))
    kl = None if outputs.rollout_kl is None or not cached else outputs.rollout_kl.cpu()
    sampled = rollout.require("rollout_logprobs")
    if not cached:
        scores = engine.score(_sequences(requests, completions))
        sampled = torch.stack([row[-new_tokens:] for row in scores]).cpu()
    gap = (outputs.logprobs.cpu().double() - sampled.double()).abs()
    found = Consistency(
        tokens=gap.numel(),
        largest=float(gap.max()),
        kl=None if kl is None else float(kl.mean()),
        largest_kl=None if kl is None else float(kl.max()),
        unvisited=count_unvisited_experts(counts),
    )
    if found.largest == 0 and not found.largest_kl:
        return found
    del rollout, outputs
    located = _rows_to_locate(requests, gap)
    return replace(found, **_locate(policy, engine, requests, completions, located, rows, cached=cached))


def _rows_to_locate(requests: Sequence[Request], gap: Tensor) -> list[int]:
    """Return the rows with the largest differences, [rows, tokens], at most one of each prompt, in order."""
    order = gap.amax(-1).argsort(descending=True, stable=True).tolist()
    of_prompt = {requests[row].prefix_ids: row for row in reversed(order)}  # the largest one of a prompt
    return sorted([row for row in order if of_prompt[requests[row].prefix_ids] == row][:LOCATED])


def _locate(
    policy: PolicyModel,
    engine: Engine,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    located: Sequence[int],
    rows: int | None,
    *,
    cached: bool,
) -> dict[str, Any]:
    """Return the first module that differs over some rows; none for a compiled one, without hooks."""
    if has_compilation(policy.model):
        return {}
    requests, completions = [requests[row] for row in located], [completions[row] for row in located]
    try:
        recording = engine.record_modules()
    except NotImplementedError:
        return {}
    with recording as engine_values:
        if cached:
            completions = _generate(engine, requests, rows)
        else:
            engine.score(_sequences(requests, completions))
    layout = pack(_rollout(requests, completions, samples=1), packed=policy.packed).to(policy.model.device)
    with record_modules(policy.model, backbone_of(policy.model), lambda _: positions_of(layout)) as trainer_values:
        policy(layout)
    if not engine_values.positions:
        return {}
    lengths = [len(sequence) - 1 for sequence in _sequences(requests, completions)]
    dtypes = [policy.model.dtype, engine.dtype or policy.model.dtype]
    rounding = 0.0 if is_batch_invariant(policy.model) else rounding_of(dtypes)
    head = _distributions(policy, trainer_values, requests, completions)
    found = first_difference(trainer_values, engine_values, lengths, head=head, rounding=rounding)
    return {} if found is None else {"module": found.module, "rounded": found.rounded}


def _distributions(
    policy: PolicyModel, values: ModuleValues, requests: list[Request], completions: list[Completion]
) -> Compared:
    """Return the log-probabilities of both sides before each sampled token, [N, V], as outputs of the head."""
    names = {module: name for name, module in policy.model.named_modules()}
    sampled = [
        TokenPosition(row, len(request.prefix_ids) - 1 + number)
        for row, request in enumerate(requests)
        for number in range(request.sampling.max_new_tokens)
    ]
    width = head_of(policy.model).weight.shape[1]
    states = cast(Tensor, values.at(Event(names[backbone_of(policy.model)], "output"), sampled))[:, :width]
    with BatchInvariance() if is_batch_invariant(policy.model) else nullcontext():
        logits = unscaled_logits(policy.model, states.to(policy.model.device, policy.model.dtype))
        trainer = logprobs_of(logits / logit_divisor(policy.model, policy.temperature)).cpu()
    ids, logprobs = (torch.cat([c.token_extras[name] for c in completions]) for name in (TOP_IDS, TOP_LOGPROBS))
    engine = torch.full_like(trainer, -torch.inf).scatter(1, ids.long(), logprobs.to(trainer.dtype))
    return Event(names[cast(nn.Module, policy.model.get_output_embeddings())], "output"), sampled, trainer, engine


def _requests(prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int) -> list[Request]:
    """Return requests in the order in which an engine generates them: by length, then by tokens."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens, eos_token_ids=())
    ordered = sorted(map(tuple, prompts), key=lambda prompt: (len(prompt), prompt))
    return [Request(prefix_ids=ids, sample_id=n, seed=n, sampling=sampling) for n, ids in enumerate(ordered)]


def _generate(engine: Engine, requests: list[Request], rows: int | None) -> list[Completion]:
    size = rows or len(requests)
    parts = [requests[start : start + size] for start in range(0, len(requests), size)]
    return [completion for part in parts for completion in engine.generate(part, logprobs=True)]


def _sequences(requests: list[Request], completions: list[Completion]) -> list[list[int]]:
    return [[*r.prefix_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]


def _rollout(requests: list[Request], completions: list[Completion], *, samples: int) -> Rollout:
    prompts, responses = [list(r.prefix_ids) for r in requests], [list(c.token_ids) for c in completions]
    rollout = Rollout.of_samples(prompts, responses, groups=[row // samples for row in range(len(requests))])
    extras = {name: torch.stack([c.token_extras[name] for c in completions]) for name in DISTRIBUTION}
    return rollout.replace(
        rollout_logprobs=torch.stack([cast(Tensor, c.logprobs) for c in completions]),
        token_extras=extras,
    )
