"""Quiet faults, each put from outside into a real fit; the audit has to name the check and the culprit of every one.

``python -m tests.faults [part of a name ...]`` prints a table and ends with ``faults injected=N caught=N``.
"""

import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import torch
from faulty import (
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
from support import fit, tiny_module, tiny_policy, tiny_prompts
from torch.optim import AdamW

import lightning_rl.audit.evidence
import lightning_rl.objective
import lightning_rl.stages.collect
import lightning_rl.stages.signal
from lightning_rl import GAE, Contributions, RLCallback, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import NoEOSMask, ReferenceKL, RolloutKL
from lightning_rl.generation.canary import CanaryError
from lightning_rl.policy import PolicyModel, Scorer
from lightning_rl.stages.draw import Drawer
from lightning_rl.stages.update import StepWeights

TEMPERATURE = 0.5


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong quietly.

    Attributes:
        name: what.
        check: the check that has to find it; of several, joined by ``|``, whichever comes first.
        culprit: what the finding's culprit has to contain.
        callbacks: corrections of the run, wrong ones among them.
        options: of the module.
        patches: what is replaced in the library while it runs.
    """

    name: str
    check: str
    culprit: str
    callbacks: Callable[[], list[RLCallback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    patches: Sequence[Any] = ()

    def named_by(self, check: str, culprit: str) -> bool:
        """Whether a finding names the right check and the right culprit."""
        return check in self.check.split("|") and self.culprit in culprit


STEPS = {"minibatches": 2, "epochs": 1}
PPO = {"advantages": GAE(), "critic": "shared"}
KL = partial(ReferenceKL, 0.1, as_loss=True)

FAULTS: tuple[Fault, ...] = (
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
        patches=[after(Drawer, "_logprobs", in_bfloat16)],
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
        patches=[patch.object(lightning_rl.stages.collect, "excluding", training_padding)],
    ),
    Fault(
        "excluded rows train",
        "masks",
        "trained",
        callbacks=lambda: [NoEOSMask("drop_tokens")],
        patches=[patch.object(lightning_rl.stages.collect, "excluding", excluding_nobody)],
    ),
    Fault(
        "reward mask ignored",
        "masks",
        "rewarded",
        callbacks=lambda: [NoEOSMask()],
        patches=[after(Contributions, "reward_mask", lambda mask, *_: torch.ones_like(mask))],
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
        patches=[after(lightning_rl.stages.collect, "scored", one_late)],
    ),
    Fault(
        "noise in the old pass",
        "on_policy_identity",
        "stage score",
        options=STEPS,
        patches=[after(lightning_rl.stages.collect, "scored", noisy)],
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
        options={"engine": lambda: Altering(request=lambda one: dataclasses.replace(one, temperature=1.0))},
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
    Fault("advantages edited between steps", "raw_fields", "advantages", callbacks=lambda: [LateEdit()], options=STEPS),
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
            after(lightning_rl.audit.evidence, "with_signal", other_rows),
            after(lightning_rl.stages.collect, "with_signal", other_rows),
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
        patches=[patch.object(lightning_rl.stages.signal, "shaped_rewards", score_at_the_last_position)],
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
        patches=[after(lightning_rl.objective, "_times", renormalised)],
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
    Fault("loss without a gradient", "gradient_liveness", "loss FunctionLoss", options={"loss": without_gradient}),
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
        patches=[after(lightning_rl.objective, "policy_metrics", shaped_kl)],
    ),
    Fault(
        "logged KL over padding",
        "raw_kl",
        "kl/ref",
        callbacks=lambda: [KL()],
        patches=[after(lightning_rl.objective, "policy_metrics", unmasked_kl)],
    ),
    Fault(
        "padding without an optional field",
        "partition",
        "rollout_kl",
        callbacks=lambda: [RolloutKL(0.1)],
        patches=[after(Rollout, "padding_rows", without_rollout_logprobs)],
    ),
)


def found_by_audit(fault: Fault | None) -> list[tuple[str, str]]:
    """Check and culprit of every finding of a short run, with the fault or without one."""
    options = {key: value() if key == "engine" else value for key, value in (fault.options if fault else {}).items()}
    audit = SignalAudit(1)
    settings = {"temperature": TEMPERATURE, "engine_logprobs": True, "optimizer": partial(AdamW, lr=0.05)}
    with ExitStack() as stack, warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for replaced in fault.patches if fault else ():
            stack.enter_context(replaced)
        callbacks = fault.callbacks() if fault else []
        module = tiny_module(**{**settings, "policy": tiny_policy, **options})
        try:
            fit(module, callbacks=[*callbacks, audit], data=tiny_prompts(16, 4), default_root_dir=folder, max_steps=6)
        except Exception as raised:  # noqa: BLE001  # a fault may break the run as well; what counts is what was found
            if isinstance(raised, CanaryError):  # the check after each sync, which comes before any rollout
                return [("canary", str(raised))]
            if not audit.findings:
                sys.stderr.write(f"{fault.name if fault else 'no fault'}: {raised}\n")
    return [(finding.check, finding.culprit) for finding in audit.findings]


def main(wanted: Sequence[str]) -> int:
    """Runs the faults, prints a table, and returns the exit code."""
    torch.set_num_threads(1)
    chosen = [fault for fault in FAULTS if not wanted or any(part in fault.name for part in wanted)]
    caught = 0
    for fault in chosen:
        found = found_by_audit(fault)
        right = [one for one in found if fault.named_by(*one)]
        caught += bool(right)
        shown = f"{right[0][0]}: {right[0][1]}" if right else f"MISSED, found {sorted(set(found))[:3]}"
        sys.stdout.write(f"{fault.name:<50} {shown}\n")
        sys.stdout.flush()
    sys.stdout.write(f"faults injected={len(chosen)} caught={caught}\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
