"""What the audit writes down while a run draws and scores: engine and reward calls, forwards of a few rows."""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rl import distributed
from lightning_rl.generation import Completion, Engine, Request, request_seed
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.policy.sampling_mask import from_bits
from lightning_rl.rewards import RewardCall, Rewards
from lightning_rl.rollout import SAMPLING_MASK, Rollout

PLAIN_ROWS, PLAIN_TOKENS, MOST_BATCHES, FEW = 2, 48, 64, 16
LEAST = -1e9  # log-probability of what cannot be drawn: 0 * -inf is not 0


Drawn = tuple[Request, Completion]


class PlainForward(NamedTuple):
    """A stretch of one response by a model's own forward: without packing, the slow way.

    Attributes:
        of: ``"policy"`` or ``"reference"``.
        row: number in :attr:`Evidence.rows`.
        begin: first position of the stretch.
        logprobs: at the run's temperature, float64, [N].
        at_one: at temperature 1.
        at_square: divided by the temperature twice.
        entropy: at the run's temperature.
    """

    of: str
    row: int
    begin: int
    logprobs: Tensor
    at_one: Tensor
    at_square: Tensor
    entropy: Tensor


class RecordedRewards:
    """Keeps what reward functions were given and said, until somebody takes it.

    Args:
        rewards: of the run; its functions are wrapped until :meth:`release`.
    """

    def __init__(self, rewards: Rewards) -> None:
        self._rewards, self._own = rewards, dict(rewards.functions)
        self._calls: list[RewardCall] = []
        rewards.functions.update({name: self._recorded(name, function) for name, function in self._own.items()})

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def called(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> Any:
            begin = time.perf_counter()
            given = function(prompts, completions, completion_ids=completion_ids, **columns)
            seconds, values = time.perf_counter() - begin, list(given)
            plain = [None if value is None else float(value) for value in values]
            call = RewardCall(name, completion_ids, plain, seconds, prompts, completions, columns, function)
            self._calls.append(call)
            return values

        return called

    def take(self) -> list[RewardCall]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def release(self) -> None:
        """Puts the functions back."""
        self._rewards.functions.update(self._own)


class RecordedEngine:
    """Keeps what an engine was last asked and returned.

    Args:
        engine: of the run; its ``generate`` is wrapped until :meth:`release`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, generate = engine, engine.generate
        self._batches: deque[list[Drawn]] = deque(maxlen=MOST_BATCHES)

        def recorded(requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
            completions = generate(requests, logprobs=logprobs)
            self._batches.append(list(zip(requests, completions, strict=False)))
            return completions

        engine.generate = recorded

    def drawn_for(self, seed: int, cycle: int) -> list[list[Drawn]]:
        """What was drawn for a rollout, batch by batch; a request's seed says which rollout it is for.

        Args:
            seed: of the run.
            cycle: number of the rollout.
        """
        own = [
            [pair for pair in batch if pair[0].seed == request_seed(seed, cycle, pair[0].sample_id)]
            for batch in list(self._batches)  # at once, because a thread may be adding others
        ]
        return [batch for batch in own if batch]

    def release(self) -> None:
        """Puts the method back."""
        vars(self._engine).pop("generate", None)


@torch.no_grad()
def outputs_of(module: RLLightningModule, rows: Rollout, *, reverse: bool = False, heat: float = 1.0) -> Outputs:
    """What the policy says of some rows, in one microbatch. Every rank calls it, one without rows too.

    Args:
        module: the run.
        rows: a few.
        reverse: put the rows into the microbatch the other way round.
        heat: what the temperature is multiplied with.
    """
    inside = torch.arange(rows.width, device=rows.groups.device) < rows.response_lengths[:, None]
    rows = rows.replace(valid_tokens=rows.valid_tokens & inside)  # masks may be what is wrong
    order = list(range(len(rows)))[:: -1 if reverse else 1]
    microbatch = plan_of_rows(rows.to("cpu"), [[order]], packed=module.packing).to(rows.groups.device).step(0)[0]
    policy, temperature = module.required_policy, module.required_policy.temperature
    policy.temperature = temperature * heat
    try:
        replayed = module.run.contributions.forward_context(microbatch.rows_of(rows))
        with module.trainer.precision_plugin.forward_context(), distributed.alone(), replayed:
            found = policy(microbatch.layout)
    finally:
        policy.temperature = temperature
    back = torch.tensor(order, dtype=torch.int64, device=rows.groups.device).argsort()
    kept = [None if part is None else _widened(part, rows.width)[: len(rows)][back] for part in found]
    return Outputs(*kept)  # pyright: ignore[reportArgumentType]


def reference_weights(module: RLLightningModule) -> Tensor:
    """A few weights of every frozen parameter of the reference, as far as this rank holds them, [N] float64."""
    if module.run.reference is None:
        return torch.zeros(0)
    frozen = [weight.detach() for weight in module.run.reference.model.parameters() if not weight.requires_grad]
    own = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in frozen]
    return torch.cat([weight.flatten()[:: max(weight.numel() // FEW, 1)][:FEW].double() for weight in own])


def forwards_plainly(module: RLLightningModule) -> bool:
    """Whether the policy's forward is a model's own one and the weights are all here."""
    return not module.parallel.sharded and not module.run.contributions.contributors("forward_context")


@torch.no_grad()
def plain_forwards(module: RLLightningModule, rows: Rollout) -> list[PlainForward]:
    """A few rows by the own forwards of policy and reference.

    None where a rank holds only a part of the weights, or a correction has its context around every forward.
    """
    if not forwards_plainly(module) or not len(rows):
        return []
    model, reference = module.required_policy.model, module.run.reference
    models: list[tuple[str, nn.Module]] = [("policy", model)]
    if reference is not None and reference.model is not model:
        models.append(("reference", reference.model))
    few = rows.select(torch.arange(min(PLAIN_ROWS, len(rows)), device=rows.groups.device))
    with module.trainer.precision_plugin.forward_context():
        return [plain for name, own in models for plain in _plain_forwards(name, own, few, module.temperature)]


def _plain_forwards(name: str, model: nn.Module, rows: Rollout, temperature: float) -> list[PlainForward]:
    prompts, responses = rows.prompt_lengths.tolist(), rows.response_lengths.tolist()
    ids = [
        torch.cat([rows.prompt_ids[row, :prompt], rows.response_ids[row, :response]])
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    logits = model(input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True), use_cache=False).logits
    found = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin = max(response - PLAIN_TOKENS, 0) if row % 2 else 0  # both ends of responses are looked at
        end = min(begin + PLAIN_TOKENS, response)
        targets = ids[row][prompt + begin : prompt + end, None]
        scores = logits[row, prompt + begin - 1 : prompt + end - 1].double()
        if SAMPLING_MASK in rows.token_extras:
            kept = from_bits(rows.token_extras[SAMPLING_MASK][row, begin:end], scores.shape[-1])
            scores = scores.masked_fill(~kept, -torch.inf)
        found.append(_plain(name, row, begin, scores, targets, temperature))
    return found


def _plain(name: str, row: int, begin: int, exact: Tensor, targets: Tensor, temperature: float) -> PlainForward:
    normal = (exact / temperature).log_softmax(-1)
    chosen, at_one, at_square = (
        (exact / divisor).log_softmax(-1).gather(1, targets)[:, 0] for divisor in (temperature, 1.0, temperature**2)
    )
    return PlainForward(name, row, begin, chosen, at_one, at_square, -(normal.exp() * normal.clamp(min=LEAST)).sum(-1))


def _widened(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))[:, :width]
