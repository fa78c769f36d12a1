"""Replay: routers of the policy that take recorded expert routes in one forward, and their own in every other."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.policy.packing import joined
from lightning_rl.policy.routes import modules_behind, routers_of
from lightning_rl.rollout import ROUTES, Rollout

CARRIER = "expert_routes"  # the keyword argument that takes routes through the model
CLOSE = 0.01  # between a router's weights, which are at most 1, and ours, in any dtype


@dataclass(slots=True, eq=False)
class Carried:
    """The routes of a microbatch's rows on their way through one forward.

    Args:
        samples: identities of the rows, for messages.
        padded: side by side for prompt and response, [b, S, R, k]; 0 in padding.
        inside: what is no padding, [b, S].
        flat: the same in the order of the forward's input, once that is known.
        taken: how often each router took them.
    """

    samples: list[int]
    padded: Int16[Tensor, "b S R k"]
    inside: Tensor
    flat: Int16[Tensor, "N R k"] | None = None
    taken: list[int] = field(default_factory=list)

    @classmethod
    def by(cls, rows: Rollout, layers: list[str]) -> "Carried":
        """The routes of rows, of which each token that the forward reads has one at each layer.

        Raises:
            ValueError: naming the layer and the row that has none.
        """
        if ROUTES not in rows.token_extras or ROUTES not in rows.prompt_extras:
            raise ValueError(f'expected "{ROUTES}" in prompt_extras and token_extras, got none: an engine records them')
        padded, inside = joined(rows, rows.prompt_extras[ROUTES], rows.token_extras[ROUTES])
        if padded.dim() != 4 or padded.shape[2] != len(layers):
            raise ValueError(
                f"expected routes [b, S, {len(layers)}, k] for {len(layers)} routers, got {list(padded.shape)}"
            )
        real = (inside & rows.real[:, None])[:, :, None, None]
        missing = (real & (padded <= 0)).nonzero()
        if len(missing):
            row, position, number, _ = missing[0].tolist()
            raise ValueError(
                f"expected a route for every token, got none at {layers[number]} for token {position} of row {row} "
                f"(sample {int(rows.sample_ids[row])})"
            )
        return cls(rows.sample_ids[rows.real].tolist(), torch.where(real, padded, 0), inside, None, [0] * len(layers))

    def lay(self, shape: tuple[int, ...]) -> None:
        """Puts them in the order of inputs of a shape: padded [b, S], or packed [1, N]."""
        packed = self.padded[self.inside]
        if shape == self.inside.shape:
            self.flat = self.padded.flatten(0, 1)
        elif shape == (1, len(packed)):
            self.flat = packed
        else:
            raise ValueError(f"expected routes for inputs {list(shape)}, got them for rows {list(self.inside.shape)}")


class Replay:
    """Hooks that make the routers of a policy take given routes inside of :meth:`replaying`, and nothing elsewhere.

    The experts come from the routes, their weights from the current router's logits, so that it keeps its gradient:
    softmax over all experts, divided by the sum over the taken ones where the model does so.

    Routes travel through the model as a keyword argument to each layer's attention, which hands them to the router of
    its layer. So they belong to one forward: activation checkpointing, which runs a layer again long after the
    context has ended, passes the same argument again, and nothing is left behind for the next forward.

    Args:
        model: of the policy.

    Raises:
        ValueError: for a dense model, or one whose routers are not beside their layer's attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind = type(model).__name__
        self.renormalises = bool(model.config.get_text_config().to_dict().get("norm_topk_prob", True))
        self._now: Carried | None = None
        self._handed: dict[int, Carried | None] = {}
        self._known: set[int] = set()
        routers, attentions = routers_of(model), modules_behind(model, "attentions")
        self.layers = [_layer_of(name) for name in routers]
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        if len(numbers) < len(routers) or numbers.keys() - set(map(_layer_of, attentions)):
            raise ValueError(f"expected one router beside the attention of a layer in {self.kind}, got {list(routers)}")
        self._handles = [model.base_model.register_forward_pre_hook(self._inject, with_kwargs=True)]
        for name, attention in attentions.items():
            hook = _numbered(self._hand_over, numbers.get(_layer_of(name)))
            self._handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        for number, router in enumerate(routers.values()):
            self._handles.append(router.register_forward_hook(_numbered(self._route, number)))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def replaying(self, rows: Rollout) -> Iterator[None]:
        """The next forward of the policy takes the routes of these rows; rows of padding replay nothing.

        Raises:
            ValueError: if a row lacks a route.
            RuntimeError: if a router did not take its routes exactly once; the message names layer and rows.
        """
        if not rows.real.any():
            yield
            return
        carried = self._now = Carried.by(rows, self.layers)
        try:
            yield
        finally:
            self._now = None
        for layer, times in zip(self.layers, carried.taken, strict=True):
            if times != 1:
                raise RuntimeError(
                    f"expected the router of {layer} to take the routes of each row once, but it took them {times} "
                    f"times, for samples {', '.join(map(str, carried.samples))}: one context holds one forward"
                )

    def _inject(self, _module: nn.Module, given: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self._now is None:
            return None
        self._now.lay(tuple(keywords["input_ids"].shape))
        return given, {**keywords, CARRIER: self._now}

    def _hand_over(
        self, number: int | None, _module: nn.Module, given: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        carried = keywords.get(CARRIER)
        if number is not None:
            self._handed[number] = carried
        return None if carried is None else (given, {key: one for key, one in keywords.items() if key != CARRIER})

    def _route(self, number: int, _router: nn.Module, _given: Any, output: tuple[Tensor, ...]) -> Any:
        carried = self._handed.pop(number, None)
        if carried is None or carried.flat is None:
            if self._now is not None:
                raise ValueError(f"{self.kind} drops the routes on their way to {self.layers[number]}: not supported")
            return None
        logits, weights, experts = output
        routes = carried.flat[:, number].long()
        self._check(number, logits, weights, experts, routes)
        if self._now is carried:  # and not a checkpoint's second forward
            carried.taken[number] += 1
        chosen = torch.where(routes > 0, routes - 1, experts)
        ours = expert_weights(logits, chosen, renormalised=self.renormalises).to(weights.dtype)
        return logits, torch.where(routes > 0, ours, weights), chosen

    @torch.no_grad()
    def _check(self, number: int, logits: Tensor, weights: Tensor, experts: Tensor, routes: Tensor) -> None:
        layer, known = self.layers[number], number in self._known
        if routes.shape != experts.shape or (not known and int(routes.max()) > logits.shape[-1]):
            raise ValueError(
                f"expected routes {list(experts.shape)} to {logits.shape[-1]} experts at {layer}, got "
                f"{list(routes.shape)} to expert {int(routes.max()) - 1}"
            )
        if not known:
            off = float((expert_weights(logits, experts, renormalised=self.renormalises) - weights).abs().max())
            if not off < CLOSE:
                raise ValueError(
                    f"expected a softmax over the experts of {layer}, but its weights are off by {off:.2g}: "
                    f"RouterReplay does not know the routers of {self.kind}"
                )
            self._known.add(number)


def expert_weights(
    logits: Float[Tensor, "N E"], experts: Int[Tensor, "N k"], *, renormalised: bool
) -> Float[Tensor, "N k"]:
    """What the outputs of some experts are multiplied with, float32.

    Example:
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> expert_weights(logits, torch.tensor([[1, 2]]), renormalised=True)
        tensor([[0.5000, 0.5000]])
    """
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if renormalised else chosen


def _numbered(hook: Callable[..., Any], number: int | None) -> Callable[..., Any]:
    return lambda *given: hook(number, *given)


def _layer_of(name: str) -> str:
    found = re.search(r"layers\.\d+", name)
    return name if found is None else found[0]
