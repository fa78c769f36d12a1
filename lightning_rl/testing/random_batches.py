"""Generated batches: small ragged rows of every kind."""

from hypothesis import strategies as st

from lightning_rl.testing.properties.rows import MAX_LENGTH, PROMPTS, Row

MAX_ROWS = 7


def batches(min_rows: int = 1) -> st.SearchStrategy[tuple[Row, ...]]:
    """Return a strategy for batches of ``min_rows`` to seven rows; the simplest row has one token and reward 0."""
    rarely = st.sampled_from((False, False, False, True))
    row = st.builds(
        Row,
        tokens=st.lists(st.booleans().map(lambda hole: not hole), min_size=1, max_size=MAX_LENGTH).map(tuple),
        prompt=st.integers(0, PROMPTS - 1),
        reward=st.integers(0, 3),
        rewarded=rarely.map(lambda left_out: not left_out),
        trained=rarely.map(lambda left_out: not left_out),
        truncated=rarely,
    )
    return st.lists(row, min_size=min_rows, max_size=MAX_ROWS).map(tuple)
