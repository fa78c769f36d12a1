"""Each rank reads its own part of a model that lies in a folder, and no rank ever holds the whole of it."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.multimodal import tiny_multimodal
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import GAE, RLCallback
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy.build import build_model
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.policy.weight_files import model_without_numbers


def a_folder(path: Path, *, tied: bool = False, towers: bool = False, **options: Any) -> Path:
    model = tiny_multimodal("gemma3") if towers else tiny_policy(3, tie_word_embeddings=tied)
    model.save_pretrained(path, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}], ids=["one file", "several files"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_files_hold_what_the_whole_model_would_have(tmp_path: Path, tied: bool, options: Any) -> None:
    folder = a_folder(tmp_path, tied=tied, **options)
    whole, built = build_model(folder), model_without_numbers(folder)
    assert built is not None
    model, files = built
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (model.get_input_embeddings().weight is model.lm_head.weight) is tied
    assert fingerprint(files.parameters()) == fingerprint(whole.named_parameters())
    assert fingerprint(model.named_buffers()) == fingerprint(whole.named_buffers())
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()


def rename(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 17}))


@pytest.mark.parametrize(
    "change",
    [
        rename,
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes()),
    ],
    ids=["another shape", "an adapter", "another name", "another file"],
)
def test_what_transformers_would_change_is_built_whole(tmp_path: Path, change: Any) -> None:
    folder = a_folder(tmp_path)
    change(folder)
    assert model_without_numbers(folder) is None


def test_a_function_and_a_name_are_built_whole() -> None:
    assert model_without_numbers(tiny_policy) is None
    assert model_without_numbers("no-owner/no-model") is None


class Watch(RLCallback):
    """Keeps what a rank begins with."""

    name = "watch"

    def __init__(self) -> None:
        self.weights = dict[str, Tensor]()
        self.apart = list[float]()

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        policy, reference = pl_module.policy, pl_module.models.reference.scoring
        for part, model in (("policy", policy), ("reference", reference)):
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                self.weights[f"{part} {name}"] = parameter.full_tensor().detach().clone()
            self.weights |= {f"{part} {name}": buffer.clone() for name, buffer in model.named_buffers()}
        self.fingerprint = pl_module.models.reference.fingerprint

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.apart.append(pl_module.run.metrics.values()["kl/ref"])


@pytest.mark.nightly
def test_two_ranks_begin_with_the_very_weights_of_a_whole_model(tmp_path: Path) -> None:
    plain, tied = a_folder(tmp_path / "plain"), a_folder(tmp_path / "tied", tied=True)
    towers = a_folder(tmp_path / "towers", towers=True)
    cases = [f"fsdp2 {plain}", f"tensor {tied}", f"fsdp2:bf16-mixed {towers}"]
    run_ranks(__file__, 2, *cases)


def rank(strategy: str, folder: str) -> None:
    """One of two ranks; the learning rate is 0."""
    runs, (strategy, _, precision) = list[Watch](), strategy.partition(":")
    trainer: dict[str, Any] = {"data": tiny_prompts(4, 4), "devices": 2, "precision": precision or "32-true"}
    for policy in (folder, partial(build_model, folder)):
        watch = Watch()
        options: dict[str, Any] = {"critic": "shared", "advantages": GAE(), "optimizer": partial(SGD, lr=0.0)}
        module = tiny_module(policy=policy, tokenizer=tiny_tokenizer(), **options)
        callbacks = [ReferenceKL(0.1, as_loss=True), watch]
        fit(module, callbacks=callbacks, strategy=STRATEGIES[strategy](), **trainer)
        runs.append(watch)
        assert module.required_policy.files is not None or policy != folder
    ours, whole = runs
    assert ours.weights.keys() == whole.weights.keys() and ours.fingerprint == whole.fingerprint
    for name, weight in whole.weights.items():
        assert torch.equal(ours.weights[name], weight), name
    assert ours.apart and not any(ours.apart)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        rank(*case.split(" "))
