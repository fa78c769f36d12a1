"""Expert routes, sampling masks and likeliest tokens of vLLM.

vLLM returns the likeliest tokens with the log-probabilities. It returns the others (``enable_return_routed_experts``,
``return_sampling_mask``) with its second model runner, which needs Triton and so a GPU. On a CPU, hooks on the routers
record routes, and masks are not available.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int16, Int32, UInt8
from torch import Tensor, nn

from lightning_rl.generation.vllm.internals import outer_name
from lightning_rl.generation.vllm.vllm_sampling import bounded_parameters
from lightning_rl.policy.expert_routes import routes_of
from lightning_rl.policy.sampling_mask import to_bits
from lightning_rl.rollout import ROUTES, SAMPLING_MASK, TOP_IDS, TOP_LOGPROBS


def available_extras() -> frozenset[str]:
    """Return the names of the extras that are available on this machine."""
    return frozenset((ROUTES, TOP_IDS, TOP_LOGPROBS, *((SAMPLING_MASK,) if torch.cuda.is_available() else ())))


def options_for(names: frozenset[str], top_logprobs: int | None = None) -> dict[str, Any]:
    """Return the options of ``vllm.LLM`` that enable these extras; routes and masks need none on a CPU."""
    options = {ROUTES: "enable_return_routed_experts", SAMPLING_MASK: "return_sampling_mask"}
    enabled = {options[name]: True for name in sorted(names & options.keys()) if torch.cuda.is_available()}
    return enabled | ({"max_logprobs": -1 if top_logprobs is None else top_logprobs} if TOP_IDS in names else {})


def check_max_logprobs(options: Mapping[str, Any], names: frozenset[str], top_logprobs: int | None) -> None:
    """Raise a ValueError if a user's ``max_logprobs`` forbids the likeliest tokens."""
    most = options.get("max_logprobs", -1)
    if TOP_IDS in names and most != -1 and (top_logprobs is None or most < top_logprobs):
        needed = "-1 for the whole vocabulary" if top_logprobs is None else f"at least {top_logprobs}"
        raise ValueError(f"expected max_logprobs of {needed}, got {most}: remove it, or record fewer likeliest tokens")


