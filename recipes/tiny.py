"""What ``--tiny`` stands for in every recipe: a small model, sums to train on, sizes for one core of a laptop, offline.

The models are written to ``runs/tiny`` when the first recipe asks for one; delete the folder, and they are made again.
The rows are the calculations of ``tiny_tools.py``, such as ``What is 48 / 2?`` with the answer ``#### 24``.
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
    """Calls a recipe's ``main`` with the options of the command line, where ``--tiny`` stands for several of them.

    Args:
        main: whose keywords are the options.
        options: what ``--tiny`` says besides :data:`SIZES`, :data:`DEVICE` and the rows; a keyword ``model`` or
            ``teacher`` names one of :data:`MODELS`.

    Returns:
        What ``main`` returns.
    """

    def small() -> dict[str, Any]:
        rows = {"train": rows_of("train"), "test": rows_of("test")}
        given = {**SIZES, **DEVICE, **rows, "model": "policy", **options}
        given |= {name: model(given[name]) for name in ("model", "teacher") if name in given}
        known = inspect.signature(main).parameters
        return {name: value for name, value in given.items() if name in known}

    return call(main, small)


def model(name: str) -> Path:
    """The folder of one of :data:`MODELS` with its tokenizer, written unless it is there."""

    def write(folder: Path) -> None:
        MODELS[name]().save_pretrained(folder)
        tiny_tools.tiny_tokenizer().save_pretrained(folder)

    return write_once(FOLDER / name, write)


def rows_of(split: str) -> Path:
    """The file with the sums of a split, written unless it is there."""

    def write(folder: Path) -> None:
        lines = [json.dumps(row) + "\n" for row in tiny_tools.calculations(split)]
        (folder / "sums.jsonl").write_text("".join(lines))

    return write_once(FOLDER / split, write) / "sums.jsonl"


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Writes a folder whole or not at all; of several ranks that do so at once, one wins."""
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
    """A tenth of a million parameters that mostly write ``#### `` and guess the number."""
    return warm_start(Qwen3ForCausalLM, Qwen3Config(**shape(), intermediate_size=128), WARM_START_STEPS)


def novice() -> PreTrainedModel:
    """The same, with a shorter education."""
    return warm_start(Qwen3ForCausalLM, Qwen3Config(**shape(), intermediate_size=128), WARM_START_STEPS // 3)


def mixture() -> PreTrainedModel:
    """The same as a mixture of four experts, of which two answer."""
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts["experts_implementation"] = "eager"
    return warm_start(Qwen3MoeForCausalLM, Qwen3MoeConfig(**shape(), **experts), WARM_START_STEPS)


def shape() -> dict[str, Any]:
    """What the small models share; of Qwen2's folders transformers would read another tokenizer than was written."""
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
    """A model that has read ``steps`` batches of right answers; random generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind(config)
    tiny_gsm8k.imitate(model, demonstrations(steps), learning_rate=5e-3)
    return model


def demonstrations(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids of sums with their answers for each step, and labels that count the answers alone."""
    tokenizer, draw, sums = tiny_tools.tiny_tokenizer(), Random(0), tiny_tools.calculations("train")
    for _ in range(steps):
        rows = [tiny_tools.demonstration(row, row["answer"]) for row in draw.sample(sums, WARM_START_ROWS)]
        yield tiny_gsm8k.padded_batch([[(tokenizer(text)["input_ids"], own) for text, own in row] for row in rows])


MODELS = {"policy": policy, "novice": novice, "mixture": mixture}
