"""TransformersEngine: decodes with the policy module itself, in an own loop over its forward with a KV cache.

Each prompt is prefilled once for all of its samples, finished rows leave the batch, and every request samples with
uniforms from its own generator (inverse CDF), so a sample does not depend on what else is in the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.generation.engine import Completion, Engine, Request
from lightning_rl.generation.filters import RowFilters
from lightning_rl.generation.recorder import Recorder
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.generation.weights.tracing import recording
from lightning_rl.policy.expert_routes import record_routes
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, Finish

COMPACT_BELOW = 0.75  # share of live rows under which finished ones are dropped; 0.5 to 0.9 measure the same


class TransformersEngine(Engine):
    """The embedded engine. Decodes with the policy module itself, where a rank holds all of it; a sync then only takes
    note of the version. Under a sharding strategy, or ahead of the trainer, it decodes with a copy, into which a sync
    writes.

    Args:
        max_rows: most rows that decode together; bounds the memory of the KV cache.
        canary: proves each sync into a copy; None switches it off.

    Raises:
        ValueError: if ``max_rows`` is not positive.
    """

    scores = True
    filters = True
    records = frozenset((ROUTES, SAMPLING_MASK))

    def __init__(self, *, max_rows: int = 512, canary: Canary | bool | None = True) -> None:
        super().__init__()
        self.canary = canary_of(canary)
        if max_rows < 1:
            raise ValueError(f"expected max_rows >= 1, got {max_rows}")
        self.max_rows = max_rows
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @override
    def start(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model, self._tokenizer = model, tokenizer

    @override
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes what differs in place; if the model that decodes is the one that trains, nothing does."""
        own = {} if self._model is None else dict(self._model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                if name not in own:
                    raise ValueError(f"expected the names of the model that decodes, got {name}")
                if own[name].data_ptr() != weight.data_ptr():
                    self.holds_copy = True
                    own[name].copy_(weight)
                del weight  # or it would be held while the next one is gathered

    @override
    @torch.no_grad()
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if self._model is None:
            raise RuntimeError("expected start() before generate()")
        training = self._model.training
        self._model.eval()  # transformers switches the cache off in train mode under activation checkpointing
        try:
            drawn: dict[int, Completion] = {}
            with record_routes(self._model) if ROUTES in self.recorded else nullcontext() as routes:
                for part in self._batches(requests):
                    batch = _Batch(
                        self._model, self._tokenizer, [requests[place] for place in part], self.version,
                        routes=routes, kept=SAMPLING_MASK in self.recorded,
                    )  # fmt: skip
                    drawn.update(zip(part, batch.run(logprobs=logprobs), strict=True))
        finally:
            self._model.train(training)
        return [drawn[place] for place in range(len(requests))]

    @override
    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        if self._model is None:
            raise RuntimeError("expected start() before score()")
        found = []
        for row in rows:
            ids = torch.tensor(row, device=self._model.device)
            logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found.append(exact.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu())
        return found

    @override
    def trace(self, ids: Sequence[int]) -> dict[str, Tensor]:
        if self._model is None:
            return {}
        with recording(self._model) as found:
            self.score([ids])
        return found

    @override
    def close(self) -> None:
        super().close()
        self._model = self._tokenizer = None
        if self.canary is not None:
            self.canary.forget()

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        places = sorted(range(len(requests)), key=lambda p: (len(requests[p].prefix_ids), requests[p].prefix_ids, p))
        for start in range(0, len(places), self.max_rows):
            yield places[start : start + self.max_rows]


@dataclass(slots=True)
class _Live:
    """The rows in the cache, in its order. A few have ended and wait to be dropped together."""

    rows: Int[Tensor, " L"]  # numbers within the batch
    alive: Bool[Tensor, " L"]
    cache: DynamicCache
    logits: Float[Tensor, "L V"]
    mask: Int[Tensor, "L S"] | None  # None if no prompt was padded
    position: Int[Tensor, " L"]


class _Batch:
    """One decode: prefill, then a token for every live row at each step.

    Args:
        model: decodes.
        tokenizer: for stop strings.
        requests: at least one.
        version: of the weights.
        routes: returns the expert routes of the last forward; None to record none.
        kept: whether to record the tokens that filters keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        requests: list[Request],
        version: int,
        *,
        routes: Callable[[], Tensor] | None,
        kept: bool,
    ) -> None:
        self.model, self.tokenizer, self.requests, self.version = model, tokenizer, requests, version
        self.stops = any(request.stop for request in requests)
        device = model.device
        longest = max(request.max_new_tokens for request in requests)
        self.tokens = torch.zeros(len(requests), longest, dtype=torch.int64, device=device)
        exact = torch.promote_types(model.dtype, torch.float32)
        self.logprobs = torch.zeros(len(requests), longest, dtype=exact, device=device)
        self.lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        self.finish = torch.full_like(self.lengths, Finish.LENGTH)
        self.limits = torch.tensor([request.max_new_tokens for request in requests], device=device)
        self.temperatures = torch.tensor([request.temperature for request in requests], dtype=exact, device=device)
        self.uniforms = torch.stack([_uniforms(request, longest, exact) for request in requests]).to(device)
        width = max(len(request.eos_ids) for request in requests)
        eos = [sorted(request.eos_ids) + [-1] * (width - len(request.eos_ids)) for request in requests]
        self.eos_ids = torch.tensor(eos, dtype=torch.int64, device=device).reshape(len(requests), width)
        filtered = any(request.keep for request in requests)
        self.filters = RowFilters([request.keep for request in requests], device) if filtered else None
        self.recorder = Recorder(len(requests), longest, routes=routes, kept=kept)

    def run(self, *, logprobs: bool) -> list[Completion]:
        """Decodes until every row has ended."""
        live = self._prefill()
        for step in range(self.tokens.shape[1]):
            chosen = self._sample(live, step)
            live.alive = live.alive & ~self._ended(live, chosen, step)
            if not live.alive.any():
                break
            live = self._advance(live, chosen, step)
        lengths, finishes = self.lengths.tolist(), self.finish.tolist()
        tokens, scores = self.tokens.cpu(), self.logprobs.cpu()
        return [
            Completion(
                token_ids=tuple(tokens[row, :length].tolist()),
                logprobs=scores[row, :length].clone() if logprobs else None,
                finish=Finish(finish),
                version=self.version,
                token_extras=self.recorder.of_tokens(row, length),
                prompt_extras=self.recorder.of_prompt(row),
            )
            for row, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
        ]

    def _prefill(self) -> _Live:
        """Runs every different prompt once, padded on the left, and repeats its cache for each of its samples."""
        prompts = list(dict.fromkeys(request.prefix_ids for request in self.requests))
        place = {prompt: number for number, prompt in enumerate(prompts)}
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        real = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        mask = None if bool(real.all()) else real
        cache = DynamicCache(config=self.model.config)
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=(real.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        index = torch.tensor([place[request.prefix_ids] for request in self.requests], device=device)
        self.recorder.prefilled(real.bool(), index)
        cache.batch_select_indices(index)
        rows = torch.arange(len(self.requests), device=device)
        alive = torch.ones_like(rows, dtype=torch.bool)
        return _Live(
            rows, alive, cache, output.logits[index, -1], None if mask is None else mask[index], lengths[index]
        )

    def _sample(self, live: _Live, step: int) -> Tensor:
        """Draws a token for every row of the cache and writes down those of the live ones."""
        temperature = self.temperatures[live.rows, None]
        greedy = temperature == 0
        exact = live.logits.to(self.logprobs.dtype)
        scores = (exact / torch.where(greedy, 1.0, temperature)).log_softmax(-1)
        scores = self._filtered(scores, greedy, live, step)
        mass = scores.exp().cumsum(-1)
        target = self.uniforms[live.rows, step, None] * mass[:, -1:]
        target = torch.minimum(target, mass[:, -1:].nextafter(torch.zeros_like(target)))
        drawn = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)  # never of probability 0
        chosen = torch.where(greedy, exact.argmax(-1, keepdim=True), drawn)
        rows = live.rows[live.alive]
        self.tokens[rows, step] = chosen[live.alive, 0]
        self.logprobs[rows, step] = scores.gather(1, chosen)[live.alive, 0]
        self.lengths[rows] = step + 1
        return chosen[:, 0]

    def _filtered(self, scores: Tensor, greedy: Tensor, live: _Live, step: int) -> Tensor:
        """Log-probabilities over the tokens that the rows' filters keep; greedy rows keep all."""
        if self.filters is None and not self.recorder.keeps:
            return scores
        kept = torch.ones_like(scores, dtype=torch.bool)
        if self.filters is not None:
            kept = self.filters.kept(scores, live.rows) | greedy
            scores = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        self.recorder.sampled(live.rows[live.alive], step, kept[live.alive])
        return scores

    def _ended(self, live: _Live, chosen: Tensor, step: int) -> Tensor:
        stopped = (chosen[:, None] == self.eos_ids[live.rows]).any(-1)
        if self.stops:
            said = [self._said_stop(row, step) for row in live.rows.tolist()]
            stopped |= torch.tensor(said, dtype=torch.bool, device=chosen.device)
        self.finish[live.rows[stopped & live.alive]] = int(Finish.STOP)
        return stopped | (step + 1 >= self.limits[live.rows])

    def _said_stop(self, row: int, step: int) -> bool:
        stops = self.requests[row].stop
        if not stops:
            return False
        if self.tokenizer is None:
            raise ValueError("expected a tokenizer, because stop strings need one: pass tokenizer= to the module")
        tail = self.tokens[row, max(0, step - max(len(stop.encode()) for stop in stops) - 8) : step + 1]
        text = self.tokenizer.decode(tail.tolist(), skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _advance(self, live: _Live, chosen: Tensor, step: int) -> _Live:
        """One forward with the chosen tokens; drops the ended rows first when enough of them have gathered."""
        rows, alive, mask, position = live.rows, live.alive, live.mask, live.position
        if alive.float().mean() < COMPACT_BELOW:
            keep = alive.nonzero()[:, 0]
            live.cache.batch_select_indices(keep)
            rows, alive, position, chosen = rows[keep], alive[keep], position[keep], chosen[keep]
            mask = None if mask is None else mask[keep]
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        output = self.model(
            input_ids=chosen[:, None], attention_mask=mask, position_ids=position[:, None],
            past_key_values=live.cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.recorder.forwarded(rows, alive, step)
        return _Live(rows, alive, live.cache, output.logits[:, -1], mask, position + 1)


def _uniforms(request: Request, length: int, dtype: torch.dtype) -> Float[Tensor, " L"]:
    return torch.rand(length, dtype=dtype, generator=torch.Generator().manual_seed(request.seed))
