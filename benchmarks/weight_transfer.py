"""Seconds of a push of the weights into one real server: by broadcast, and through a file.

    .venv-vllm/bin/python benchmarks/weight_transfer.py

Both take turns on the same server (``lightning-rl serve``, on a CPU), with a new client for every push. The
first push of a client makes the group, or warms the page cache; the second one is measured, from the trainer's first
tensor to the server's last call. CPU seconds are those of the trainer and of all processes of the server. The scores of
a row are compared with the trainer's after each push. Where vLLM is not installed nothing is measured.
"""

import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from jsonargparse import auto_cli
from measure import Report, Seconds
from transformers import PreTrainedModel

from lightning_rl import VLLMServerEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # whose are servers on loopback
from kit.served import Served
from kit.served_runs import an_engine
from kit.vllm_models import a_model, moved, synced

TRANSFERS = ("file", "broadcast")


def main(
    pushes: int = 4, width: int = 512, layers: int = 8, vocabulary: int = 8192, storage: Path | None = None
) -> None:
    """Print medians and the ratio to the file.

    Args:
        pushes: that are measured, by each way.
        width: of the model's hidden states.
        layers: of the model.
        vocabulary: of the model.
        storage: of the file; by default the folder for temporary files.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = {
        "hidden_size": width,
        "head_dim": width // 4,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "initializer_range": 0.03,  # or rounding alone would be above the bound
    }
    model = a_model("qwen2", architectures=["Qwen2ForCausalLM"], **shape)
    size = sum(parameter.nbytes for parameter in model.parameters())
    report, seconds, joins = Report("weight_transfer"), {name: Seconds([], []) for name in TRANSFERS}, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(model, Path(folder))
        try:
            for _ in range(pushes):
                for transfer in TRANSFERS:
                    engine = an_engine(served, canary=False, transfer=transfer, storage=storage)
                    engine.start(model, None, device=model.device, dtype=model.dtype)
                    engine.expect(model.named_parameters())
                    begin = time.perf_counter()
                    synced(engine, model, 0)
                    first = time.perf_counter() - begin
                    moved(model, 0.01)
                    wall, cpu = time.perf_counter(), time.process_time() + cpu_seconds(served)
                    synced(engine, model, 1)
                    wall, cpu = time.perf_counter() - wall, time.process_time() + cpu_seconds(served) - cpu
                    seconds[transfer].add(wall, cpu)
                    joins += [first - wall] if transfer == "broadcast" else []
                    report.bound(f"score by {transfer}, difference", difference(engine, model), at_most=1e-4)
                    engine.close()
        finally:
            served.stop()
    report.table(f"a push of {size / 1e6:.0f} MB in float32", seconds, base="file")
    report.rows("the first push of a group takes longer by", ("seconds",), [(f"{max(joins):.2f} at most",)])
    report.finish()


def cpu_seconds(served: Served) -> float:
    """Of all processes of a server."""
    times = [process.cpu_times() for process in served.family()]
    return sum(each.user + each.system for each in times)


@torch.no_grad()
def difference(engine: VLLMServerEngine, model: PreTrainedModel) -> float:
    """Largest difference of a log-probability of a row between server and trainer."""
    row = torch.randint(model.config.vocab_size, (60,), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return float((engine.score([row.tolist()])[0] - expected).abs().max())


if __name__ == "__main__":
    if find_spec("vllm") is None:
        print("not measured: vLLM is not installed here; .venv-vllm has it")
    else:
        auto_cli(main, as_positional=False)
