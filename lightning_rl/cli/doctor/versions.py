"""Versions: are the installed packages inside the windows that this library is tested with?"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lightning_rl.cli.doctor.finding import Finding, error, fact
from lightning_rl.cli.recipes import Reached

SHOWN = ("torch", "lightning", "transformers")


def versions(given: Reached) -> Iterator[Finding]:
    """Every required package, and every installed optional one, is inside its window."""
    del given
    yield fact("versions", ", ".join(f"{name} {version(name)}" for name in SHOWN))
    for requirement in map(Requirement, requires("lightning-rl") or ()):
        extra = requirement.marker is not None and "extra" in str(requirement.marker)
        yield from _outside(requirement, optional=extra)


def _outside(requirement: Requirement, *, optional: bool) -> Iterator[Finding]:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        if not optional:
            found = f"{requirement.name}{requirement.specifier}"
            yield error("versions", f"expected {found}, which is not installed", f"pip install '{found}'")
        return
    if not requirement.specifier.contains(installed, prereleases=True):
        yield error(
            "versions", f"expected {requirement.name} {requirement.specifier}, got {installed}",
            f"pip install '{requirement.name}{requirement.specifier}'",
        )  # fmt: skip
