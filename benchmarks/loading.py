"""Peak memory of two ranks that build a policy and its reference under FSDP2, from a folder and from a function.

    python benchmarks/loading.py

From a folder each rank reads its own parts; a function returns the whole model on each rank. Measures the growth of
peak resident memory; gloo, float32, on this machine. Freed memory returns to the system immediately (``GIVES_BACK``),
so that the heap of the C library is not measured.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from jsonargparse import auto_cli
from measure import Report, peak_memory
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lightning_rl import FakeEngine
from lightning_rl.callbacks import ReferenceKL

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kit.ranks import STRATEGIES, run_ranks  # ranks on loopback are the tests'
from kit.support import fit, tiny_module, tiny_prompts, tiny_tokenizer

PART = 0.75  # of the peak of whole models
MIB = 2**20
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main(vocabulary: int = 4096, width: int = 512, layers: int = 20, inner: int = 1536, *, quick: bool = False) -> None:
    """Measure a model of 250 MB, or with ``quick`` a small one, whose figures mean little."""
    vocabulary, width, inner = (512, 64, 128) if quick else (vocabulary, width, inner)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        num_key_value_heads=1,
        eos_token_id=1,
        bos_token_id=None,
    )
    os.environ.update(GIVES_BACK)  # of the ranks, which begin with it
    peaks = dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(config)
        size = sum(parameter.nbytes for parameter in model.parameters()) / MIB
        model.save_pretrained(folder, max_shard_size="50MB")
        del model
        for source in ("folder", "function"):
            run_ranks(__file__, 2, "rank", source, folder)
            peaks[source] = [json.loads((Path(folder) / f"{source}{rank}").read_text()) for rank in range(2)]
    report = Report("loading", {"model": f"{size:.0f} MiB"})
    rows = [(source, *(f"{peak:.0f}" for peak in own), f"{max(own) / size:.2f}") for source, own in peaks.items()]
    report.rows("peak above the start, MiB", ("from a", "rank 0", "rank 1", "largest, of the model"), rows)
    if not quick:
        ratio = max(peaks["folder"]) / max(peaks["function"])
        report.bound("peak from a folder, of that from a function", ratio, at_most=PART)
    report.finish()


def load(folder: str) -> PreTrainedModel:
    """Return the whole model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rank(source: str, folder: str) -> None:
    """Build policy and reference on one of two ranks, and record the peak memory."""
    before = peak_memory()
    policy = folder if source == "folder" else partial(load, folder)
    module = tiny_module(policy=policy, tokenizer=tiny_tokenizer(), engine=FakeEngine(lambda _: [2, 1]))
    fit(
        module,
        callbacks=[ReferenceKL(0.1, as_loss=True)],
        data=tiny_prompts(4, 4),
        strategy=STRATEGIES["fsdp2"](),
        devices=2,
        max_steps=0,
    )
    (Path(folder) / f"{source}{os.environ['RANK']}").write_text(json.dumps((peak_memory() - before) / MIB))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    else:
        auto_cli(main, as_positional=False)
