"""Ranks that fail together: what each of them raises, given what the others did."""

from typing import Any

import pytest

from lightning_rl import EngineError
from lightning_rl.distributed import collectives, failing_together

FINE, OF_THE_KIND, OTHER = None, EngineError("no server"), ValueError("a bad request")


def draw(failure: Exception | None) -> None:
    with failing_together("a draw", EngineError):
        if failure is not None:
            raise failure


@pytest.mark.parametrize(
    ("mine", "other", "raised", "message"),
    [
        pytest.param(
            FINE,
            OF_THE_KIND,
            EngineError,
            r"every rank, but it failed on \[1\].*rank 1 EngineError: no server",
            id="other",
        ),
        pytest.param(
            FINE, OTHER, RuntimeError, r"but it failed on \[1\].*rank 1 ValueError: a bad request", id="other-kind"
        ),
        pytest.param(OF_THE_KIND, FINE, EngineError, "no server", id="mine"),
        pytest.param(OF_THE_KIND, OF_THE_KIND, EngineError, "no server", id="both"),
        pytest.param(OTHER, FINE, ValueError, "a bad request", id="mine-of-another-kind"),
        pytest.param(OTHER, OF_THE_KIND, ValueError, "a bad request", id="mine-of-another-kind-theirs-not"),
        pytest.param(OF_THE_KIND, OTHER, RuntimeError, r"it failed on \[0, 1\]: see their errors", id="not-alike"),
    ],
)
def test_an_error_of_the_kind_is_raised_on_every_rank_or_on_none(
    mine: Any, other: Any, raised: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = None if other is None else (isinstance(other, EngineError), f"{type(other).__name__}: {other}")
    monkeypatch.setattr(collectives, "process_objects", lambda known: [known, theirs])
    with pytest.raises(raised, match=message) as caught:
        draw(mine)
    assert type(caught.value) is raised
