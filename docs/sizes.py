"""Writes the table of sizes in docs/scale.md, with ``lightning-rl plan`` for each row. Run ``python docs/sizes.py``."""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

from lightning_rl.cli import plan
from lightning_rl.cli.parser import command_line

PAGE = Path(__file__).with_name("scale.md")
BEGIN, END = "<!-- docs/sizes.py writes what follows -->\n", "<!-- up to here -->\n"

SAMPLES, MEAN_TOKENS = 512, 2000  # of a rollout, of a response
MEMORY, BANDWIDTH, FLOPS = 80e9, 3.35e12, 989e12  # of a device: bytes, bytes and bfloat16 operations a second
USED_MEMORY, USED_BANDWIDTH, USED_FLOPS = 0.9, 0.4, 0.4  # shares that an engine, decoding and training reach
PASSES = 10  # operations for a parameter and token: scores 2, update 6, recomputed activations 2
STATE, SENT, LINK = 16, 2, 10e9  # bytes of a parameter: trained, sent; bytes a second of the slowest link
SLOTS = 256


class Model(NamedTuple):
    """A size of model.

    Attributes:
        parameters: how many.
        cache: bytes of keys and values for a token, in bfloat16.
        engine: devices that one engine lies on.
    """

    parameters: float
    cache: int
    engine: int


MODELS = {
    "7B": Model(7.6e9, 2 * 28 * 4 * 128 * 2, 1),
    "32B": Model(32.8e9, 2 * 64 * 8 * 128 * 2, 2),
    "72B": Model(72.7e9, 2 * 80 * 8 * 128 * 2, 4),
}
ROWS = (("7B", 8), ("7B", 16), ("32B", 16), ("32B", 32), ("72B", 32), ("72B", 64))


def words_of(name: str, devices: int) -> list[str]:
    """The command for a size on a number of training devices; a generation device of it is one engine."""
    model = MODELS[name]
    weights, bandwidth = SENT * model.parameters, model.engine * BANDWIDTH * USED_BANDWIDTH
    room = model.engine * MEMORY * USED_MEMORY - weights
    slots = min(SLOTS, int(room / (model.cache * MEAN_TOKENS)))
    together = slots * bandwidth / (weights + slots * model.cache * MEAN_TOKENS)
    step = SAMPLES * MEAN_TOKENS * PASSES * model.parameters / (devices * FLOPS * USED_FLOPS)
    options = {
        "--samples": SAMPLES, "--mean-tokens": MEAN_TOKENS, "--max-tokens": 16_000, "--slots": slots,
        "--step-seconds": f"{step:.3g}", "--training-devices": devices, "--sync-seconds": f"{weights / LINK:.2g}",
        "--tokens-per-second": round(together), "--tokens-per-second-alone": round(bandwidth / weights),
    }  # fmt: skip
    return ["plan", *(str(word) for pair in options.items() for word in pair), "--max-staleness", "1", "2", "4"]


def row(name: str, devices: int) -> str:
    """A row of the table."""
    model, words, said = MODELS[name], words_of(name, devices), io.StringIO()
    options = dict(zip(words[1::2], words[2::2], strict=False))
    with redirect_stdout(said):
        plan.run(command_line().parse_args(words), [])
    found = re.search(
        r"\n(\d+) generation devices .*max_staleness=(\d+): .* idle for (\d+%) .* takes (\S+) s", said.getvalue()
    )
    assert found is not None
    engines, staleness, idle, seconds = found.groups()
    generating = int(engines) * model.engine
    cells = [
        name, devices, f"{STATE * model.parameters / devices / 1e9:.1f} GB", f"{options['--sync-seconds']} s",
        f"{options['--step-seconds']} s", f"{options['--tokens-per-second']} at {options['--slots']}",
        f"{engines} x {model.engine}", f"{generating / devices:.2g}", staleness, idle, f"{seconds} s",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def table() -> str:
    """The whole of it, with one command to try."""
    head = (
        "model", "training devices", "states on each", "sync", "step", "tokens/s of an engine at slots",
        "engines x devices", "generation devices for one that trains", "`max_staleness`", "trainer idle", "a rollout",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(row(*which) for which in ROWS)]
    return "\n".join(
        [*lines, "", "The first row again:", "", "```bash", f"lightning-rl {' '.join(words_of(*ROWS[0]))}", "```", ""]
    )


def main() -> None:
    """Writes the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
