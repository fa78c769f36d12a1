"""Frozen model other than the reference, which scores whole rollouts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.policy.build import ModelSource, build_scorer, model_and_files
from lightning_rl.policy.model import PolicyModel
from lightning_rl.policy.plan import make_plan
from lightning_rl.rollout import Rollout


class Teacher:
    """Scores the valid tokens of a rollout; every rank holds a full copy.

    Args:
        source: Name or path of a causal language model with the policy's vocabulary, or a callable that builds one.
        temperature: Divisor of its logits; the sampling temperature, so that both are comparable.
        max_tokens_per_microbatch: Function that returns the maximum number of tokens of a microbatch.
        packed: True to score without padding.
        precise: Context manager around every forward, for the precision of the run.
        policy: Policy of the run, if known.

    Raises:
        ValueError: If a check of :func:`.build_scorer` fails.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        temperature: float,
        max_tokens_per_microbatch: Callable[[], int],
        packed: bool,
        precise: Callable[[], AbstractContextManager[object]] = nullcontext,
        policy: PolicyModel | None = None,
    ) -> None:
        known, processor = (None, None) if policy is None else (policy.model, policy.processor)
        model, _ = model_and_files(source, "teacher", whole=processor is not None)
        options: dict[str, Any] = {"temperature": temperature, "packed": packed, "processor": processor}
        self.scorer = build_scorer(model, "teacher", known, **options)
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.packed = packed
        self.precise = precise

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Return the log-probability of each valid token, 0 elsewhere, shape [B, T]."""
        device = rollout.response_ids.device
        self.scorer.to(device)
        exact = torch.promote_types(self.scorer.model.dtype, torch.float32)
        logprobs = torch.zeros(rollout.response_ids.shape, dtype=exact, device=device)
        plan = make_plan(
            rollout.to("cpu"),
            minibatches=1,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch(),
            packed=self.packed,
        )
        for microbatch in plan.to(device).microbatches():
            with self.precise():
                part = self.scorer.logprobs(microbatch.layout)
            logprobs[microbatch.index, : part.shape[1]] = part.to(exact)
        return logprobs