class OutputExtras:
    """Extras of vLLM's outputs. ``llm`` has to be built with :func:`options_for` ``names``."""

    def __init__(self, llm: Any, names: frozenset[str], vocabulary: int, top_logprobs: int | None = None) -> None:
        self.names, self.vocabulary = names, vocabulary
        self.top_logprobs = min(top_logprobs or vocabulary, vocabulary)
        listens = ROUTES in names and not torch.cuda.is_available()
        self._listener = RouteListener(llm) if listens else None

    @property
    def sampling(self) -> dict[str, Any]:
        """Additional sampling parameters: tokens from the prefix cache pass no router."""
        options: dict[str, Any] = {} if self._listener is None else {"skip_reading_prefix_cache": True}
        return options | ({"logprobs": self.top_logprobs, "flat_logprobs": True} if TOP_IDS in self.names else {})

    def accept(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return sampling parameters in the form that an engine with these extras accepts."""
        return bounded_parameters(parameters, self.vocabulary) if SAMPLING_MASK in self.names else parameters

    def clear(self) -> None:
        """Drop the records of earlier requests."""
        if self._listener is not None:
            self._listener.clear()

    def of(self, output: Any) -> dict[str, Any]:
        """Return the extras of a finished request as keyword arguments of Completion."""
        tokens, prompt = dict[str, Tensor](), dict[str, Tensor]()
        if ROUTES in self.names:
            routes = routes_from(output) if self._listener is None else self._listener.routes(output)
            length, last = len(output.prompt_token_ids), routes.new_zeros(1, *routes.shape[1:])
            tokens[ROUTES], prompt[ROUTES] = torch.cat([routes[length:], last]), routes[:length].clone()
        if SAMPLING_MASK in self.names:
            tokens[SAMPLING_MASK] = mask_from(output, self.vocabulary)
        if TOP_IDS in self.names:
            tokens[TOP_IDS], tokens[TOP_LOGPROBS] = top_from(output, self.top_logprobs)
        return {"token_extras": tokens, "prompt_extras": prompt}


class RouteListener:
    """Records the experts chosen by the routers of an engine in this process.

    A forward contains tokens of many requests one after the other, in the order of the runner's batch; positions give
    the index of each token in its request. Under CUDA graphs and compilation models call no hooks.
    """

    def __init__(self, llm: Any) -> None:
        (self._runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        self._now: list[Tensor] = []
        self._requests: dict[str, list[tuple[Tensor, Tensor]]] = {}
        model: nn.Module = self._runner.model
        for module in model.modules():
            router: Any = getattr(module, "router", None)
            if hasattr(router, "set_capture_fn"):
                router.set_capture_fn(lambda experts: self._now.append(experts.clone()))
        model.register_forward_pre_hook(lambda *_: self._now.clear())
        model.register_forward_hook(self._after_forward, with_kwargs=True)

    def _after_forward(self, _model: nn.Module, _input: Any, keywords: Mapping[str, Any], _output: Any) -> None:
        batch = self._runner.input_batch
        if not self._now or not batch.num_reqs:
            return
        ends = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        positions, routes = keywords["positions"].clone(), routes_of(self._now)
        for number, name in enumerate(batch.req_ids):
            tokens = slice(ends[number], ends[number + 1])
            parts = self._requests.setdefault(outer_name(name), [])
            parts.append((positions[tokens], routes[tokens]))

    def clear(self) -> None:
        """Drop the records of all requests."""
        self._requests.clear()

    def routes(self, output: Any) -> Int16[Tensor, "S R k"]:
        """Return and drop the routes of a finished request without its last token; 0 where unknown."""
        positions, routes = (torch.cat(parts) for parts in zip(*self._requests.pop(output.request_id), strict=True))
        length = _forward_length(output)
        inside = positions < length
        ordered = routes.new_zeros(length, *routes.shape[1:])
        ordered[positions[inside]] = routes[inside]
        return ordered


def routes_from(output: Any) -> Int16[Tensor, "S R k"]:
    """Return the routes in vLLM's output of a finished request, without its last token.

    Raises:
        RuntimeError: If some are missing.
    """
    experts, length = output.outputs[0].routed_experts, _forward_length(output)
    if experts is None or len(experts) != length:
        got = "none" if experts is None else len(experts)
        raise RuntimeError(f"expected routes of {length} tokens from vLLM, got {got}")
    return routes_of(list(torch.from_numpy(experts.astype(np.int64)).unbind(1)))


def mask_from(output: Any, vocabulary: int) -> UInt8[Tensor, "L V8"]:
    """Return the sampling mask of each token of the response as bits.

    Raises:
        RuntimeError: If some are missing.
    """
    row = output.outputs[0]
    sets = None if row.sampling_mask is None else row.sampling_mask.token_ids
    if sets is None or len(sets) != len(row.token_ids):
        got = "none" if sets is None else len(sets)
        raise RuntimeError(f"expected the kept tokens of {len(row.token_ids)} tokens from vLLM, got {got}")
    mask = torch.zeros(len(sets), vocabulary, dtype=torch.bool)
    for place, ids in enumerate(sets):
        mask[place, ids] = True
    return to_bits(mask)


def top_from(output: Any, number: int) -> tuple[Int32[Tensor, "L K"], Float[Tensor, "L K"]]:
    """Return the likeliest tokens before each token of the response, and their log-probabilities.

    vLLM returns the sampled token first and then these.

    Raises:
        RuntimeError: If some are missing.
    """
    row = output.outputs[0]
    flat = row.logprobs
    if len(flat.token_ids) != len(row.token_ids) * (1 + number):
        raise RuntimeError(
            f"expected {number} likeliest tokens of each of {len(row.token_ids)} tokens from vLLM, got "
            f"{len(flat.token_ids)} in all"
        )
    ids, logprobs = (np.array(values).reshape(-1, 1 + number)[:, 1:] for values in (flat.token_ids, flat.logprobs))
    return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(logprobs.astype(np.float32))


def _forward_length(output: Any) -> int:
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
