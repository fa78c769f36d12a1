"""Configurations in the form of published ones are translated, and their recipes train a step."""

import json
import re
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.support import VOCABULARY, tiny_policy, tiny_tokenizer

from lightning_rl import FakeEngine
from lightning_rl.cli.recipes import load_recipe
from lightning_rl.translation.trl import from_trl

FOLDER = Path(__file__).parent / "configurations"
ROW = {"answer": "4", "solution": "$4$"}
MODULE = "def zero(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SIZES = {
    r"prompts_per_rollout=\d+": "prompts_per_rollout=2",
    r"minibatches_per_rollout=\d+": "minibatches_per_rollout=1",
    r"max_new_tokens=\d+": "max_new_tokens=4",
    r"max_steps=\S+": "max_steps=1,",
    r"\n    logger=.*": "\n    logger=False,",
    r"precision=\S+": 'precision="32-true",',
    r"adamw_8bit\(": "partial(AdamW, ",
    r"^from functools import partial$|^from torch.optim import AdamW$": "",
}
"""Sizes of a recipe by pattern, with those of a short step on a CPU."""

REWARD = {"reward": ["step_rewards.zero"]}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "cookbook.py": {},
    "gsm8k_demo.py": {"column": "messages"},
    "mini_r1.yaml": {**REWARD, "ignore": ["dataset_id_or_path"]},
    "open_r1_code.yaml": {**REWARD, "column": "problem_statement", "ignore": ["reward_weights"]},
    "open_r1_distill.yaml": {"column": "problem"},
    "open_r1_instruct.yaml": {"column": "problem"},
    "open_r1_simple_rl.yaml": {"column": "problem"},
    "trl_grpo_lora.yaml": REWARD,
    "trl_length.py": {},
    "trl_quickstart.py": REWARD,
    "trl_vllm.py": {},
    "unsloth.ipynb": {"column": "messages"},
}


def test_every_configuration_is_listed() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CONFIGURATIONS}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.filterwarnings("ignore")
def test_a_published_configuration_trains_a_step(name: str, tmp_path: Path) -> None:
    options = CONFIGURATIONS[name]
    chat = options.get("column") == "messages" or name == "cookbook.py"
    prompt: Any = [{"role": "user", "content": "a b"}] if chat else "a b"
    column = options.get("column", "prompt")
    (tmp_path / "rows.jsonl").write_text((json.dumps({column: prompt, **ROW}) + "\n") * 64)
    (tmp_path / "step_rewards.py").write_text(MODULE)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for part in (tiny_policy(vocab_size=VOCABULARY), tokenizer):
        part.save_pretrained(tmp_path / "policy")
    source, _ = from_trl(
        FOLDER / name,
        1,
        str(tmp_path / "policy"),
        options.get("reward", []),
        str(tmp_path / "rows.jsonl"),
        options.get("ignore", []),
    )
    for pattern, size in SIZES.items():
        source = re.sub(pattern, size, source, flags=re.MULTILINE)
    imports = "from functools import partial\nfrom torch.optim import AdamW\n"
    (tmp_path / "recipe.py").write_text(source.replace('"""\n\n', f'"""\n\n{imports}', 1))
    sys.modules.pop("step_rewards", None)
    with chdir(tmp_path):
        parts = load_recipe(tmp_path / "recipe.py", [])
        engine = FakeEngine(lambda request: [2 + request.sample_id % 3, 1])
        parts.module.run.options = replace(parts.module.options, engine=engine)
        parts.trainer.fit(parts.module, parts.data)
    assert parts.trainer.global_step == 1
