"""The packages of the quickstart's report are checked before training."""

from importlib.util import find_spec
from typing import Any, cast

import pytest
import sorting_task as task


def test_a_missing_extra_is_named_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    nothing = cast(Any, None)  # is not reached
    with (
        pytest.raises(SystemExit, match=r"expected matplotlib for the report: pip install 'lightning-rl\[report\]'"),
        task.report(nothing, nothing, nothing),
    ):
        pytest.fail("the fit began")
