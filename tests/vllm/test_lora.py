"""LoRA without merging: the adapter alone goes to vLLM, a new one for each version, and the canary watches it."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import served_runs
from kit.engine_requests import launch
from kit.served import SECRET, Served
from kit.support import fit, tiny_module, tiny_prompts
from kit.vllm_models import a_model, prompts_of, requests_for, synced, worst
from kit.vllm_rank import Watch, an_engine
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl import RLLightningModule, Rollout, VLLMEngine, VLLMServerEngine
from lightning_rl.callbacks import RolloutKL
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.vllm import internals
from lightning_rl.policy.lora import base_model_of

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def with_adapter(name: str = "qwen2", length: int = 256, **options: Any) -> nn.Module:
    known: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, **options}
    return get_peft_model(a_model(name, max_position_embeddings=length), LoraConfig(**known))


def a_run() -> RLLightningModule:
    return tiny_module(
        policy=with_adapter,
        engine=an_engine(lora="adapter"),
        minibatches_per_rollout=2,
        temperature=0.8,
        max_new_tokens=12,
        eos_token_ids=[1, *range(20, 30)],
    )


def moved_adapter(model: PreTrainedModel, seed: int) -> None:
    """Every part of the adapter takes a random step."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


def start_engine(model: PreTrainedModel) -> VLLMEngine:
    engine = an_engine(lora="adapter", canary=None)
    launch(engine, model)
    engine.expect(model.named_parameters())
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen2", {}, id="untied"),
        pytest.param("qwen2-tied", {"rank_pattern": {"v_proj": 9}, "use_rslora": True}, id="tied-ranks-differ"),
    ],
)
def test_each_version_of_the_adapter_is_the_trainers_and_the_base_comes_once(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reloads, reload = [], internals.reload
    monkeypatch.setattr(internals, "reload", lambda *given: (reloads.append(1), reload(*given)))
    model = base_model_of(with_adapter(name, **options))
    engine, requests = start_engine(model), requests_for(prompts_of(8))
    for version in range(3):
        moved_adapter(model, version)
        if version:
            assert worst(model, requests, engine.generate(requests, logprobs=True)) > 1e-2, "stale"
        completions = synced(engine, model, version).generate(requests, logprobs=True)
        assert worst(model, requests, completions) < 1e-4
        assert engine.score([[4, 5, 6]])[0].shape == (2,)
    assert len(reloads) == 1
    engine.close()


def test_a_run_sends_adapters_and_the_canary_agrees() -> None:
    watch = Watch()
    fit(a_run(), callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(16, 4, validation=[[2, 3]]))
    assert len(watch.rollouts) == 4
    for rollout in watch.rollouts:
        difference = rollout.require("rollout_logprobs") - rollout.require("old_logprobs")
        assert float(difference[rollout.valid_tokens].abs().max()) < 1e-4
    assert watch.rows[0]["time/canary"] > 0


@pytest.mark.parametrize(
    ("name", "copies"), [("qwen2", ["lm_head", "norm"]), ("qwen2-tied", ["lm_head"]), ("qwen2-tied", ["embed_tokens"])]
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_modules_that_train_as_copies_are_the_trainers_at_every_sync(name: str, copies: list[str]) -> None:
    model, engine = base_model_of(with_adapter(name, modules_to_save=copies)), an_engine(canary=None)
    launch(engine, model)
    engine.expect(model.named_parameters())
    requests = requests_for(prompts_of(8))
    for version in range(2):
        moved_adapter(model, version)
        completions = synced(engine, model, version).generate(requests, logprobs=True)
        assert worst(model, requests, completions) < 1e-4
    engine.close()


def test_a_policy_without_adapters_or_with_more_than_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r'none in Qwen2ForCausalLM: use lora="merged"'):
        start_engine(a_model())
    model = base_model_of(with_adapter())
    model.get_input_embeddings().weight.requires_grad_()
    with pytest.raises(ValueError, match=r"got model\.embed_tokens\.weight that trains as well"):
        start_engine(model)
    with pytest.raises(ValueError, match='expected lora="merged" or "adapter", got \'both\''):
        an_engine(lora="both")


Drawn = tuple[int, list[Request], list[Completion]]


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, row: list[int]) -> Tensor:
    logprobs = model(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def bytes_of(folder: Path) -> int:
    """Return the bytes of the tensors in the files of a folder."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return sum(tensor.nbytes for file in files for tensor in file.values())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Return two servers that take adapters."""
    model, options = a_model("qwen2-tied", max_position_embeddings=1024), ("--enable-lora", "--max-lora-rank", "8")
    one, two = (Served(model, tmp_path_factory.mktemp("served"), options=options) for _ in range(2))
    for server in (one, two):
        server.wait()
    yield one, two
    assert one.stop() == two.stop() == (0, [])


@pytest.mark.parametrize("versions", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_request_keeps_the_adapter_of_its_start_over_three_syncs(
    both: tuple[Served, Served], versions: int, tmp_path: Path
) -> None:
    model = base_model_of(with_adapter("qwen2-tied", length=1024))
    engine = served_runs.an_engine(*both, lora="adapter", canary=False, storage=tmp_path)
    launch(engine, model)
    engine.expect(model.named_parameters())
    first = {name: weight.clone() for name, weight in model.state_dict().items() if "lora_" in name}
    states, drawn = list[dict[str, Tensor]](), list[Drawn]()
    drawing, crossed = list[threading.Thread](), list[bool]()

    def draw(version: int, tokens: int) -> None:
        requests = requests_for(prompts_of(2, 40, seed=version), max_new_tokens=tokens)
        drawn.append((version, requests, engine.generate(requests, logprobs=True)))

    for version in range(versions):
        model.load_state_dict(first, strict=False)
        moved_adapter(model, version)
        states.append({name: model.state_dict()[name].clone() for name in first})
        synced(engine, model, version)
        row = [5, *prompts_of(1, 60, seed=version)[0]]
        scores = engine.score_copies(row)
        assert scores.keys() == {server.url for server in both}
        assert all(float((found - logprobs_of(model, row)).abs().max()) < 1e-4 for found in scores.values())
        draw(version, 10)
        if version % 3 == 0:
            for thread in drawing[-1:]:
                crossed.append(thread.is_alive())
                thread.join()
            if version + 3 < versions:
                drawing.append(threading.Thread(target=draw, args=(version, 960)))
                drawing[-1].start()
    assert len(drawn) == versions + versions // 3 and 2 * sum(crossed) >= len(crossed), crossed
    for version, requests, completions in drawn:
        assert {(completion.version, completion.versions) for completion in completions} == {(version, None)}
        model.load_state_dict(states[version], strict=False)
        assert worst(model, requests, completions) < 1e-4
        model.load_state_dict(states[version - 1], strict=False)
        assert worst(model, requests, completions) > 1e-2, "a stale adapter would be seen"
    base, *_, last = sorted(tmp_path.glob("*/*"), key=lambda folder: int(folder.name))
    base_bytes, adapter_bytes = (bytes_of(folder) for folder in (base, last))
    assert (base.name, last.name) == ("0", str(versions))
    assert base_bytes == sum(tensor.nbytes for tensor in a_model("qwen2-tied").state_dict().values())
    assert adapter_bytes * 20 <= base_bytes
    engine.close()


@pytest.mark.parametrize("transfer", ["file", "broadcast"])
def test_a_run_on_servers_sends_adapters_to_one_that_joins_too(
    both: tuple[Served, Served], transfer: str, tmp_path: Path
) -> None:
    listing = tmp_path / "servers"
    listing.write_text(both[0].url)
    options: dict[str, Any] = {"api_key": SECRET, "patience": 300, "timeout": 120, "transfer": transfer}
    engine = VLLMServerEngine(listing, lora="adapter", **options)

    class Join(Watch):
        """List both servers after the second rollout."""

        @override
        def observe(self, rollout: Rollout) -> None:
            super().observe(rollout)
            if len(self.rollouts) == 2:
                listing.write_text("\n".join(server.url for server in both))
                end = time.monotonic() + 120
                while len(engine._running().ready()) < 2:  # noqa: SLF001
                    assert time.monotonic() < end, "the list was not followed"

    watch = Join()
    module = served_runs.a_run(both[0], policy=partial(with_adapter, "qwen2-tied"), engine=engine)
    fit(module, callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(16, 4))
    served_runs.check_run(watch, 4)
    assert len(watch.rows) == 8 and all(abs(row["kl/rollout"]) < 1e-5 for row in watch.rows[::2])
