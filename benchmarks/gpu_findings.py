"""Checks of `gpu_smoke.py` by number, and their findings; runs one check as a script.

Each finding is written immediately as a line of JSON, so a crash loses none.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30


class Check(NamedTuple):
    """A check: the file and function that make it, seconds after which it is ended, and variables of its process."""

    number: str
    title: str
    script: str
    function: str
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()


SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
CHECKS = (
    Check("1", "ceilings: matrix products and copies", "gpu_kernels", "ceilings", 30),
    Check("2", "branches: versions and kernels that are here", "gpu_kernels", "branches", 90),
    Check("3", "numbers of the CPU from every loss, estimator and correction", "gpu_kernels", "same_numbers", 90),
    Check("4", "vocabulary head against float64", "gpu_kernels", "head", 40),
    Check("5", "packed attention against plain attention", "gpu_kernels", "packed_attention", 60),
    Check("6", "vLLM against the trainer, tokens a second", "gpu_engines", "generation", 300),
    Check("7", "sleep and wake", "gpu_engines", "sleep", 200),
    Check("7b", "sleep and wake with expandable segments", "gpu_engines", "sleep", 200, SEGMENTS),
    Check("8", "canary", "gpu_engines", "canary", 300),
    Check("9", "fits with and without staleness", "gpu_fits", "fits", 300),
    Check("10", "update: MFU, memory and profile", "gpu_updates", "updates", 200),
    Check("10b", "update of 7B parameters", "gpu_updates", "large_update", 100),
    Check("11", "FSDP2 on one rank: a resume, bit for bit", "gpu_fits", "resume", 60),
    Check("12", "two ranks on one device", "gpu_fits", "two_ranks", 60),
    Check("13", "server and pushes of weights", "gpu_engines", "server", 300),
    Check("14", "TRL with the same vLLM", "gpu_trl", "against_trl", 500),
    Check("15", "trace of an optimizer step", "gpu_updates", "trace", 60),
    Check("16", "validate, fit and test with VLLMEngine() under bf16-mixed", "gpu_defaults", "stages", 300),
    Check("17", "filters, adapters, experts and one rank of a launcher", "gpu_defaults", "requests", 600),
    Check("18", "the embedded engine under bf16-mixed", "gpu_defaults", "embedded", 240),
    Check("19", "16-mixed", "gpu_defaults", "half", 40),
)


class SkipError(Exception):
    """A check has no meaning here."""


class Findings:
    """Findings of a check.

    Args:
        path: of the file, a line for each finding.
        tiny: on the CPU with tiny models.
        seconds: until the check is ended.
        model: folder of a pretrained model, for the checks that take one.
    """

    def __init__(self, path: Path, *, tiny: bool, seconds: float = 600.0, model: str | None = None) -> None:
        self.path, self.tiny, self.seconds, self.model = path, tiny, seconds, model

    @property
    def device(self) -> str:
        """Device of the check."""
        return "cpu" if self.tiny else "cuda"

    def figure(self, what: str, value: Any) -> None:
        """Record a figure without a bound."""
        text = f"{value:.4g}" if isinstance(value, float) else value
        self._write({"kind": "figure", "what": what, "value": text})

    def headline(self, text: str) -> None:
        """Record a result for the summary; a check may have several."""
        self._write({"kind": "headline", "text": text})

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Record a figure with an upper bound."""
        self._write_bound(what, value, {"at_most": bound}, holds=value <= bound)

    def at_least(self, what: str, value: float, bound: float) -> None:
        """Record a figure with a lower bound."""
        self._write_bound(what, value, {"at_least": bound}, holds=value >= bound)

    def skip(self, why: str) -> None:
        """Report why there is nothing to check."""
        self._write({"kind": "skip", "why": why})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of a check; an error or skip does not affect the others."""
        try:
            yield
        except SkipError as reason:
            self.figure(name, f"SKIPPED: {reason}")
        except Exception as error:  # noqa: BLE001  the next part runs after any error
            traceback.print_exc()
            self.figure(f"{name}, error", f"{type(error).__name__}: {str(error)[:200]}")
            self.at_most(f"{name}, errors", 1.0, 0.0)

    def _write_bound(self, what: str, value: float, bound: dict[str, float], *, holds: bool) -> None:
        self._write({"kind": "bound", "what": what, "bound": {"value": float(value), **bound, "holds": bool(holds)}})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def needs(*packages: str) -> None:
    """Skip a check whose packages are missing."""
    for package in packages:
        if find_spec(package) is None:
            raise SkipError(f"{package} is not installed")


def _needs_cuda() -> None:
    import torch  # here, so that what runs on the CPU does not wait for it

    if not torch.cuda.is_available():
        raise SkipError("PyTorch finds no CUDA here")


def needs_gpu(findings: Findings, gibibytes: float = 0.0) -> None:
    """Skip a check on the CPU, or on a GPU with less memory."""
    if findings.tiny:
        raise SkipError("needs CUDA")
    import torch

    held = torch.cuda.get_device_properties(0).total_memory / GIB
    if held < gibibytes:
        raise SkipError(f"needs a GPU of {gibibytes:g} GiB, here are {held:.0f}")


def main(arguments: Sequence[str]) -> None:
    """Make one check: the function of a script, a file for the findings, and options of `Findings` as JSON."""
    script, function, path, options = arguments
    warnings.simplefilter("ignore")
    findings = Findings(Path(path), **json.loads(options))
    try:
        if not findings.tiny:
            _needs_cuda()
        getattr(import_module(script), function)(findings)
    except SkipError as reason:
        findings.skip(str(reason))


if __name__ == "__main__":
    sys.modules["gpu_findings"] = sys.modules["__main__"]  # so that its classes are those that checks import
    main(sys.argv[1:])
