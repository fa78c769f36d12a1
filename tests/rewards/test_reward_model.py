"""RewardModel: the score of another model, the same in any batch, with any padding in its configuration."""

import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import EOS, VOCABULARY, tiny_policy, tiny_tokenizer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lightning_rl.rewards import RewardModel

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.5}
DECODER = {"num_key_value_heads": 2, "num_labels": 1, "bos_token_id": None, "eos_token_id": EOS}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification, DECODER),
    "llama": (LlamaConfig, LlamaForSequenceClassification, DECODER),
    "bert": (BertConfig, BertForSequenceClassification, {"num_labels": 1}),
    "roberta": (RobertaConfig, RobertaForSequenceClassification, {"num_labels": 1, "pad_token_id": 1}),
}
IDS = [[2, 3, 4, 5, 6, 7, 8], [3], [5, EOS], [9, 0], [4, 4, 4, 4], [EOS], [0], [7, 15, 15]]
TEXTS = ["a b c", "a", "d </s>", "e", "b b b b", "c </s>", "n", "f n n"]


def classifier_of(kind: str = "qwen2", *, pad: int | None = None, **options: Any) -> nn.Module:
    config, model, more = KINDS[kind]
    built = config(**{**SHAPE, "pad_token_id": pad, **more, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifier = model(built)
    if pad is not None:  # weights are drawn otherwise, with zeros for the padding
        classifier.load_state_dict(classifier_of(kind, **options).state_dict())
    return classifier


def alone(ids: list[int], **options: Any) -> float:
    """Return the output of the model for one text, without padding and without the library."""
    model = classifier_of(**options).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def scores(reward: RewardModel, prompts: list[Any], completion_ids: list[list[int]]) -> list[float | None]:
    return reward(prompts, [""] * len(prompts), completion_ids=completion_ids)


def of_policy(build: Any, **options: Any) -> RewardModel:
    return RewardModel(model=build, tokens="policy", device="cpu", **options)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("pad", [None, EOS, 0, 15], ids=lambda pad: f"pad-{pad}")
@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 8, 1000])
def test_a_text_scores_as_alone_in_any_batch_and_for_any_padding(
    kind: str, pad: int | None, max_tokens_per_microbatch: int
) -> None:
    reward = of_policy(partial(classifier_of, kind, pad=pad), max_tokens_per_microbatch=max_tokens_per_microbatch)
    wanted = [alone([2, *ids], kind=kind) for ids in IDS]
    assert len({round(value, 3) for value in wanted}) == len(wanted)  # they differ, so a wrong position would show
    assert scores(reward, [[2]] * len(IDS), IDS) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_too(kind: str) -> None:
    ids = [[token if token != 1 else 2 for token in row] for row in IDS]  # 1 is what RoBERTa was trained to pad with
    together = scores(of_policy(partial(classifier_of, kind)), [[2]] * len(ids), ids)
    each = scores(of_policy(partial(classifier_of, kind), max_tokens_per_microbatch=1), [[2]] * len(ids), ids)
    assert together == pytest.approx(each, rel=1e-4, abs=1e-5)


def test_what_the_models_own_padding_would_do_is_wrong() -> None:
    model = classifier_of(pad=EOS).eval()
    with torch.no_grad():
        own = model(input_ids=torch.tensor([[5, EOS]])).logits[0, 0].item()
    assert own != pytest.approx(alone([5, EOS]), rel=1e-2)  # the silent failure that the reward does not have
    assert scores(of_policy(partial(classifier_of, pad=EOS)), [[5]], [[EOS]]) == pytest.approx(
        [alone([5, EOS])], rel=1e-4
    )


def test_more_rows_than_token_ids() -> None:
    ids = [[token] for token in range(VOCABULARY)]
    found = scores(of_policy(classifier_of), [[2]] * VOCABULARY, ids)
    assert found == pytest.approx([alone([2, token]) for token in range(VOCABULARY)], rel=1e-4, abs=1e-5)


def folder_of(model: Any, folder: Path, *, template: str | None = None) -> Path:
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder_with_its_own_tokenizer(tmp_path: Path) -> None:
    reward = RewardModel(model=folder_of(classifier_of(), tmp_path), device="cpu")
    ids = [tiny_tokenizer()(f"a b {text}")["input_ids"] for text in TEXTS]
    assert reward(["a b "] * 8, TEXTS) == pytest.approx([alone(row) for row in ids], rel=1e-4, abs=1e-5)


TEMPLATE = "{% for m in messages %}{{ 'a ' if m['role'] == 'user' else 'b ' }}{{ m['content'] }} </s> {% endfor %}"


