"""``lightning-rl replay`` on what a recipe recorded: exit codes, and what it says."""

import re
import shutil
from pathlib import Path

import pytest
from kit.ranks import run_ranks
from safetensors.torch import load_file, save_file

from lightning_rl.cli.main import main

RECIPE = Path(__file__).parents[1] / "recording" / "recorded_recipe.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe, with its recordings and checkpoints."""
    own = tmp_path_factory.mktemp("run")
    run_ranks(RECIPE, 1, own)
    return own


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    return (ended.value.code, lines) if isinstance(ended.value.code, int) else (2, [str(ended.value.code)])


@pytest.mark.nightly
def test_a_recorded_rollout_is_bitwise_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, folder / "recorded" / "rollout-000001.json")
    assert code == 0
    assert lines[-1] == "bitwise equal"
    assert {line.split()[-1] for line in lines[1:-2]} == {"equal"}


def test_a_changed_tensor_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rollout-000001.safetensors"
    tensors = load_file(folder / "recorded" / path.name)
    row = int(tensors["rollout/rewarded"].nonzero()[-1])
    tensors["rollout/rewards"][row] += 1
    save_file(tensors, path)
    shutil.copy(folder / "recorded" / "rollout-000001.json", tmp_path)
    code, lines = said(capsys, path)
    assert code == 1
    assert lines[-1] == "NOT EQUAL"
    (advantages,) = (line for line in lines if line.startswith("advantages"))
    named = re.search(r"DIFFERS: .* first sample (\d+), position", advantages)
    assert named and (int(named[1]) - 16) // 4 == row // 4, advantages  # in the group of four
    code, lines = said(capsys, path, folder / "recorded" / path.name)
    assert code == 1
    assert lines[2].startswith("rollout/rewards") and f"sample {16 + row}:" in lines[2]


def test_a_recording_equals_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "recorded" / "rollout-000000.json"
    assert said(capsys, path, path)[0] == 0


def test_a_recipe_gives_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "recorded" / "rollout-000001.json"
    assert said(capsys, path, "--recipe", RECIPE, "--", folder)[0] == 0
    code, lines = said(capsys, path, "--recipe", RECIPE, "--", folder, "--loss", "reinforce")
    assert code == 1
    assert any(line.startswith("gradient of pass 1") and "DIFFERS" in line for line in lines)


def test_two_configurations_are_compared_on_one_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "recorded" / "rollout-000001.json"
    code, lines = said(capsys, path, "--against", RECIPE, "--", folder, "--delta", "1e6", "--loss", "own")
    assert code == 0
    assert "callbacks.opsm.delta    0.001 against 1000000.0" in lines
    assert "advantages              equal" in lines
    assert any(line.startswith("rejected in pass 1") and line.endswith("tokens against 0") for line in lines)


@pytest.mark.filterwarnings(  # of Lightning, because the recipe is told another folder than that of its run
    "ignore:.*pre-optimization state.*:UserWarning",
    "ignore:Checkpoint directory:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
)
def test_a_checkpoint_gives_log_probabilities_and_gradient_norm(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "recorded" / "rollout-000001.json"
    code, lines = said(capsys, path, "--recipe", RECIPE, "--checkpoint", folder / "step=6.ckpt", "--", tmp_path)
    assert code == 0, lines
    assert lines[-6].endswith("from which step 2 started")
    assert [line.split()[-1] for line in lines[-5:-2]] == ["equal"] * 3
    code, lines = said(capsys, path, "--recipe", RECIPE, "--checkpoint", folder / "step=2.ckpt", "--", tmp_path)
    assert code == 1
    assert "no recorded step started from them" in lines[-3]


@pytest.mark.nightly
def test_a_loss_of_a_script_needs_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(RECIPE, 1, tmp_path, "--loss", "own")
    path = tmp_path / "recorded" / "rollout-000001.json"
    code, lines = said(capsys, path)
    assert code == 2
    assert "pass --recipe with the script that made the run" in lines[0]
    assert said(capsys, path, "--recipe", RECIPE, "--", tmp_path, "--loss", "own")[0] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_the_ranks_of_a_run_are_replayed_together(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(RECIPE, 2, tmp_path, "--strategy", strategy, "--ranks", "2")
    names = sorted(path.name for path in (tmp_path / "recorded").glob("*.json"))
    assert names == [f"rollout-00000{cycle}-rank{rank}.json" for cycle in (0, 1) for rank in (0, 1)]
    code, lines = said(capsys, tmp_path / "recorded" / names[2])
    assert code == 0, lines
    assert sum(line.startswith("advantages") for line in lines) == 2
    if strategy == "ddp":  # whose checkpoint is a file
        own = ["--strategy", strategy, "--ranks", "2"]
        step = ["--recipe", RECIPE, "--checkpoint", tmp_path / "step=6.ckpt", "--", tmp_path / "again", *own]
        command = tmp_path / "command.py"
        command.write_text("from lightning_rl.cli.main import main\n\nmain()\n")
        run_ranks(command, 2, "replay", tmp_path / "recorded" / names[2], *step)
    (tmp_path / "recorded" / names[3]).unlink()
    assert said(capsys, tmp_path / "recorded" / names[2])[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "last.ckpt"], "expected --recipe with --checkpoint"),
        (["--recipe", RECIPE, "--against", RECIPE], "expected one of a second recording, --recipe and --against"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = said(capsys, "rollout.json", *options)
    assert (code, message in lines[0]) == (2, True)
