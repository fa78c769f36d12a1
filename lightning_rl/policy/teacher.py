"""Teacher: a frozen model other than the reference, which scores whole rollouts by itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_rl.policy.build import ModelSource, build_model, check_frozen
from lightning_rl.policy.model import Scorer
from lightning_rl.policy.plan import make_plan
from lightning_rl.rollout import Rollout


class Teacher:
    """Scores the valid tokens of a rollout; every rank holds a whole copy.

    Args:
        source: name or path of a causal language model with the policy's vocabulary, or a callable that builds one.
        temperature: what its logits are divided by; the one of the sampling, so that it can be compared.
        token_budget: tokens of a microbatch at most.
        packed: whether it scores without padding.
        precise: context of every forward, for the precision of the run.

    Raises:
        ValueError: if the model has dropout, or our forward does not agree with its own.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        temperature: float,
        token_budget: int,
        packed: bool,
        precise: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        model = check_frozen(build_model(source), packed=packed)
        self.scorer = Scorer(model, temperature=temperature, packed=packed)
        self.token_budget = token_budget
        self.packed = packed
        self.precise = precise

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Log-probability of each valid token, 0 elsewhere, shape [B, T]."""
        device = rollout.response_ids.device
        self.scorer.to(device)
        exact = torch.promote_types(self.scorer.model.dtype, torch.float32)
        logprobs = torch.zeros(rollout.response_ids.shape, dtype=exact, device=device)
        plan = make_plan(rollout.to("cpu"), minibatches=1, token_budget=self.token_budget, packed=self.packed)
        for microbatch in plan.to(device).microbatches():
            with self.precise():
                part = self.scorer.logprobs(microbatch.layout)
            logprobs[microbatch.index, : part.shape[1]] = part.to(exact)
        return logprobs
