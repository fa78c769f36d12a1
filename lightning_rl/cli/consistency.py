"""consistency: compares engine and trainer under the options that change how they compute."""

import argparse
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from lightning_rl.cli.export import source_of
from lightning_rl.cli.output import say
from lightning_rl.generation import Engine, TransformersEngine, VLLMEngine
from lightning_rl.generation.engine_comparison import DISTRIBUTION, Consistency, compare
from lightning_rl.generation.weights.weight_stream import persistent_buffers
from lightning_rl.policy import ModelOptions, PolicyModel
from lightning_rl.policy.build import ModelSource, build_model, build_policy
from lightning_rl.policy.compilation import compile_layers

LONGEST = 24  # tokens of a prompt
CHUNK = 32  # tokens of a chunk of a prefill
HEADER = ("", "largest |Δ|", "mean KL", "largest KL", "first module that differs")
UNLOCATED = 1e-3  # nats that rounding does not reach in float32, where modules cannot be compared
WIDTHS = (28, 12, 10, 11, 0)


@dataclass(frozen=True, slots=True)
class Case:
    """Options of engine and trainer that are compared.

    Args:
        name: Name in the table.
        model: Options of the trainer.
        dtype: Dtype of the weights of both.
        rows: Number of requests that are generated together; None for all.
        cached: False to compare with the scores of whole sequences.
        adapter: True to add a LoRA adapter with random weights to all linear layers.
        engine: Options of the engine.
    """

    name: str
    model: ModelOptions = field(default_factory=ModelOptions)
    dtype: torch.dtype = torch.float32
    rows: int | None = None
    cached: bool = True
    adapter: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


