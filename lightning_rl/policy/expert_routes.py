"""Expert routes: experts chosen for each token of a mixture of experts, recorded by the engine and replayed in
training.

Routes are int16 of shape [N, R, k] for N input tokens, R routers in the order of the layers and k experts per token:
the expert's index + 1, or 0 where nothing was recorded, as in padding. They contain no expert weights.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.policy.sequences import join_sequences, sequences_of
from lightning_rl.policy.text_model import backbone_of, modules_behind
from lightning_rl.rollout import ROUTES, Rollout

CARRIER = "expert_routes"  # keyword argument that passes routes through the model
CLOSE = 0.01  # tolerance between a router's weights, at most 1, and ours, in any dtype


def routers_of(model: PreTrainedModel, reader: str = "RouterReplay") -> dict[str, nn.Module]:
    """Return the routers of a mixture of experts by name, in the order of the layers, for a correction.

    Raises:
        ValueError: If the model is dense.
    """
    routers = modules_behind(model, "router_logits")
    if not routers:
        raise ValueError(
            f"expected a mixture of experts, got {type(model).__name__}, which has no routers: leave {reader} out"
        )
    return routers


def routes_of(experts: list[Int[Tensor, "N k"]]) -> Int16[Tensor, "N R k"]:
    """Return routes from the expert indices chosen by each router.

    Example:
        >>> routes_of([torch.tensor([[0, 3]]), torch.tensor([[2, 1]])]).tolist()
        [[[1, 4], [3, 2]]]
    """
    return (torch.stack(experts, 1) + 1).to(torch.int16)


@contextmanager
def record_routes(model: PreTrainedModel) -> Iterator[Callable[[], Int16[Tensor, "N R k"]]]:
    """Yield a function that returns the routes of the last forward, in the order of its flattened input.

    Raises:
        ValueError: If the model is dense.
    """
    experts: list[Tensor] = []
    routers = routers_of(model).values()
    handles = [router.register_forward_hook(lambda _m, _i, output: experts.append(output[2])) for router in routers]

    def take() -> Tensor:
        routes = routes_of(experts)
        experts.clear()
        return routes

    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def count_experts(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield the number of tokens of each expert by router, counted inside.

    Empty for a dense model, and for one whose routers do not return logits, weights and experts.
    """
    counts: dict[str, Tensor] = {}

    def count(name: str, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            added = torch.bincount(output[2].flatten(), minlength=output[0].shape[-1])
            counts[name] = counts[name] + added if name in counts else added

    handles = [
        router.register_forward_hook(lambda _m, _i, output, name=name: count(name, output))
        for name, router in modules_behind(model, "router_logits").items()
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def count_unvisited_experts(counts: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of experts without a token, by router, without zeros."""
    return {router: number for router, count in counts.items() if (number := int((count == 0).sum()))}


@dataclass(slots=True, eq=False)
class MicrobatchRoutes:
    """Routes of a microbatch for one forward: padded [2, 14, 4, 8] for 2 sequences, 4 routers and 8 experts per token.

    Args:
        samples: Ids of the rows' samples, for messages.
        padded: Routes of prompt and response side by side, [b, S, R, k]; 0 in padding.
        packed: True where an entry is among packed inputs, [b, S].
        flat: Routes in the order of the forward's input, once known.
        times_taken: Number of times each router used them.
    """

    samples: list[int]
    padded: Int16[Tensor, "b S R k"]
    packed: Tensor
    flat: Int16[Tensor, "N R k"] | None = None
    times_taken: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Rollout, layers: list[str]) -> "MicrobatchRoutes":
        """Return the routes of rows, after checking that every input token has one at each layer.

        Raises:
            ValueError: If one is missing; names layer and row.
        """
        if ROUTES not in rows.token_extras or ROUTES not in rows.prompt_extras:
            raise ValueError(f'expected "{ROUTES}" in prompt_extras and token_extras, got none: an engine records them')
        padded, inside = join_sequences(rows, rows.prompt_extras[ROUTES], rows.token_extras[ROUTES])
        if padded.dim() != 4 or padded.shape[2] != len(layers):
            raise ValueError(
                f"expected routes [b, S, {len(layers)}, k] for {len(layers)} routers, got {list(padded.shape)}"
            )
        sequences = sequences_of(rows)
        place = torch.arange(inside.shape[1], device=inside.device)
        row_of, packed = sequences.row, inside & (place >= sequences.common[:, None])
        real = (inside & rows.real[row_of, None])[:, :, None, None]
        missing = (real & (padded <= 0)).nonzero()
        if len(missing):
            sequence, position, number, _ = missing[0].tolist()
            row = int(row_of[sequence])
            raise ValueError(
                f"expected a route for every token, got none at {layers[number]} for token {position} of row {row} "
                f"(sample {int(rows.sample_ids[row])})"
            )
        return cls(rows.sample_ids[rows.real].tolist(), torch.where(real, padded, 0), packed, None, [0] * len(layers))

    def order_like(self, shape: tuple[int, ...]) -> None:
        """Set ``flat`` for inputs of a shape: padded [b, S], or packed [1, N]."""
        packed = self.padded[self.packed]
        if shape == self.packed.shape:
            self.flat = self.padded.flatten(0, 1)
        elif shape == (1, len(packed)):
            self.flat = packed
        else:
            raise ValueError(f"expected routes for inputs {list(shape)}, got them for rows {list(self.packed.shape)}")


class ExpertReplay:
    """Hooks that make the routers of a policy use given routes inside :meth:`replay`.

    The experts come from the routes and their weights from the current router's logits, which keeps the gradient:
    softmax over all experts, divided by the sum over the chosen ones if the model does so.

    Routes pass through the model as a keyword argument of each layer's attention, whose hook hands them to the layer's
    router. They thus belong to one forward: activation checkpointing, which runs a layer again after the context has
    ended, passes the same argument again.

    Args:
        model: Model of the policy.

    Raises:
        ValueError: If the model is dense, or its routers are not beside their layer's attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind = type(model).__name__
        self.normalizes = bool(model.config.get_text_config().to_dict().get("norm_topk_prob", True))
        self._now: MicrobatchRoutes | None = None
        self._at_router: dict[int, MicrobatchRoutes | None] = {}
        self._familiar: set[int] = set()
        routers, attentions = routers_of(model), modules_behind(model, "attentions")
        self.layers = [_layer_of(name) for name in routers]
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        if len(numbers) < len(routers) or numbers.keys() - set(map(_layer_of, attentions)):
            raise ValueError(f"expected one router beside the attention of a layer in {self.kind}, got {list(routers)}")
        self._handles = [backbone_of(model).register_forward_pre_hook(self._inject, with_kwargs=True)]
        for name, attention in attentions.items():
            hook = partial(self._hand_over, numbers.get(_layer_of(name)))
            self._handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        for number, router in enumerate(routers.values()):
            self._handles.append(router.register_forward_hook(partial(self._route, number)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def replay(self, rows: Rollout) -> Iterator[None]:
        """Use the routes of these rows in the next forward of the policy; padding rows have none.

        Raises:
            ValueError: If a row lacks a route.
            RuntimeError: If a router did not use its routes exactly once; names layer and rows.
        """
        if not rows.real.any():
            yield
            return
        routes = self._now = MicrobatchRoutes.of(rows, self.layers)
        try:
            yield
        finally:
            self._now = None
        for layer, times in zip(self.layers, routes.times_taken, strict=True):
            if times != 1:
                raise RuntimeError(
                    f"expected the router of {layer} to take the routes of each row once, but it took them {times} "
                    f"times, for samples {', '.join(map(str, routes.samples))}: one context holds one forward"
                )

    def _inject(self, _module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self._now is None:
            return None
        self._now.order_like(tuple(keywords["input_ids"].shape))
        return inputs, {**keywords, CARRIER: self._now}

    def _hand_over(
        self, number: int | None, _module: nn.Module, inputs: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        routes = keywords.get(CARRIER)
        if number is not None:
            self._at_router[number] = routes
        return None if routes is None else (inputs, {key: keywords[key] for key in keywords if key != CARRIER})

    def _route(self, number: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> Any:
        routes = self._at_router.pop(number, None)
        if routes is None or routes.flat is None:
            if self._now is not None:
                raise ValueError(f"{self.kind} drops the routes on their way to {self.layers[number]}: not supported")
            return None
        logits, weights, experts = output
        replayed = routes.flat[:, number].long()
        self._check(number, logits, weights, experts, replayed)
        if self._now is routes:  # not in a recomputation
            routes.times_taken[number] += 1
        chosen = torch.where(replayed > 0, replayed - 1, experts)
        ours = expert_weights(logits, chosen, normalized=self.normalizes).to(weights.dtype)
        return logits, torch.where(replayed > 0, ours, weights), chosen

    @torch.no_grad()
    def _check(self, number: int, logits: Tensor, weights: Tensor, experts: Tensor, routes: Tensor) -> None:
        layer, familiar = self.layers[number], number in self._familiar
        if routes.shape != experts.shape or (not familiar and int(routes.max()) > logits.shape[-1]):
            raise ValueError(
                f"expected routes {list(experts.shape)} to {logits.shape[-1]} experts at {layer}, got "
                f"{list(routes.shape)} to expert {int(routes.max()) - 1}"
            )
        if familiar:
            return
        off = float((expert_weights(logits, experts, normalized=self.normalizes) - weights).abs().max())
        if not off < CLOSE:
            raise ValueError(
                f"expected a softmax over the experts of {layer}, but its weights are off by {off:.2g}: "
                f"RouterReplay does not know the routers of {self.kind}"
            )
        self._familiar.add(number)


def expert_weights(
    logits: Float[Tensor, "N E"], experts: Int[Tensor, "N k"], *, normalized: bool
) -> Float[Tensor, "N k"]:
    """Return the float32 weights of the outputs of some experts.

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> expert_weights(logits, torch.tensor([[1, 2]]), normalized=True)
        tensor([[0.5000, 0.5000]])
    """
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if normalized else chosen


def _layer_of(name: str) -> str:
    match = re.search(r"layers\.\d+", name)
    return name if match is None else match[0]
