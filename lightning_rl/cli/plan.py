r"""plan: how many generation devices a run needs, which ``max_staleness``, and how long its trainer waits.

A simulation of what the loop does (docs/pipelining.md), in a time of its own. Devices decode as
:class:`~lightning_rl.generation.paced.Pace` says, the trainer takes the same time for every rollout, and lengths come
from recordings or from a lognormal distribution: :math:`\ln L = \mu + \sigma Z` with the given mean of :math:`L`, so
:math:`\mu = \ln \mathrm{mean} - \sigma^2 / 2`. Prefill and rewards take no time.
"""

import argparse
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.cli.output import say
from lightning_rl.generation.paced import Decoding, Pace
from lightning_rl.recording import Recording

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of the generation devices: tokens that they draw for each that training eats
MAX_DEVICES = 100_000  # more take minutes to simulate
MAX_RATE = 1e9  # tokens/s of one device: beyond, seconds are lost in the rounding of the time
NEARLY = 1.05  # a plan that costs so much of the cheapest is as good, if its samples are less stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a run.

    Args:
        lengths: of the responses of each rollout, in tokens.
        step_seconds: that the trainer takes for a rollout once it has its responses.
        sync_seconds: that new weights take to reach the devices; nothing is drawn meanwhile.
    """

    lengths: Sequence[Sequence[int]]
    step_seconds: float
    sync_seconds: float = 0.0

    @property
    def tokens(self) -> float:
        """Of a rollout, on average."""
        return sum(map(sum, self.lengths)) / len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What comes of a run.

    Attributes:
        devices: that generate.
        max_staleness: of the run.
        idle: share of the time in which the trainer waits.
        seconds: of one rollout, everything included.
    """

    devices: int
    max_staleness: int
    idle: float
    seconds: float


def forecast(load: Load, pace: Pace, max_staleness: int, *, concurrent: bool = True) -> Forecast:
    """Simulates a run, and measures it without the rollouts in which its pipeline fills and runs dry.

    Args:
        load: its work.
        pace: of its generation devices.
        max_staleness: how many rollouts are generated ahead.
        concurrent: whether the engine can be asked for several of them at a time, as servers can.

    Raises:
        ValueError: if there are too few rollouts to measure one.
    """
    first, last = max_staleness + 1, len(load.lengths) - 1 - max_staleness
    if last < first:
        raise ValueError(
            f"expected at least {2 * first} rollouts for max_staleness={max_staleness}, got {len(load.lengths)}"
        )
    streams = concurrent and max_staleness > 1
    fleet, waited, had = _Fleet(load.lengths, pace, concurrent=concurrent), list[float](), list[float]()
    for number in range(len(load.lengths)):
        waits = 0.0 if streams or number not in fleet else fleet.wait(number)
        fleet.sync(load.sync_seconds)
        fleet.ask(number + max_staleness if streams else number)
        waited.append(waits + fleet.wait(number))
        had.append(fleet.now)
        fleet.ask(number + max_staleness)
        fleet.go_on(fleet.now + load.step_seconds)
    seconds = had[last] - had[first - 1]
    idle = sum(waited[first : last + 1]) / seconds
    return Forecast(devices=pace.devices, max_staleness=max_staleness, idle=idle, seconds=seconds / (last - first + 1))


class _Fleet:
    """Rollouts that are decoded, together or one after the other."""

    def __init__(self, lengths: Sequence[Sequence[int]], pace: Pace, *, concurrent: bool) -> None:
        self._lengths, self._concurrent = lengths, concurrent
        self._decoding, self._left = Decoding[tuple[int, int]](pace), list(map(len, lengths))
        self._asked, self._queue, self._busy = 0, deque[int](), set[int]()

    @property
    def now(self) -> float:
        return self._decoding.now

    def __contains__(self, number: int) -> bool:
        return number < self._asked

    def ask(self, last: int) -> None:
        """For every rollout up to one that nobody asked for."""
        last = min(last, len(self._lengths) - 1)
        self._queue.extend(range(self._asked, last + 1))
        self._asked = max(self._asked, last + 1)
        self._begin()

    def sync(self, seconds: float) -> None:
        self._decoding.skip(self.now + seconds)

    def wait(self, number: int) -> float:
        """Until a rollout is there; for how long."""
        begin = self.now
        while self._left[number]:
            self._advance(self._decoding.next())
        return self.now - begin

    def go_on(self, to: float) -> None:
        while (event := self._decoding.next()) <= to:
            self._advance(event)
        self._advance(to)

    def _advance(self, to: float) -> None:
        for number, _ in self._decoding.advance(to):
            self._left[number] -= 1
            if not self._left[number]:
                self._busy.discard(number)
                self._begin()

    def _begin(self) -> None:
        while self._queue and (self._concurrent or not self._busy):
            number = self._queue.popleft()
            self._busy.add(number)
            for place, tokens in enumerate(self._lengths[number]):
                self._decoding.ask((number, place), tokens, number)


def drawn_lengths(samples: int, rollouts: int, *, mean: float, sigma: float, limit: int, seed: int) -> list[list[int]]:
    """Lengths of responses by lot: lognormal, at least 1 and cut off at a limit.

    Args:
        samples: of a rollout.
        rollouts: how many.
        mean: tokens of a response, before the limit.
        sigma: standard deviation of the logarithm; 0 for equal lengths, above 1 for a long tail.
        limit: most tokens.
        seed: of the lot.
    """
    generator, mu = random.Random(seed), math.log(mean) - sigma**2 / 2
    most = math.log(limit)  # of larger ones there may be no number
    return [
        [min(limit, max(1, round(math.exp(min(most, generator.gauss(mu, sigma)))))) for _ in range(samples)]
        for _ in range(rollouts)
    ]


