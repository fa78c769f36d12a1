"""With rollouts in flight everything waits or ends in order: saving, resuming, evaluating, errors, signals, the end."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import differing, fit, recorder, tiny_module, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, Rollout, TransformersEngine
from lightning_rl.callbacks import AdaptiveKL, DynamicSampling, TruncatedIS
from lightning_rl.checkpointing import INTERRUPTED
from lightning_rl.generation import Completion, EngineState, Request
from lightning_rl.rollouts import ahead
from lightning_rl.rollouts.ahead import pending_from_state
from lightning_rl.samples import Prompt

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning",  # Lightning, of every checkpoint under manual optimization
    "ignore:The dirpath has changed:UserWarning",  # a resumed run of these tests saves elsewhere
    "ignore:Be aware that when using `ckpt_path`:UserWarning",  # or nowhere
)

WAIT = 60.0  # seconds after which a test that would hang fails
STEPS = 10  # two epochs of two rollouts with K = 4, and half a rollout more
VALIDATED: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None}


def in_flight() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


class Gated(TransformersEngine):
    """Draws nothing ahead before its gate is opened; ``fails`` is raised then."""

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__()
        self.gate, self.fails = threading.Event(), fails

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(WAIT), "the gate stayed closed"
            if self.fails is not None:
                raise self.fails
        return super().generate_batch(requests, logprobs=logprobs)


def hooked(**hooks: Callable[..., Any]) -> Callback:
    """A callback with plain functions for hooks of the Trainer."""
    return type("Hooked", (Callback,), {name: staticmethod(function) for name, function in hooks.items()})()


def run(
    folder: Path | None = None,
    *callbacks: Callback,
    data: PromptDataModule | None = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> RLLightningModule:
    """Ten optimizer steps, with a checkpoint after each if there is a folder for them."""
    saving = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    module = tiny_module(**{"max_staleness": 1, "minibatches_per_rollout": 2, "epochs_per_rollout": 2, **options})
    fit(
        module,
        callbacks=[TruncatedIS(), *callbacks, *saving],
        data=data or tiny_prompts(8, 4, validation=[[2, 3], [5]]),
        **dict[str, Any](max_epochs=4, max_steps=STEPS, enable_checkpointing=folder is not None) | (trainer or {}),
    )
    return module


CASES: dict[str, tuple[Callable[[], list[RLCallback]], dict[str, Any]]] = {
    "grpo": (lambda: [AdaptiveKL(0.05, as_loss=True)], {}),
    "ppo": (list, {"advantages": "gae", "critic": "shared", "group_size": 1}),
    "remax": (list, {"advantages": "remax", "group_size": 1}),
    "dynamic-sampling": (lambda: [DynamicSampling()], {}),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*groups are missing after:UserWarning")
@pytest.mark.parametrize(
    "case", ["grpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in CASES if name != "grpo")]
)
def test_resuming_at_every_step_of_a_pipelined_run_ends_bitwise_equal(case: str, tmp_path: Path) -> None:
    corrections, options = CASES[case]
    expected = run(tmp_path / "whole", *corrections(), trainer=VALIDATED, **options)
    for step in range(1, STEPS):
        trainer = {**VALIDATED, "ckpt_path": tmp_path / "whole" / f"step={step}.ckpt"}
        resumed = run(tmp_path / f"from-{step}", *corrections(), trainer=trainer, **options)
        assert resumed.global_step == STEPS and differing(resumed, expected) == [], f"step {step}"


@pytest.mark.nightly
@pytest.mark.parametrize("step", [3, 4])
def test_resuming_within_a_rollout_and_between_two_ends_bitwise_equal(step: int, tmp_path: Path) -> None:
    expected, seen = run(tmp_path / "whole"), list[Rollout]()
    trainer = {"ckpt_path": tmp_path / "whole" / f"step={step}.ckpt"}
    assert differing(run(None, recorder(seen)("seen"), trainer=trainer), expected) == []
    assert seen[0].policy_version[seen[0].action_mask].unique().tolist() == [0], "of weights that are gone"


def test_a_checkpoint_waits_for_the_rollout_in_flight_and_holds_it(tmp_path: Path) -> None:
    engine, data = Gated(), tiny_prompts(8, 4)
    opening = hooked(on_save_checkpoint=lambda *_: engine.gate.set())
    run(tmp_path, opening, engine=engine, data=data)
    for step, numbers in {1: [1], 4: [1], 5: [2], 8: [2], 9: []}.items():
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        (rank,) = checkpoint["lightning_rl"]["ranks"]
        assert [found["rollout"] for found in rank["prefetched"]] == numbers, f"step {step}"
        places = [place for found in rank["prefetched"] for place in found["places"]]
        assert places == [place for number in numbers for place in range(4 * number, 4 * number + 4)]
        assert checkpoint["PromptDataModule"] == {"cursor": 12 if step > 4 else 8, "step_index": step}


def test_a_checkpoint_with_more_in_flight_than_allowed_is_refused(tmp_path: Path) -> None:
    run(tmp_path, trainer={"max_steps": 6})
    with pytest.raises(ValueError, match=r"at most 0 rollouts in flight .* got 1: resume with max_staleness=1"):
        run(max_staleness=0, allow_config_changes=["max_staleness"], trainer={"ckpt_path": tmp_path / "step=2.ckpt"})


def test_a_synchronous_run_can_go_on_ahead(tmp_path: Path) -> None:
    seen = list[Rollout]()
    run(tmp_path, max_staleness=0, trainer={"max_steps": 4})
    allowed = ["max_staleness"]
    run(None, recorder(seen)("seen"), allow_config_changes=allowed, trainer={"ckpt_path": tmp_path / "step=4.ckpt"})
    versions = [rollout.policy_version[rollout.action_mask].unique().tolist() for rollout in seen]
    assert versions == [[1], [1]], "the first one was not generated ahead"


@pytest.mark.nightly
def test_a_finished_run_goes_on_with_the_prompts_of_a_longer_one_and_newer_weights(tmp_path: Path) -> None:
    longer, seen = run(trainer={"max_steps": 12}), list[Rollout]()
    run(tmp_path, trainer={"max_steps": 8})
    full = {"max_steps": 12, "ckpt_path": tmp_path / "step=4.ckpt"}  # the next rollout is in flight
    assert differing(run(trainer=full), longer) == []
    further = run(None, recorder(seen)("seen"), trainer={**full, "ckpt_path": tmp_path / "step=8.ckpt"})
    assert further.global_step == 12 and differing(further, longer)
    assert [rollout.groups.unique().tolist() for rollout in seen] == [[8, 9, 10, 11]]
    assert seen[0].policy_version[seen[0].action_mask].unique().tolist() == [2], "in the longer run it is 1"


def test_a_finished_run_without_rollouts_ahead_goes_on_bitwise_as_a_longer_one(tmp_path: Path) -> None:
    longer = run(max_staleness=0, trainer={"max_steps": -1, "max_epochs": 2})
    run(tmp_path, max_staleness=0, trainer={"max_steps": -1, "max_epochs": 1})
    further = {"max_steps": -1, "max_epochs": 2, "ckpt_path": tmp_path / "step=8.ckpt"}
    assert differing(run(max_staleness=0, trainer=further), longer) == []


@pytest.mark.nightly
def test_validation_and_answers_wait_for_the_rollout_in_flight_and_change_nothing() -> None:
    engine = Gated()

    def answering(trainer: Any, module: Any, *_: Any) -> None:
        engine.gate.set()
        assert len(module.generate([[2, 3]])) == 1

    plain = run(trainer={"limit_val_batches": 0})
    validated = run(trainer={"val_check_interval": 1, "check_val_every_n_epoch": None})
    answered = run(None, hooked(on_train_batch_end=answering), engine=engine, trainer={"limit_val_batches": 0})
    assert differing(validated, plain) == [] == differing(answered, plain)


def test_an_error_of_the_engine_comes_with_the_traceback_of_its_thread(tmp_path: Path) -> None:
    engine = Gated(fails=OSError("the engine is gone"))
    opening = hooked(on_train_batch_end=lambda *_: engine.gate.set())
    with pytest.raises(OSError, match="the engine is gone") as raised:
        run(None, opening, engine=engine, trainer={"default_root_dir": tmp_path})
    frames = {frame.name for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert {"generate_batch", "generate", "take", "on_train_batch_start"} <= frames
    assert engine.state is EngineState.ASLEEP and in_flight() == []
    assert torch.load(tmp_path / INTERRUPTED, weights_only=True)["global_step"] == 4


def test_a_rollout_that_failed_is_saved_as_its_prompts_and_drawn_anew(tmp_path: Path) -> None:
    engine, seen = Gated(fails=OSError("the engine is gone")), list[Rollout]()
    with pytest.raises(OSError, match="the engine is gone"):
        run(tmp_path, hooked(on_save_checkpoint=lambda *_: engine.gate.set()), engine=engine)
    checkpoint = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    (lost,) = checkpoint["lightning_rl"]["ranks"][0]["prefetched"]
    assert lost == {"rollout": 1, "places": [4, 5, 6, 7], "samples": None}
    run(None, recorder(seen)("seen"), trainer={"ckpt_path": tmp_path / "step=4.ckpt"})
    assert [rollout.groups.unique().tolist() for rollout in seen] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    versions = [rollout.policy_version[rollout.action_mask].unique().tolist() for rollout in seen]
    assert versions == [[1], [1]]


def test_samples_ahead_of_an_older_checkpoint_are_refused_and_prompts_ahead_load() -> None:
    states: list[dict[str, Any]] = [{"rollout": number, "places": [3], "samples": None} for number in (2, 3)]
    (loaded, _) = pending_from_state(states, lambda places: [Prompt(index, (2,), "?", {}) for index in places]).values()
    assert [prompt.index for prompt in loaded.prompts] == [3] and loaded.samples is None
    states[1]["samples"] = {"samples": {}, "greedy": None, "outcomes": []}
    message = r"expected trajectories of rollout 3, .* in the form of lightning-rl 0.1.0: end the run with that version"
    with pytest.raises(ValueError, match=message):
        pending_from_state(states, lambda _: [], "0.1.0")


def test_an_error_of_the_trainer_waits_for_the_thread_and_closes_the_engine() -> None:
    engine = Gated()

    def fails(*_: Any) -> None:
        engine.gate.set()
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(None, hooked(on_train_batch_end=fails), engine=engine)
    assert engine.state is EngineState.ASLEEP and in_flight() == []


@pytest.mark.nightly
def test_a_signal_saves_what_is_in_flight_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    expected, engine = run(), Gated()
    opening = hooked(on_save_checkpoint=lambda *_: engine.gate.set())

    def kill(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        run(None, hooked(on_train_batch_start=kill), opening, engine=engine, trainer={"default_root_dir": tmp_path})
    assert in_flight() == [] and engine.state is EngineState.ASLEEP
    saved = torch.load(tmp_path / INTERRUPTED, weights_only=True)
    assert saved["global_step"] == 2 and len(saved["lightning_rl"]["ranks"][0]["prefetched"]) == 1
    assert differing(run(trainer={"ckpt_path": tmp_path / INTERRUPTED}), expected) == []


def test_an_engine_that_hangs_is_given_up_with_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    monkeypatch.setattr(ahead, "HURRY", 0.01)
    engine = Gated(fails=OSError("given up"))
    message = r"expected rollout 1 within 0.01 seconds, .* raise lightning_rl\.rollouts\.ahead"
    with pytest.raises(TimeoutError, match=message):
        run(engine=engine)
    (thread,) = in_flight()
    engine.gate.set()
    thread.join(WAIT)
    assert in_flight() == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("limits", "rollouts"),
    [
        pytest.param({"max_steps": 6}, 2, id="steps-within-a-rollout"),
        pytest.param({"max_steps": 8}, 2, id="steps-at-the-end-of-one"),
        pytest.param({"max_steps": -1, "max_epochs": 1}, 2, id="one-epoch"),
        pytest.param({"max_steps": -1, "max_epochs": 2}, 4, id="over-epochs"),
        pytest.param({"max_steps": -1, "max_epochs": 3, "limit_train_batches": 6}, 5, id="epochs-that-cut-a-rollout"),
    ],
)
def test_nothing_is_drawn_that_nobody_trains_on(limits: dict[str, Any], rollouts: int) -> None:
    data, seen = tiny_prompts(8, 4), list[Rollout]()
    run(None, recorder(seen)("seen"), data=data, trainer=limits)
    assert len(seen) == rollouts and data.position.cursor == 4 * rollouts and in_flight() == []


def test_what_is_in_flight_when_a_run_stops_early_is_dropped() -> None:
    data, seen = tiny_prompts(8, 4), list[Rollout]()

    def stop(trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 4

    run(None, hooked(on_train_batch_end=stop), recorder(seen)("seen"), data=data)
    assert len(seen) == 1 and data.position.cursor == 8 and in_flight() == []


def test_a_second_fit_begins_with_nothing_in_flight() -> None:
    module, seen, data = tiny_module(max_staleness=1), list[Rollout](), tiny_prompts(8, 4)
    for _ in range(2):
        fit(module, callbacks=[TruncatedIS(), recorder(seen)("seen")], data=data)
    versions = [rollout.policy_version[rollout.action_mask].unique().tolist() for rollout in seen]
    assert versions == [[0], [0], [2], [2]] and data.position.cursor == 16
