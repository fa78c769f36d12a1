"""Corrections by themselves: weights, masks and what they are made of, without a policy loss."""

from goldens.cases import Case, Outputs
from goldens.corrections import opsm_of
from goldens.options import peer_ratio
from goldens.policy_options import m2_threshold
from goldens.registry import INTERPOLATED, NotOfferedError, replays
from goldens.views import view_of_case
from lightning_rl.losses import M2PO
from lightning_rl.signal.kl import k1, k3
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.selection import local_values


@replays("off_policy/_apply_m2po_masking")
def m2po_mask(case: Case) -> Outputs:
    """The tokens that M2PO keeps."""
    view = view_of_case(case)
    (kept,) = M2PO(threshold=m2_threshold(case)).prepare([view], local_sum, local_values)
    return {"modified_mask": kept & view.valid_tokens}


@replays("off_policy/compute_opsm_mask", "off_policy/get_off_policy_mask")
def opsm(case: Case) -> Outputs:
    """The rows that OPSM keeps: on the policy before the update at slime, on the engine's at TRL."""
    view = view_of_case(case)
    against = "rollout" if "rollout_logp" in case else "old"
    delta = case.params.get("opsm_delta", case.params.get("off_policy_threshold"))
    kept = opsm_of(delta, against).sequence_mask(view)
    return {"opsm_mask": kept[:, None].expand_as(view.logprobs), "keep_mask": kept[:, None]}


@replays("off_policy/compute_importance_ratio_and_mismatch_kl")
def mismatch(case: Case) -> Outputs:
    """The log-ratio, its exponential, and the estimate of KL(engine || policy) on the engine's samples."""
    logprobs, rollout = case["logp"], case["rollout_logp"]
    return {
        "log_ratio": k1(logprobs, rollout),
        "ratio": peer_ratio(case, logprobs, rollout),
        "mismatch_kl": k3(rollout, logprobs, tangent=False),
    }


@replays("off_policy/compute_prox_logp_approximations")
def interpolated(case: Case) -> Outputs:
    """AReaL's approximation of old log-probabilities."""
    raise NotOfferedError(f"{INTERPOLATED} ({case.algorithm})")
