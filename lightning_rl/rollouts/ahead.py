"""Ahead: rollouts that threads generate while the trainer works on earlier ones.

Only :meth:`Collector.sample` runs in a thread. The trainer's thread takes prompts, scores completions and enters
collectives, so results do not depend on timing. Engines that are not thread-safe generate one rollout at a time.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer

from lightning_rl.corrections import Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import failing_together, process_objects
from lightning_rl.generation import Completion, Engine, EngineError, Request
from lightning_rl.rewards.submitted import Submitted
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Trajectory
from lightning_rl.samples.trajectory_state import state_of_trajectories, trajectories_of_state
from lightning_rl.utils.tracing import RolloutSpans
from lightning_rl.version import __version__

PATIENCE = 3600.0  # timeout in seconds for one rollout
HURRY = 12.0  # timeout in seconds for all rollouts together when a signal ends the run
Context = Callable[[], AbstractContextManager[object]]


class Sampled(NamedTuple):
    """Samples of one call to an engine.

    Attributes:
        trajectories: Samples in the order of the prompts, equally many for each; those of the baseline last.
        logprobs: True if they have the engine's log-probabilities.
        pairs: Requests as the engine got them with their completions; empty after a load from a checkpoint.
        started: Reward calls on the samples that are running.
    """

    trajectories: Sequence[Trajectory]
    logprobs: bool = False
    pairs: Sequence[tuple[Request, Completion]] = ()
    started: Mapping[str, Submitted] = MappingProxyType({})

    def select(self, *, baseline: bool) -> list[Trajectory]:
        """Return the samples of the baseline, or those that train."""
        return [each for each in self.trajectories if each.baseline is baseline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A rollout that was submitted.

    Args:
        prompts: Prompts of its first round, on this rank.
        samples: Future with the samples of the engine; None if generation failed before the checkpoint was saved.
    """

    prompts: Sequence[Prompt]
    samples: Future[Sampled] | None = None


