"""Log-probabilities and entropy from logits, through our vocabulary head with the identity as its weights."""

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.registry import replays
from goldens.views import gradient
from lightning_rl.policy.logprobs import token_logprobs
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.reductions import token_mean

DROPPED = -1e9  # the logit of an entry without probability


def head(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every position."""
    logits = logits - logits.detach().amax(-1, keepdim=True)  # a softmax does not see it, but float32 rounds finer
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    found = token_logprobs(
        logits.reshape(-1, logits.shape[-1]), identity, None, labels.reshape(-1), temperature=temperature
    )
    return found[0].reshape(labels.shape), found[1].reshape(labels.shape)


@replays("entropy_and_selective_log_softmax", "truncated_log_softmax")
def head_outputs(case: Case) -> Outputs:
    """Values and both gradients; a truncated softmax leaves the entropy alone."""
    logits, labels = case["logits"].requires_grad_(), case.ids("labels")
    at_logp = case.params.get("temperature_logp", case.params.get("temperature", 1.0))
    at_entropy = case.params.get("temperature_entropy", case.params.get("temperature", 1.0))
    kept = logits
    if "keep_mask" in case:
        own = torch.nn.functional.one_hot(labels, logits.shape[-1]).bool()
        kept = logits.masked_fill(~(case.mask("keep_mask") | own), DROPPED)
    logprobs, entropy = head(kept, labels, at_logp)[0], head(logits, labels, at_entropy)[1]
    if "mask" in case:
        entropy = masked_fill_invalid(entropy, case.mask())
    return {
        "logp": logprobs,
        "entropy": entropy,
        "entropy_from_log_probs": head(logits.detach(), labels, at_entropy)[1],
        "grad_logits_logp": gradient(logprobs.sum(), logits),
        "grad_logits_entropy": gradient(entropy.sum(), logits),
    }


@replays("entropy_loss")
def entropy_loss(case: Case) -> Outputs:
    """The entropy averaged over the valid tokens."""
    logits, mask = case["logits"], case.mask()
    _, entropy = head(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))
    weights = token_mean(mask, mask.any(-1), torch.arange(len(mask)))
    return {"loss": (masked_fill_invalid(entropy, mask) * weights).sum()}
