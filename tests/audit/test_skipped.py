"""Skipped checks are logged and counted: they neither pass nor fail."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import an_algorithm, fit, ragged_rollout, tiny_module, tiny_policy, tiny_prompts
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.audit import CHECKS, SignalAudit
from lightning_rl.audit.checks.logprob_checks import NO_POLICY
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.testing.properties.check import judge
from lightning_rl.testing.properties.subsample import some_rows


def evidence_of(**changes: Any) -> Evidence:
    """Return a finished rollout of a run without an engine, a policy or a critic."""
    rollout = ragged_rollout().sanitize().replace(**changes)
    return Evidence(
        algorithm=an_algorithm(), facts=RunFacts(), rollout=rollout, groups=rollout, rows=some_rows(rollout, 0)
    )


def test_a_check_that_cannot_look_says_why() -> None:
    findings, skipped = judge([CHECKS["weight_sync"], CHECKS["values_ignore_temperature"]], evidence_of())
    assert findings == []
    assert skipped == {
        "weight_sync": NO_POLICY,
        "values_ignore_temperature": "there is no critic",
    }


@pytest.mark.parametrize("name", CHECKS)
def test_a_rollout_without_rows_is_skipped_and_no_check_breaks(name: str) -> None:
    empty = ragged_rollout().sanitize().select(torch.zeros(12, dtype=torch.bool))
    evidence = Evidence(algorithm=an_algorithm(), facts=RunFacts(), rollout=empty, groups=empty, rows=empty)
    assert CHECKS[name].judge(evidence) == ([], {name: "the rollout has no rows"})


def test_skipped_checks_are_counted_logged_and_summed_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit, logger = SignalAudit(1, "raise", checks=["values_ignore_temperature", "masks"]), CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(tiny_module(), callbacks=[audit], logger=logger)
    assert audit.skipped == {"values_ignore_temperature": "there is no critic"}
    names, *rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    assert [row[names.index("signal_audit/skipped")] for row in rows] == ["1.0"] * 4
    assert "values_ignore_temperature: there is no critic" in caplog.text


def test_a_reference_without_weights_of_its_own_is_compared_all_the_same() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    from lightning_rl.callbacks import ReferenceKL

    audit = SignalAudit(1, "raise", checks=["logprob_alignment"])
    module = tiny_module(policy=lambda: peft.get_peft_model(tiny_policy(), adapter))
    fit(module, callbacks=[ReferenceKL(0.1, as_loss=True), audit], data=tiny_prompts(4, 4))
    assert not audit.findings and not audit.skipped
