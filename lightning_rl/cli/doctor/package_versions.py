"""Check that installed packages are within the supported versions."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.cli.recipes import Recipe
from lightning_rl.utils.finding import Finding

PRINTED = ("torch", "lightning", "transformers")


def versions(recipe: Recipe) -> Iterator[Finding]:
    """Check that required and installed optional packages are within the supported versions."""
    del recipe
    yield fact("versions", ", ".join(f"{name} {version(name)}" for name in PRINTED))
    for requirement in map(Requirement, requires("lightning-rl") or ()):
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        window = f"{requirement.name}{requirement.specifier}"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            if not optional:
                yield error("versions", f"expected {window}, got none installed", f"pip install '{window}'")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            observed = f"expected {requirement.name} {requirement.specifier}, got {installed}"
            yield error("versions", observed, f"pip install '{window}'")