class Ahead:
    """Submitted rollouts by number; finished ones stay until :meth:`drop`.

    Args:
        engine: Engine of the run; None to generate nothing ahead.
        max_staleness: Maximum number of rollouts generated ahead.

    Attributes:
        spans: Spans of the rollouts that are submitted or in progress.
    """

    def __init__(self, engine: Engine | None = None, max_staleness: int = 0) -> None:
        self.engine, self.max_staleness = engine, max_staleness
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None  # shared, because each stream reserves its own memory
        self._pending: dict[int, Pending] = {}
        self.spans = RolloutSpans()

    @property
    def concurrent(self) -> bool:
        """True if several rollouts are generated at once, and generation continues during weight syncs."""
        return self.engine is not None and self.max_staleness > 1 and self.engine.capabilities.concurrent

    def __contains__(self, number: int) -> bool:
        """Return True if a rollout has been submitted."""
        return number in self._pending

    def submit(
        self,
        number: int,
        end: float,
        skipped: Collection[int],
        next_prompts: Callable[[], list[Prompt]],
        sampling: Callable[[Sequence[Prompt], int], Callable[[], Sampled]],
    ) -> None:
        """Submit the rollouts that may be generated during rollout ``number``, up to the end of the fit.

        Args:
            number: Number of the rollout that the trainer works on.
            end: End of the fit in rollouts since the start of the run.
            skipped: Numbers of rollouts that are not generated; their prompts are kept.
            next_prompts: Returns this rank's prompts of the next rollout.
            sampling: Returns a function that samples a rollout from its prompts in a thread.
        """
        for each in range(number + (not self.concurrent), number + 1 + self.max_staleness):
            known = self._pending.get(each)
            if known is None and each < end:
                self._pending[each] = Pending(prompts=next_prompts())
            elif known is None or known.samples is not None or not self.concurrent:
                continue
            if each not in skipped:
                self.start(each, sampling)

    def start(self, number: int, sampling: Callable[[Sequence[Prompt], int], Callable[[], Sampled]]) -> None:
        """Sample a rollout whose prompts are known in a thread; threads begin in the order of the calls."""
        prompts = self._pending[number].prompts
        if self._threads is None:
            at_once = 1 + self.max_staleness if self.concurrent else 1
            self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="ahead")
        with self.spans.of(number).current():
            run = copy_context().run
        self._pending[number] = Pending(prompts=prompts, samples=self._threads.submit(run, sampling(prompts, number)))

    def context(self, forward: Context, device: torch.device) -> Context:
        """Return a context for a thread that generates from here on, with the precision of ``forward``."""
        context = thread_context(forward, device)
        if device.type != "cuda" or self.engine is None or not self.engine.capabilities.shares_policy:
            return context
        self._stream = self._stream or torch.cuda.Stream(device)
        return stream_context(context, self._stream, torch.cuda.current_stream(device).record_event())

    def take(
        self, number: int, phase: Callable[[str], AbstractContextManager[object]], *, idle: bool = False
    ) -> Sampled | Sequence[Prompt] | None:
        """Wait for a rollout; every rank has to call this.

        Args:
            number: Number of the rollout.
            phase: Context manager that shows a phase and measures its time.
            idle: True to wait for the other rollouts, too, so that the engine is free.

        Returns:
            First round, kept until :meth:`drop`; prompts if it has to be sampled again; None if not submitted.

        Raises:
            Exception: Error of the engine, with the traceback of the thread.
            RuntimeError: If generation failed on another rank.
            TimeoutError: After :data:`PATIENCE` seconds.
        """
        if not self.max_staleness:
            return None
        with phase("wait"):
            if idle:
                self.drain()
            if (pending := self._pending.get(number)) is None:
                return None
            with failing_together("generation", EngineError):
                self._wait(number)
                samples = None if pending.samples is None else pending.samples.result()
            everywhere = all(process_objects(samples is not None))
            return samples if everywhere else pending.prompts

    def in_flight(self, number: int) -> dict[str, Stat]:
        """Return metrics of the requests in flight before a rollout; none if nothing is generated ahead."""
        if self.engine is None or not self.max_staleness:
            return {}
        oldest = self.engine.in_flight.oldest()
        age = Stat.single(0 if oldest is None else number - oldest)
        return {"in_flight/tokens": Stat.single(self.engine.in_flight.tokens()), "in_flight/staleness": age.maximum()}

    def check(self, rollout: Rollout, number: int) -> None:
        """Check that no token of rollout ``number`` comes from weights that are too old.

        Raises:
            RuntimeError: With the sample, its version and the limit.
        """
        late = rollout.action_mask & (number - rollout.policy_version > self.max_staleness)
        if late.any():
            row, position = late.nonzero()[0].tolist()
            raise RuntimeError(
                f"expected tokens of rollout {number} from weights at most {self.max_staleness} rollouts old "
                f"(max_staleness), got version {int(rollout.policy_version[row, position])} at row {row} (sample "
                f"{int(rollout.sample_ids[row])}), response position {position}"
            )

    def pending(self) -> Mapping[int, Pending]:
        """Return the submitted rollouts by number."""
        return dict(self._pending)

    def drop(self, *numbers: int) -> None:
        """Remove rollouts."""
        for number in numbers:
            self._pending.pop(number, None)

    def drain(self, *, hurried: bool = False) -> None:
        """Wait for all rollouts that are being generated, and keep them, failed ones too; every rank has to call this.

        Args:
            hurried: True to wait :data:`HURRY` seconds in all; unfinished rollouts keep their prompts only.

        Raises:
            TimeoutError: After :data:`PATIENCE` seconds for one rollout, unless hurried.
        """
        if hurried:
            wait([pending.samples for pending in self._pending.values() if pending.samples is not None], HURRY)
        elif self._pending:
            with failing_together("generation"):
                for number in self._pending:
                    self._wait(number)

    def close(self) -> None:
        """Drop every rollout, after waiting for those being generated, because a thread cannot be stopped."""
        self._end(wait=True)
        self._pending = {}
        self.spans.end()

    def _end(self, *, wait: bool) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=True)
            self._threads = None

    def _wait(self, number: int) -> None:
        samples = self._pending[number].samples
        if samples is None or wait([samples], PATIENCE).done:
            return
        self._end(wait=False)
        raise TimeoutError(
            f"expected rollout {number} within {PATIENCE:g} seconds, but the engine is still generating it: check "
            "the engine, sample fewer or shorter responses, or raise lightning_rl.rollouts.ahead.PATIENCE"
        )

    def load(self, pending: Mapping[int, Pending]) -> None:
        """Replace the submitted rollouts.

        Raises:
            ValueError: If there are more than ``max_staleness``.
        """
        if (number := len(pending)) > self.max_staleness:
            raise ValueError(
                f"expected a checkpoint with at most {self.max_staleness} rollouts in flight (max_staleness), got "
                f"{number}: resume with max_staleness={number}"
            )
        self.close()
        self._pending = dict(pending)


