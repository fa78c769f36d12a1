"""Effect of the corrections of a case on its tokens, without a policy loss."""

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution, corrections_of, readers_of
from goldens.options import peer_ratio
from goldens.views import view_of_case


def corrected(case: Case) -> Outputs:
    """Return the effect of the corrections of a case on its tokens."""
    view = view_of_case(case)
    done = Contribution(view, corrections_of(case))
    ratio = peer_ratio(case, view.require("old_logprobs"), view.require("rollout_logprobs"))
    found = {"ratio": ratio, "abs_dev": (ratio - 1).abs(), "clipfrac_tokens": (done.kept_weight != ratio).to(ratio)}
    if "pg_loss" in case:
        found["weighted_loss"] = case["pg_loss"] * done.kept_weight
    rejected = view.valid_tokens & done.kept
    weight = done.kept_weight
    if case.peer == "verl":  # two families apart: weights, which may be 0, and rejections, which shrink the mask
        weight = Contribution(view, readers_of(case, "rollout_is")).kept_weight
        rejected = view.valid_tokens & Contribution(view, readers_of(case, "rollout_rs")).kept
    if case.peer == "SkyRL":  # masks stand in the mask alone
        weight = done.weight
    by_row = "sequence" in (case.params.get("tis_ratio_type"), str(case.params.get("mode")).split("_")[0])
    return {**found, "modified_mask": rejected, "is_weights": weight[:, :1] if by_row else weight}