COMMON = (
    Case("default"),
    Case("one row at a time", rows=1),
    Case("no cache", cached=False),
    Case("packing=False", ModelOptions(packing=False)),
    Case("compile=True", ModelOptions(compile=True)),
    Case("LoRA", adapter=True),
    Case("bfloat16", dtype=torch.bfloat16),
)
CASES: dict[str, tuple[Case, ...]] = {
    "transformers": (
        *COMMON,
        Case('consistency="bitwise"', ModelOptions(consistency="bitwise")),
        Case("bitwise, bfloat16", ModelOptions(consistency="bitwise"), dtype=torch.bfloat16),
    ),
    "vllm": (
        *COMMON,
        Case("bfloat16 engine", engine={"dtype": torch.bfloat16}),
        Case(
            "chunked prefill, no cache",
            rows=1,
            cached=False,
            engine={"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8},
        ),
    ),
}
ENGINES: dict[str, Callable[..., Engine]] = {"transformers": TransformersEngine, "vllm": VLLMEngine}


def run(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    """Run the command and return the exit code: 1 if a difference is more than rounding."""
    del options
    try:
        source = source_of(arguments.model)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"expected a name, a folder or module:function, got {arguments.model!r}: {error}") from error
    return consistency(source, arguments.engine, arguments.prompts, arguments.tokens)


def consistency(source: ModelSource, engine: str = "transformers", prompts: int = 8, tokens: int = 16) -> int:
    """Print a table of the differences of engine and trainer, with a row for each of :data:`CASES`.

    Args:
        source: Source of the model.
        engine: Name of the engine.
        prompts: Number of random prompts, which get two responses each.
        tokens: Length of a response.

    Returns:
        Exit code: 1 if a difference is more than rounding, 0 otherwise.

    Raises:
        SystemExit: If the model is refused.
    """
    disable_progress_bar()
    try:
        packing = _packs(source)
    except ValueError as refused:
        raise SystemExit(str(refused)) from refused
    say(_line(HEADER))
    failed, unvisited, number = False, dict[str, int](), 0
    cases = CASES[engine] if packing else map(_without_packing, CASES[engine])
    for _, alike in groupby(cases, attrgetter("model", "dtype", "adapter", "engine")):
        for case, found in measure(source, list(alike), engine, prompts, tokens):
            if isinstance(found, Exception):
                reason = next(iter(str(found).splitlines()), type(found).__name__)
                say(_line((case.name, "-", "-", "-", reason)))
                continue
            say(_line((case.name, *_cells(found))))
            failed |= _fails(case, found)
            unvisited, number = unvisited or dict(found.unvisited), max(number, found.tokens)
    if not number:
        raise SystemExit("expected at least one row that can be compared, got none: see the reasons above")
    say(f"\n{number} tokens; differences of their log-probabilities and KL over the vocabulary, in nats")
    for router, experts in unvisited.items():
        say(f"{router}: no token visits {experts} of its experts, which are not compared: increase --prompts")
    return int(failed)


def _packs(source: ModelSource) -> bool:
    """Return False for a model that trains only without packing.

    Raises:
        ValueError: If it is refused without packing, too.
    """
    try:
        build_policy(source, None, temperature=1.0, packed=True)
    except ValueError:
        build_policy(source, None, temperature=1.0, packed=False)
        return False
    return True


def _without_packing(case: Case) -> Case:
    return replace(case, model=replace(case.model, packing=False))


def _fails(case: Case, found: Consistency) -> bool:
    """Return True if a difference is more than rounding."""
    exact = case.dtype == torch.float32 and not case.engine
    return (found.module is not None and not found.rounded) or (exact and not found.largest <= UNLOCATED)


def measure(
    source: ModelSource, cases: Sequence[Case], engine_name: str, prompts: int, tokens: int
) -> Iterator[tuple[Case, Consistency | Exception]]:
    """Build engine and trainer once for cases of the same options, and compare; yield results or refusals."""
    limit = {"max_model_len": LONGEST + tokens} if engine_name == "vllm" else {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first, engine = cases[0], None
    try:
        policy = _policy(source, first).to(device=device, dtype=first.dtype)
        engine = ENGINES[engine_name](canary=None, **limit, **first.engine)
        engine.select_extras(DISTRIBUTION)
        engine.start(policy.model, None, device=device, dtype=policy.model.dtype)
        engine.expect(_weights(policy.model))
        rows = _prompts(prompts, policy.vocabulary)
        for version, case in enumerate(cases):
            engine.load_weights(_weights(policy.model), version=version)  # clears the prefix cache of vLLM
            yield case, compare(policy, engine, rows, new_tokens=tokens, rows=case.rows, cached=case.cached)
    except (ImportError, ValueError) as refused:
        yield from ((case, refused) for case in cases)
    finally:
        if engine is not None:
            engine.close()
        policy = None
        gc.collect()  # before the next model is loaded


def _policy(source: ModelSource, case: Case) -> PolicyModel:
    options, default = case.model, torch.get_default_dtype()
    source = partial(_with_adapter, source) if case.adapter else source
    torch.set_default_dtype(case.dtype)
    try:
        policy = build_policy(source, None, temperature=1.0, packed=options.packing, batch_invariant=options.bitwise)
    finally:
        torch.set_default_dtype(default)
    if options.backend is not None:
        compile_layers(policy, policy.layers(), options.backend)
    return policy.eval()


def _with_adapter(source: ModelSource) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model  # an extra

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft reads it
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(build_model(source), config)  # pyrefly: ignore[bad-return]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, weight.detach()) for name, weight in model.named_parameters())
    yield from persistent_buffers(model)


def _prompts(number: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts of different lengths that repeat no token before all were drawn."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (number,), generator=generator).tolist()
    rounds = -(-sum(lengths) // vocabulary)
    ids = torch.cat([torch.randperm(vocabulary, generator=generator) for _ in range(rounds)])
    return [part.tolist() for part in ids[: sum(lengths)].split(lengths)]


def _cells(found: Consistency) -> tuple[str, ...]:
    numbers = (found.largest, found.kl, found.largest_kl)
    cells = ["-" if number is None else f"{number:.1e}" if number else "0" for number in numbers]
    module = found.module or "-"
    return *cells, f"{module} (rounding)" if found.rounded else module


def _line(cells: Sequence[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
