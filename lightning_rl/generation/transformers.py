"""Engine that decodes with the policy module itself, with a KV cache.

Each distinct prompt is prefilled once, finished rows leave the batch, and each request samples with uniforms from its
own generator (inverse CDF), so a sample does not depend on its batch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rl.generation.cache import VLLM_DRAWS, KVCache, cache_argument
from lightning_rl.generation.decode_extras import DecodeExtras
from lightning_rl.generation.engine import Capabilities, Engine
from lightning_rl.generation.packed_weights import packable_layers, packed_weights, packing_pays
from lightning_rl.generation.sampling_params import RowFilters, in_units
from lightning_rl.generation.weights.canary import Canary, canary_of
from lightning_rl.policy.batch_invariance import BatchInvariance, is_batch_invariant
from lightning_rl.policy.compilation import without_compilation
from lightning_rl.policy.embedding_gradients import embedding_leaves, token_gradients
from lightning_rl.policy.expert_routes import record_routes
from lightning_rl.policy.logprobs import FILTERED, exact_logits, logprobs_of
from lightning_rl.policy.media import media_arguments, media_of_prompts, plain_placeholders
from lightning_rl.policy.model import head_layer, logit_divisor, needs_half, random_rows, unscaled_logits
from lightning_rl.policy.module_values import DecodedPositions, ModuleValues, record_modules
from lightning_rl.policy.probe_weights import probe_weights
from lightning_rl.policy.text_model import backbone_of
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS, FinishReason
from lightning_rl.samples import Completion, Request, SamplingParams
from lightning_rl.utils.arguments import check_counts

COMPACT_BELOW = 0.75  # share of live rows below which finished rows are dropped; 0.5 to 0.9 measure the same


class TransformersEngine(Engine):
    """Embedded engine, which decodes with the policy module itself where a rank holds all of it.

    A sync then only changes the version. Under a sharding strategy, or ahead of the trainer, it copies the weights.
    Prompts of a model that minds padding on their left decode with others of equal length. On a CPU, a float32 model of
    millions of weights decodes with packed weights if they save time in its first draw. Checkpoints store this choice,
    which changes the last bits of log-probabilities. ``consistency="bitwise"`` packs no weights.

    Args:
        max_rows: Maximum number of rows that decode together; bounds the memory of the KV cache.
        canary: Check of each sync into a copy; None to skip it.

    Raises:
        ValueError: If ``max_rows`` is not positive; at the start, if the model keeps a state outside of the KV cache.
    """

    capabilities = Capabilities(
        filters=True,
        scores=True,
        extras=frozenset((ROUTES, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS)),
        shares_policy=True,
        pictures=True,
    )

    def __init__(self, *, max_rows: int = 512, canary: Canary | bool | None = True) -> None:
        super().__init__()
        check_counts(1, max_rows=max_rows)
        self.capabilities = replace(self.capabilities, max_rows=max_rows)
        self.canary = canary_of(canary)
        self.max_rows = max_rows
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._decodes_ragged = True  # prompts of unequal lengths together
        self._packs: bool | None = None  # weights, on a CPU; None until it is measured

    @override
    def start(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        cache_argument(model)  # or it cannot decode
        self._model, self._tokenizer, self.dtype = model, tokenizer, model.dtype
        self._decodes_ragged = self._check_decoding(model)

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy each weight in place, unless it shares memory with the model that decodes."""
        model = self._model
        tensors = {} if model is None else {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, weight in weights:
                if name not in tensors:
                    raise ValueError(f"expected names of the engine's model, got {name}")
                if tensors[name].data_ptr() != weight.data_ptr():
                    self.holds_copy = True
                    tensors[name].copy_(weight)
                del weight  # drop the reference before the next weight is gathered

    @override
    @torch.no_grad()
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        model = self._model_for("generate")
        training = model.training
        model.eval()  # transformers disables the cache in train mode under activation checkpointing
        completions: dict[int, Completion] = {}
        try:
            routes = record_routes(model) if ROUTES in self.extras else nullcontext()
            exact = exact_logits(head_layer(model))
            packed = self._packed_weights(model, requests)
            with without_compilation(model), exact, packed, routes as take_routes, cached_casts(model):
                for chosen in self._batches(requests):
                    batch = [requests[place] for place in chosen]
                    max_tokens = max(request.sampling.max_new_tokens for request in batch)
                    extras = DecodeExtras(
                        len(batch),
                        max_tokens,
                        take_routes=take_routes,
                        with_mask=SAMPLING_MASK in self.extras,
                        top_tokens=self.top_logprobs if TOP_IDS in self.extras else 0,
                    )
                    decode = _decode_of(model)(model, self._tokenizer, batch, self.version, extras)
                    completions.update(zip(chosen, decode.run(logprobs=logprobs), strict=True))
        finally:
            model.train(training)
        return [completions[place] for place in range(len(requests))]

    def _packed_weights(self, model: PreTrainedModel, requests: Sequence[Request]) -> AbstractContextManager[None]:
        layers = packable_layers(model)
        if layers and requests and self._packs is None:
            tokens = max(request.sampling.max_new_tokens for request in requests)
            self._packs = packing_pays(layers, rows=min(len(requests), self.max_rows), tokens=tokens)
        return packed_weights(layers if self._packs else [])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"packs": self._packs}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._packs = state.get("packs", False)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield places of requests that decode together, of similar or equal lengths, samples of a prompt adjacent."""
        lengths = [len(request.prefix_ids) for request in requests]
        places = sorted(range(len(requests)), key=lambda place: (lengths[place], requests[place].prefix_ids, place))
        for _, group in groupby(places, key=lambda place: 0 if self._decodes_ragged else lengths[place]):
            chosen = list(group)
            yield from (chosen[start : start + self.max_rows] for start in range(0, len(chosen), self.max_rows))

    @torch.no_grad()
    def _check_decoding(self, model: PreTrainedModel) -> bool:
        """Compare small decodes with forwards of whole sequences; return True if prompts of unequal lengths agree, too.

        Raises:
            ValueError: If prompts of equal lengths do not.
        """
        (first, *_), (_, second, _, third) = random_rows(model)
        equal, training = [first, first, second[:4], third], model.training
        refusal = f"expected {type(model).__name__} to give the same log-probabilities with a KV cache as without, but"
        model.eval()
        try:
            with (
                probe_weights(model, cast=not needs_half(model)),
                torch.autocast(model.device.type, enabled=False),  # it would hide a wrong state, or look like one
                without_compilation(model),
                exact_logits(head_layer(model)),
            ):
                limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
                rounding = self._decoding_error(model, equal)
                try:
                    ragged = self._decoding_error(model, random_rows(model)[0])
                except (AssertionError, RuntimeError):
                    ragged = math.inf
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a model that has its own cache
            raise ValueError(f"{refusal} {type(error).__name__}: {error}: {VLLM_DRAWS}") from error
        finally:
            model.train(training)
        if not rounding < limit:
            raise ValueError(f"{refusal} they differ by {rounding:.2g}: {VLLM_DRAWS}")
        chunks = getattr(model.config.get_text_config(), "attention_chunk_size", None)  # counted with the padding
        return not chunks and ragged <= max(1e-4, 10 * rounding)

    def _decoding_error(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> float:
        """Return the largest difference of log-probabilities with and without a cache; infinity if padding is read."""
        tokens = (8, 3, 8, 1)  # some finish before others
        samplings = [SamplingParams(max_new_tokens=n, temperature=1.0, eos_token_ids=()) for n in tokens]
        requests = [
            Request(prefix_ids=tuple(ids), sample_id=number, seed=number, sampling=sampling)
            for number, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        extras = DecodeExtras(len(requests), max(tokens), take_routes=None, with_mask=False)
        decode = _decode_of(model)(model, None, requests, 0, extras)
        if decode.reads_padding():
            return math.inf
        drawn = decode.run(logprobs=True)
        scores = self.score([[*ids, *one.token_ids] for ids, one in zip(prompts, drawn, strict=True)])
        parts = [(one.logprobs, score[-len(one.token_ids) :]) for one, score in zip(drawn, scores, strict=True)]
        return max(float((found - score).abs().max()) for found, score in parts if found is not None)

    @override
    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        model, scores = self._model_for("score"), []
        for row in rows:
            ids = torch.tensor(row, device=model.device)
            with without_compilation(model), exact_logits(head_layer(model)):
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scores.append(exact.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu())
        return scores

    @override
    def record_modules(self) -> AbstractContextManager[ModuleValues]:
        model = self._model_for("record_modules")
        return record_modules(model, backbone_of(model), DecodedPositions())

    @override
    def close(self) -> None:
        super().close()
        self._model = self._tokenizer = None

    def _model_for(self, what: str) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError(f"expected start() before {what}()")
        return self._model


@contextmanager
def cached_casts(model: nn.Module) -> Iterator[None]:
    """Cache autocast's copies of the weights inside the context; without autocast do nothing.

    Lightning disables autocast's cache, and autocast never caches a weight that requires no gradient.
    """
    device = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    frozen = [weight for weight in model.parameters() if weight.dtype == torch.float32 and not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad = True
        with torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=True):
            yield
    finally:
        torch.clear_autocast_cache()
        for weight in frozen:
            weight.requires_grad = False


@dataclass(slots=True)
class _Live:
    """Rows in the cache, in its order. Finished rows are dropped several at a time."""

    rows: Int[Tensor, " L"]  # numbers within the batch
    alive: Bool[Tensor, " L"]
    cache: KVCache
    logits: Float[Tensor, "L V"]
    mask: Int[Tensor, "L S"] | None  # None if no prompt was padded
    position: Int[Tensor, " L"]


class _Decode:
    """Decode of a batch of requests: prefill, then one token per live row and step."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        requests: list[Request],
        version: int,
        extras: DecodeExtras,
    ) -> None:
        self.model, self.tokenizer, self.requests, self.version = model, tokenizer, requests, version
        self.extras = extras
        self.cache_argument = cache_argument(model)
        samplings = [request.sampling for request in requests]
        device, max_tokens = model.device, extras.shape[1]
        self.tokens = torch.zeros(extras.shape, dtype=torch.int64, device=device)
        exact = torch.promote_types(model.dtype, torch.float32)
        self.logprobs = torch.zeros(extras.shape, dtype=exact, device=device)
        self.lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        self.finish = torch.full_like(self.lengths, FinishReason.LENGTH)
        self.limits = torch.tensor([sampling.max_new_tokens for sampling in samplings], device=device)
        temperatures = [sampling.temperature for sampling in samplings]
        divisor = {temperature: self._divisor(temperature or 1.0) for temperature in set(temperatures)}
        divisors = torch.tensor([divisor[temperature] for temperature in temperatures], dtype=exact)
        self.divisors = divisors.to(device) if (divisors != 1).any() else None
        greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
        self.greedy = greedy if 0 in temperatures else None
        self.uniforms = torch.stack([_uniforms(request, max_tokens, exact) for request in requests]).to(device)
        eos = [torch.tensor(request.eos_token_ids, dtype=torch.int64) for request in requests]
        self.eos_ids = nn.utils.rnn.pad_sequence(eos, batch_first=True, padding_value=-1).to(device)
        self.stops = any(sampling.stop for sampling in samplings)
        self.filters = RowFilters(samplings, device) if any(sampling.filters for sampling in samplings) else None

    def run(self, *, logprobs: bool) -> list[Completion]:
        """Decode until every row has finished."""
        live = self._prefill()
        for step in range(self.tokens.shape[1]):
            chosen = self._sample(live, step)
            live.alive = live.alive & ~self._ends(live, chosen, step)
            if not live.alive.any():
                break
            live = self._advance(live, chosen, step)
        lengths, finishes = self.lengths.tolist(), self.finish.tolist()
        tokens, scores = self.tokens.cpu(), self.logprobs.cpu()
        return [
            Completion(
                token_ids=tuple(tokens[row, :length].tolist()),
                logprobs=scores[row, :length].clone() if logprobs else None,
                finish=FinishReason(finish),
                version=self.version,
                token_extras=self.extras.of_tokens(row, length),
                prompt_extras=self.extras.of_prompt(row),
                sample_id=self.requests[row].sample_id,
            )
            for row, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
        ]

    def reads_padding(self) -> bool:
        """Return True if the logits after a prompt depend on the padding on its left."""
        prompts = self._prompts()
        lengths = torch.tensor([len(prompt.prefix_ids) for prompt in prompts], device=self.model.device)
        with embedding_leaves(self.model) as leaves:
            logits, real, *_ = self._read_prompts(prompts, lengths)
            reads = logits.requires_grad  # or the logits are constant
            return reads and bool(token_gradients(logits.log_softmax(-1)[:, 0], leaves)[~real].any())

    def _prefill(self) -> _Live:
        """Run each distinct prompt once, and repeat its cache for each of its samples."""
        prompts = self._prompts()
        place = {prompt.prompt_key: number for number, prompt in enumerate(prompts)}
        device = self.model.device
        lengths = torch.tensor([len(prompt.prefix_ids) for prompt in prompts], device=device)
        logits, real, cache, position = self._read_prompts(prompts, lengths)
        mask = None if bool(real[:, 0].all()) else real.long()  # no padding on the left
        index = torch.tensor([place[request.prompt_key] for request in self.requests], device=device)
        self.extras.add_prompts(real, index)
        cache.take_rows(index)
        rows = torch.arange(len(self.requests), device=device)
        alive = torch.ones_like(rows, dtype=torch.bool)
        return _Live(rows, alive, cache, logits[index], None if mask is None else mask[index], position[index])

    def _prompts(self) -> list[Request]:
        """Return the first request of each distinct prompt."""
        return list({request.prompt_key: request for request in reversed(self.requests)}.values())[::-1]

    def _read_prompts(self, prompts: list[Request], lengths: Tensor) -> tuple[Tensor, Tensor, KVCache, Tensor]:
        """Return the logits after each prompt, left-padded, a mask of real tokens, their cache and next positions."""
        rows, device = [prompt.prefix_ids for prompt in prompts], lengths.device
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
        real = torch.arange(width, device=device) >= width - lengths[:, None]
        cache = KVCache(self.model.config, width + self.tokens.shape[1])
        mask, positions = None if bool(real.all()) else real.long(), (real.long().cumsum(-1) - 1).clamp(min=0)
        if (media := media_of_prompts([prompt.media for prompt in prompts], ids, real)) is None:
            return self._forward(ids, mask, positions, cache), real, cache, lengths
        arguments = media_arguments(self.model.base_model, media, positions)
        positions = arguments.pop("position_ids")
        with plain_placeholders(self.model, ids, media.drawn) as plain:
            logits = self._forward(plain, mask, positions, cache, **arguments)
        last = positions.view(-1, *ids.shape).amax(0).masked_fill(~real, -1).amax(-1)
        return logits, real, cache, last + 1

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache, **arguments: Tensor
    ) -> Tensor:
        """Return the logits after the last token; the tokens are added to the cache."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
            **arguments,
        )
        return output.logits[:, -1]

    def _sample(self, live: _Live, step: int) -> Tensor:
        """Sample a token for every row of the cache and store those of live rows."""
        scores, mask = self._filter(self._scores(live), live, step)
        logprobs = self._distribution(live, scores, mask)
        self.extras.add_top(live.rows, live.alive, logprobs, step)
        mass = in_units(scores.exp()).cumsum_(-1)  # in place: a vocabulary is large
        target = (self.uniforms[live.rows, step, None] * mass[:, -1:]).to(mass.dtype)
        target = torch.minimum(target, mass[:, -1:] - 1)  # of a product that was rounded up
        chosen = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)  # beyond it only for NaN
        if self.greedy is not None:
            chosen = torch.where(self.greedy[live.rows, None], live.logits.argmax(-1, keepdim=True), chosen)
        rows = live.rows[live.alive]
        self.tokens[rows, step] = chosen[live.alive, 0]
        self.logprobs[rows, step] = logprobs.gather(1, chosen)[live.alive, 0]
        self.lengths[rows] = step + 1
        return chosen[:, 0]

    def _scores(self, live: _Live) -> Tensor:
        """Return log-probabilities at the rows' temperatures; at 1 for greedy rows."""
        return self._divide(live).log_softmax(-1)

    def _divide(self, live: _Live) -> Tensor:
        exact = live.logits.to(self.logprobs.dtype)
        return exact if self.divisors is None else exact / self.divisors[live.rows, None]

    def _divisor(self, temperature: float) -> float:
        """Return the divisor of a request's logits."""
        return temperature

    def _distribution(self, live: _Live, scores: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002  a subclass reads them
        """Return the log-probabilities of the vocabulary as they are recorded."""
        return scores

    def _filter(self, scores: Tensor, live: _Live, step: int) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities renormalized over the tokens that pass the filters, and a mask of these."""
        if self.filters is None and not self.extras.with_mask:
            return scores, None
        mask = torch.ones_like(scores, dtype=torch.bool)
        if self.filters is not None:
            mask = self.filters.mask(scores, live.rows)
            scores = scores.masked_fill(~mask, -torch.inf).log_softmax(-1)
        self.extras.add_mask(live.rows[live.alive], mask[live.alive], step)
        return scores, mask

    def _ends(self, live: _Live, chosen: Tensor, step: int) -> Tensor:
        """Return True for each row that ends with the sampled token."""
        stopped = (chosen[:, None] == self.eos_ids[live.rows]).any(-1)
        if self.stops:
            strings = [self._ends_with_stop_string(row, step) for row in live.rows.tolist()]
            stopped |= torch.tensor(strings, dtype=torch.bool, device=chosen.device)
        self.finish[live.rows[stopped & live.alive]] = int(FinishReason.STOP)
        return stopped | (step + 1 >= self.limits[live.rows])

    def _ends_with_stop_string(self, row: int, step: int) -> bool:
        stops = self.requests[row].sampling.stop
        if not stops:
            return False
        if self.tokenizer is None:
            raise ValueError("expected a tokenizer, because stop strings need one: pass tokenizer= to the module")
        tail = self.tokens[row, max(0, step - max(len(stop.encode()) for stop in stops) - 8) : step + 1]
        text = self.tokenizer.decode(tail.tolist(), skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _advance(self, live: _Live, chosen: Tensor, step: int) -> _Live:
        """Run a forward with the sampled tokens; drop finished rows first if there are many."""
        rows, alive, mask, position = live.rows, live.alive, live.mask, live.position
        if alive.float().mean() < COMPACT_BELOW:
            keep = alive.nonzero()[:, 0]
            live.cache.take_rows(keep)
            rows, alive, position, chosen = rows[keep], alive[keep], position[keep], chosen[keep]
            mask = None if mask is None else mask[keep]
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        logits = self._forward(chosen[:, None], mask, position[:, None], live.cache)
        self.extras.add_routes(rows, alive, step)
        return _Live(rows, alive, live.cache, logits, mask, position + 1)


class _InvariantDecode(_Decode):
    """Decode of a batch-invariant model, whose log-probabilities have the bits of those in training."""

    width = 0  # of the cache, in tokens

    @override
    def reads_padding(self) -> bool:
        """Return False: padding is on the right of causal attention."""
        return False

    @override
    def _read_prompts(self, prompts: list[Request], lengths: Tensor) -> tuple[Tensor, Tensor, KVCache, Tensor]:
        """Pad on the right, so that each token is at its position."""
        rows = [prompt.prefix_ids for prompt in prompts]
        self.width = width = max(map(len, rows))
        ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=lengths.device)
        column = torch.arange(width, device=ids.device)
        cache = KVCache(self.model.config, width + self.tokens.shape[1], aligned=True)
        states = self._states(ids, column.expand(len(ids), -1), cache)
        return self._logits(states[torch.arange(len(ids)), lengths - 1]), column < lengths[:, None], cache, lengths

    @override
    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache, **arguments: Tensor
    ) -> Tensor:
        self.width += 1
        return self._logits(self._states(ids, positions, cache)[:, -1])

    def _states(self, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        cache.place(positions, self.width)
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "query_positions": positions}
        output = backbone_of(self.model)(**inputs, use_cache=True, **{self.cache_argument: cache})
        return output.last_hidden_state

    def _logits(self, states: Tensor) -> Tensor:
        with BatchInvariance():
            return unscaled_logits(self.model, states)

    @override
    def _divisor(self, temperature: float) -> float:
        return logit_divisor(self.model, temperature)

    @override
    def _distribution(self, live: _Live, scores: Tensor, mask: Tensor | None) -> Tensor:
        logits = self._divide(live) if mask is None else self._divide(live).masked_fill(~mask, FILTERED)
        with BatchInvariance():
            logprobs = logprobs_of(logits)
        return logprobs if mask is None else logprobs.masked_fill_(~mask, -torch.inf)


def _decode_of(model: PreTrainedModel) -> type[_Decode]:
    return _InvariantDecode if is_batch_invariant(model) else _Decode


def _uniforms(request: Request, length: int, dtype: torch.dtype) -> Float[Tensor, " L"]:
    return torch.rand(length, dtype=dtype, generator=torch.Generator().manual_seed(request.seed))
