"""Options of ``--tiny`` in recipes: a small model, small data and sizes for one core of a laptop, offline.

Models are cached in ``runs/tiny``. The rows are the calculations of ``tiny_tools.py``, such as ``What is 48 / 2?`` with
the answer ``#### 24``.
"""

import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import tiny_gsm8k
import tiny_tools
import torch
from command_line import call
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FOLDER = Path("runs") / "tiny"
SIZES = {"rollouts": 4, "prompts_per_rollout": 8, "max_new_tokens": 8, "learning_rate": 1e-3}
DEVICE = {"accelerator": "cpu", "precision": "32-true", "devices": 1, "strategy": "auto"}
WARM_START_STEPS, WARM_START_ROWS = 40, 32


def command_line(main: Callable[..., Any], **options: Any) -> Any:
    """Call a recipe's ``main`` with the options of the command line and of ``--tiny``.

    Args:
        main: Function whose keywords are the options.
        options: Options of ``--tiny`` besides :data:`SIZES`, :data:`DEVICE` and the rows; ``model`` and ``teacher`` are
            names of :data:`MODELS`.

    Returns:
        Result of ``main``.
    """

    def small() -> dict[str, Any]:
        rows = {"train": rows_of("train"), "test": rows_of("test")}
        values: dict[str, Any] = {**SIZES, **DEVICE, **rows, "model": "policy", **options}
        values |= {name: model(values[name]) for name in ("model", "teacher") if name in values}
        known = inspect.signature(main).parameters
        return {name: value for name, value in values.items() if name in known}

    return call(main, small)


def model(name: str) -> Path:
    """Return the folder of one of :data:`MODELS` with its tokenizer, written if missing."""

    def write(folder: Path) -> None:
        MODELS[name]().save_pretrained(folder)
        tiny_tools.tiny_tokenizer().save_pretrained(folder)

    return write_once(FOLDER / name, write)


def rows_of(split: str) -> Path:
    """Return the file with the calculations of a split, written if missing."""

    def write(folder: Path) -> None:
        lines = [json.dumps(row) + "\n" for row in tiny_tools.calculations(split)]
        (folder / "sums.jsonl").write_text("".join(lines))

    return write_once(FOLDER / split, write) / "sums.jsonl"


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a folder atomically; of several ranks, one succeeds."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent))
        write(beside)
        try:
            beside.rename(folder)
        except OSError:  # another rank was first
            shutil.rmtree(beside)
    return folder


def policy() -> PreTrainedModel:
    """Return a model of 0.1 million parameters that mostly writes ``#### `` and a random number."""
    return warm_start(Qwen3ForCausalLM, Qwen3Config(**shape(), intermediate_size=128), WARM_START_STEPS)


def novice() -> PreTrainedModel:
    """Return a model of the same size after fewer steps."""
    return warm_start(Qwen3ForCausalLM, Qwen3Config(**shape(), intermediate_size=128), WARM_START_STEPS // 3)


def mixture() -> PreTrainedModel:
    """Return a mixture of four experts, two of them active, with the same data and number of steps."""
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts["experts_implementation"] = "eager"
    return warm_start(Qwen3MoeForCausalLM, Qwen3MoeConfig(**shape(), **experts), WARM_START_STEPS)


def shape() -> dict[str, Any]:
    """Return the common configuration of the small models; Qwen3, because transformers replaces tokenizers of Qwen2."""
    return {
        "vocab_size": len(tiny_tools.tiny_tokenizer()),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tiny_gsm8k.END,
        "pad_token_id": tiny_gsm8k.END,
    }


def warm_start(kind: Callable[[Any], PreTrainedModel], config: PreTrainedConfig, steps: int) -> PreTrainedModel:
    """Return a model trained on ``steps`` batches of correct answers; global random generators are unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind(config)
    tiny_gsm8k.imitate(model, demonstrations(steps), learning_rate=5e-3)
    return model


def demonstrations(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids of calculations with their answers for each step, and labels on the answers only."""
    tokenizer, draw, sums = tiny_tools.tiny_tokenizer(), Random(0), tiny_tools.calculations("train")
    for _ in range(steps):
        rows = [tiny_tools.demonstration(row, row["answer"]) for row in draw.sample(sums, WARM_START_ROWS)]
        yield tiny_gsm8k.padded_batch([[(tokenizer(text)["input_ids"], own) for text, own in row] for row in rows])


MODELS = {"policy": policy, "novice": novice, "mixture": mixture}
