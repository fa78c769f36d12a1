"""Writes docs/coming_from_trl.md: what becomes of every option of TRL. Run ``python docs/coming_from_trl.py``."""

import json
from collections.abc import Mapping
from pathlib import Path

from lightning_rl.translation.option import Option
from lightning_rl.translation.trl_options import SCRIPT, SECTIONS, TRAINER, VERSION

PAGE = Path(__file__).with_suffix(".md")
STEPS = PAGE.parents[1] / "tests/data/trl/first_steps.json"
HEAD = f"""# Coming from TRL

`lightning-rl from-trl CONFIG` makes a recipe of a `GRPOConfig` of TRL {VERSION} with the arguments of its
`GRPOTrainer`. Made by `python docs/coming_from_trl.py` from
[the table](../lightning_rl/translation/trl_options.py) that the command itself reads.

```bash
lightning-rl from-trl grpo.py --output recipe.py
lightning-rl from-trl grpo.yaml --output recipe.py --yaml run.yaml --devices 8
lightning-rl from-trl config.json --model Qwen/Qwen2.5-0.5B-Instruct --reward my_rewards.right --prompts prompts.jsonl
```

* **What it reads**: a script with one `GRPOConfig(...)`, and with one `GRPOTrainer(...)` if there is one; YAML as for
  `trl grpo --config`; JSON. A script is parsed and never run. Names are followed to what they are bound to, once, in
  the module or in the function around the call. A value that is computed is refused by name: write it out.
* **What it carries over**: reward functions, data sets, adapters and tools of a script, as code, with the statements
  that they need. Reward functions are called here [as TRL calls them](reward_execution.md), and
  `environment_factory` classes work [as they are](environments.md).
* **What it writes**: a script of Python, and with `--yaml` a file for [LightningCLI](lightning.md), which cannot hold
  code. What has to be known about the options that you set stands at its head. Defaults of TRL are written out where
  ours differ.
* **What it refuses**: each option that would be lost, by name, with a reason. Nothing is written then.
* `--devices` says how many processes the run has, which TRL asks its launcher. `--model`, `--reward` and `--prompts`
  say what a configuration without a `GRPOTrainer` leaves open.

Then look at it before it trains: `lightning-rl doctor recipe.py` ([doctor](doctor.md)).

## What is the same by number

Both sides were given the same model and the same completions, and took two optimizer steps on one rollout. Loss and
gradient norm of the translated recipe are within 1e-5 of TRL's in [a test](../tests/cli/test_from_trl.py), which reads
[the record](../tests/data/trl/first_steps.json) of what TRL computed; `make bench-trl` installs TRL in an environment
of its own and compares anew ([test](../tests/translation/test_in_trl.py)). In the second step the ratio is no longer 1.

| configuration | TRL's loss, step 1 | gradient norm | loss, step 2 | gradient norm |
|---|---|---|---|---|
"""
WORDS = """
The configurations stand in [translated.py](../tests/kit/translated.py). What was not compared by number: vLLM, several
devices, `bf16`.

## The options

*same*: it means here what it means there. *different*: read the last column. *refused*: any value but TRL's default
ends the translation. An empty second column means that there is nothing to set.
"""
COLUMNS = """
| option | here | | what has to be known |
|---|---|---|---|
"""


def rows(options: Mapping[str, Option]) -> str:
    """The lines of a table."""
    return "".join(
        f"| `{option.name}` | {option.ours} | {option.verdict} | {option.says} |\n" for option in options.values()
    )


def page() -> str:
    """The whole page."""
    steps = json.loads(STEPS.read_text())
    numbers = "".join(
        f"| `{case}` | " + " | ".join(f"{step[name]:.5f}" for step in both for name in ("loss", "grad_norm")) + " |\n"
        for case, both in steps.items()
    )
    sections = {**SECTIONS, "Arguments of GRPOTrainer": TRAINER, "Further options of trl grpo": SCRIPT}
    tables = "".join(f"\n### {name}\n{COLUMNS}{rows(options)}" for name, options in sections.items())
    return HEAD + numbers.replace("-0.00000", "0.00000") + WORDS + tables


if __name__ == "__main__":
    PAGE.write_text(page())
