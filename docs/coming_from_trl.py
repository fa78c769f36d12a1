"""Writes docs/coming_from_trl.md, the options of TRL. Run ``python docs/coming_from_trl.py``."""

import json
from itertools import groupby
from pathlib import Path

from lightning_rl.translation.trl_options import SECTIONS, VERSION, Table

PAGE = Path(__file__).with_suffix(".md")
STEPS = PAGE.parents[1] / "tests/data/trl/first_steps.json"
HEAD = f"""# Coming from TRL

`lightning-rl from-trl CONFIG` writes a recipe from a `GRPOConfig` of TRL {VERSION}. It reads the
[table](../lightning_rl/translation/trl_options.py) from which `python docs/coming_from_trl.py` makes this page.

```bash
lightning-rl from-trl grpo.py --output recipe.py --model some/model --reward my_rewards.right --prompts some/data
lightning-rl from-trl grpo.yaml --output recipe.py --devices 8
```

* **Input**: a script with one `GRPOConfig(...)`, or YAML or JSON for `trl grpo --config`. A script is parsed and never
  run: its options have to be written out, in the call or in a name that is assigned once.
* **Output**: a script whose docstring lists the differences from TRL. Where defaults differ, TRL's are written out.
* **Refused**: an option that would be lost ends the translation, with its name and a reason.
* `--devices` is the number of processes, which TRL takes from its launcher.

Check the recipe before it trains: `lightning-rl doctor recipe.py` ([doctor](doctor.md)).

## Arguments of GRPOTrainer

These are objects, so write them into the recipe.

| argument | here |
|---|---|
| `model` | `policy`: a name, or a function that builds the model |
| `reward_funcs` | `rewards`, [called as TRL calls them](reward_execution.md) |
| `reward_processing_classes` | `RewardModel(model=, tokenizer=)` |
| `args` | the options below |
| `train_dataset`, `eval_dataset` | `PromptDataModule(prompts)`, `Evaluation(prompts=)` |
| `processing_class` | `tokenizer` |
| `callbacks` | callbacks of Lightning |
| `optimizers` | `optimizer=` and `lr_scheduler=`, functions that build them |
| `peft_config` | `policy` builds the model with its adapter, see [strategies](strategies.md) |
| `quantization_config` | the policy is not quantized |
| `tools`, `environment_factory` | `tools`, `environment`; `EnvironmentReward()` for `get_reward` |
| `rollout_func` | an `Environment`, or an `Engine` |

## Two optimizer steps

TRL and the translated recipe were given the same model and completions, and made two optimizer steps on one rollout.
Loss and gradient norm agree to 1e-5 ([test](../tests/cli/test_from_trl.py),
[record](../tests/data/trl/first_steps.json),
[configurations](../tests/kit/translated.py)); `make bench-trl` compares with TRL itself in a separate environment
([test](../tests/translation/test_in_trl.py)). vLLM, several devices and `bf16` were not compared.

| configuration | TRL's loss, step 1 | gradient norm | loss, step 2 | gradient norm |
|---|---|---|---|---|
"""
WORDS = """
## The options

*same*: no difference. *different*: see the last column. *refused*: only TRL's default is accepted. Options in one row
share their counterpart; an empty second column means that there is nothing to set.
"""
COLUMNS = """
| option | here | | note |
|---|---|---|---|
"""


def rows(options: Table) -> str:
    """Returns the rows of a table; neighbours that differ in their names alone share one."""
    lines = ""
    for cells, group in groupby(options, lambda name: (options[name].ours, options[name].verdict, options[name].note)):
        lines += f"| {', '.join(f'`{name}`' for name in group)} | {' | '.join(cells)} |\n"
    return lines


def page() -> str:
    """Returns the page."""
    steps = json.loads(STEPS.read_text())
    numbers = "".join(
        f"| `{case}` | " + " | ".join(f"{step[name]:.5f}" for step in both for name in ("loss", "grad_norm")) + " |\n"
        for case, both in steps.items()
    )
    tables = "".join(f"\n### {name}\n{COLUMNS}{rows(options)}" for name, options in SECTIONS.items())
    return HEAD + numbers.replace("-0.00000", "0.00000") + WORDS + tables


if __name__ == "__main__":
    PAGE.write_text(page())
