"""Models of a folder: all of their weights are read, in their shapes, or nothing is trained."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import tiny_policy
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import DataParallel

from lightning_rl.policy.build import build_model, build_tokenizer
from lightning_rl.policy.model import check_scoring
from lightning_rl.policy.weight_files import model_without_numbers

WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_policy().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "put_around", [partial(torch.compile, backend="eager"), DataParallel], ids=["compile", "parallel"]
)
def test_a_model_with_something_around_it_is_refused_with_what_does_the_same(put_around: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"got \w+ around it, which changes .*: return the model itself; compile=True"):
        build_model(lambda: put_around(tiny_policy()))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop(NORM),
            rf"to be all of the model, got none for {NORM}, which would be initialized",
        ),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if ".mlp." in name],
            r"got none for model\.layers\.0\.mlp\.\w+\.weight and \d+ others",
        ),
        (
            lambda weights: weights.update({NORM: torch.ones(3)}),
            rf"to be those of its configuration, got 1 of other shapes, such as {NORM}, \[3\] where \[\d+\] is needed",
        ),
    ],
    ids=["one", "several", "shape"],
)
def test_weights_that_are_missing_or_of_another_shape_are_refused_and_not_drawn_by_lot(
    change: Callable[[dict[str, Tensor]], object], message: str, folder: Path, *, split: bool
) -> None:
    rewrite(folder, change)
    assert not split or model_without_numbers(folder) is None, "it is built whole, which says why it cannot be"
    with pytest.raises(ValueError, match=message):
        build_model(folder)


def test_a_head_that_is_missing_is_refused_unless_nothing_reads_it(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"got none for lm_head\.weight, which would be initialized randomly"):
        build_model(folder)
    read = build_model(folder, head=False).get_parameter(NORM)
    assert torch.equal(read, tiny_policy().get_parameter(NORM))


@pytest.mark.parametrize("kept", [0, 30, -100], ids=["empty", "head", "end"])
def test_a_file_that_is_cut_off_is_named(kept: int, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert model_without_numbers(folder) is None
    with pytest.raises(ValueError, match=rf"that can be loaded, got '{folder}': {path}: Error while deserializing"):
        build_model(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_leaves_the_words_to_transformers(index: str, folder: Path) -> None:
    (folder / f"{WEIGHTS}.index.json").write_text(index)
    assert model_without_numbers(folder) is None


@pytest.mark.parametrize("packed", [False, True])
def test_weights_that_are_nan_are_said_to_be_the_fault(folder: Path, *, packed: bool) -> None:
    rewrite(folder, lambda weights: weights.update({NORM: torch.full_like(weights[NORM], torch.nan)}))
    with pytest.raises(ValueError, match="to give numbers as log-probabilities, got NaN: look for NaN and infinity"):
        check_scoring(build_model(folder), packed=packed)


def test_a_policy_whose_folder_is_misspelt_is_named_with_the_one_beside_it(folder: Path) -> None:
    typo = str(folder.parent / folder.name[::-1][1:][::-1])
    said = rf"got '{typo}', which does not exist: did you mean '{folder}'\?"
    with pytest.raises(ValueError, match=rf"^expected policy= to be an existing folder, .*{said}$") as refused:
        build_tokenizer(None, typo)
    assert refused.value.__cause__ is None and refused.value.__context__ is None
    with pytest.raises(ValueError, match=rf"^expected tokenizer= to be an existing folder.*{said}$"):
        build_tokenizer(typo, tiny_policy)
    with pytest.raises(ValueError, match=rf"^expected the folder of a causal language model, {said}$"):
        build_model(typo)
