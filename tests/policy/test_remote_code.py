"""Code that lies beside weights is never run: for policies, tokenizers and reward models, without a question."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rl.policy.build import build_model, build_tokenizer
from lightning_rl.rewards import RewardModel

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizer

Path({left!r}).touch()


class Config(PretrainedConfig):
    model_type = "own"


class Model(PreTrainedModel):
    config_class = Config


class Tokenizer(PreTrainedTokenizer):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code beside it that writes a file when it runs, and a terminal that answers yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = tmp_path / "own"
    own.mkdir()
    (own / "code.py").write_text(CODE.format(left=str(tmp_path / "left")))
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model"}
    auto = {name: f"code.{kind}" for name, kind in {**kinds, "AutoModelForSequenceClassification": "Model"}.items()}
    (own / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (own / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return own


@pytest.mark.parametrize("load", [build_model, lambda own: build_tokenizer(None, own)], ids=["policy", "tokenizer"])
def test_the_message_says_how_to_trust_it(load: Callable[[str], object], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"code in a checkpoint is never run; if you trust it"):
        load(str(folder))
    assert not (folder.parent / "left").exists()


def test_a_reward_model_does_not_run_it(folder: Path) -> None:
    reward = RewardModel(model=str(folder))
    with pytest.raises(ValueError, match="contains custom code which must be executed"):
        reward.reader  # noqa: B018
    with pytest.raises(ValueError, match="contains custom code which must be executed"):
        reward(["p"], ["c"], completion_ids=[[1]])
    assert not (folder.parent / "left").exists()
