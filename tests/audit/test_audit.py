"""The audit: silent on clean runs, right on faults, and no part of what it watches."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import __main__ as faults
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts, weights_of
from lightning.pytorch.profilers import SimpleProfiler
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import (
    GAE,
    ClipCov,
    ClippedSurrogate,
    KLCov,
    Normalized,
    RLCallback,
    RLLightningModule,
    Rollout,
    presets,
    warmup_then_linear,
)
from lightning_rl.audit import CHECKS, AuditError, SignalAudit, recheck
from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    DynamicSampling,
    EntropyBonus,
    IcePop,
    NoEOSMask,
    OffPolicyIS,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    SequenceRatioMask,
    TeacherKL,
    TruncatedIS,
)
from lightning_rl.corrections import Corrections
from lightning_rl.utils.mutation_guard import EditError

RECIPES = {
    "grpo": presets.grpo,
    "ppo": presets.ppo,
    "gspo": presets.gspo,
    "cispo": presets.cispo,
    "rloo": partial(presets.rloo, max_new_tokens=8),
    "reinforce_plus_plus": presets.reinforce_plus_plus,
}


def largest_legal_set(recipe: str) -> list[RLCallback]:
    """Every correction that goes with a recipe."""
    per_token, ratio = recipe in ("ppo", "reinforce_plus_plus"), recipe != "rloo"
    ratios = [SequenceRatioMask("geometric", 0.5, 2.0), SequenceRatioMask("product", 0.0, 9.0).with_name("product")]
    masks = [*ratios, OutlierMask(), IcePop(), OPSM(against="rollout")]
    terms = [RolloutKL(), EntropyBonus(0.001, target=1.0), OverlongPenalty(8, 4), NoEOSMask()]
    references = [AdaptiveKL(0.01)] if per_token else [ReferenceKL(0.01, as_loss=True)]
    weights = [TruncatedIS()] if ratio else [OffPolicyIS()]
    return [*masks, *terms, *references, *weights, *([RewardNormalization()] if per_token else [])]


def clean(recipe: str, rollouts: int, seed: int, **trainer: Any) -> SignalAudit:
    """A run without faults that is audited at every rollout."""
    audit, options = SignalAudit(1, "raise"), dict(RECIPES[recipe]().options)
    steps = {"minibatches_per_rollout": 2, "epochs_per_rollout": 1} if recipe != "rloo" else {}
    settings: dict[str, Any] = {"temperature": 0.7, "seed": seed, **options, **steps}
    module = tiny_module(policy=partial(tiny_policy, seed), optimizer=partial(AdamW, lr=1e-3), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        corrections = [*largest_legal_set(recipe), audit]
        fit(module, callbacks=corrections, data=tiny_prompts(4 * rollouts, 4), **trainer)
    return audit


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_alarm_on_clean_runs(recipe: str, precision: Any, tmp_path: Path) -> None:
    audit = clean(recipe, 5, 0, precision=precision, default_root_dir=tmp_path)
    assert not audit.findings and audit.seconds > 0


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_alarm_on_many_clean_rollouts(recipe: str, precision: Any, tmp_path: Path) -> None:
    for seed in range(3):
        assert not clean(recipe, 14, seed, precision=precision, default_root_dir=tmp_path).findings


def sparse(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float | None]:
    """A reward that often does not apply."""
    return [None if len(ids) % 3 == 0 else len(ids) / 8 for ids in completion_ids]


OTHERS: dict[str, tuple[dict[str, Any], Callable[[], list[RLCallback]]]] = {
    "critic of its own": ({"advantages": "gae", "critic": partial(tiny_policy, 3)}, lambda: [ReferenceKL(0.1)]),
    "values without whitening": ({"advantages": GAE(gamma=0.9, lam=0.8, whitened=False), "critic": "shared"}, list),
    "padded": ({"packing": False, "minibatches_per_rollout": 2}, lambda: [ReferenceKL(0.1, as_loss=True)]),
    "many steps": (
        {"minibatches_per_rollout": 2, "epochs_per_rollout": 3, "max_tokens_per_microbatch": 24},
        lambda: [OPSM(1e-3), TruncatedIS()],
    ),
    "dynamic sampling": ({"minibatches_per_rollout": 2}, lambda: [DynamicSampling(), NoEOSMask("drop_tokens")]),
    "remax": ({"advantages": "remax", "reduction": "sequence_mean"}, lambda: [NoEOSMask()]),
    "teacher": ({}, lambda: [TeacherKL(partial(tiny_policy, 5), 0.1, as_loss=True)]),
    "teacher as a reward": ({"advantages": "reinforce_plus_plus"}, lambda: [TeacherKL(partial(tiny_policy, 5), 0.1)]),
    "batch normalisation": ({"advantages": Normalized(mean="batch", std="batch")}, lambda: [RewardNormalization()]),
    "group and batch": ({"advantages": Normalized(std="batch", epsilon=1e-3)}, lambda: [RewardNormalization("group")]),
    "rows without reward": ({"rewards": {"sparse": sparse, "parity_reward": (parity_reward, 0.0)}}, list),
    "prompts weigh the same": ({"reduction": "prompt_mean", "loss": "gspo", "minibatches_per_rollout": 2}, list),
    "clip-cov": ({"loss": ClipCov(fraction=0.2, cov_low=0.0, cov_high=5.0), "minibatches_per_rollout": 2}, list),
    "kl-cov": (
        {"loss": KLCov(fraction=0.3, coef=0.5), "minibatches_per_rollout": 2, "max_tokens_per_microbatch": 24},
        list,
    ),
    "m2po": ({"loss": "m2po", "minibatches_per_rollout": 2}, lambda: [EntropyBonus(0.01, target=1.0)]),
    "entropy and dual clip": (
        {"loss": ClippedSurrogate(dual_clip=3.0), "epochs_per_rollout": 2},
        lambda: [EntropyBonus(0.01)],
    ),
    "top-k": ({"top_k": 6, "top_p": 0.9, "temperature": 0.8, "minibatches_per_rollout": 2}, lambda: [TruncatedIS()]),
    "no clipping, a schedule": ({"max_grad_norm": None, "lr_scheduler": warmup_then_linear(2, 10)}, list),
    "cold": (
        {"temperature": 0.3, "epochs_per_rollout": 2, "eos_token_ids": [1, 5]},
        lambda: [ReferenceKL(0.1, as_loss=True)],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_no_alarm_in_other_configurations(name: str, tmp_path: Path) -> None:
    options, corrections = OTHERS[name]
    for seed in range(2):
        audit = SignalAudit(1, "raise")
        module = tiny_module(**{"seed": seed, **options})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, callbacks=[*corrections(), audit], data=tiny_prompts(32, 4), default_root_dir=tmp_path)
        assert not audit.findings and audit.seconds > 0


def often_enough(number: int) -> pytest.MarkDecorator:
    """Every twelfth fault in each run of the tests, all of them in the long one and in ``make test-faults``."""
    return pytest.mark.long if number % 12 else pytest.mark.slow


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=often_enough(number)) for number, fault in enumerate(faults.FAULTS)],
)
def test_every_fault_is_found_with_its_culprit(fault: faults.Fault) -> None:
    found = faults.found_by_audit(fault)
    assert any(fault.named_by(check, culprit) for check, culprit in found), found


def test_the_runs_of_the_faults_are_clean_without_them() -> None:
    assert faults.found_by_audit(None) == []


def test_watching_changes_nothing() -> None:
    weights = []
    for audits in ([], [SignalAudit(1, "raise")]):
        module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2)
        fit(module, callbacks=[OPSM(1e-3), ReferenceKL(0.1, as_loss=True), *audits])
        weights.append(weights_of(module))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_a_finding_says_who_and_what_to_do_and_the_rollout_is_kept(tmp_path: Path) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == "detached KL loss")
    with pytest.raises(AuditError) as raised:
        fit(tiny_module(), callbacks=[*fault.callbacks(), SignalAudit(1, "raise")], default_root_dir=tmp_path)
    assert "gradient_liveness: callback reference_kl.loss_term: expected a term with a gradient" in str(raised.value)
    assert "What to do: compute it from view.logprobs without detach()" in str(raised.value)
    saved = torch.load(tmp_path / "audit" / "rollout-0.pt", weights_only=True)
    assert saved["findings"][0]["check"] == "gradient_liveness" and saved["rollout"]["response_ids"].dim() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cured"),
    [
        ("detached KL loss", [ReferenceKL(0.1, as_loss=True)]),
        ("token ids of another row", None),
        ("update at temperature 1, without an old pass", None),
        ("rewards of the row before", None),
        ("an optimizer without half of the parameters", None),
        ("a mean over microbatches", None),
        ("ratio counted twice", [OPSM()]),
    ],
)
def test_the_saved_file_reproduces_a_finding(tmp_path: Path, name: str, cured: list[RLCallback] | None) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    found = faults.found_by_audit(fault, tmp_path)
    path = sorted((tmp_path / "audit").glob("*.pt"))[-1]
    options = {key: value for key, value in fault.options.items() if key != "engine"}
    module = tiny_module(**{"policy": tiny_policy, **options})
    again = recheck(path, module, fault.callbacks())
    assert {(one.check, one.culprit) for one in again} <= set(found) and any(
        fault.named_by(a.check, a.culprit) for a in again
    )
    if cured is not None:
        assert not recheck(path, tiny_module(**options), cured)


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == "detached KL loss")
    faults.found_by_audit(fault, tmp_path)
    with pytest.raises(ValueError, match=r"expected checks out of .* got 'nothing'"):
        recheck(tmp_path / "audit" / "rollout-0.pt", tiny_module(), checks=["nothing"])


def test_it_looks_every_so_many_rollouts_at_the_checks_it_was_given(tmp_path: Path) -> None:
    fault = next(fault for fault in faults.FAULTS if fault.name == "detached KL loss")
    audit = SignalAudit(3, checks=["gradient_liveness"])
    with pytest.warns(UserWarning, match=r"the audit of rollout [03] found"):
        fit(tiny_module(), callbacks=[*fault.callbacks(), audit], default_root_dir=tmp_path)
    assert len(audit.findings) == 2, "rollouts 0 and 3 of 4"
    other = SignalAudit(1, checks=["versions"])
    fit(tiny_module(), callbacks=[*fault.callbacks(), other], default_root_dir=tmp_path)
    assert not other.findings


class Methods(RLCallback):
    """Looks whether anything of a run stands in the place of a method while it is audited."""

    name = "methods"

    def __init__(self, module: RLLightningModule) -> None:
        self.module, self.replaced = module, set[str]()

    @override
    def observe(self, rollout: Rollout) -> None:
        parts = (self, self.module, self.module.engine, self.module.rewards, self.module.run.metrics)
        self.replaced |= {name for part in parts for name in vars(part) if callable(getattr(type(part), name, None))}


def test_nothing_of_a_run_is_wrapped_and_the_profiler_is_as_before_once_a_fit_is_over() -> None:
    profiler, module = SimpleProfiler(), tiny_module()
    methods, functions = Methods(module), dict(module.rewards.functions)
    trainer: Any = fit(module, callbacks=[methods, SignalAudit(1, "raise")], profiler=profiler)
    assert not methods.replaced
    assert module.rewards.functions == functions
    assert trainer.profiler is profiler
    assert "[Callback]signal_audit.on_train_batch_end" in profiler.recorded_durations, "it still measures every hook"


class EditInObserve(RLCallback):
    """Edits the finished rollout while it looks at it, past the version counters."""

    name = "edit_in_observe"

    @override
    def observe(self, rollout: Rollout) -> None:
        rollout.require("advantages").data.mul_(0.5)


def test_who_edits_a_rollout_while_looking_at_it_is_named_by_the_core(tmp_path: Path) -> None:
    audit, message = SignalAudit(1, checks=["raw_fields"]), "observe of edit_in_observe wrote in place to advantages"
    with pytest.raises(EditError, match=message):
        fit(tiny_module(minibatches_per_rollout=2), callbacks=[EditInObserve(), audit], default_root_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_rollouts": 0}, "every_n_rollouts to be a whole number above 0"),
        ({"mode": "print"}, "mode warn or raise"),
        ({"checks": ["nothing"]}, "expected checks out of .*trained_tokens, .* got 'nothing'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SignalAudit(**options)


def test_every_check_says_what_it_means_and_contributions_stay_legal() -> None:
    assert len(CHECKS) >= 40 and all(check.meaning.endswith(".") for check in CHECKS.values())
    assert Corrections([SignalAudit()]).callbacks[0].name == "signal_audit"


def test_the_page_lists_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()
    rows = page.partition("| checked | checks |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(CHECKS), "each check has one place in the table"