def test_chat_prompts_go_through_the_models_chat_template(tmp_path: Path) -> None:
    reward = RewardModel(model=folder_of(classifier_of(), tmp_path, template=TEMPLATE), device="cpu")
    chat = [[{"role": "user", "content": "c d"}]] * 2
    values = reward(chat, [[{"role": "assistant", "content": text}] for text in ("e", "f g")])
    ids = [tiny_tokenizer()(f"a c d </s> b {text} </s>")["input_ids"] for text in ("e", "f g")]
    assert values == pytest.approx([alone(row) for row in ids], rel=1e-4, abs=1e-5)


def test_token_ids_need_the_policys_tokenizer(tmp_path: Path) -> None:
    reward = RewardModel(model=folder_of(classifier_of(), tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r'got token ids: pass tokens="policy" if it has that of the policy'):
        reward([[2, 3]], ["d"])
    with pytest.raises(ValueError, match="expected completion_ids of 1 completions for RewardModel"):
        of_policy(classifier_of)([[2]], ["d"])


def test_a_model_whose_head_would_be_random_is_refused(tmp_path: Path) -> None:
    reward = RewardModel(model=folder_of(tiny_policy(), tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"to be a reward model, but it has no weights for \['score.weight'\]"):
        reward(["a"], ["b"])


class Summing(nn.Module):
    """Sum of the ids times the label, as logits [B, labels]."""

    def __init__(self, labels: int, *, minding: bool = False) -> None:
        super().__init__()
        self.labels, self.minding = labels, minding

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the output."""
        ids = input_ids * attention_mask * (input_ids.shape[1] if self.minding else 1)
        return ids.sum(-1).float()[:, None] * torch.arange(self.labels)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"label": 1}, 5.0),
        ({"label": 2}, 10.0),
        ({"label": -1}, 10.0),
    ],
)
def test_labels(options: dict[str, Any], value: float) -> None:
    assert scores(of_policy(partial(Summing, 3), **options), [[2]], [[3]]) == pytest.approx([value])


@pytest.mark.parametrize("label", [None, 3, -4])
def test_a_label_has_to_be_one_of_them(label: int | None) -> None:
    with pytest.raises(ValueError, match=rf"expected label= to index the reward model's 3 labels, got {label}"):
        scores(of_policy(partial(Summing, 3), label=label), [[2]], [[3]])


def test_a_model_that_minds_its_padding_is_refused_unless_it_gets_none() -> None:
    minding = partial(Summing, 2, minding=True)
    with pytest.raises(
        ValueError, match=r"expected the reward model to score a text the same beside a longer one as al"
    ):
        scores(of_policy(minding, label=1), [[2]], [[3]])
    assert scores(of_policy(minding, label=1, max_tokens_per_microbatch=1), [[2]] * 2, [[3], [3, 4]]) == [10.0, 27.0]


def test_too_long_a_text_takes_its_row_out() -> None:
    with pytest.warns(
        UserWarning, match=r"1 texts are longer than .* limit of 64 tokens, the longest has 65: their rows get no"
    ):
        values = scores(of_policy(classifier_of), [[2]] * 2, [[3] * 64, [3] * 63])
    assert (
        values[0] is not None and math.isnan(values[0]) and values[1] == pytest.approx(alone([2] + [3] * 63), rel=1e-4)
    )


def test_ids_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected token ids below the reward model's vocabulary of 16, got 16"):
        scores(of_policy(classifier_of), [[2]], [[16]])


def test_it_is_frozen_in_evaluation_mode_and_draws_no_random_number() -> None:
    reward = of_policy(partial(classifier_of, attention_dropout=0.5))
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        values = scores(reward, [[2]], [[3]])
    assert values == pytest.approx([alone([2, 3])], rel=1e-5)  # in float32 all the same
    assert torch.equal(torch.get_rng_state(), state)
    module = reward.scorer.module
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


def test_by_default_it_runs_on_a_device_of_this_machine() -> None:
    """A build of torch for GPUs names one where there is no driver, too."""
    reward = RewardModel(model=classifier_of, tokens="policy")
    assert scores(reward, [[2]], [[3]]) == pytest.approx([alone([2, 3])], rel=1e-3)


def test_it_is_built_at_the_first_call_and_a_copy_builds_its_own(tmp_path: Path) -> None:
    reward = RewardModel(model=tmp_path / "later", device="cpu")
    early = pickle.loads(pickle.dumps(reward))
    folder_of(classifier_of(), tmp_path / "later")
    assert early == reward and early(["a"], ["b"]) == reward(["a"], ["b"])
    late = pickle.loads(pickle.dumps(reward))
    assert "scorer" not in vars(late) and late(["a"], ["b"]) == reward(["a"], ["b"])
