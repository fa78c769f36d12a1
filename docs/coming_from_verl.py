"""Writes docs/coming_from_verl.md: what becomes of the options of verl. Run ``python docs/coming_from_verl.py``."""

from collections.abc import Mapping
from pathlib import Path

from lightning_rl.translation.option import Option
from lightning_rl.translation.verl_options import SECTIONS, VERSION

PAGE = Path(__file__).with_suffix(".md")
HEAD = f"""# Coming from verl

`lightning-rl from-verl CONFIG` makes a recipe of the options of a GRPO run of verl {VERSION}: YAML with the options
that are set, nested or by dotted names; after `--` overrides as on verl's command line. Made by
`python docs/coming_from_verl.py` from [the table](../lightning_rl/translation/verl_options.py) that the command reads.

```bash
lightning-rl from-verl grpo.yaml --output recipe.py
lightning-rl from-verl grpo.yaml --output recipe.py -- data.train_batch_size=256 actor_rollout_ref.rollout.n=8
```

* Options that do not stand below are refused by name, also at verl's default: leave them out. A file that Hydra wrote
  holds hundreds of them, so give what was set and not what came out.
* Names and defaults are those of `_generated_ppo_trainer.yaml` in verl 0.9.1 ([test](../tests/cli/test_from_verl.py)).
  The functions behind them are compared with verl's recorded cases in [parity](parity.md); a whole run was not
  compared.
* A `custom_reward_function` is called row by row with what verl gives it. Where verl chooses a reward by `data_source`,
  say which with `--reward module.function`.
* A run of verl counts rollouts, a `Trainer` optimizer steps: `save_freq` and `test_freq` are multiplied.

*same*: it means here what it means there. *different*: read the last column. *refused*: any value but verl's default
ends the translation. An empty second column means that there is nothing to set.
"""
COLUMNS = """
| option | here | | what has to be known |
|---|---|---|---|
"""


def rows(options: Mapping[str, Option]) -> str:
    """The lines of a table."""
    return "".join(f"| `{name}` | {one.ours} | {one.verdict} | {one.says} |\n" for name, one in options.items())


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {name}\n{COLUMNS}{rows(options)}" for name, options in SECTIONS.items())


if __name__ == "__main__":
    PAGE.write_text(page())
