"""Faults of the stages from the draw to the loss, each put in from outside."""

import dataclasses
from functools import partial
from unittest.mock import patch

import torch
from kit.engine_requests import with_sampling

import lightning_rl.algorithm
import lightning_rl.audit.evidence
import lightning_rl.rollouts.collect
import lightning_rl.rollouts.signal
from faults.fault import Fault
from faults.faulty import (
    Altering,
    Copying,
    DetachedKL,
    Exploding,
    InPlaceKL,
    LateEdit,
    PostRejection,
    SpreadTooFar,
    TokenwiseOPSM,
    Twice,
    Unmasked,
    after,
    all_forget_temperature,
    by_position,
    changed_rows,
    excluding_nobody,
    finish_by_width,
    in_bfloat16,
    noisy,
    old_forgets_temperature,
    one_late,
    only_in_rollouts,
    other_rows,
    over_everyone,
    over_the_batch,
    per_microbatch,
    renormalised,
    rolled_ids,
    score_at_the_last_position,
    shaped_kl,
    training_padding,
    unmasked_kl,
    without_eos,
    without_gradient,
    without_rollout_logprobs,
)
from lightning_rl import GAE, Rollout
from lightning_rl.callbacks import NoEOSMask, ReferenceKL, RolloutKL
from lightning_rl.corrections import Corrections
from lightning_rl.policy import PolicyModel, Scorer
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.update import StepWeights

STEPS = {"minibatches": 2, "epochs": 1}
PPO = {"advantages": GAE(), "critic": "shared"}
KL = partial(ReferenceKL, 0.1, as_loss=True)

