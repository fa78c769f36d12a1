"""Rollouts that are generated while the policy trains on earlier ones: whose weights draw them, and what is known."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import (
    callback_of,
    differing,
    fit,
    recorder,
    rollout_of,
    tiny_module,
    tiny_policy,
    tiny_prompts,
    weights_of,
)
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import (
    EngineError,
    FakeEngine,
    RLCallback,
    RLLightningModule,
    Rollout,
    TransformersEngine,
)
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import DynamicSampling, OffPolicyIS, RolloutKL, TruncatedIS
from lightning_rl.generation import Capabilities, Completion, Request
from lightning_rl.rollouts.ahead import Ahead, stream_context

WAIT = 60.0  # seconds after which a test that would hang fails


def module_of(max_staleness: int = 1, **options: Any) -> RLLightningModule:
    return tiny_module(**{"max_staleness": max_staleness, **options})


def versions_of(rollouts: Iterable[Rollout]) -> list[list[int]]:
    """The versions that occur in each rollout."""
    return [rollout.policy_version[rollout.action_mask].unique().tolist() for rollout in rollouts]


def in_background() -> bool:
    return threading.current_thread() is not threading.main_thread()


class Steps(RLCallback):
    """Counts optimizer steps, keeps their metrics, and lets another thread wait for one."""

    name = "steps"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._made = threading.Condition()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        with self._made:
            self.rows.append(pl_module.run.metrics.values())
            self._made.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait for a number of steps."""
        with self._made:
            assert self._made.wait_for(lambda: len(self.rows) >= number, WAIT), f"no step {number} was made"


