"""Requests, their seeds, and the states of an engine."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.support import tiny_policy
from torch import Tensor
from typing_extensions import override

from lightning_rl import FakeEngine, TransformersEngine
from lightning_rl.generation import Capabilities, Engine, EngineError, EngineState, Request, request_seed, turn_seed


def a_request(**options: object) -> Request:
    return request_of(**{"prefix_ids": (2, 3), "sample_id": 7, "max_new_tokens": 4, **options})  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"prefix_ids": ()}, "a prompt of at least one token for sample 7, got none", id="empty-prompt"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens to be a whole number above 0, got 0", id="nothing-to-draw"),
        pytest.param({"temperature": -0.1}, "expected temperature >= 0, got -0.1", id="negative-temperature"),
        pytest.param({"eos_token_ids": None}, "eos_token_ids, which may be empty, for sample 7, got None", id="no-eos"),
    ],
)
def test_a_request_is_checked_when_it_is_made(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_request(**options)


@pytest.mark.parametrize(
    ("identity", "seed"),
    [
        ((0, 0, 0, 0), 1307958396),
        ((0, 0, 1, 0), 407480017),
        ((0, 1, 0, 0), 694742802),
        ((1, 0, 0, 0), 1506085581),
        ((0, 0, 0, 1), 465023628),
        ((3, 7, 511, 2), 478622788),
    ],
)
def test_seeds_never_change_between_versions_of_the_library(identity: tuple[int, int, int, int], seed: int) -> None:
    run_seed, rollout, sample_id, turn = identity
    assert turn_seed(request_seed(run_seed, rollout, sample_id), turn) == seed


def test_every_part_of_the_identity_makes_another_seed_of_31_bits() -> None:
    firsts = [request_seed(a, b, c) for a in range(5) for b in range(5) for c in range(20)]
    seeds = [turn_seed(first, turn) for first in firsts for turn in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and 2**30 < max(seeds) < 2**31


class LeavesEarly(FakeEngine):
    """Reads one weight."""

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in weights:
            break


class Fails(FakeEngine):
    """Raises before it reads a weight."""

    @override
    def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise ValueError("out of memory")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (LeavesEarly, EngineError, "expected LeavesEarly.load_stream to read all weights, got 2 that it left: iterate"),
        (Fails, ValueError, "out of memory"),
    ],
)
def test_a_stream_of_weights_that_an_engine_leaves_is_read_to_its_end_with_an_error(
    kind: type[FakeEngine], error: type[Exception], message: str
) -> None:
    engine, gathered = kind(lambda _: [5, 1]), list[int]()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            gathered.append(number)
            yield f"weight {number}", torch.zeros(1)

    with pytest.raises(error, match=message):
        engine.load_weights(weights(), 0)
    assert gathered == [0, 1, 2] and engine.state is EngineState.AWAKE


def engines() -> list[Engine]:
    fake, real = FakeEngine(lambda _: [5, 1]), TransformersEngine()
    for engine in (fake, real):
        launch(engine, tiny_policy())
    return [fake, real]


@pytest.mark.parametrize("engine", engines(), ids=["fake", "transformers"])
def test_an_engine_generates_only_with_the_trainers_weights(engine: Engine) -> None:
    requests = [a_request(eos_token_ids=[1])]
    assert (engine.state, engine.version) == (EngineState.ASLEEP, -1)
    with pytest.raises(RuntimeError, match="expected a synced engine, got one that is asleep: call load_weights first"):
        engine.generate(requests)
    engine.wake()
    with pytest.raises(RuntimeError, match="got one that is awake"):
        engine.generate(requests)
    engine.load_weights(iter([("model.norm.weight", torch.zeros(32))]), 3)
    assert engine.state is EngineState.SYNCED
    assert engine.generate(requests)[0].version == 3
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(requests)
    engine.load_weights([], 4)
    assert engine.generate(requests)[0].version == 4
    engine.close()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(requests)


def test_weights_are_not_synced_if_the_stream_breaks() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(1)
        raise OSError("lost")

    engine = FakeEngine(lambda _: [1])
    engine.load_weights([], 1)
    with pytest.raises(OSError, match="lost"):
        engine.load_weights(broken(), 2)
    assert (engine.state, engine.version) == (EngineState.AWAKE, 1)


def test_transformers_needs_a_model_and_at_least_one_row() -> None:
    engine = TransformersEngine()
    engine.load_weights([], 0)
    with pytest.raises(RuntimeError, match=r"expected start\(\) before generate\(\)"):
        engine.generate([a_request()])
    with pytest.raises(ValueError, match="expected max_rows to be a whole number above 0, got 0"):
        TransformersEngine(max_rows=0)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_only_an_engine_that_syncs_while_it_generates_may_generate_during_a_sync(meanwhile: bool) -> None:
    states: list[EngineState] = []

    class Watched(FakeEngine):
        capabilities = Capabilities(syncs_while_generating=meanwhile)

        def load_stream(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
            states.append(self.state)
            super().load_stream(weights, version)

    engine = Watched(lambda _: [2])
    for version in (0, 1):
        engine.load_weights([], version)
    assert states == [EngineState.AWAKE, EngineState.SYNCED if meanwhile else EngineState.AWAKE]
    assert (engine.state, engine.version) == (EngineState.SYNCED, 1)


@pytest.mark.parametrize(("former", "name"), [("_take", "load_stream"), ("_draw", "generate_batch")])
def test_a_subclass_that_overrides_a_method_by_its_former_name_is_refused(former: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"expected Mine to define {name}, got {former}, its former name: rename it"):
        type("Mine", (TransformersEngine,), {former: lambda *_: None})
