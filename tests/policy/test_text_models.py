"""Checkpoints of models with towers: each family is built and refused as the table of docs/strategies.md has it."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.engine_requests import request_of
from kit.multimodal import PAGE, tiny_multimodal
from kit.support import VOCABULARY, fit, tiny_module, tiny_prompts, tiny_tokenizer
from kit.vllm_models import FAMILIES, HYBRIDS, a_model
from kit.vllm_vision import WHOLE
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from lightning_rl import TransformersEngine
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.build import build_model, build_policy
from lightning_rl.policy.text_model import backbone_of, has_towers, text_class_of
from lightning_rl.policy.weight_files import model_without_numbers
from lightning_rl.rollout import Rollout

TEMPERATURE = 0.7
NOT_DRAWN = ("nemotron_h_omni",)  # whose steps with a KV cache differ from its forward by more than 1e-3
PROMPTS = [[2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [8, 9], [10]]
RESPONSES = [[7, 8, 9, 2, 3, 10, 4], [11, 12], [13, 4, 5], [6]]  # inkling2 has 14 tokens


@dataclass(frozen=True)
class Row:
    """A family in the table."""

    family: str
    built: str
    packed: bool
    vllm: bool

    @property
    def whole(self) -> bool:
        """Return whether the whole model is built, towers frozen."""
        return self.built == "whole"


def section() -> str:
    (found,) = re.findall(r"^## Models with towers\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def built_here(cell: str) -> str:
    """Return what the installed transformers builds."""
    built, _, since = cell.partition("; refused before transformers ")
    if since and Version(transformers.__version__) < Version(since.split(":")[0]):
        return "refused"
    return built.split(",")[0].strip("`")


def table() -> list[Row]:
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section().splitlines() if line.startswith("| `")
    ]
    return [
        Row(family, built_here(built), packed == "yes", vllm == "yes")
        for families, built, packed, vllm in lines[1:]  # below the head
        for family in re.findall(r"`([\w-]+)`", families)
    ]


ROWS = [row for row in table() if row.family in CONFIG_MAPPING]  # older releases of transformers lack the newest
TRAINED = [row for row in ROWS if not row.built.startswith("refused")]
each_family = pytest.mark.parametrize("row", TRAINED, ids=[row.family for row in TRAINED])
FIRST = {row.built: row.family for row in reversed(TRAINED) if not row.whole}


def first_of_each_class(row: Row) -> Any:
    """Return a parameter for a family, nightly if another one is built as the same class."""
    again = not row.whole and FIRST[row.built] != row.family
    return pytest.param(row, id=row.family, marks=[pytest.mark.nightly] if again else [])


@dataclass(frozen=True)
class Checkpoint:
    """A model with towers, and the folder that its class wrote."""

    whole: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Checkpoint]:
    """Of the families so far, each written once."""
    return {}


@pytest.fixture
def checkpoint(row: Row, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if row.family not in checkpoints:
        written = Checkpoint(tiny_multimodal(row.family), tmp_path_factory.mktemp(row.family))
        written.whole.save_pretrained(written.folder)
        checkpoints[row.family] = written
    return checkpoints[row.family]


def policy_of(folder: Path, *, packed: bool) -> PolicyModel:
    return build_policy(folder, None, temperature=TEMPERATURE, packed=packed)


def head_of(model: PreTrainedModel) -> Any:
    """The vocabulary head, which NemotronH's whole model has in its language model."""
    parts = [part.get_output_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)]
    return next(head for head in parts if head is not None)