class Late(TransformersEngine):
    """Ahead of the trainer, it draws only once the policy has made an optimizer step away from what it was given."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps, self.held = steps, list[tuple[dict[str, Tensor], dict[str, Tensor]]]()

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        before = self.copied()
        if in_background():
            self.steps.wait_for(self.version + 1)
            self.held.append((before, self.copied()))
        return super().generate_batch(requests, logprobs=logprobs)

    def copied(self) -> dict[str, Tensor]:
        """The weights that it decodes with, now."""
        assert self._model is not None
        return {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}


def test_the_optimizer_moves_no_weights_under_a_running_generation() -> None:
    rollouts, steps = list[Rollout](), Steps()
    engine = Late(steps)
    fit(module_of(engine=engine), callbacks=[TruncatedIS(), steps, recorder(rollouts)("seen")])
    assert len(engine.held) == 3, "the first of four rollouts is drawn by the trainer's thread"
    for before, after in engine.held:
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
    (first, _), (second, _), _ = engine.held
    assert any(not torch.equal(second[name], weight) for name, weight in first.items()), "the policy trained"
    assert versions_of(rollouts) == [[0], [0], [1], [2]]


def test_samples_have_the_log_probabilities_of_the_weights_that_their_version_names() -> None:
    rollouts, weights, steps = list[Rollout](), list[dict[str, Tensor]](), Steps()
    module = module_of(engine=Late(steps))
    taking = callback_of("taking", observe=lambda _: weights.append(weights_of(module)))
    fit(module, callbacks=[TruncatedIS(), steps, taking, recorder(rollouts)("seen")])
    for rollout in rollouts[1:]:
        ((version,),) = versions_of([rollout])
        policy = tiny_policy()
        policy.load_state_dict({name.removeprefix("policy.model."): w for name, w in weights[version].items()})
        for row, length in enumerate(rollout.response_lengths.tolist()):
            prompt = rollout.prompt_ids[row, : rollout.prompt_lengths[row]]
            response = rollout.response_ids[row, :length]
            with torch.no_grad():
                logits = policy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(rollout.require("rollout_logprobs")[row, :length], expected)


OPTIONS: dict[str, tuple[dict[str, Any], list[type[RLCallback]]]] = {
    "grpo": ({"minibatches_per_rollout": 2}, [TruncatedIS, RolloutKL]),
    "ppo": (
        {
            "minibatches_per_rollout": 2,
            "epochs_per_rollout": 2,
            "advantages": "gae",
            "critic": "shared",
            "group_size": 1,
        },
        [TruncatedIS],
    ),
    "remax": ({"advantages": "remax", "group_size": 1, "loss": "reinforce"}, [OffPolicyIS]),
    "dynamic-sampling": ({"top_p": 0.9, "top_k": 8}, [TruncatedIS, DynamicSampling]),
}


@pytest.mark.filterwarnings("ignore:.*groups are missing after:UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_which_thread_is_faster_changes_no_bit(name: str) -> None:
    options, corrections = OPTIONS[name]
    steps, modules = Steps(), list[RLLightningModule]()
    for engine, watchers in ((TransformersEngine(), []), (Late(steps), [steps])):
        modules.append(module_of(engine=engine, **options))
        callbacks = [*(correction() for correction in corrections), *watchers]
        fit(modules[-1], callbacks=callbacks, max_steps=6, max_epochs=4)
    assert differing(*modules) == []


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*groups are missing after:UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_no_sample_is_lost_or_drawn_twice(name: str) -> None:
    (options, corrections), rollouts = OPTIONS[name], list[Rollout]()
    module, data = module_of(**options), tiny_prompts()
    fit(
        module, callbacks=[*(correction() for correction in corrections), recorder(rollouts)("seen")], data=data,
        max_epochs=2,
    )  # fmt: skip
    ids = torch.cat([rollout.sample_ids for rollout in rollouts])
    assert len(rollouts) == 8 and len(ids.unique()) == len(ids)
    if DynamicSampling not in corrections:
        assert sorted(ids.tolist()) == list(range(2 * 16 * module.options.group_size)), (
            "every prompt of both epochs, once"
        )
        assert data.position.cursor == 2 * 16, "every sample is trained on"


def test_staleness_is_measured_for_each_token() -> None:
    steps = Steps()
    fit(module_of(minibatches_per_rollout=2), callbacks=[TruncatedIS(), steps], data=tiny_prompts(12, 4))
    found = [(row["staleness/mean"], row["staleness/max"]) for row in steps.rows]
    assert found[::2] == [(0, 0), (1, 1), (1, 1)] and all("time/wait" in row for row in steps.rows[::2])


def test_without_staleness_nothing_runs_in_another_thread_and_nothing_is_copied() -> None:
    module = module_of(0)
    drawn = list[bool]()
    draw = TransformersEngine.generate_batch

    class Watched(TransformersEngine):
        @override
        def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
            drawn.append(in_background())
            return draw(self, requests, logprobs=logprobs)

    module.run.options = replace(module.options, engine=Watched())
    fit(module)
    assert module.models.replica is None and drawn == [False] * 4


class Paused(FakeEngine):
    """Takes weights while it generates; a response has the version that it began under, or says an earlier one."""

    capabilities = Capabilities(syncs_while_generating=True)

    def __init__(self, steps: Steps, *, late: int = 0) -> None:
        super().__init__(lambda request: [2 + request.sample_id % 5] * 4 + [1])
        self.steps, self.late = steps, late

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        version = self.version
        if in_background():
            version = max(version - self.late, 0)
            self.steps.wait_for(version + 1)
        return [replace(found, version=version) for found in super().generate_batch(requests, logprobs=logprobs)]


def test_an_engine_that_takes_weights_while_it_generates_may_be_further_ahead() -> None:
    rollouts, steps = list[Rollout](), Steps()
    module = module_of(2, engine=Paused(steps), patience=None)  # which draws the same tokens every time
    fit(module, callbacks=[TruncatedIS(), steps, recorder(rollouts)("seen")], max_epochs=2)
    assert len(rollouts) == 8 and versions_of(rollouts)[:2] == [[0], [0]]
    for number, (version,) in enumerate(versions_of(rollouts)):
        assert number - 2 <= version <= number
    assert max(row["staleness/max"] for row in steps.rows) <= 2


def test_a_token_that_is_too_old_names_row_and_version() -> None:
    steps = Steps()
    with pytest.raises(EngineError, match=r"tokens of version 1, which it had at .* got version 0 for sample 32 \("):
        fit(module_of(engine=Paused(steps, late=1)), callbacks=[TruncatedIS(), steps])
    old = rollout_of([1.0, 0.0], [[1, 1], [1, 0]]).replace(policy_version=torch.tensor([[4, 4], [3, -1]]))
    Ahead(max_staleness=2).check(old, 5)
    with pytest.raises(
        RuntimeError, match=r"rollout 5 from weights at most 1 rollouts old .* version 3 at row 1 \(sample 101\), resp"
    ):
        Ahead(max_staleness=1).check(old, 5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_what_draws_ahead_has_the_precision_of_the_run(precision: Any) -> None:
    steps = Steps()
    module = module_of(engine=Late(steps), optimizer=partial(AdamW, lr=1e-3))
    fit(module, callbacks=[TruncatedIS(), steps], precision=precision)
    replica, policy = module.models.replica, module.required_policy.model
    assert replica is not None
    assert {weight.dtype for weight in replica.parameters()} == {module.parallel.compute_dtype(policy.dtype)}
    buffers = [{name: buffer.dtype for name, buffer in model.named_buffers()} for model in (replica, policy)]
    assert buffers[0] == buffers[1]
    assert abs(steps.rows[0]["kl/rollout"]) < (1e-9 if precision == "64-true" else 1e-2)
    assert all(abs(row["kl/rollout"]) < 1e-2 for row in steps.rows), "drift of one small optimizer step"


def test_the_thread_has_autocast_and_number_of_threads_of_the_trainer() -> None:
    seen = list[tuple[bool, bool, torch.dtype, int]]()

    class Looks(TransformersEngine):
        @override
        def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
            state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads()
            seen.append((in_background(), *state))
            return super().generate_batch(requests, logprobs=logprobs)

    fit(module_of(engine=Looks()), callbacks=[TruncatedIS()], precision="bf16-mixed", data=tiny_prompts(8, 4))
    assert set(seen) == {(False, True, torch.bfloat16, 1), (True, True, torch.bfloat16, 1)}


@pytest.mark.nightly
def test_the_audit_knows_every_sample_and_allows_versions_within_the_bound() -> None:
    checks = ["trained_tokens", "versions", "sample_conservation", "weight_sync", "first_forward"]
    steps, audit, counts = Steps(), SignalAudit(1, "raise", checks), list[int]()

    class Counts(RLCallback):
        name = "counts"

        @override
        def observe_generated(self, pairs: Sequence[tuple[Request, Completion]]) -> None:
            counts.append(len({request.sample_id for request, _ in pairs}))

    callbacks = [TruncatedIS(), audit, steps, Counts()]
    fit(module_of(engine=Late(steps)), callbacks=callbacks, max_epochs=2)
    assert counts == [16] * 8 and audit.findings == []


def test_versions_that_no_sync_had_are_refused_before_anything_trains(tmp_path: Path) -> None:
    class Ahead(Paused):
        @override
        def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
            return [replace(drawn, version=9) for drawn in super().generate_batch(requests, logprobs=logprobs)]

    with pytest.raises(EngineError, match="weights that were pushed, the last of which is 0 from Ahead, got version 9"):
        fit(module_of(2, engine=Ahead(Steps())), callbacks=[TruncatedIS()], default_root_dir=tmp_path)


def test_an_engine_on_a_stream_of_its_own_waits_for_its_weights_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened = list[str]()

    @contextmanager
    def note(what: str) -> Iterator[None]:
        happened.append(f"enter {what}")
        yield
        happened.append(f"leave {what}")

    class Stream:
        def wait_event(self, event: str) -> None:
            """Notes what it waits for."""
            happened.append(f"wait for {event}")

        def synchronize(self) -> None:
            """Record the synchronization."""
            happened.append("synchronize")

    def fail_in(context: Any) -> None:
        with context():
            happened.append("draw")
            raise RuntimeError("in the engine")

    stream: Any = Stream()
    weights: Any = "weights"
    monkeypatch.setattr(torch.cuda, "stream", lambda entered: note("the stream" if entered is stream else "another"))
    with pytest.raises(RuntimeError, match="in the engine"):
        fail_in(stream_context(lambda: note("the device"), stream, weights))
    assert happened == ["enter the device", "wait for weights", "enter the stream", "draw", "synchronize"]
    happened.clear()
    with stream_context(lambda: note("the device"), stream, weights)():
        pass
    assert happened[-3:] == ["leave the stream", "synchronize", "leave the device"]
