"""``save_pretrained`` writes a folder that transformers loads, bitwise the trained weights, from every strategy."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.strategy_cases import lora_policy
from kit.support import VOCABULARY, fit, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typing_extensions import override

GAE: dict[str, Any] = {"advantages": "gae", "group_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"policy": partial(tiny_policy, tie_word_embeddings=True)},
    "shared critic": {"critic": "shared", **GAE},
    "own critic": {"critic": partial(tiny_policy, 1), **GAE},
    "lora": {"policy": partial(lora_policy, torch.float32)},
    "lora with tied heads": {"policy": partial(lora_policy, torch.float32, tie_word_embeddings=True)},
}
FILE = "model.safetensors"
PROMPTS = torch.arange(2, VOCABULARY)[None]


class Exports(Callback):
    """At the end: an export, the weights one by one, and the policy's own logits where a rank holds all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.save_pretrained(self.folder)
        streamed = pl_module.parallel.full_parameters(pl_module.policy)
        weights = {name: weight.cpu().clone() for name, weight in streamed}
        if trainer.is_global_zero:
            torch.save(weights, self.folder / "weights")


def export(folder: Path, case: str, **where: Any) -> None:
    """Trains for two steps and exports while and after the run."""
    torch.set_num_threads(1)
    module = tiny_module(**CASES[case], tokenizer=tiny_tokenizer())
    trainer = fit(module, callbacks=[Exports(folder)], data=tiny_prompts(8, 4), **where)
    module.save_pretrained(folder / "after")
    if trainer.world_size == 1:
        assert module.policy is not None
        with torch.no_grad():
            torch.save(module.policy.model(PROMPTS).logits, folder / "logits")


def check(folder: Path, case: str) -> None:
    """Compares a folder with the weights that were streamed beside it."""
    modes = {file.stat().st_mode for file in folder.rglob("*.safetensors")} | {(folder / "config.json").stat().st_mode}
    assert len(modes) == 1  # tensors are for whom the rest is for
    weights: dict[str, Tensor] = torch.load(folder / "weights")
    expected = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert (folder / "after" / FILE).read_bytes() == (folder / FILE).read_bytes()
    if "lora" in case:
        expected = merged_by_hand(expected)
    found = dict(exported.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert any(not torch.equal(found[name], first) for name, first in tiny_policy().named_parameters() if name in found)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # the automatic class follows the model's name
    assert tokenizer("c a b")["input_ids"] == tiny_tokenizer()("c a b")["input_ids"]
    if (folder / "logits").exists():
        with torch.no_grad():
            torch.testing.assert_close(exported(PROMPTS).logits, torch.load(folder / "logits"))
    check_critic(folder / "critic", case, weights)


def merged_by_hand(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of LoRA with rank 2 and the default scale of 4: W + 4 B A."""
    plain = {name.replace("base_layer.", ""): w for name, w in weights.items() if "lora_" not in name}
    for name, down in weights.items():
        if "lora_A" in name:
            up = weights[name.replace("lora_A", "lora_B")]
            plain[name.replace("lora_A.default.", "")] += up @ down * 4.0
    return plain


def check_critic(folder: Path, case: str, weights: dict[str, Tensor]) -> None:
    """Check a separate backbone, which is a model, and the value head, which is not."""
    assert (folder / "config.json").exists() == (case == "own critic")
    if "critic" in case:
        head = load_file(folder / "value_head.safetensors")["weight"]
        assert torch.equal(head, weights["value_head.weight"]) and bool(head.any())
    if case == "own critic":
        backbone = dict(AutoModelForCausalLM.from_pretrained(folder).base_model.named_parameters())
        own = {name.removeprefix("critic."): w for name, w in weights.items() if name.startswith("critic.")}
        assert backbone.keys() == own.keys() and all(torch.equal(backbone[name], w) for name, w in own.items())


@pytest.mark.parametrize("case", CASES)
def test_one_device(case: str, tmp_path: Path) -> None:
    export(tmp_path, case)
    check(tmp_path, case)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategies",
    [
        ["fsdp2"],
        pytest.param(sorted(STRATEGIES.keys() - {"fsdp2"}), marks=pytest.mark.nightly),
    ],
    ids=["fsdp2", "the others"],
)
def test_two_ranks(strategies: list[str], tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path, *strategies)
    for strategy in strategies:
        for case in CASES:
            check(tmp_path / strategy / case, case)


if __name__ == "__main__":
    for strategy in sys.argv[2:]:
        for case in CASES:
            export(Path(sys.argv[1]) / strategy / case, case, strategy=STRATEGIES[strategy](), devices=2)
