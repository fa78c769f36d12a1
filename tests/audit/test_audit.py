"""Audit: no findings on clean runs, findings on faults, and no changes of the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import __main__ as faults
from kit.support import fit, tiny_module, weights_of
from lightning.pytorch.profilers import SimpleProfiler
from typing_extensions import override

from lightning_rl import (
    RLCallback,
    RLLightningModule,
    Rollout,
)
from lightning_rl.audit import CHECKS, AuditError, SignalAudit, recheck
from lightning_rl.callbacks import (
    OPSM,
    ReferenceKL,
)
from lightning_rl.corrections import Corrections
from lightning_rl.recording import Recording


def test_watching_changes_nothing() -> None:
    weights = []
    for audits in ([], [SignalAudit(1, "raise")]):
        module = tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2)
        fit(module, callbacks=[OPSM(1e-3), ReferenceKL(0.1, as_loss=True), *audits])
        weights.append(weights_of(module))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


@pytest.fixture(scope="module")
def finding_of_detached_kl(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Message and file of the finding about a detached KL loss."""
    folder = tmp_path_factory.mktemp("detached")
    fault = next(fault for fault in faults.FAULTS if fault.name == "detached KL loss")
    with pytest.raises(AuditError) as raised:
        fit(tiny_module(), callbacks=[*fault.callbacks(), SignalAudit(1, "raise")], default_root_dir=folder)
    return str(raised.value), folder / "audit" / "rollout-000000.json"


def test_a_finding_says_who_and_what_to_do_and_the_rollout_is_kept(finding_of_detached_kl: tuple[str, Path]) -> None:
    message, path = finding_of_detached_kl
    assert "gradient_liveness: callback reference_kl.loss_term: expected a term with a gradient" in message
    assert "What to do: compute it from view.logprobs without detach()" in message
    (line,) = path.with_name("findings-0.jsonl").read_text().splitlines()
    assert json.loads(line)["check"] == "gradient_liveness" and len(Recording.load(path).rollout)


def test_the_recording_reproduces_a_finding_until_it_is_fixed(finding_of_detached_kl: tuple[str, Path]) -> None:
    path, algorithm = finding_of_detached_kl[1], tiny_module().algorithm
    fault = next(fault for fault in faults.FAULTS if fault.name == "detached KL loss")
    again = recheck(path, algorithm, fault.callbacks())
    assert any(fault.named_by(one.check, one.culprit) for one in again)
    assert not recheck(path, algorithm, [ReferenceKL(0.1, as_loss=True)])


def test_an_unknown_check_is_refused(finding_of_detached_kl: tuple[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"expected checks out of .* got 'nothing'"):
        recheck(finding_of_detached_kl[1], tiny_module().algorithm, checks=["nothing"])


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
    """Records methods of a run that are replaced during the audit."""

    name = "methods"

    def __init__(self, module: RLLightningModule) -> None:
        self.module, self.replaced = module, set[str]()

    @override
    def observe(self, rollout: Rollout) -> None:
        parts = (self, self.module, self.module.options.engine, self.module.options.rewards, self.module.run.metrics)
        self.replaced |= {name for part in parts for name in vars(part) if callable(getattr(type(part), name, None))}


@pytest.mark.nightly
def test_nothing_of_a_run_is_wrapped_and_the_profiler_is_as_before_once_a_fit_is_over() -> None:
    profiler, module = SimpleProfiler(), tiny_module()
    methods, functions = Methods(module), dict(module.options.rewards.by_name)
    trainer: Any = fit(module, callbacks=[methods, SignalAudit(1, "raise")], profiler=profiler)
    assert not methods.replaced
    assert module.options.rewards.by_name == functions
    assert trainer.profiler is profiler
    assert "[Callback]signal_audit.on_train_batch_end" in profiler.recorded_durations, "it still measures every hook"


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
    rows = page.partition("| subject | checks |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(CHECKS), "each check has one place in the table"
