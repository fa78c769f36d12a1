"""VLLMEngine in whole runs, against a fake that behaves as the sources of vLLM do."""

from collections.abc import Iterator

import pytest
import torch
from kit.fake_vllm import FakeVLLM, fake_vllm
from kit.support import fit, recorder, tiny_module, tiny_prompts

from lightning_rl import Rollout, VLLMEngine
from lightning_rl.generation import EngineState


@pytest.fixture
def gpu() -> Iterator[FakeVLLM]:
    with fake_vllm(gpus=1) as fake:
        yield fake


def test_a_fit_in_mixed_precision_passes_its_canary_and_draws(gpu: FakeVLLM) -> None:
    seen: list[Rollout] = []
    module = tiny_module(engine=VLLMEngine())
    fit(module, callbacks=[recorder(seen)("seen")], data=tiny_prompts(8, 4), precision="bf16-mixed")
    assert [int(rollout.policy_version.max()) for rollout in seen] == [0, 1]
    for rollout in seen:
        assert rollout.rollout_logprobs is not None and rollout.rollout_logprobs[rollout.valid_tokens].isfinite().all()
    assert [built.options["enable_sleep_mode"] for built in gpu.built] == [True]
    assert module.engine.state is EngineState.ASLEEP


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16"), ("32-true", "float32"), ("64-true", "float32")],
)
def test_vllm_holds_the_weights_in_the_dtype_in_which_the_run_computes(
    precision: str, expected: str, gpu: FakeVLLM
) -> None:
    module = tiny_module(engine=VLLMEngine())
    fit(module, data=tiny_prompts(4, 4), precision=precision)
    assert [str(built.dtype) for built in gpu.built] == [f"torch.{expected}"]


def test_a_dtype_of_the_user_s_own_stands(gpu: FakeVLLM) -> None:
    fit(tiny_module(engine=VLLMEngine(dtype=torch.float32)), data=tiny_prompts(4, 4), precision="bf16-mixed")
    assert [built.dtype for built in gpu.built] == [torch.float32]
