"""Compiled layers: equal results, no recompilation for other rows, unchanged decoding and checkpoints."""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.run_checks import refuse
from kit.strategy_cases import lora_policy
from kit.support import fit, ragged_rollout, tiny_model, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import SGD

from lightning_rl import RLLightningModule
from lightning_rl.callbacks import ReferenceKL, TruncatedIS
from lightning_rl.distributed import Parallel
from lightning_rl.policy import ModelOptions, PolicyModel, pack
from lightning_rl.policy.activation_checkpointing import Checkpointing
from lightning_rl.policy.build import build_policy
from lightning_rl.policy.compilation import compile_layers, has_compilation
from lightning_rl.policy.lora import adapters_off
from lightning_rl.run_checks import check_kernels

exactly = torch.testing.assert_close
PLAIN, COMPILED = False, "eager"
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # raised and caught within torch.compile
    "default::DeprecationWarning:torch",  # what inductor imports
)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each test begins with nothing compiled."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """Return the number of compiled graphs."""
    assert not counters["recompile_limit"]
    return counters["stats"]["unique_graphs"]


def policies(
    family: str, backend: str, *, checkpointing: Checkpointing | None = None, packed: bool = True
) -> list[PolicyModel]:
    """The same policy with a critic, as it is and compiled."""
    source: Any = partial(lora_policy, torch.float64) if family == "lora" else partial(tiny_model, family)
    built = partial(build_policy, source, "shared", temperature=0.7, packed=packed, checkpointing=checkpointing)
    plain, compiled = built(), built()
    compile_layers(compiled, compiled.layers(), backend)
    return [plain, compiled]


def differentiate(policy: PolicyModel, seed: int, *, packed: bool = True) -> list[Tensor]:
    """Log-probabilities of some rows and the gradient of their sum."""
    rows = ragged_rollout(4 + seed, seed=seed, longest=3 + seed, dtype=torch.float64)
    outputs = policy(pack(rows, packed=packed))
    policy.zero_grad()
    assert outputs.values is not None
    (outputs.logprobs.sum() + outputs.values.sum()).backward()
    return [outputs.logprobs.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("qwen2", None), ("lora", "full"), ("gemma3_text", None)],
)
def test_values_and_gradients_are_those_of_the_model_as_it_is(family: str, checkpointing: Checkpointing | None) -> None:
    plain, compiled = policies(family, "aot_eager", checkpointing=checkpointing)
    for seed in range(3):
        tolerance = 1e-4 if family == "gemma3_text" else 1e-10  # its norms are float32
        exactly(differentiate(compiled, seed), differentiate(plain, seed), rtol=tolerance, atol=tolerance)
    assert graphs() > 0


@pytest.mark.nightly
def test_without_packing_the_numbers_are_the_same() -> None:
    plain, compiled = policies("qwen2", "aot_eager", packed=False)
    exactly(differentiate(compiled, 3, packed=False), differentiate(plain, 3, packed=False), rtol=1e-10, atol=1e-10)
    assert graphs() > 0


@pytest.mark.nightly
def test_generated_code_gives_the_same_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what other processors left is not for this one
    plain, compiled = policies("qwen2", "inductor")
    for seed in range(3):
        exactly(differentiate(compiled, seed), differentiate(plain, seed), rtol=1e-5, atol=1e-5)  # norms are float32


@pytest.mark.nightly
def test_other_rows_lengths_and_layers_compile_nothing_anew() -> None:
    _, policy = policies("lora", "eager")

    def step(seed: int) -> None:
        differentiate(policy, seed)
        with torch.no_grad():
            policy(pack(ragged_rollout(5, seed=seed, dtype=torch.float64)))
            with adapters_off(policy):
                policy(pack(ragged_rollout(5, seed=seed, dtype=torch.float64), packed=False))

    for seed in range(2):
        step(seed)
    first = graphs()
    for seed in range(2, 6):
        step(seed)
    assert graphs() == first


@pytest.mark.nightly
def test_twice_the_layers_are_no_more_graphs() -> None:
    counts = []
    for layers in (2, 4):
        torch.compiler.reset()
        counters.clear()
        model = tiny_policy(dtype=torch.float64, num_hidden_layers=layers)
        policy = PolicyModel(model, model, temperature=1.0, packed=True)
        compile_layers(policy, policy.layers(), "eager")
        differentiate(policy, 2)
        counts.append(graphs())
    assert counts[0] == counts[1]


def module(backend: str | bool, **options: Any) -> RLLightningModule:
    policy = partial(tiny_policy, dtype=torch.float64)
    settings = {
        "advantages": "gae",
        "critic": partial(tiny_policy, 1, dtype=torch.float64),
        "minibatches_per_rollout": 2,
    }
    return tiny_module(
        policy=policy,
        optimizer=partial(SGD, lr=0.05),
        compile=backend,
        **settings,
        **options,
    )


def run(backend: str | bool, steps: int, *, begin: Path | None = None, end: Path | None = None) -> dict[str, Tensor]:
    """Weights after some optimizer steps, from a checkpoint on and up to one."""
    trained, data = module(backend), tiny_prompts(16)
    epochs = 1 if begin is None else 2  # the epoch that max_steps ended counts as over
    trainer = fit(trained, callbacks=[ReferenceKL(0.1)], data=data, max_steps=steps, max_epochs=epochs, ckpt_path=begin)
    assert trainer.global_step == steps
    if end is not None:
        trainer.save_checkpoint(end)
    return weights_of(trained)


@pytest.mark.nightly
def test_a_fit_is_the_same() -> None:
    expected, found = run(PLAIN, 4), run(COMPILED, 4)
    assert graphs() > 0 and found.keys() == expected.keys()
    exactly(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.nightly
def test_a_run_goes_on_from_a_checkpoint_with_or_without(tmp_path: Path) -> None:
    plain, compiled = tmp_path / "plain.ckpt", tmp_path / "compiled.ckpt"
    half_way = run(PLAIN, 2, end=plain)
    run(COMPILED, 2, end=compiled)
    expected = run(PLAIN, 4, begin=plain)
    assert any(not torch.equal(expected[name], weight) for name, weight in half_way.items())
    for backend, half in ((COMPILED, plain), (PLAIN, compiled), (COMPILED, compiled)):
        exactly(run(backend, 4, begin=half), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.nightly
def test_a_checkpoint_of_a_compiled_run_loads_into_a_module(tmp_path: Path) -> None:
    weights = run(COMPILED, 2, end=tmp_path / "end.ckpt")
    again = {name: module(PLAIN).options[name] for name in ("policy", "critic", "rewards")}
    saved = RLLightningModule.load_from_checkpoint(tmp_path / "end.ckpt", optimizer=SGD, **again)
    exactly(weights_of(saved), weights, rtol=0, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [0, 1])
def test_decoding_compiles_nothing_and_draws_the_same(ahead: int) -> None:
    texts = []
    for backend in (PLAIN, COMPILED):
        trained = module(backend, max_staleness=ahead)
        fit(trained, callbacks=[ReferenceKL(0.1), TruncatedIS()], data=tiny_prompts(16), max_steps=2)
        before = graphs()
        texts.append(trained.generate([[2, 3], [4]], temperature=1.0))
        assert graphs() == before
    assert texts[0] == texts[1]


def test_a_copy_is_not_compiled() -> None:
    plain, compiled = policies("qwen2", "eager")
    assert has_compilation(compiled) and not has_compilation(copy.deepcopy(compiled)) and not has_compilation(plain)
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a dense model with compile=, got Qwen3Moe\w+, whose experts"):
        policies("qwen3_moe", "eager")


@pytest.mark.parametrize("backend", ["fastest", "True", None, 1])
def test_an_unknown_backend_is_refused_at_construction(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"expected compile to be True, False or one of inductor, .*got "):
        tiny_module(compile=backend)


class Splitting(Parallel):
    """A strategy that splits the parts of a layer."""

    compiles = False


def test_a_strategy_that_splits_the_parts_of_a_layer_is_refused() -> None:
    parallel = Splitting(fit(tiny_module(), data=tiny_prompts(4), max_steps=1).strategy)
    with pytest.raises(ValueError, match=r"that supports compile=.*or remove it"):
        refuse(check_kernels(ModelOptions(compile=True), parallel))
    refuse(check_kernels(ModelOptions(), parallel))