def state_of_pending(pending: Mapping[int, Pending]) -> list[dict[str, Any]]:
    """Return rollouts as values that load under ``weights_only=True``; prompts by their index in the stream."""
    states = []
    for number, rollout in pending.items():
        future, samples = rollout.samples, None
        if future is not None and future.done() and not future.cancelled() and not future.exception():
            made = future.result()
            samples = {"logprobs": made.logprobs, "trajectories": state_of_trajectories(made.trajectories)}
        places = [prompt.index for prompt in rollout.prompts]
        states.append({"rollout": number, "places": places, "samples": samples})
    return states


def pending_from_state(
    states: Iterable[Mapping[str, Any]], at: Callable[[Iterable[int]], list[Prompt]], version: str = __version__
) -> dict[int, Pending]:
    """Restore rollouts from :func:`state_of_pending`.

    Args:
        states: States of the rollouts.
        at: Returns the prompts at indices of the stream.
        version: Version of the library that saved them.

    Raises:
        ValueError: If it stored samples in another form.
    """
    pending = {}
    for state in states:
        prompts, samples = at(state["places"]), None
        if state["samples"] is not None:
            if "trajectories" not in state["samples"]:
                raise ValueError(
                    f"expected trajectories of rollout {state['rollout']}, which was generated ahead of training, got "
                    f"samples in the form of lightning-rl {version}: end the run with that version, or start a "
                    "new run from its weights"
                )
            samples = Future[Sampled]()
            made = trajectories_of_state(state["samples"]["trajectories"], prompts)
            samples.set_result(Sampled(made, state["samples"]["logprobs"]))
        pending[state["rollout"]] = Pending(prompts=prompts, samples=samples)
    return pending


def remaining_steps(trainer: Trainer, batch_idx: int) -> float:
    """Return the number of step indices left in a fit, the current one included; skipped optimizer steps add more.

    Args:
        trainer: Trainer with ``max_epochs``, ``max_steps`` and the length of an epoch.
        batch_idx: Number of the current step index within the epoch.
    """
    per_epoch, epochs, steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    further = math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch - 1) * per_epoch
    return min(per_epoch - batch_idx + further, math.inf if steps == -1 else steps - trainer.global_step)


def staleness(rollout: Rollout, number: int) -> dict[str, Stat]:
    """Return the age of each token's weights, in rollouts before rollout ``number``."""
    age = Stat.of(number - rollout.policy_version, rollout.valid_tokens)
    return {"staleness/mean": age, "staleness/max": age.maximum()}


def thread_context(context: Context, device: torch.device) -> Context:
    """Return a context that copies this thread's autocast, thread count and device to another thread.

    The default dtype is global to the process and is not copied.
    """
    with context():
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    threads = torch.get_num_threads()

    @contextmanager
    def inside() -> Iterator[None]:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.autocast(device.type, enabled=autocast[0], dtype=autocast[1]):
            yield

    return inside


def stream_context(context: Context, stream: torch.cuda.Stream, ready: torch.Event) -> Context:
    """Return a context that runs kernels on their own CUDA stream, so that they do not wait for the trainer's kernels.

    Args:
        context: Outer context, which sets the device.
        stream: Stream for the kernels; synchronized on exit, so that weights may be overwritten afterwards.
        ready: Event that the first kernel waits for, such as a copy of weights.
    """

    @contextmanager
    def inside() -> Iterator[None]:
        with context():
            stream.wait_event(ready)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    return inside