@torch.no_grad()
def logprobs_alone(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probabilities of a response by the model's own forward of one sequence."""
    ids = torch.tensor([prompt + response])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def test_the_table_says_of_vllm_what_its_tests_run() -> None:
    run = {type(a_model(name)).__name__ for name in (*FAMILIES, *HYBRIDS)}
    assert len(TRAINED) > 30 and {row.built for row in TRAINED if row.vllm and not row.whole} <= run
    assert not run & {row.built for row in TRAINED if not row.vllm}
    assert {row.family for row in TRAINED if row.whole and row.vllm} == WHOLE.keys()


def test_the_page_names_every_decoder_with_towers_of_the_installed_transformers() -> None:
    families = [CONFIG_MAPPING[family]() for family in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
    towers = {config.model_type for config in families if not config.is_encoder_decoder and has_towers(config)}
    assert len(towers) > 30 and towers <= set(re.findall(r"`([\w.-]+)`", section()))


@pytest.mark.nightly
@each_family
def test_the_language_model_is_built_with_the_weights_of_the_checkpoint(row: Row, checkpoint: Checkpoint) -> None:
    model, whole = build_model(checkpoint.folder), checkpoint.whole
    assert type(model) is type(whole) if row.whole else type(model).__name__ == row.built
    assert has_towers(model.config) is row.whole
    ids = torch.randint(2, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = backbone_of(whole)(input_ids=ids).last_hidden_state
        found = backbone_of(model)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # grouped experts round by where weights lie
    heads = [head_of(part).weight for part in (model, whole)]
    assert torch.equal(*heads)
    tied = [head is part.get_input_embeddings().weight for head, part in zip(heads, (model, whole), strict=True)]
    assert tied[0] is tied[1] and (row.whole or model.config.tie_word_embeddings is tied[0])


@pytest.mark.parametrize("row", [first_of_each_class(row) for row in TRAINED])
def test_scores_and_draws_are_those_of_whole_sequences(row: Row, checkpoint: Checkpoint) -> None:
    if not row.packed:
        with pytest.raises(ValueError, match="use packing=False"):
            policy_of(checkpoint.folder, packed=True)
    rows = Rollout.of_samples(PROMPTS, RESPONSES, groups=(0, 0, 1, 2))
    policy = policy_of(checkpoint.folder, packed=row.packed).eval()
    for packed in {False, row.packed}:
        with torch.no_grad():
            scores = policy(pack(rows, packed=packed)).logprobs
        for score, prompt, response in zip(scores, PROMPTS, RESPONSES, strict=True):
            alone = logprobs_alone(policy.model, prompt, response)
            torch.testing.assert_close(score[: len(response)], alone, rtol=0, atol=1e-5)
    if row.family in NOT_DRAWN:
        with pytest.raises(ValueError, match=r"with a KV cache as without, .*: pass engine=VLLMEngine"):
            check_draws(policy, packed=row.packed)
    else:
        check_draws(policy, packed=row.packed)


def check_draws(policy: PolicyModel, *, packed: bool) -> None:
    """Draws from ragged prompts, with a KV cache, and compares with the scoring pass."""
    engine = TransformersEngine()
    engine.start(policy.model, None, device=torch.device("cpu"), dtype=torch.float32)
    engine.load_weights(policy.model.named_parameters(), 0)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": TEMPERATURE, "eos_token_ids": [1]}
    requests = [request_of(tuple(prompt), n, 1000 + n, **options) for n, prompt in enumerate(PROMPTS)]
    drawn = engine.generate(requests, logprobs=True)
    rows = Rollout.of_samples(PROMPTS, [list(one.token_ids) for one in drawn], groups=(0, 0, 1, 2))
    with torch.no_grad():
        scores = policy(pack(rows, packed=packed)).logprobs
    for one, score in zip(drawn, scores, strict=True):
        assert one.logprobs is not None
        torch.testing.assert_close(one.logprobs, score[: len(one.token_ids)], rtol=0, atol=1e-5)


@pytest.mark.nightly
@each_family
def test_a_step_moves_the_language_model_alone_and_what_is_saved_loads_again(
    row: Row, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    policy = policy_of(checkpoint.folder, packed=row.packed)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    (group,) = policy.parameter_groups()
    text = {*backbone_of(policy.model).parameters(), head_of(policy.model).weight}
    assert set(group["params"]) == text and (len(text) < len(before)) is row.whole
    optimizer = torch.optim.SGD(group["params"], lr=0.1)
    (
        -policy(pack(Rollout.of_samples(PROMPTS, RESPONSES, groups=range(4)), packed=row.packed)).logprobs
    ).sum().backward()
    optimizer.step()
    moved = {name for name, value in policy.model.named_parameters() if not torch.equal(value, before[name])}
    named = {name for name, value in policy.model.named_parameters() if value in text}
    assert moved <= named and len(moved) > 0.5 * len(named)
    policy.model.save_pretrained(tmp_path / "saved")
    again = build_model(tmp_path / "saved")
    assert type(again) is type(policy.model)
    for name, value in policy.model.named_parameters():
        assert torch.equal(again.get_parameter(name), value), name


@pytest.mark.parametrize("row", [row for row in ROWS if row.built.startswith("refused")], ids=lambda row: row.family)
def test_what_cannot_train_on_text_is_refused_with_the_reason(row: Row, checkpoint: Checkpoint) -> None:
    reasons = {
        "paligemma": "differ by .*: its head is not a plain linear layer, or its attention is not causal",
        "inkling2": "the 16 tokens of its vocabulary head, got 14 without its padding: train another model",
        "diffusion_gemma": "to read padded tokens of text alone, got TypeError: .* needs more than text",
        "voxtral_realtime": "to read padded tokens of text alone, got TypeError: .* needs more than text",
    }
    with pytest.raises(ValueError, match=reasons[row.family]):
        policy_of(checkpoint.folder, packed=False)


FILED = [row for row in TRAINED if row.family in ("gemma3", "mistral3", "llama4", "qwen3_5", "qwen2_5_vl", "idefics3")]


@pytest.mark.parametrize("row", FILED, ids=lambda row: row.family)
def test_files_are_read_part_by_part_under_the_names_of_the_checkpoint(row: Row, checkpoint: Checkpoint) -> None:
    built, whole = model_without_numbers(checkpoint.folder), build_model(checkpoint.folder)
    assert built is not None and type(built[0]) is type(whole)
    model, files = built
    read = dict(files.parameters())
    assert list(read) == [name for name, _ in whole.named_parameters()]
    for name, value in whole.named_parameters():
        assert torch.equal(read[name], value), name
    for name, value in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name
    assert model.config.to_dict() == whole.config.to_dict()


def first_token(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """A reward with spread for random policies."""
    return [float(ids[0]) for ids in completion_ids]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.family in ("gemma3", "qwen3_vl")], ids=lambda row: row.family
)
def test_a_run_trains_and_exports_it(row: Row, checkpoint: Checkpoint, tmp_path: Path) -> None:
    module = tiny_module(policy=checkpoint.folder, tokenizer=tiny_tokenizer(), rewards=first_token)
    fit(module, callbacks=[ReferenceKL(0.1, as_loss=True)], data=tiny_prompts(4, 4), max_steps=2)
    module.save_pretrained(tmp_path)
    exported, before = build_model(tmp_path), build_model(checkpoint.folder)
    assert type(exported) is type(before)
    moved = {name for name, value in exported.named_parameters() if not torch.equal(value, before.get_parameter(name))}
    frozen = {name for name, value in module.required_policy.model.named_parameters() if not value.requires_grad}
    assert moved and not moved & frozen and bool(frozen) is row.whole


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "language_model.model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("row", [row for row in ROWS if row.family == "gemma3"], ids=lambda row: row.family)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(LAYER), r"got none for model\.language_model\.layers\.1\.mlp\.down_proj\.weight"),
        (
            lambda weights: weights.update({LAYER.replace("1", "2"): torch.ones(2)}),
            r"those of its configuration, got model\.language_model\.layers\.2\.mlp\.down_proj\.weight, which "
            r"Gemma3ForConditionalGeneration has no place for: correct config\.json",
        ),
    ],
    ids=["missing", "left over"],
)
def test_a_text_weight_that_is_missing_or_left_over_is_named(
    change: Any, message: str, row: Row, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint.folder, tmp_path / row.family)
    rewrite(folder, change)
    assert model_without_numbers(folder) is None
    with pytest.raises(ValueError, match=message):
        build_model(folder)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_function_may_build_a_model_with_towers_which_are_frozen(family: str) -> None:
    policy = build_policy(lambda: tiny_multimodal(family).train(), None, temperature=1.0, packed=True)
    trained = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    assert trained and not [name for name in trained if "visual" in name or "vision" in name or "multi_modal" in name]
    policy(pack(Rollout.of_samples(PROMPTS, RESPONSES, groups=range(4)))).logprobs.sum().backward()


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["t5gemma2"]().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"can load, got .*: Unrecognized configuration class .*T5Gemma2Config",
    ):
        build_model(tmp_path)


def test_a_model_of_text_is_what_it_was() -> None:
    assert text_class_of(CONFIG_MAPPING["qwen2"]()) is not None and not has_towers(CONFIG_MAPPING["qwen2"]())
