"""PacedEngine and its model of devices: when answers come, by hand, and which weights their tokens are of."""

import threading
from collections.abc import Sequence

import pytest

from lightning_rl import EngineError, Sampling
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.paced import Decoding, Pace, PacedEngine

WAIT = 60.0  # seconds after which a test that would hang fails
PACE = Pace(devices=1, slots=2, fixed=1.0, each=0.5)  # alone 1.5 s for a token, of two 2 s


def events(decoding: Decoding[str]) -> list[tuple[float, list[str]]]:
    """When responses end, and which."""
    found = list[tuple[float, list[str]]]()
    while (when := decoding.next()) < float("inf"):
        if ended := decoding.advance(when):
            found.append((when, ended))
    return found


def test_responses_share_a_device_and_wait_for_a_slot_in_the_order_of_their_rank() -> None:
    decoding = Decoding[str](PACE)
    for key, tokens, rank in (("a", 4, 0), ("b", 2, 0), ("later", 1, 5), ("c", 1, 1)):
        decoding.ask(key, tokens, rank)
    assert events(decoding) == [(4.0, ["b"]), (6.0, ["c"]), (8.0, ["a", "later"])]


def test_devices_decode_beside_each_other_and_the_emptiest_takes_the_next() -> None:
    decoding = Decoding[str](Pace(devices=2, slots=2, fixed=1.0, each=0.5))
    for key, tokens in (("a", 2), ("b", 3), ("c", 2)):
        decoding.ask(key, tokens)
    assert events(decoding) == [(4.0, ["a", "c"]), (4.5, ["b"])]


def test_nothing_is_drawn_in_a_time_that_is_skipped() -> None:
    decoding = Decoding[str](PACE)
    decoding.ask("a", 4)
    decoding.advance(3.0)
    decoding.skip(10.0)
    assert decoding.lengths() == {"a": 2} and events(decoding) == [(13.0, ["a"])]


def test_a_pace_is_that_of_what_was_measured() -> None:
    measured = Pace.of(2000.0, alone=50.0, slots=100)
    assert 100 / measured.step(100) == pytest.approx(2000) and 1 / measured.step(1) == pytest.approx(50)
    guessed = Pace.of(2000.0, slots=64)
    assert guessed.fixed == pytest.approx(64 * guessed.each) and 64 / guessed.step(64) == pytest.approx(2000)
    with pytest.raises(ValueError, match=r"expected alone in \(20, 2000\], got 10"):
        Pace.of(2000.0, alone=10.0, slots=100)


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """The time, in seconds."""
        return self.time

    def wait(self, changed: threading.Condition, until: float) -> None:
        """Until the test moves on."""
        del until
        assert changed.wait(WAIT)

    def move(self, engine: PacedEngine, to: float) -> None:
        """Goes on to a time."""
        with engine._changed:  # noqa: SLF001
            self.time = to
            engine._changed.notify_all()  # noqa: SLF001


def requests(number: int) -> list[Request]:
    sampling = Sampling(max_new_tokens=8, eos_token_ids=(1,))
    return [Request(prefix_ids=(2,), sample_id=place, seed=0, sampling=sampling) for place in range(number)]


def in_a_thread(engine: PacedEngine, asked: Sequence[Request], found: list[object]) -> threading.Thread:
    """Draws elsewhere, and keeps what comes of it."""

    def draw() -> None:
        try:
            found.append(engine.generate(asked))
        except EngineError as error:
            found.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    with engine._changed:  # noqa: SLF001
        assert engine._changed.wait_for(lambda: engine.asked, WAIT)  # noqa: SLF001
    return thread


def an_engine(clock: Hands) -> PacedEngine:
    engine = PacedEngine(lambda request: [3] * (2 + 2 * request.sample_id) + [1], PACE, clock=clock)
    engine.load_weights([], 0)
    return engine


def test_tokens_carry_the_version_of_their_moment_and_answers_leave_the_flight_as_they_come() -> None:
    clock, found = Hands(), list[object]()
    engine = an_engine(clock)
    assert engine.in_flight.tokens() == 0 and engine.in_flight.oldest() is None
    thread = in_a_thread(engine, requests(2), found)
    assert engine.in_flight.tokens() == 16 and engine.in_flight.oldest() == 0
    clock.move(engine, 6.0)  # the first has its three tokens, the second as many
    engine.load_weights([], 1)
    assert engine.in_flight.tokens() == 8
    clock.move(engine, 9.0)
    thread.join(WAIT)
    ((first, second),) = found  # pyright: ignore[reportGeneralTypeIssues]
    assert isinstance(first, Completion) and isinstance(second, Completion)
    assert (first.versions, second.versions) == ((0, 0, 0), (0, 0, 0, 1, 1))
    assert engine.in_flight.tokens() == 0


def test_closing_cuts_short_who_waits() -> None:
    found = list[object]()
    engine = an_engine(Hands())
    thread = in_a_thread(engine, requests(1), found)
    engine.close()
    thread.join(WAIT)
    assert isinstance(found[0], EngineError) and "closed meanwhile" in str(found[0])
    assert engine.in_flight.tokens() == 0
