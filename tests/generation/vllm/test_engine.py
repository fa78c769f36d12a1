"""VLLMEngine in whole runs, against a fake that behaves as the sources of vLLM do."""

from collections.abc import Iterator

import pytest
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
    assert len(gpu.built) == 1
    assert module.engine.state is EngineState.ASLEEP
