"""Peak memory of the weight stream from a sharded policy to the embedded engine, against its bound.

    python benchmarks/weight_streaming.py

Two ranks on this machine, gloo, float32. Counted at torch's allocator and not in pages, which a process keeps after it
has freed them. "Scratch" is what gloo copies within a collective; it is not ours, and other backends have none.
The bound is the larger of the largest parameter and the largest module that engines fuse (q, k, v; gate, up), and for
FSDP1, which gathers whole units, the largest unit more.
"""

import json
import sys
import tempfile
from pathlib import Path

from jsonargparse import auto_cli

HEAD = ("strategy", "model", "own shard", "parameter", "fused", "FSDP unit", "streaming", "bound", "peak", "scratch")


def main(vocabulary: int = 8192, width: int = 768, layers: int = 4, inner: int = 3072, ranks: int = 2) -> None:
    """Print one row for each strategy in MB, and fails if a bound is broken; by default a model of 200 MB."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from kit import streaming_memory  # ranks on loopback are the tests'
    from kit.ranks import run_ranks

    shape = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    print("MB, the largest of all ranks; peak = own shard + streaming\n")
    print("".join(f"{title:>11}" for title in HEAD))
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(streaming_memory.__file__, ranks, folder, ",".join(streaming_memory.SPLIT), json.dumps(shape))
        for strategy in streaming_memory.SPLIT:
            found = json.loads((Path(folder) / strategy).read_text())
            bound = max(found["parameter"], found["fused"]) + (found["unit"] if strategy == "fsdp1" else 0)
            shard = -(-found["model"] // ranks)
            row = (found["model"], shard, found["parameter"], found["fused"], found["unit"])
            row = (*row, found["own"], bound, shard + found["own"], found["scratch"])
            print(f"{strategy:>11}" + "".join(f"{size / 1e6:>11.1f}" for size in row))
            broken += [strategy] if found["own"] > bound + 1e6 else []
    if broken:
        raise SystemExit(f"above the bound: {', '.join(broken)}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
