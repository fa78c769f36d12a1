"""Log-probabilities and entropy from logits, through our vocabulary head with the identity as its weights."""

import torch
from kit.support import view_of
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import replays, without_effect
from goldens.views import gradient, reduced
from lightning_rl.policy.logprobs import token_logprobs
from lightning_rl.signal.masked import masked_fill_invalid

DROPPED = -1e9  # the logit of an entry without probability


def head(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every position; of several labels at each, the log-probability of each."""
    if labels.dim() == logits.dim():
        several = [head(logits, column, temperature) for column in labels.unbind(-1)]
        return torch.stack([logprobs for logprobs, _ in several], -1), several[0][1]
    logits = logits - logits.detach().amax(-1, keepdim=True)  # a softmax does not see it, but float32 rounds finer
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    found = token_logprobs(
        logits.reshape(-1, logits.shape[-1]), identity, None, labels.reshape(-1), temperature=temperature
    )
    return found[0].reshape(labels.shape), found[1].reshape(labels.shape)


def truncated(logits: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """Logits without the entries that sampling left out; a label itself always stays."""
    own = torch.nn.functional.one_hot(labels, logits.shape[-1]).bool()
    own = own.any(-2) if labels.dim() == logits.dim() else own
    return logits.masked_fill(~(keep | own), DROPPED)


@replays("entropy_logprob/*")
def head_outputs(case: Case) -> Outputs:
    """Values and both gradients; a truncated softmax leaves the entropy alone."""
    logits, labels = case["logits"].requires_grad_(), case.ids("labels")
    at_logp = case.params.get("temperature_logp", case.params.get("temperature", 1.0))
    at_entropy = case.params.get("temperature_entropy", case.params.get("temperature", 1.0))
    kept = logits
    if "keep_mask" in case:
        kept = truncated(logits, labels, case.mask("keep_mask"))
    logprobs, entropy = head(kept, labels, at_logp)[0], head(logits, labels, at_entropy)[1]
    without_effect(case, "chunk_size")
    if case.params.get("attention_mask", "mask" in case):
        entropy = masked_fill_invalid(entropy, case.mask())
    return {
        "logp": logprobs,
        "entropy": entropy,
        "entropy_from_log_probs": head(logits.detach(), labels, at_entropy)[1],
        "grad_logits_logp": gradient(logprobs.sum(), logits),
        "grad_logits_entropy": gradient(entropy.sum(), logits),
    }


@replays("entropy_logprob/compute_entropy_loss")
def entropy_loss(case: Case) -> Outputs:
    """The entropy averaged as the case says, over the valid tokens unless it says otherwise."""
    logits, mask = case["logits"], case.mask()
    _, entropy = head(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))
    average = average_of(case)
    view = view_of(entropy, valid=mask, dtype=entropy.dtype)
    view = view.replace(trained=trained_rows(case, mask))
    loss = reduced(view, masked_fill_invalid(entropy, mask), average.reduction)
    return {"loss": loss * average.scale(view.valid_tokens, view.trained)}
