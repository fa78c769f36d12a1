"""Runs where TRL is installed, and imports nothing else of this repository.

    python tests/translation/in_trl.py fields
    python tests/translation/in_trl.py steps FOLDER

The first prints the options of TRL with their defaults, the second loss and gradient norm of the steps of the script
``grpo.py`` in a folder, whose completions are those of ``completions.json``.
"""

import dataclasses
import inspect
import json
import runpy
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any


def defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass with their defaults; None for one that has to be given."""
    fields = {}
    for field in dataclasses.fields(kind):
        made = field.default_factory
        value = made() if made is not dataclasses.MISSING else field.default
        fields[field.name] = None if value is dataclasses.MISSING else getattr(value, "value", value)
    return fields


def fields() -> dict[str, Any]:
    """Return the options of TRL: GRPOConfig, GRPOTrainer and ``trl grpo``."""
    import transformers

    trl, script = import_module("trl"), import_module("trl.scripts.grpo")
    arguments = list(inspect.signature(trl.GRPOTrainer.__init__).parameters.values())[1:]
    trainer = {one.name: None if one.default is inspect.Parameter.empty else one.default for one in arguments}
    return {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "config": defaults(trl.GRPOConfig),
        "trainer": trainer,
        "script": {**defaults(script.GRPOScriptArguments), **defaults(trl.ModelConfig)},
    }


def steps(folder: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each optimizer step of the folder's script."""
    trl: Any = import_module("trl")
    answers = json.loads((folder / "completions.json").read_text())
    losses: list[float] = []
    trainers: list[Any] = []

    def speak(prompts: list[str], trainer: Any) -> dict[str, Any]:
        asked: dict[str, int] = defaultdict(int)
        prompt_ids, completion_ids = [], []
        for prompt in prompts:
            completion_ids.append(answers[prompt][asked[prompt] % len(answers[prompt])])
            prompt_ids.append(trainer.processing_class(prompt)["input_ids"])
            asked[prompt] += 1
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}  # as transformers does

    class GRPOTrainer(trl.GRPOTrainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, rollout_func=speak)
            trainers.append(self)

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            losses.append(float(loss))
            return loss

    trl.GRPOTrainer = GRPOTrainer
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "grpo.py"))
    (trainer,) = trainers
    microbatches = trainer.args.gradient_accumulation_steps
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    parts = [losses[first : first + microbatches] for first in range(0, len(losses), microbatches)]
    return [{"loss": sum(part), "grad_norm": norm} for part, norm in zip(parts, norms, strict=True)]


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    found = fields() if sys.argv[1] == "fields" else steps(Path(sys.argv[2]).resolve())
    sys.stdout.write(f"\n{json.dumps(found)}\n")
