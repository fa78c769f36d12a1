"""A pretrained language model trains in every precision and with each option that changes its forward."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.browser import chromium
from kit.real_model import FOLDER, NEEDED, ShortFit
from kit.support import weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import override

from lightning_rl import GAE, Conversations, ModelOptions
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import ReferenceKL, TruncatedIS
from lightning_rl.environments import Action, Environment, EnvironmentReward, StepResult
from lightning_rl.reporting import RunReport

pytestmark = [pytest.mark.nightly, NEEDED]


def check_training(run: ShortFit) -> None:
    """Every step had a finite gradient above 0, and changed weights."""
    norms = run.metrics["optim/grad_norm"]
    assert len(norms) == run.trainer.global_step and all(0 < norm < math.inf for norm in norms.values())


@pytest.mark.parametrize(
    ("precision", "difference", "kl"),
    [("32-true", 5e-5, 1e-8), ("bf16-mixed", 0.05, 2e-3), ("bf16-true", 0.08, 5e-3)],
)
def test_engine_and_trainer_differ_by_the_rounding_of_the_precision(
    precision: str, difference: float, kl: float
) -> None:
    run = ShortFit(trainer={"precision": precision})
    check_training(run)
    assert 0 < run.differences.mean() < difference
    assert all(0 <= value < kl for value in run.metrics["kl/rollout"].values())


def test_bitwise_consistency_leaves_no_difference() -> None:
    run = ShortFit(model=ModelOptions(consistency="bitwise"))
    check_training(run)
    assert not run.differences.any() and set(run.metrics["kl/rollout"].values()) == {0.0}


def test_activation_checkpointing_changes_no_bit() -> None:
    plain, checkpointed = ShortFit(), ShortFit(model=ModelOptions(activation_checkpointing=True))
    expected = weights_of(plain.module)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(checkpointed.module).items())


def test_adapters_train_beside_frozen_weights_which_are_the_reference() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))

    before = weights_of_model(adapted())
    run = ShortFit(ReferenceKL(beta=0.04, as_loss=True), policy=adapted, tokenizer=str(FOLDER))
    check_training(run)
    assert run.metrics["kl/ref"][0] == 0.0
    for name, weight in weights_of(run.module).items():
        name = name.removeprefix("policy.model.")
        assert name not in before or ("lora_" in name) != torch.equal(weight, before[name]), name


def weights_of_model(model: Any) -> dict[str, torch.Tensor]:
    return {name: copy.deepcopy(weight.data) for name, weight in model.named_parameters()}


def test_a_reference_measures_the_distance_from_the_start() -> None:
    first, second = ShortFit(ReferenceKL(beta=0.04, as_loss=True)).metrics["kl/ref"].values()
    assert first == 0.0 != second and abs(second) < 0.5


def test_a_shared_critic_trains() -> None:
    run = ShortFit(advantages=GAE(), critic="shared", group_size=1)
    check_training(run)
    first, second = run.metrics["value/error"].values()
    assert 0 < first < 2 and 0 < second < 2


def test_rollouts_ahead_are_one_rollout_old() -> None:
    run = ShortFit(TruncatedIS(), rollouts=3, max_staleness=1)
    check_training(run)
    assert list(run.metrics["staleness/mean"].values()) == [0.0, 1.0, 1.0]


def test_the_audit_finds_no_fault() -> None:
    audit = SignalAudit(every_n_rollouts=1)
    check_training(ShortFit(audit, rollouts=3))
    assert audit.findings == []


class TryTwice(Environment):
    """Asks for the sum, and asks again if the answer is wrong."""

    @override
    def reset(self, row: Any, seed: int) -> list[Any]:
        self.answer, self.turns = str(row["answer"]), 0
        return []

    @override
    def step(self, answer: Action) -> StepResult:
        self.turns += 1
        right = self.answer in answer.text
        done = right or self.turns == 2
        messages = [] if done else [{"role": "user", "content": "Add the numbers again."}]
        return StepResult(messages=messages, reward=float(right), done=done)


def test_conversations_of_two_turns_train() -> None:
    run = ShortFit(environment=Conversations(TryTwice, max_turns=2, max_turn_tokens=16), rewards=EnvironmentReward())
    check_training(run)
    assert all(1 <= turns <= 2 for turns in run.metrics["env/turns"].values())
    assert run.differences.mean() < 5e-5


def test_the_exported_folder_is_the_trained_policy(tmp_path: Path) -> None:
    run = ShortFit()
    run.module.save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("What is 2 + 3 + 4?", return_tensors="pt").input_ids
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    initial = AutoModelForCausalLM.from_pretrained(FOLDER)
    trained = run.module.required_policy.model
    with torch.no_grad():
        logits = [model(ids).logits for model in (exported, trained, initial)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_the_report_shows_the_texts_of_a_rollout_in_a_browser(tmp_path: Path) -> None:
    run = ShortFit(RunReport(1))
    with chromium(tmp_path) as browser:
        browser.open(run.folder / "report" / "report.html", "#rollout?rollout=1&colour=ratio")
        text = browser.ask("document.getElementById('main').textContent")
        assert "What is" in text and browser.said == []
