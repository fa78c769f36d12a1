"""Weights on shared storage: written in parts, and read completely or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_rl.generation.weights.weight_folder import read_weights, write_weights


def some_weights(number: int = 7) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        f"layer.{n}": torch.randn(4, n + 1, generator=draw).to([torch.float32, torch.bfloat16][n % 2])
        for n in range(number)
    }


@pytest.mark.parametrize(("part_bytes", "parts"), [(1, 7), (100, 3), (2**30, 1)])
def test_what_is_written_is_read_in_its_order(part_bytes: int, parts: int, tmp_path: Path) -> None:
    weights = some_weights()
    write_weights(weights.items(), tmp_path / "a" / "0", part_bytes=part_bytes)
    assert len(list((tmp_path / "a" / "0").glob("*.safetensors"))) == parts
    found = list(read_weights(tmp_path / "a" / "0"))
    assert [name for name, _ in found] == list(weights)
    assert all(torch.equal(tensor, weights[name]) and tensor.dtype == weights[name].dtype for name, tensor in found)


def test_no_more_than_a_part_is_held(tmp_path: Path) -> None:
    alive: list[int] = []

    class Counted(Tensor):
        pass

    def stream() -> Iterator[tuple[str, Tensor]]:
        for number in range(9):
            written = len(list(tmp_path.glob("0.part/*.safetensors")))
            alive.append(number - 3 * written)
            yield str(number), torch.zeros(10)

    write_weights(stream(), tmp_path / "0", part_bytes=120)
    assert max(alive) <= 2 + 1, "three tensors of 40 bytes make a part"


def test_a_stream_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.zeros(2)
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        write_weights(stream(), tmp_path / "0", part_bytes=1)
    assert not list(tmp_path.iterdir())


def test_damage_is_found_before_the_first_tensor_is_read(tmp_path: Path) -> None:
    write_weights(some_weights().items(), tmp_path / "0", part_bytes=100)
    last = max((tmp_path / "0").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"expected weights in {last}, got a damaged file"):
        read_weights(tmp_path / "0")
    with pytest.raises(FileNotFoundError, match="which does not exist here: pass storage= on all machines"):
        read_weights(tmp_path / "1")
