"""Filters of sampling parameters: top-k, top-p and min-p as masks."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_rl.generation.engine import Engine
from lightning_rl.rollout import SAMPLING_MASK
from lightning_rl.samples import SamplingParams

CANDIDATES = 1024  # most likely tokens that top-p tries before it sorts the vocabulary
UNITS = 2**30  # integer that stands for probability 1, see in_units


class RowFilters:
    """Top-k, top-p and min-p of several rows as tensors; each row may have its own values."""

    def __init__(self, samplings: Sequence[SamplingParams], device: torch.device) -> None:
        rows = [sampling if sampling.filters else SamplingParams() for sampling in samplings]
        self.top_k = torch.tensor([row.top_k for row in rows], device=device)[:, None]
        self.top_p = torch.tensor([row.top_p for row in rows], device=device)[:, None]
        self.min_p = torch.tensor([row.min_p for row in rows], device=device)[:, None]
        self.largest_k = max(row.top_k for row in rows)
        self.with_top_p = any(row.top_p < 1 for row in rows)

    def mask(self, logprobs: Float[Tensor, "L V"], rows: Int[Tensor, " L"]) -> Bool[Tensor, "L V"]:
        """Return the tokens that each row may sample, always including the most likely one.

        Example:
            >>> filters = RowFilters([SamplingParams(top_p=0.7), SamplingParams(top_k=1)], torch.device("cpu"))
            >>> filters.mask(torch.tensor([[0.5, 0.3, 0.2]] * 2).log(), torch.tensor([0, 1])).tolist()
            [[True, True, False], [True, False, False]]
        """
        floor = logprobs.amax(-1, keepdim=True) + self.min_p[rows].log()
        if self.largest_k:
            top_k = self.top_k[rows]
            largest = logprobs.topk(min(self.largest_k, logprobs.shape[-1]), -1).values
            kth = largest.gather(1, (top_k - 1).clamp(0, largest.shape[-1] - 1))
            floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
        kept = logprobs >= floor
        return _nucleus(logprobs.masked_fill(~kept, -torch.inf), self.top_p[rows]) if self.with_top_p else kept


def in_units(mass: Float[Tensor, "L V"]) -> Int[Tensor, "L V"]:
    """Convert probabilities in place to integer multiples of 2^-30.

    Sums of integers are exact, so a sample depends neither on the order of additions on a device nor on other rows. On
    CUDA a cumsum of floats depends on both, and raises under ``torch.use_deterministic_algorithms``.

    Example:
        >>> in_units(torch.tensor([[0.75, 0.25]])).tolist() == [[3 * 2**28, 2**28]]
        True
    """
    whole = torch.int32 if mass.dtype == torch.float32 else torch.int64
    return mass.view(whole).copy_(mass.mul_(UNITS).round_())


def _nucleus(scores: Float[Tensor, "L V"], top_p: Float[Tensor, "L 1"]) -> Bool[Tensor, "L V"]:
    """Return the fewest most likely tokens with a mass of ``top_p``, or all possible ones where it is 1.

    A row is sorted whole only if its :data:`CANDIDATES` most likely tokens have less mass, so no row affects another.
    """
    limited = top_p < 1
    mass = scores.softmax(-1)
    likeliest, order = mass.topk(min(CANDIDATES, mass.shape[-1]), -1)
    kept = _until(likeliest, order, top_p, mass.shape[-1])
    beyond = ((likeliest.sum(-1, keepdim=True) < top_p) & limited)[:, 0].nonzero()[:, 0]
    if len(beyond) and likeliest.shape[-1] < mass.shape[-1]:
        kept[beyond] = _until(*mass[beyond].sort(-1, descending=True), top_p[beyond], mass.shape[-1])
    return torch.where(limited, kept, scores > -torch.inf)


def _until(
    mass: Float[Tensor, "L K"], order: Int[Tensor, "L K"], share: Float[Tensor, "L 1"], vocabulary: int
) -> Tensor:
    """Return tokens of descending mass while the mass before them is below ``share``; the first one is always kept."""
    units = in_units(mass.clone())
    kept = (units.cumsum(-1) - units < share.double() * UNITS) & (mass > 0)
    kept[:, 0] = True
    return torch.zeros(len(mass), vocabulary, dtype=torch.bool, device=mass.device).scatter_(1, order, kept)


def filter_problems(sampling: SamplingParams, engine: Engine) -> Iterator[str]:
    """Yield a problem if the engine does not take the temperature, ignores a filter, or needs one to list masks."""
    yield from temperature_problems(sampling, engine)
    lists_masks = SAMPLING_MASK in engine.extras and engine.capabilities.lists_masks
    if sampling.temperature > 0 and not sampling.filters and lists_masks:
        yield (
            f"expected a greedy or filtered evaluation, because training filters, got temperature="
            f"{sampling.temperature} alone: {type(engine).__name__} would list the whole vocabulary per token; "
            "pass top_k=, top_p= or min_p=, or engine=TransformersEngine()"
        )
    if sampling.filters and not engine.capabilities.filters:
        yield (
            f"expected an engine that supports top_k={sampling.top_k}, top_p={sampling.top_p}, "
            f"min_p={sampling.min_p} of an evaluation, got {type(engine).__name__}, which ignores them: use "
            "engine=TransformersEngine(), or remove them"
        )


def temperature_problems(sampling: SamplingParams, engine: Engine) -> Iterator[str]:
    """Yield a problem if the engine would change or refuse a temperature."""
    lowest, highest = engine.capabilities.temperatures
    if sampling.temperature > 0 and not lowest <= sampling.temperature <= highest:
        yield (
            f"expected temperature 0 or within [{lowest:g}, {highest:g}] for {type(engine).__name__}, got "
            f"{sampling.temperature}: change it, or use engine=TransformersEngine()"
        )
