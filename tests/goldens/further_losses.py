"""Losses of whole responses and terms beside a loss: VESPO, DRO, LUSPO, GSPO's options, and VAPO's imitation term."""

import math
from dataclasses import replace

from goldens.cases import Case, Outputs
from goldens.corrections import Contribution
from goldens.logged import logged
from goldens.options import peer_of
from goldens.policy import WEIGHTS, corrections_around
from goldens.policy_options import dual_clip_of, surrogate
from goldens.reduction_options import average_of, trained_rows
from goldens.registry import replays
from goldens.views import objective, view_of_case
from lightning_rl import DRO, GSPO, VESPO, LossView, SequenceSumNorm
from lightning_rl.callbacks import PositiveNLL
from lightning_rl.corrections import Corrections
from lightning_rl.signal.importance_ratios import LOG_RATIO_BOUND
from lightning_rl.signal.reductions import sequence_mean, token_mean

FLOOR = 1e-8  # of a weight before its logarithm


def vespo_of(case: Case) -> VESPO:
    """VESPO with the shape of a case, on the engine's policy where a case weighs old against rollout."""
    names = {
        "k_pos": "k_positive",
        "lambda_pos": "lambda_positive",
        "k_neg": "k_negative",
        "lambda_neg": "lambda_negative",
    }
    shape = {ours: case.params[theirs] for theirs, ours in names.items() if theirs in case.params}
    return VESPO(**shape, anchor="rollout" if "importance_sampling_ratio" in case else "old")


@replays("vespo")
def vespo(case: Case) -> Outputs:
    """The loss, with the engine's log-probabilities from the ratio of old to rollout policy that a case gives."""
    view, rest = view_of_case(case), replace(case, arrays={k: v for k, v in case.arrays.items() if k not in WEIGHTS})
    if "importance_sampling_ratio" in case:
        log_ratio = case["importance_sampling_ratio"].clamp(FLOOR, math.exp(LOG_RATIO_BOUND)).log()
        view = view.replace(rollout_logprobs=case["old_logp"] - log_ratio)
    return objective(view, vespo_of(case), token_mean, callbacks=corrections_around(rest))


@replays("vespo_weights")
def vespo_weights(case: Case) -> Outputs:
    """The weight of each response."""
    return {"phi": vespo_of(case).weights(view_of_case(case))[:, :1]}


@replays("luspo")
def luspo(case: Case) -> Outputs:
    """GSPO, every response as many times as it has tokens."""
    return objective(view_of_case(case), GSPO(**dual_clip_of(case)), SequenceSumNorm(1))


@replays("dro")
def dro(case: Case) -> Outputs:
    """The policy gradient on a quadratic leash."""
    view = view_of_case(case, rollout_logprobs=case["old_logp"])  # for what the peer logs
    loss = DRO(beta=case.params["dro_beta"], anchor="old")
    average = average_of(case)
    view = view.replace(trained=trained_rows(case, view.valid_tokens, average))
    done = Contribution(view, [])
    return {**objective(view, loss, average.reduction), **logged(case, view, loss, done)}


@replays("gspo_rollout_anchor")
def on_the_rollout(case: Case) -> Outputs:
    """One ratio of the current to the engine's policy, and no weight beside it."""
    view = view_of_case(case)
    view = view.replace(trained=trained_rows(case, view.valid_tokens, average_of(case)))
    loss = GSPO(**dual_clip_of(case), anchor="rollout")
    plain = replace(case, params={name: value for name, value in case.params.items() if "vllm" not in name})
    found = objective(view, loss, sequence_mean)
    return {**found, **logged(plain, view, loss, Contribution(view, []))}


@replays("vapo_positive_nll")
def imitated(case: Case) -> Outputs:
    """PPO's surrogate with the likelihood of right responses."""
    view = _rewarded(case)
    correction = PositiveNLL(case.params["positive_example_nll_weight"])
    view = Corrections([correction]).provide(view)
    return objective(
        view, surrogate(case), average_of(case).reduction, callbacks=[correction, *corrections_around(case)]
    )


def _rewarded(case: Case) -> LossView:
    kept = case.mask("sample_mask")
    view = view_of_case(case, valid=case.mask() & kept[:, None], trained=kept)
    assert peer_of(case).empty_rows
    return view.replace(rewards=case["rewards"].to(view.rewards.dtype), rewarded=kept)
