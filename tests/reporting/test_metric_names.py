"""No metric is the folder of another: those of the lists, and all that fits with every correction log together."""

import re
import warnings
from functools import partial
from typing import Any

import pytest
from kit.conversations import Echo, talking_module
from kit.metric_names import Names, folders, noting_reward
from kit.support import fit, parity_reward, tiny_model, tiny_module, tiny_policy, tiny_tokenizer
from properties.exports import correction_examples

from lightning_rl import Evaluation, PromptDataModule, RLCallback
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import OPSM, NoEOSMask, OffPolicyIS, ReferenceKL, RouterAuxLoss, RouterReplay, TeacherKL
from lightning_rl.glossary import entry_of, glossary


def concrete(pattern: str) -> list[str]:
    """Names that a pattern stands for."""
    name = re.sub(r"<(\w+)>", r"\1", pattern)
    return [name] if not name.endswith(("@k", "@n")) else [f"{name[:-1]}1{end}" for end in ("", "_low", "_high")]


def test_no_name_of_the_lists_is_the_folder_of_another() -> None:
    patterns = {name for entry in glossary() for name in entry.names}
    assert folders(name for pattern in patterns for name in concrete(pattern)) == set()


REWARDS: dict[str, Any] = {"parity": parity_reward, "noting": noting_reward}


def evaluations(**options: Any) -> list[Evaluation]:
    several = Evaluation("sums", [[2], [3]], samples=2, rewards=REWARDS, **options)
    return [several, Evaluation("env", [[2]], rewards=REWARDS)]


def options_of(correction: RLCallback) -> dict[str, Any]:
    """Options that a correction needs."""
    if isinstance(correction, OffPolicyIS):
        return {"loss": "reinforce"}
    if isinstance(correction, RouterAuxLoss):
        return {"policy": partial(tiny_model, "qwen3_moe")}
    return {"advantages": "reinforce_plus_plus"} if "token_reward" in correction.contributes else {}


AUDIT = SignalAudit(1, checks=["logged_metrics"])
RUNS: dict[str, tuple[dict[str, Any], list[RLCallback]]] = {
    "many": (
        {"minibatches_per_rollout": 2, "tokenizer": tiny_tokenizer(), "evaluation": evaluations(answer=str.strip)},
        [OPSM(0.1), OPSM(0.05, against="rollout").with_name("opsm_of_the_rollout"), NoEOSMask(), SignalLedger(), AUDIT],
    ),
    "critic": ({"advantages": "gae", "critic": "shared", "evaluation": evaluations()}, [ReferenceKL(0.1)]),
    "greedy": ({"advantages": "remax", "max_staleness": 1}, [NoEOSMask("drop_tokens")]),
    "teacher": ({}, [TeacherKL(partial(tiny_policy, 5), 0.1, as_loss=True)]),
    **{
        f"{type(correction).__name__} {number}": (options_of(correction), [correction])
        for number, correction in enumerate(correction_examples())
        if not isinstance(correction, RouterReplay | TeacherKL)  # need experts or a teacher
    },
}


@pytest.fixture(scope="module")
def names_of_a_fit() -> set[str]:
    """Every name that fits log, as those of one run: any of their parts may be in it together."""
    names = Names()
    for options, callbacks in RUNS.values():
        rows = [{"prompt": [2 + place, 4], "level": "easy", "role": "solver"} for place in range(8)]
        data = PromptDataModule(rows, 4, validation=[[2, 3]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a part lacks beside it, such as a correction of old samples
            trainer = fit(tiny_module(**{"rewards": REWARDS, **options}), callbacks=callbacks, data=data, logger=names)
        names.seen |= set(trainer.callback_metrics) | set(trainer.logged_metrics)
    for environment in (Echo, {"echo": Echo, "other": Echo}):
        rows = [{"prompt": [2, 3], "environment": name} for name in ("echo", "other") * 4]
        module = talking_module(environment=environment, evaluation=Evaluation("sums", rows[:2]))
        fit(module, data=PromptDataModule(rows, 4, validation=rows[:2]), logger=names)
    return names.seen


@pytest.mark.nightly
def test_no_name_that_fits_log_is_the_folder_of_another(names_of_a_fit: set[str]) -> None:
    assert folders(names_of_a_fit) == set()
    assert {
        *("reward/noting", "reward_failed/noting", "reward_metric/noting/failed", "reward_metric/noting/judge/failed"),
        *("val/sums/pass@2", "val/sums/pass@2_low", "val/sums/maj@2", "val/env/reward/parity", "val/env/failed"),
        *("rollout", "engine/aborted", "env/turns", "env/echo/turns", "ledger/tokens/used", "value/error"),
        *("opsm_of_the_rollout/rejected", "reward/greedy", "time/wait", "signal_audit/findings"),
    } <= names_of_a_fit


@pytest.mark.nightly
def test_the_page_of_metrics_or_the_docstring_of_its_callback_has_each_name_that_fits_log(
    names_of_a_fit: set[str],
) -> None:
    docs = {callback.name: type(callback).__doc__ or "" for _, callbacks in RUNS.values() for callback in callbacks}
    for name in names_of_a_fit - {"epoch"}:
        entry = entry_of(name)
        assert entry is not None, name
        if entry is glossary()[-1]:  # of any metric of a callback
            callback, metric = name.split("/", 1)
            assert f"``{callback.removesuffix('_of_the_rollout')}/{metric}``" in docs[callback]
    assert {"curriculum/easy", "curriculum/mastered", "role_baseline/mean"} <= names_of_a_fit
