"""Liger's kernels come into one model and no other, without its losses; `make test-liger` runs the kernels themselves.

It has the package, and Triton's interpreter runs on a CPU what a GPU would; elsewhere that test is skipped.
"""

import copy
import os
import sys
from collections.abc import Callable
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit.run_checks import refuse
from kit.support import fit, ragged_rollout, tiny_model, tiny_module
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from lightning_rl import run_checks
from lightning_rl.distributed import Parallel
from lightning_rl.policy import ModelOptions, PolicyModel, pack
from lightning_rl.policy.liger import apply_liger
from lightning_rl.run_checks import check_kernels

exactly = torch.testing.assert_close
ROTATE = modeling_qwen2.apply_rotary_pos_emb
Calls = list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A package that does to transformers what liger-kernel does, and notes what is called."""
    noted: Calls = []

    def rotate(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        noted.append("rope")
        return ROTATE(*arguments, **options)

    def swiglu_forward(module: Any, hidden: Tensor) -> Tensor:
        noted.append("swiglu")
        return type(module).forward(module, hidden)

    def apply_liger_kernel_to_qwen2(
        *,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        assert rope and rms_norm and swiglu and not cross_entropy and not fused_linear_cross_entropy
        modeling_qwen2.apply_rotary_pos_emb = rotate
        modeling_qwen2.Qwen2MLP = type("LigerSwiGLUMLP", (), {})
        for layer in getattr(model, "model", model).layers:
            layer.mlp.forward = MethodType(swiglu_forward, layer.mlp)

    package, transformers, patches = (ModuleType(name) for name in ("liger_kernel", "transformers", "monkey_patch"))
    patches.__dict__["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"qwen2": apply_liger_kernel_to_qwen2}
    transformers.__dict__["monkey_patch"] = patches
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    return noted


def score(policy: PolicyModel) -> Tensor:
    return policy(pack(ragged_rollout(6, dtype=torch.float64))).logprobs


def test_one_model_is_changed_and_no_other_of_its_family(calls: Calls) -> None:
    policy, other = (PolicyModel(tiny_model("qwen2"), None, temperature=0.7, packed=True) for _ in range(2))
    names, before = list(policy.state_dict()), dict(vars(modeling_qwen2))
    apply_liger(policy.model)
    assert vars(modeling_qwen2) == before
    assert list(policy.state_dict()) == names
    expected = score(other)
    assert calls == []
    exactly(score(policy), expected, rtol=0, atol=0)
    assert calls == ["rope", "swiglu"] * 2
    exactly(score(PolicyModel(tiny_model("qwen2"), None, temperature=0.7, packed=True)), expected, rtol=0, atol=0)
    assert len(calls) == 4


def test_a_copy_runs_on_its_own_weights(calls: Calls) -> None:
    policy = PolicyModel(tiny_model("qwen2"), None, temperature=0.7, packed=True)
    apply_liger(policy.model)
    before, copied = score(policy), copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    exactly(score(policy), before, rtol=0, atol=0)
    calls.clear()
    assert not torch.equal(score(copied), before)
    assert calls == ["rope", "swiglu"] * 2


def test_a_critic_without_a_head_is_a_model_as_well(calls: Calls) -> None:
    policy = PolicyModel(tiny_model("qwen2"), tiny_model("qwen2", 1), temperature=0.7, packed=True)
    for model in policy.models():
        apply_liger(model)
    score(policy)
    assert len(policy.models()) == 2 and calls == ["rope", "swiglu"] * 4


def test_a_family_that_the_package_does_not_know_is_refused(calls: Calls) -> None:
    with pytest.raises(ValueError, match=r"a model that liger-kernel supports, got gemma3_text: leave liger= out"):
        apply_liger(tiny_model("gemma3_text"))


def test_it_is_refused_on_a_cpu_before_the_model_is_built() -> None:
    built: list[Callable[[], object]] = []
    with pytest.raises(ValueError, match=r"expected a GPU for liger=True, got cpu"):
        fit(tiny_module(policy=lambda: built.append(tiny_module), liger=True))
    assert not built


def test_it_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checks, "has_liger", lambda: False)
    gpu = cast(Parallel, SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda"))))
    with pytest.raises(ValueError, match=r'pip install "lightning-rl\[liger\]", or remove it'):
        refuse(check_kernels(ModelOptions(liger=True), gpu))


def test_it_is_refused_beside_compilation() -> None:
    with pytest.raises(ValueError, match=r"expected compile= or liger=, got both"):
        tiny_module(compile=True, liger=True)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs liger-kernel: make test-liger")
@pytest.mark.filterwarnings("default")  # what the package warns of is its own
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_its_kernels_give_the_same_log_probabilities_and_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy, language = pytest.importorskip("numpy"), pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    norms = pytest.importorskip("liger_kernel.ops.rms_norm")
    convert = interpreter._implicit_cvt  # noqa: SLF001

    def with_floats(argument: Any) -> Any:
        """The interpreter hands numbers over as they are, the compiler as tensors."""
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(norms, "rsqrt", lambda number: 1 / language.sqrt(number))  # CUDA's own, otherwise
    plain = PolicyModel(tiny_model(family, dtype=torch.float32), None, temperature=0.7, packed=True)
    changed = copy.deepcopy(plain)
    apply_liger(changed.model)
    kinds = {type(part).__name__ for part in changed.modules() if "forward" in vars(part)}
    assert {kind.removeprefix(family.title()) for kind in kinds} == {"Attention", "MLP", "RMSNorm"}
    for policy in (plain, changed):
        policy(pack(ragged_rollout(6))).logprobs.sum().backward()
    exactly(score(changed), score(plain), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(plain.parameters(), changed.parameters(), strict=True):
        exactly(theirs.grad, ours.grad, rtol=1e-4, atol=1e-4)
