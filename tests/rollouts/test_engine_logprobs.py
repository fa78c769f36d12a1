"""Log-probabilities of the engine: requested in the rollouts in which something reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.first_step import SavesAt
from kit.support import a_trainer, fit, recorder, tiny_module, tiny_prompts, weights_of
from lightning.pytorch.callbacks import EarlyStopping
from typing_extensions import override

from lightning_rl import Evaluation, FakeEngine, RLCallback, Rollout, TransformersEngine
from lightning_rl.advantages import OptimalTokenBaseline
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import DynamicSampling, TruncatedIS
from lightning_rl.generation import Completion, Request
from lightning_rl.recording import Recording, RolloutRecorder, replay
from lightning_rl.recording.differences import replay_differences

STEPS = 6


class Asked(FakeEngine):
    """Keeps by rollout whether log-probabilities were requested."""

    def __init__(self) -> None:
        super().__init__(lambda request: [5, 1][request.sample_id % 2 :])
        self.asked: dict[int, set[bool]] = {}

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        for request in requests:
            self.asked.setdefault(request.rollout, set()).add(logprobs)
        return super().generate_batch(requests, logprobs=logprobs)


def asked_in(*callbacks: RLCallback, **options: Any) -> list[int]:
    """Return the rollouts of six in which log-probabilities were requested."""
    engine = Asked()
    module = tiny_module(engine=engine, **{"mismatch_every_n_rollouts": 4, **options})
    fit(module, callbacks=callbacks, data=tiny_prompts(24, 4), max_steps=STEPS)
    assert all(len(kinds) == 1 for kinds in engine.asked.values()) and len(engine.asked) == STEPS
    return [number for number, (asked,) in engine.asked.items() if asked]


@pytest.mark.parametrize(
    ("callbacks", "options", "rollouts"),
    [
        ([], {"mismatch_every_n_rollouts": 1}, [0, 1, 2, 3, 4, 5]),
        ([], {}, [0, 4]),
        ([], {"loss": "dppo"}, [0, 1, 2, 3, 4, 5]),
        ([], {"advantages": OptimalTokenBaseline(importance_cap=2.0)}, [0, 1, 2, 3, 4, 5]),
        ([TruncatedIS()], {}, [0, 1, 2, 3, 4, 5]),
        ([SignalAudit(3, checks=["trained_tokens"])], {}, [0, 3, 4]),
    ],
    ids=["by default", "interval", "loss", "estimator", "correction", "audit"],
)
def test_log_probabilities_are_requested_where_something_reads_them(
    callbacks: list[RLCallback], options: dict[str, Any], rollouts: list[int]
) -> None:
    assert asked_in(*callbacks, **options) == rollouts


class Logged(RLCallback):
    """Keeps for each step whether ``kl/rollout`` is in its row."""

    name = "logged"

    def __init__(self) -> None:
        self.rows: list[bool] = []

    @override
    def observe_step(self, trace: Any) -> None:
        self.rows.append("kl/rollout" in trace.logged)


def test_rollouts_without_them_lack_field_and_metric_and_train_equally() -> None:
    runs = []
    for interval in (1, 2):
        module, rollouts, logged = tiny_module(mismatch_every_n_rollouts=interval), list[Rollout](), Logged()
        fit(module, callbacks=[recorder(rollouts)("recorder"), logged], data=tiny_prompts(16, 4), max_steps=4)
        runs.append((weights_of(module), [one.rollout_logprobs is not None for one in rollouts], logged.rows))
    (every, *_), (other, present, rows) = runs
    assert present == rows == [True, False, True, False]
    assert all(torch.equal(weight, other[name]) for name, weight in every.items())


def test_neither_the_line_of_a_rollout_nor_early_stopping_uses_the_mismatch_of_an_earlier_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = EarlyStopping("kl/rollout", mode="max", min_delta=10.0, patience=3)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer = fit(tiny_module(mismatch_every_n_rollouts=3), callbacks=[stop], data=tiny_prompts(64, 4))
    assert trainer.global_step == 10  # looked at rollouts 0, 3, 6 and 9
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert ["kl" in line for line in lines] == [number % 3 == 0 for number in range(10)]


def test_a_rollout_without_them_refuses_a_reader_that_does_not_declare_itself() -> None:
    class Undeclared(RLCallback):
        name = "undeclared"

        @override
        def observe(self, rollout: Rollout) -> None:
            rollout.require("rollout_logprobs")

    with pytest.raises(ValueError, match=r'expected the rollout field "rollout_logprobs" to be set, got None: add'):
        asked_in(Undeclared())


def test_evaluations_and_generate_request_none() -> None:
    engine = Asked()
    module = tiny_module(engine=engine, evaluation=Evaluation("sums", [[2, 3], [4]], samples=2))
    a_trainer().validate(module, tiny_prompts(4, 4))
    module.generate([[2, 3]])
    assert engine.asked == {0: {False}}


def test_recordings_with_and_without_them_replay(tmp_path: Path) -> None:
    module = tiny_module(mismatch_every_n_rollouts=2)
    fit(module, callbacks=[RolloutRecorder(tmp_path)], data=tiny_prompts(8, 4), max_steps=2)
    recordings = [Recording.load(path) for path in sorted(tmp_path.glob("*.json"))]
    assert [one.rollout.rollout_logprobs is not None for one in recordings] == [True, False]
    for recording in recordings:
        (replayed,) = replay([recording], [recording.algorithm()])
        assert [what for what, one in replay_differences(recording, replayed) if one is not None] == []


@pytest.mark.filterwarnings("ignore:max_staleness=1 trains")
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"callbacks": [DynamicSampling()]}])
def test_a_run_resumes_between_rollouts_with_and_without_them(options: dict[str, Any], tmp_path: Path) -> None:
    settings = {"mismatch_every_n_rollouts": 2, "minibatches_per_rollout": 2, "engine": TransformersEngine()}
    callbacks = options.pop("callbacks", [])

    def run(**more: Any) -> dict[str, torch.Tensor]:
        module = tiny_module(**settings, **options)
        further = more.pop("callbacks", [])
        fit(module, callbacks=[*callbacks, *further], data=tiny_prompts(24, 4), max_steps=6, **more)
        return weights_of(module)

    saves = [SavesAt(step, tmp_path / f"{step}.ckpt") for step in (1, 2, 3, 4)]
    whole = run(callbacks=saves)
    for step in (1, 2, 3, 4):
        resumed = run(ckpt_path=tmp_path / f"{step}.ckpt")
        assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items()), step
