"""A package that is missing is named with its extra; what one sets up when it is imported stays its own affair."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters.foreign import check_name, load
from adapters.gem import GemEnvironment
from adapters.openenv import OpenEnvEnvironment
from adapters.reasoning_gym import ReasoningGym
from adapters.textarena import TextArenaEnvironment

from lightning_rl.environments.adapters.gym import begin

EXTRAS: dict[str, tuple[str, Callable[[], object]]] = {
    "reasoning-gym": ("reasoning_gym", lambda: ReasoningGym("chain_sum")),
    "gem": ("gem", lambda: GemEnvironment("game:GuessTheNumber-v0-easy")),
    "textarena": ("textarena", lambda: TextArenaEnvironment("GuessTheNumber-v0")),
    "openenv": ("openenv", lambda: OpenEnvEnvironment(object, render=str, parse=str)),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, make = EXTRAS[extra]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=rf"expected {library} .* pip install 'lightning-rl\[{extra}\]'"):
        make()


def test_a_package_that_sets_up_logging_leaves_this_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty.py").write_text("import logging; logging.basicConfig(level=1, force=True); here = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    root = logging.getLogger()
    before = list(root.handlers), root.level
    assert load("chatty", extra="chatty").here and (list(root.handlers), root.level) == before
    monkeypatch.delitem(sys.modules, "chatty")


def test_a_wrong_name_is_answered_by_those_that_hold_it_or_else_the_nearest() -> None:
    known = ["chain_sum", "chain_product", "sudoku"]
    check_name("sudoku", known, option="task", library="gym")
    for name, cure in {
        "CHAIN": "write 'chain_sum' or 'chain_product'",
        "sudoko": "write 'sudoku'",
        "": "look among the 3 that it has",
    }.items():
        with pytest.raises(ValueError, match=f"expected task to be a name that gym knows, got '{name}': {cure}"):
            check_name(name, known, option="task", library="gym")


def test_the_opening_takes_the_place_of_all_but_system_messages() -> None:
    opening = {"role": "user", "content": "Begin."}
    system = {"role": "system", "content": "Be brief."}
    assert (
        begin({"prompt": "play"}, "Begin.") == begin({}, "Begin.") == begin({"prompt": [3, 4]}, "Begin.") == [opening]
    )
    assert begin({"prompt": [system, {"role": "user", "content": "play"}]}, "Begin.") == [system, opening]