STAGES: tuple[Fault, ...] = (
    Fault("token ids of another row", "sampled_is_trained", "stage draw", patches=[changed_rows(rolled_ids)]),
    Fault(
        "finish reason from the padded width",
        "sampled_is_trained",
        "stage draw",
        patches=[changed_rows(finish_by_width)],
    ),
    Fault(
        "rollout log-probabilities in bfloat16",
        "sampled_is_trained",
        "stage draw",
        patches=[after(Sampler, "_logprobs", in_bfloat16)],
    ),
    Fault(
        "version read after the response",
        "versions",
        "engine Altering",
        options={"engine": lambda: Altering(completion=lambda one: dataclasses.replace(one, version=one.version + 1))},
    ),
    Fault(
        "a sample counted twice",
        "sample_conservation",
        "stage draw",
        patches=[changed_rows(lambda r: r.replace(sample_ids=r.sample_ids // 2 * 2))],
    ),
    Fault(
        "groups of a fixed size by position",
        "sample_conservation",
        "stage draw",
        patches=[changed_rows(lambda r: r.replace(groups=torch.arange(len(r)) // 3))],
    ),
    Fault(
        "the sampled EOS dropped",
        "ends",
        "engine Altering",
        options={"engine": lambda: Altering(completion=without_eos)},
    ),
    Fault(
        "every response called cut off",
        "ends",
        "engine Altering",
        options={
            "engine": lambda: Altering(completion=lambda one: dataclasses.replace(one, finish=type(one.finish)(1)))
        },
    ),
    Fault(
        "padding trains",
        "masks",
        "valid_tokens",
        patches=[patch.object(lightning_rl.rollouts.collect, "excluding", training_padding)],
    ),
    Fault(
        "excluded rows train",
        "masks",
        "trained",
        callbacks=lambda: [NoEOSMask("drop_tokens")],
        patches=[patch.object(lightning_rl.rollouts.collect, "excluding", excluding_nobody)],
    ),
    Fault(
        "reward mask ignored",
        "masks",
        "rewarded",
        callbacks=lambda: [NoEOSMask()],
        patches=[after(Corrections, "reward_mask", lambda mask, *_: torch.ones_like(mask))],
    ),
    Fault(
        "old log-probabilities at temperature 1",
        "logprob_alignment",
        "before the update",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", old_forgets_temperature)],
    ),
    Fault(
        "every forward at temperature 1",
        "logprob_alignment",
        "the policy",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", all_forget_temperature)],
    ),
    Fault(
        "update at temperature 1, without an old pass",
        "logprob_alignment",
        "stage update",
        patches=[patch.object(PolicyModel, "forward", all_forget_temperature)],
    ),
    Fault(
        "old log-probabilities one position late",
        "logprob_alignment",
        "before the update",
        options=STEPS,
        patches=[after(lightning_rl.rollouts.collect, "scored", one_late)],
    ),
    Fault(
        "noise in the old pass",
        "on_policy_identity",
        "stage score",
        options=STEPS,
        patches=[after(lightning_rl.rollouts.collect, "scored", noisy)],
    ),
    Fault(
        "reference at temperature 1",
        "logprob_alignment",
        "the reference",
        callbacks=lambda: [KL()],
        patches=[after(Scorer, "__init__", lambda _, scorer, *__: setattr(scorer.scoring, "temperature", 1.0))],
    ),
    Fault(
        "engine that never moves", "canary|weight_sync", "engine", options={"engine": lambda: Copying(lambda _: False)}
    ),
    Fault(
        "one layer is never synced",
        "canary|weight_sync",
        "engine",
        options={"engine": lambda: Copying(lambda name: "layers.1." not in name)},
    ),
    Fault(
        "engine samples at another temperature",
        "canary|weight_sync",
        "engine",
        options={"engine": lambda: Altering(request=lambda one: with_sampling(one, temperature=1.0))},
    ),
    Fault(
        "engine samples rollouts alone at another temperature",
        "weight_sync",
        "engine Altering",
        options={"engine": lambda: Altering(request=only_in_rollouts)},
    ),
    Fault(
        "raw KL overwritten in place",
        "pure_contributions",
        "reference_kl.token_reward",
        callbacks=lambda: [InPlaceKL(0.1)],
        options=PPO,
    ),
    Fault(
        "advantages edited between steps",
        "raw_fields",
        "late_edit.on_train_batch_end",
        callbacks=lambda: [LateEdit()],
        options=STEPS,
    ),
    Fault(
        "rows without reward in the mean",
        "excluded_rows",
        "estimator over_everyone",
        callbacks=lambda: [NoEOSMask()],
        options={"advantages": over_everyone},
    ),
    Fault(
        "batch mean for a group mean",
        "group_isolation",
        "estimator over_the_batch",
        options={"advantages": over_the_batch},
    ),
    Fault(
        "groups by position in the estimator", "row_order", "estimator by_position", options={"advantages": by_position}
    ),
    Fault(
        "advantages of the row before",
        "row_order",
        "estimator",
        patches=[
            after(lightning_rl.audit.evidence, "estimate_signal", other_rows),
            after(lightning_rl.rollouts.collect, "estimate_signal", other_rows),
        ],
    ),
    Fault(
        "advantages outside of the valid tokens",
        "advantage_support",
        "estimator SpreadTooFar",
        options={"advantages": SpreadTooFar()},
    ),
    Fault(
        "score lost at a masked token",
        "reward_conservation",
        "shaped reward",
        options=PPO,
        patches=[patch.object(lightning_rl.rollouts.signal, "shaped_rewards", score_at_the_last_position)],
    ),
    Fault(
        "denominators per microbatch",
        "partition",
        "reduction",
        callbacks=lambda: [KL()],
        patches=[patch.object(StepWeights, "of", per_microbatch)],
    ),
    Fault(
        "denominator after rejection",
        "denominators",
        "post_rejection",
        callbacks=lambda: [PostRejection()],
        options=STEPS,
        patches=[after(lightning_rl.algorithm, "_times", renormalised)],
    ),
    Fault(
        "token-wise OPSM",
        "sequence_decisions",
        "tokenwise_opsm.token_mask",
        callbacks=lambda: [TokenwiseOPSM(1e-4)],
        options={**PPO, **STEPS},
    ),
    Fault(
        "detached KL loss",
        "gradient_liveness",
        "reference_kl.loss_term",
        callbacks=lambda: [DetachedKL(0.1, as_loss=True)],
    ),
    Fault("loss without a gradient", "gradient_liveness", "loss without_gradient", options={"loss": without_gradient}),
    Fault("ratio counted twice", "ratio_counts_once", "twice.token_weight", callbacks=lambda: [Twice()], options=STEPS),
    Fault(
        "weights that leave one token",
        "weights_keep_samples",
        "exploding.token_weight",
        callbacks=lambda: [Exploding()],
    ),
    Fault(
        "metrics after rejection",
        "metric_populations",
        "post_rejection.metrics",
        callbacks=lambda: [PostRejection()],
        options=STEPS,
    ),
    Fault("metrics over padding", "metric_populations", "unmasked.metrics", callbacks=lambda: [Unmasked()]),
    Fault(
        "logged KL is the penalty",
        "raw_kl",
        "kl/ref",
        callbacks=lambda: [KL()],
        patches=[after(lightning_rl.algorithm, "policy_metrics", shaped_kl)],
    ),
    Fault(
        "logged KL over padding",
        "raw_kl",
        "kl/ref",
        callbacks=lambda: [KL()],
        patches=[after(lightning_rl.algorithm, "policy_metrics", unmasked_kl)],
    ),
    Fault(
        "padding without an optional field",
        "partition",
        "rollout_kl",
        callbacks=lambda: [RolloutKL(0.1)],
        patches=[after(Rollout, "padding_rows", without_rollout_logprobs)],
    ),
)
