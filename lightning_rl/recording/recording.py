"""Recording: the two files of a recorded rollout, tensors as safetensors and everything else as JSON.

``rollout-000012.safetensors`` holds ``rollout/<field>`` (every field of the Rollout) and ``sampled/scored`` ([B] bool,
rows with a reward before any mask). For each pass over the rollout, ``pass/<number>/`` holds the ``Outputs`` of the
policy that a view has, by name, in the step that trained the row, and ``gradient``, that of the loss with respect to
``logprobs``, each [B, T].
``rollout-000012.json`` holds the rest; see :class:`Recording`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.recording.recorded_algorithm import restore_algorithm
from lightning_rl.rollout import Rollout
from lightning_rl.utils.atomic_write import write_atomically

FORMAT = 3
ENTRIES = {"rollout", "rank", "ranks", "device", "threads", "versions", "options", "algorithm", "states", "plan"}
ENTRIES |= {"steps", "samples"}
NUMBERS = ("rollout", "rank", "ranks", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Rollout with all inputs of its signal, loss and gradient.

    Attributes:
        header: JSON values: ``rollout`` (its number), ``rank``, ``ranks``, ``device``, ``threads``, ``versions``,
            ``options`` of the module, ``algorithm`` (:mod:`lightning_rl.recording.recorded_algorithm`), ``states`` of
            the callbacks before the signal, ``plan`` (rows of each microbatch of each minibatch), ``steps`` (for each
            optimizer step: parts of the loss, gradient norm, hash of the weights before it, states of the callbacks),
            and ``samples`` as text; ``pictures`` are those of prompts, small, by group.
        tensors: CPU tensors by name.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def rollout(self) -> Rollout:
        """The finished rollout."""
        fields = [name for name in self.tensors if name.startswith("rollout/")]
        return Rollout.from_state({name.removeprefix("rollout/"): self.tensors[name] for name in fields})

    def algorithm(self) -> Algorithm:
        """Return a new instance of the recorded algorithm.

        Raises:
            ValueError: If a part is user code, which only the recipe has.
        """
        return restore_algorithm(self.header["algorithm"])

    @property
    def minibatches(self) -> int:
        """Number of optimizer steps per pass."""
        return len(self.header["plan"])

    def of_step(self, number: int, what: str) -> Tensor | None:
        """Return a [B, T] tensor of the pass of optimizer step ``number``, or None if it was not recorded."""
        return self.tensors.get(f"pass/{number // self.minibatches}/{what}")

    def save(self, folder: Path) -> Path:
        """Write both files atomically, the JSON last, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = stem_of(*(self.header[key] for key in ("rollout", "rank", "ranks")))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        text = json.dumps({"format": FORMAT, **self.header}, indent=1)
        write_atomically(folder / f"{stem}.safetensors", lambda part: save_file(tensors, part))
        write_atomically(folder / f"{stem}.json", lambda part: part.write_text(text, encoding="utf-8"))
        return folder / f"{stem}.json"

    @staticmethod
    def load(path: str | Path) -> "Recording":
        """Load a recording from the path of either file, without executing anything in them.

        Raises:
            ValueError: Naming the file and the fault, if it is not a recording of this format.
            FileNotFoundError: If a file does not exist.
        """
        text, file = Path(path).with_suffix(".json"), Path(path).with_suffix(".safetensors")
        for part in (text, file):
            if not part.is_file():
                cure = "a recording is a .json and a .safetensors of one name in one folder"
                raise FileNotFoundError(f"expected {part}, got no such file: {cure}")
        try:
            header = json.loads(text.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as wrong:
            raise ValueError(f"expected the JSON of a recording in {text}, got an invalid file: {wrong}") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            got = header.get("format") if isinstance(header, dict) else f"a {type(header).__name__}"
            raise ValueError(f"expected a recording of format {FORMAT}, got {got!r:.80} in {text}")
        if missing := sorted(ENTRIES - header.keys()):
            raise ValueError(f"expected a recording of RolloutRecorder, got {text} without {missing[0]}")
        if wrong := [name for name in NUMBERS if type(header[name]) is not int]:
            raise ValueError(f"expected {wrong[0]} to be an integer, got {header[wrong[0]]!r:.80} in {text}")
        try:
            recording = Recording(header=header, tensors=load_file(file))
            rows = len(recording.rollout)
        except (SafetensorError, ValueError, TypeError, KeyError) as damaged:
            raise ValueError(f"expected the tensors of a recording in {file}, got an invalid file: {damaged}") from None
        recorded = [name for name in recording.tensors if not name.startswith("rollout/")]
        wrong = [name for name in recorded if recording.tensors[name].shape[:1] != (rows,)]
        if "sampled/scored" not in recorded or wrong:
            got = f"{wrong[0]!r} of other rows" if wrong else "no sampled/scored"
            raise ValueError(f"expected tensors of {rows} samples in {file}, got {got}")
        return recording

    @staticmethod
    def of_all_ranks(path: str | Path) -> "list[Recording]":
        """Return the recordings of all ranks in order, given the path of one.

        Raises:
            FileNotFoundError: If a recording is missing.
        """
        recording = Recording.load(path)
        number, ranks = recording.header["rollout"], recording.header["ranks"]
        names = [f"{stem_of(number, rank, ranks)}.json" for rank in range(ranks)]
        return [recording] if ranks == 1 else [Recording.load(Path(path).with_name(name)) for name in names]


def stem_of(number: int, rank: int, ranks: int) -> str:
    """Return the name of a recording's files without suffix."""
    return f"rollout-{number:06d}" + (f"-rank{rank}" if ranks > 1 else "")
