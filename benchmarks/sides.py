"""Sides of a comparison: processes that make a GRPO step per request, and report its time."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from measure import Seconds
from workload import Lengths, lengths_of

PHASES, WARM = ("generation", "scoring", "update", "other"), 2


class Cell(NamedTuple):
    """Work of a step; its size is a name or the folder of a model."""

    size: str
    lengths: Lengths
    prompts: int
    longest: int
    group: int = 8
    rollouts: int = 8
    rate: float = 1e-6
    seed: int = 0
    trl_microbatches: int = 1

    @property
    def title(self) -> str:
        """Of tables."""
        return f"{Path(self.size).name}, {self.lengths}, {self.prompts} x {self.group}, at most {self.longest} tokens"


class Side:
    """A process that makes steps.

    Args:
        process: that makes them.
        errors: its file of them.
        expected: tokens of a step; 0 if the policy samples their number.
    """

    def __init__(self, process: "subprocess.Popen[str]", errors: Any, expected: int) -> None:
        self.process, self.errors, self.expected = process, errors, expected
        self.peak, self.rewards = 0, list[float]()
        self.seconds = {name: Seconds([], []) for name in ("whole", *PHASES)}

    def step(self) -> None:
        """Make one and notes its seconds.

        Raises:
            RuntimeError: if it ended, or worked on other tokens than it was to.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("expected pipes to the process")
        stdin.write("\n")
        stdin.flush()
        line = next((line for line in stdout if line.startswith('{"whole"')), None)
        if line is None:
            self.errors.seek(0)
            raise RuntimeError(f"expected a step of {self.process.args}, but it ended\n{self.errors.read()[-4000:]}")
        step = json.loads(line)
        expected = self.expected or step["tokens"][0]
        if step["tokens"] != [expected] * 2:
            raise RuntimeError(f"expected {expected} tokens drawn and trained, got {step['tokens']}")
        left = [whole - sum(step[name][place] for name in PHASES[:-1]) for place, whole in enumerate(step["whole"])]
        self.peak = step["peak"]
        self.rewards.append(step["reward"])
        for name, seconds in self.seconds.items():
            seconds.add(*(left if name == "other" else step[name]))

    def tail(self, name: str, rounds: int) -> Seconds:
        """Return the last steps of a phase."""
        return self.seconds[name].tail(rounds)


@contextmanager
def side(python: Path, script: str, cell: Cell, *, corrections: bool = False) -> Iterator[Side]:
    """Run a side of a cell."""
    lengths = lengths_of(cell.lengths, cell.prompts * cell.group, cell.longest)
    options = json.dumps({**cell._asdict(), "corrections": corrections})
    command = [str(python), str(Path(__file__).with_name(script)), options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, stderr=errors, **pipes) as process:
        try:
            yield Side(process, errors, sum(lengths))
        finally:
            process.kill()
