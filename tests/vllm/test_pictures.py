"""Pictures in vLLM, in process and at a server: token ids, log-probabilities, syncs, runs, and faults of an engine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_requests import launch
from kit.served import Served
from kit.served_runs import an_engine
from kit.support import fit, tiny_module
from kit.vision import Camera, picture_rows
from kit.vllm_models import moved, prompts_of, requests_for, synced, weights_of, worst
from kit.vllm_rank import Watch
from kit.vllm_vision import (
    CAUSAL,
    WHOLE,
    gap,
    processor_in,
    prompts_with_pictures,
    served_model,
    served_tokenizer,
    trajectories_of,
    whole_model,
)
from transformers import AutoProcessor, PreTrainedTokenizerBase

from lightning_rl import Engine, FinishReason, PromptDataModule, TransformersEngine, VLLMEngine
from lightning_rl.callbacks import RolloutKL
from lightning_rl.environments import EnvironmentReward
from lightning_rl.generation import CanaryError
from lightning_rl.generation.engine import EngineError
from lightning_rl.generation.weights import weight_stream
from lightning_rl.policy.processor import attach


@pytest.fixture(scope="module", params=CAUSAL)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str) -> PreTrainedTokenizerBase:
    return served_tokenizer(family)


@pytest.fixture(scope="module")
def engine(family: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[VLLMEngine]:
    engine, model = VLLMEngine(canary=False, kv_cache_memory_bytes=2**25, block_size=32), served_model(family)
    launch(engine, model, tokenizer)
    engine.expect(weights_of(model))
    yield engine
    engine.close()


def test_log_probabilities_after_pictures_are_the_trainers_at_every_sync(
    family: str, engine: VLLMEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    model, samples = served_model(family), trajectories_of(prompts_with_pictures(tokenizer))
    for version in range(2):
        completions = synced(engine, model, version).generate([each.request for each in samples], logprobs=True)
        assert gap(model, samples, completions) < 1e-4
        moved(model, 0.02)  # of the towers, too


def test_a_processor_of_vllm_that_writes_other_tokens_is_an_error_before_any_log_probability(
    engine: VLLMEngine, family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = served_model(family)
    (sample,) = trajectories_of(prompts_with_pictures(tokenizer)[:1])
    assert sample.request.media is not None
    place = list(sample.request.prefix_ids).index(13)
    longer = (*sample.request.prefix_ids[:place], sample.request.prefix_ids[place], *sample.request.prefix_ids[place:])
    drawn = torch.zeros(len(longer), dtype=torch.bool)
    request = replace(sample.request, prefix_ids=longer, media=replace(sample.request.media, drawn=drawn))
    with pytest.raises(EngineError, match=r"with \d+ placeholders for 1 pictures, as the trainer's"):
        synced(engine, model).generate([request], logprobs=True)
    drawn[place] = True
    request = replace(request, media=replace(sample.request.media, drawn=drawn))
    (completion,) = synced(engine, model).generate([request], logprobs=True)
    assert completion.finish is FinishReason.ABORT, "a sampled placeholder stands before the picture"


def small(**options: Any) -> VLLMEngine:
    return VLLMEngine(kv_cache_memory_bytes=2**25, block_size=32, **options)


def run(family: str, engine: Engine, **options: Any) -> Watch:
    """Two rollouts of a policy that reads pictures; RolloutKL logs how far engine and trainer are apart."""
    watch = Watch()
    module = tiny_module(
        policy=partial(served_model, family),
        tokenizer=processor_in(served_tokenizer(family)),
        engine=engine,
        eos_token_ids=[1, 4, 5],
        temperature=0.8,
        minibatches_per_rollout=2,
        **options,
    )
    fit(module, callbacks=[RolloutKL(), watch], data=PromptDataModule(picture_rows(8), 4))
    return watch


def check(watch: Watch) -> None:
    assert len(watch.rollouts) == 2
    for rollout in watch.rollouts:
        assert rollout.prompt_items or rollout.response_items
        assert rollout.rollout_logprobs is not None and rollout.old_logprobs is not None
        difference = (rollout.rollout_logprobs - rollout.old_logprobs)[rollout.valid_tokens & rollout.action_mask]
        assert float(difference.abs().max()) < 1e-4
        assert float(rollout.old_logprobs[rollout.valid_tokens & rollout.action_mask].mean()) < -1, "not deterministic"


def test_a_run_samples_as_it_trains_in_process(family: str) -> None:
    check(run(family, small()))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma3", {}, "expected VLLMEngine to attend in both directions within a picture, .* which is causal: use a"),
        ("qwen2_5_vl", {"language_model_only": True}, "expected VLLMEngine to take pictures, got a limit of 0: remove"),
        ("qwen2_5_vl", {"limit_mm_per_prompt": {"image": 0}}, "expected VLLMEngine to take pictures, got a limit of 0"),
    ],
)
def test_an_engine_that_does_not_read_pictures_as_the_policy_does_is_refused_at_its_start(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(small(**options), served_model(family), served_tokenizer(family))


def test_more_pictures_than_the_limit_are_named() -> None:
    tokenizer, engine = served_tokenizer("qwen2_5_vl"), small(limit_mm_per_prompt={"image": 1}, canary=False)
    launch(engine, model := served_model("qwen2_5_vl"), tokenizer)
    engine.expect(weights_of(model))
    requests = [each.request for each in trajectories_of(prompts_with_pictures(tokenizer))]
    with pytest.raises(
        ValueError, match=r'at most 1 pictures, the limit_mm_per_prompt\["image"\] of vLLM, got 2 for s'
    ):
        synced(engine, model).generate(requests)
    engine.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_a_run_samples_as_it_trains_at_a_server(family: str, tmp_path: Path) -> None:
    model = served_model(family)
    served = Served(model, tmp_path, processor=processor_in(served_tokenizer(family)))
    try:
        check(run(family, an_engine(served)))
        options = {"environment": Camera, "rewards": EnvironmentReward(), "max_turn_tokens": 3, "max_new_tokens": 60}
        check(run(family, an_engine(served), **options))
    finally:
        served.stop()


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_the_canary_finds_towers_that_a_sync_does_not_reach(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = weight_stream.copies

    def without_towers(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, weight + ("visual" in name)) for name, weight in copies(*arguments))

    monkeypatch.setattr(weight_stream, "copies", without_towers)
    with pytest.raises(CanaryError, match="to read pictures as training does, and it agrees on text, but its log-prob"):
        run(family, small())


def test_a_sync_drops_the_features_of_pictures(
    engine: VLLMEngine, family: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = served_model(family), trajectories_of(prompts_with_pictures(tokenizer))
    requests = [each.request for each in samples]
    synced(engine, model).generate(requests, logprobs=True)
    monkeypatch.setattr(engine._llm.llm_engine, "reset_encoder_cache", lambda: None)  # noqa: SLF001
    moved(model, 0.05)
    with pytest.raises(RuntimeError, match="Encoder cache miss"):
        synced(engine, model).generate(requests, logprobs=True)
    monkeypatch.undo()
    assert gap(model, samples, synced(engine, model).generate(requests, logprobs=True)) < 1e-4


def test_environments_show_pictures_over_several_turns(family: str) -> None:
    options = {"environment": Camera, "rewards": EnvironmentReward(), "max_turn_tokens": 3, "max_new_tokens": 60}
    engine = small()
    here = run(family, TransformersEngine(), **options)
    check(there := run(family, engine, **options))
    for one, two in zip(here.rollouts, there.rollouts, strict=True):
        assert one.width > 3 and one.sample_ids.tolist() == two.sample_ids.tolist()


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_with_towers_generates_text_without_them(family: str) -> None:
    model, engine = whole_model(family), small(canary=False)
    launch(engine, model)
    engine.expect(weights_of(model))
    assert not [name for name in engine._plan.expected if "visual" in name or "vision" in name]  # noqa: SLF001
    requests = requests_for(prompts_of(6))
    for version in range(2):
        assert worst(model, requests, synced(engine, model, version).generate(requests, logprobs=True)) < 1e-4
        moved(model, 0.02)
    engine.close()


def test_processors_from_files_write_the_same_tokens_and_pixels(
    family: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    processor_in(tokenizer).save_pretrained(tmp_path)
    other = attach(AutoProcessor.from_pretrained(tmp_path))
    for here, there in zip(prompts_with_pictures(tokenizer), prompts_with_pictures(other), strict=True):
        assert here.token_ids == there.token_ids
        items = {} if here.media is None else here.media.items
        for name, value in items.items():
            assert there.media is not None
            torch.testing.assert_close(there.media.items[name], value, atol=1e-6, rtol=0)
