"""The order of a run: set by its seed alone, the same for every number of ranks, and found again at any prompt."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.ranks import run_ranks
from kit.support import fit, tiny_module
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_rl import PromptDataModule, RLCallback, Rollout
from lightning_rl.data import Prompt
from lightning_rl.rollouts.collector import distribute_prompts

ROWS = [{"prompt": [2 + n % 9, 3], "n": n} for n in range(11)]
TABLE = datasets.Dataset.from_list(ROWS)
SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "table": lambda: TABLE,
    "stream": lambda: TABLE.to_iterable_dataset(num_shards=2),
}
TRAINED = ("list", "stream")
each_source = pytest.mark.parametrize("kind", SOURCES)


def connected(kind: str, **options: Any) -> PromptDataModule:
    data = PromptDataModule(SOURCES[kind](), 4, **dict[str, Any](epoch_length=3, shuffle_buffer=5) | options)
    data.connect(None, None)
    return data


@pytest.mark.parametrize("kind", ["list", "table"])
@pytest.mark.parametrize(
    ("seed", "start", "order"),
    [(0, 0, [2, 5, 1, 4, 0, 3, 6]), (0, 7, [2, 5, 0, 6, 1, 3, 4]), (3, 0, [1, 5, 6, 0, 2, 3, 4])],
)
def test_an_order_never_changes_between_versions(kind: str, seed: int, start: int, order: list[int]) -> None:
    source = ROWS[:7] if kind == "list" else TABLE.select(range(7))
    data = PromptDataModule(source, 4, seed=seed)
    assert [prompt.columns["n"] for prompt in data.at(range(start, start + 7))] == order


@pytest.mark.nightly
@each_source
@given(
    ranks=st.sampled_from([1, 2, 4]),
    rounds=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=20)
def test_the_ranks_share_the_samples_of_one(kind: str, ranks: int, rounds: list[int], shuffle: bool, seed: int) -> None:
    whole = connected(kind, shuffle=shuffle, seed=seed)
    streams = [connected(kind, shuffle=shuffle, seed=seed) for _ in range(ranks)]
    for share in rounds:
        wanted = share * 4 // ranks
        shares = [
            distribute_prompts(stream.take(wanted * ranks), [wanted] * ranks)[rank]
            for rank, stream in enumerate(streams)
        ]
        together = sorted((prompt for part in shares for prompt in part), key=lambda prompt: prompt.index)
        assert together == whole.take(wanted * ranks)


@pytest.mark.nightly
@each_source
@given(cursor=st.integers(0, 40), shuffle=st.booleans(), seed=st.integers(0, 5))
@settings(max_examples=30)
def test_a_run_resumes_at_any_prompt(kind: str, cursor: int, shuffle: bool, seed: int) -> None:
    rows: list[Prompt] = connected(kind, shuffle=shuffle, seed=seed).take(50)
    again = connected(kind, shuffle=shuffle, seed=seed)
    again.load_state_dict(json.loads(json.dumps({"cursor": cursor})))
    assert again.take(9) == rows[cursor : cursor + 9] and again.position.cursor == cursor + 9


class Samples(RLCallback):
    """Keeps which prompt every sample of this rank continues."""

    name = "samples"

    def __init__(self) -> None:
        self.prompts: dict[int, list[int]] = {}

    @override
    def observe(self, rollout: Rollout) -> None:
        self.prompts |= dict(zip(rollout.sample_ids.tolist(), rollout.prompt_ids.tolist(), strict=True))


def train(kind: str, **trainer: Any) -> tuple[int, dict[int, list[int]]]:
    torch.set_num_threads(1)
    seen, module = Samples(), tiny_module(minibatches_per_rollout=1)
    fit(module, callbacks=[seen], data=connected(kind), max_epochs=1, max_steps=-1, **trainer)
    return module.global_rank, seen.prompts


@pytest.mark.nightly
def test_two_ranks_train_on_the_samples_of_one(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)
    shares = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for kind in TRAINED:
        _, whole = train(kind)
        parts = [{int(sample): prompt for sample, prompt in share[kind].items()} for share in shares]
        assert parts[0] | parts[1] == whole and [len(part) for part in parts] == [24, 24], kind
    assert len({json.dumps(share["list"]) for share in shares}) == 2


if __name__ == "__main__":
    found: dict[str, dict[int, list[int]]] = {}
    number = 0
    for source in TRAINED:
        number, found[source] = train(source, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    (Path(sys.argv[1]) / str(number)).write_text(json.dumps(found))
