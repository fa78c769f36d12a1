"""``lightning-rl consistency``: the table, its exit code, and what it says of a wrong engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import tiny_model
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl.cli import consistency
from lightning_rl.cli.consistency import CASES, HEADER
from lightning_rl.cli.main import main
from lightning_rl.generation import TransformersEngine


def folder_of(path: Path, family: str = "qwen2", **options: Any) -> str:
    tiny_model(family, dtype=torch.float32, **options).save_pretrained(path)
    return str(path)


def table_of(model: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(["consistency", model, "--prompts", "4", "--tokens", "6"])
    lines = capsys.readouterr().out.splitlines()
    return ended.value.code, lines[next(place for place, line in enumerate(lines) if HEADER[1] in line) :]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_table_has_a_row_for_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = table_of(folder_of(tmp_path), capsys)
    assert code == 0
    assert all(name in lines[0] for name in HEADER)
    rows = {
        case.name: line.removeprefix(case.name).split()
        for case, line in zip(CASES["transformers"], lines[1:], strict=False)
    }
    assert all(float(row[0]) < 1e-4 for name, row in rows.items() if "bfloat16" not in name)
    assert 1e-4 < float(rows["bfloat16"][0]) < 1
    assert rows['consistency="bitwise"'] == rows["bitwise, bfloat16"] == ["0", "0", "0", "-"]
    assert rows["default"][-1] == "(rounding)"
    assert lines[-1].startswith("48 tokens")


class StaleEngine(TransformersEngine):
    """Engine that keeps one tensor of a layer at other values."""

    @override
    def start(self, model: PreTrainedModel, *args: Any, **options: Any) -> None:
        model = tiny_model("qwen2", dtype=torch.float32)
        super().start(model, *args, **options)

    @override
    def load_stream(self, weights: Any, version: int) -> None:
        super().load_stream(weights, version)
        with torch.no_grad():
            self._model_for("load_stream").get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.1)


def test_an_engine_with_a_stale_tensor_fails_with_its_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(consistency.ENGINES, "transformers", StaleEngine)
    monkeypatch.setitem(CASES, "transformers", CASES["transformers"][:2])
    code, lines = table_of(folder_of(tmp_path), capsys)
    assert code == 1
    assert [line.split()[-1] for line in lines[1:3]] == ["model.layers.1.mlp.down_proj"] * 2


def test_a_model_that_cannot_be_packed_is_compared_without_packing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "transformers", CASES["transformers"][:1])
    code, lines = table_of(folder_of(tmp_path, "lfm2"), capsys)
    assert code == 0
    assert lines[1].endswith("(rounding)")


@pytest.mark.parametrize("model", ["missing/folder/of", "nosuch:function", "json:nosuch"])
def test_a_wrong_model_ends_with_one_sentence(model: str) -> None:
    with pytest.raises(SystemExit, match=r"^(policy: )?expected .*, got "):
        main(["consistency", model])


def test_a_case_that_a_model_refuses_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = [case for case in CASES["transformers"] if case.name in ("default", "compile=True")]
    monkeypatch.setitem(CASES, "transformers", tuple(compiled))
    code, lines = table_of(folder_of(tmp_path, "qwen3_moe", num_experts=64), capsys)
    assert code == 0
    assert "expected a dense model with compile=" in lines[2]
    assert "model.layers.0.mlp.gate: no token visits" in lines[-2]