def recorded_lengths(folder: Path) -> list[list[int]]:
    """Lengths of the responses of every rollout that a RolloutRecorder wrote to a folder, those of all ranks together.

    Raises:
        ValueError: if there is none.
    """
    found: dict[int, list[int]] = {}
    for path in sorted(folder.glob("rollout-*.json")):
        recording = Recording.load(path)
        rollout = recording.rollout
        lengths = rollout.drawn_lengths[rollout.real].tolist()
        found.setdefault(recording.header["rollout"], []).extend(max(1, length) for length in lengths)
    if not found:
        raise ValueError(f"expected recordings of RolloutRecorder in {folder}, got none")
    return [found[number] for number in sorted(found)]


def plans(load: Load, pace: Pace, devices: Sequence[int], staleness: Sequence[int]) -> list[Forecast]:
    """A forecast for each number of devices and each staleness."""
    return [forecast(load, replace(pace, devices=number), bound) for number in devices for bound in staleness]


def best(forecasts: Sequence[Forecast], training_devices: int) -> Forecast:
    """The one with the fewest seconds of all devices for a rollout; of those that are :data:`NEARLY` as cheap the one
    with the smallest staleness.
    """

    def cost(forecast: Forecast) -> float:
        return (training_devices + forecast.devices) * forecast.seconds

    least = min(map(cost, forecasts))
    return min((f for f in forecasts if cost(f) <= NEARLY * least), key=lambda f: (f.max_staleness, cost(f)))


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Prints a table of forecasts, and the plan to take.

    Returns:
        The exit code, 0.

    Raises:
        SystemExit: if an option is out of range, or there is nothing to read lengths from.
    """
    if options:
        raise SystemExit(f"expected no further options, got {' '.join(options)}")
    try:
        load, pace = _work_and_pace(arguments)
        devices = arguments.generation_devices or _numbers_of_devices(load, pace, max(arguments.max_staleness))
        forecasts = plans(load, pace, devices, arguments.max_staleness)
    except (ValueError, OSError) as refused:
        raise SystemExit(str(refused)) from refused
    lengths = [length for rollout in load.lengths for length in rollout]
    training = arguments.training_devices
    say(
        f"{len(load.lengths[0])} responses a rollout, of {sum(lengths) / len(lengths):,.0f} tokens on average and at "
        f"most {max(lengths):,}; {load.step_seconds:g} s of training on {training} devices, syncs of "
        f"{load.sync_seconds:g} s"
    )
    say(
        f"a generation device draws {pace.slots / pace.step(pace.slots):,.0f} tokens/s, for one response alone "
        f"{1 / pace.step(1):,.0f}\n"
    )
    say("generation devices  max_staleness  trainer idle  seconds per rollout")
    for each in forecasts:
        say(f"{each.devices:>18}  {each.max_staleness:>13}  {each.idle:>11.0%}  {each.seconds:>19.3g}")
    taken = best(forecasts, training)
    say(
        f"\n{taken.devices} generation devices ({taken.devices / training:.2g} for each training device) with "
        f"max_staleness={taken.max_staleness}: the trainer is idle for {taken.idle:.0%} of the time, and a rollout "
        f"takes {taken.seconds:.3g} s"
    )
    return 0


def _numbers_of_devices(load: Load, pace: Pace, max_staleness: int) -> list[int]:
    """Numbers to look at, none of them larger than there are responses in flight at a time."""
    needed = load.tokens / load.step_seconds * pace.step(pace.slots) / pace.slots
    most = (max_staleness + 1) * max(map(len, load.lengths))
    return sorted({max(1, math.ceil(min(most, share * needed))) for share in LOADS})


def _work_and_pace(arguments: argparse.Namespace) -> tuple[Load, Pace]:
    """The work and the devices that the command line describes."""
    for bound in arguments.max_staleness:
        check_counts(0, max_staleness=bound)
    check_counts(1, rollouts=arguments.rollouts, training_devices=arguments.training_devices)
    check_numbers(above=0, finite=True, step_seconds=arguments.step_seconds, mean_tokens=arguments.mean_tokens)
    number = arguments.rollouts + 2 * (max(arguments.max_staleness) + 1)
    if arguments.recordings is not None:
        lengths = list(islice(cycle(recorded_lengths(arguments.recordings)), number))
    else:
        check_counts(1, samples=arguments.samples, max_tokens=arguments.max_tokens)
        check_numbers(at_least=0, finite=True, sigma=arguments.sigma)
        lengths = drawn_lengths(
            arguments.samples,
            number,
            mean=arguments.mean_tokens,
            sigma=arguments.sigma,
            limit=arguments.max_tokens,
            seed=arguments.seed,
        )
    sync = 0.02 * arguments.step_seconds if arguments.sync_seconds is None else arguments.sync_seconds
    check_numbers(at_least=0, finite=True, sync_seconds=sync)
    for number in arguments.generation_devices or ():
        check_counts(1, generation_devices=number)
    if (most := max(arguments.generation_devices or [0])) > MAX_DEVICES:
        raise ValueError(f"expected at most {MAX_DEVICES} generation devices, got {most}")
    check_numbers(at_most=MAX_RATE, tokens_per_second=arguments.tokens_per_second)
    pace = Pace.of(arguments.tokens_per_second, alone=arguments.tokens_per_second_alone, slots=arguments.slots)
    return Load(lengths=lengths, step_seconds=arguments.step_seconds, sync_seconds=sync), pace
