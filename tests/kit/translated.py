"""Runs of two steps with given completions, in TRL and in a recipe translated from its options."""

import csv
import io
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.support import EOS, VOCABULARY, tiny_policy, tiny_tokenizer
from lightning_rl import FakeEngine
from lightning_rl.cli.recipes import load_recipe
from lightning_rl.samples import Request
from lightning_rl.translation.trl import from_trl

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ROOT / "tests/data/trl/options.json"
FIRST_STEPS = ROOT / "tests/data/trl/first_steps.json"

PROMPTS = ("a b c", "d e", "f g h i")
GROUP = 4
MAX_NEW_TOKENS = 8
STEPS = 2

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_generations": GROUP,
    "num_iterations": 2,
    "max_completion_length": MAX_NEW_TOKENS,
    "temperature": 0.9,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}
CASES: dict[str, dict[str, Any]] = {
    "dapo_with_kl": {"epsilon_high": 0.28, "delta": 1.5, "beta": 0.04},
    "dr_grpo_with_opsm": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "off_policy_mask_threshold": 0.01,
    },
    "gspo_two_rewards": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "scale_rewards": "batch",
        "reward_weights": [1.0, 0.5],
    },
    "grpo": {"loss_type": "grpo", "max_grad_norm": 0.05, "weight_decay": 0.0},
    "bnpo_in_one_batch": {"loss_type": "bnpo", "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    "vespo": {"loss_type": "vespo", "vespo_k_neg": 1.5},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "beta": 0.01,
        "use_bias_correction_kl": False,
    },
}

REWARDS = '''"""Rewards of a test."""


def odd(prompts, completions, *, completion_ids, **columns):
    return [float(len(ids) % 2) for ids in completion_ids]


def short(prompts, completions, *, completion_ids, **columns):
    return [None if len(ids) > 6 else 1.0 / len(ids) for ids in completion_ids]
'''

SCRIPT = """from datasets import Dataset
from step_rewards import odd, short
from trl import GRPOConfig, GRPOTrainer

rows = {rows}
options = {options}
args = GRPOConfig(output_dir="out", **options)
trainer = GRPOTrainer(
    model={model!r}, reward_funcs=[{rewards}], args=args, train_dataset=Dataset.from_list(rows)
)
trainer.train()
"""


def completions() -> dict[str, list[list[int]]]:
    """For each prompt its completions in their order, most of them with an end."""
    draw = random.Random(18)
    answers = {}
    for prompt in PROMPTS:
        lengths = [draw.randint(1, MAX_NEW_TOKENS) for _ in range(GROUP)]
        rows = [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
        answers[prompt] = [[*row[:-1], EOS] if number % 3 else row for number, row in enumerate(rows)]
    return answers


def reward_names(case: str) -> tuple[str, ...]:
    """The reward functions of a case."""
    return ("odd", "short") if "reward_weights" in CASES[case] else ("odd",)


def prepare(folder: Path, case: str) -> Path:
    """A folder with model, tokenizer, rewards and the script of a case, which is returned."""
    tiny_policy(vocab_size=VOCABULARY + 8).save_pretrained(folder / "policy")  # transformers adds a padding token
    tiny_tokenizer().save_pretrained(folder / "policy")
    (folder / "step_rewards.py").write_text(REWARDS)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    options = {**COMMON, **CASES[case]}
    script = SCRIPT.format(
        rows=[{"prompt": prompt} for prompt in PROMPTS],
        options=options,
        model=str(folder / "policy"),
        rewards=", ".join(reward_names(case)),
    )
    (folder / "grpo.py").write_text(script)
    (folder / "completions.json").write_text(json.dumps(completions()))
    return folder / "grpo.py"


def translate(script: Path, case: str) -> Path:
    """The recipe of a prepared script."""
    rewards = [f"step_rewards.{name}" for name in reward_names(case)]
    folder = script.parent
    source, _ = from_trl(script, 1, str(folder / "policy"), rewards, str(folder / "rows.jsonl"))
    (folder / "recipe.py").write_text(source)
    return folder / "recipe.py"


def run_in_trl(python: Path, *arguments: str) -> Any:
    """Return the output of :mod:`tests.translation.in_trl` in another environment."""
    command = [str(python), str(ROOT / "tests/translation/in_trl.py"), *arguments]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def speak(ids_of: Callable[[str], Sequence[int]]) -> Callable[[Request], Sequence[int]]:
    """The script of an engine that gives each prompt its completions in their order, again for each rollout."""
    answers, asked = completions(), defaultdict[str, int](int)
    prompts = {tuple(ids_of(prompt)): prompt for prompt in PROMPTS}

    def answer(request: Request) -> Sequence[int]:
        prompt = prompts[request.prefix_ids]
        asked[prompt] += 1
        return answers[prompt][(asked[prompt] - 1) % GROUP]

    return answer


@contextmanager
def unimported(name: str) -> Iterator[None]:
    """Leaves a module that lies in the current folder out of what later tests import."""
    sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.modules.pop(name, None)


def steps_of(recipe: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each optimizer step of a recipe, with the completions given."""
    with chdir(recipe.parent), unimported("step_rewards"):
        parts = load_recipe(recipe, [])
        tokenizer = parts.module.options.tokenizer
        assert tokenizer is not None
        engine = FakeEngine(speak(lambda prompt: tokenizer(prompt)["input_ids"]))
        parts.module.run.options = replace(parts.module.options, engine=engine)
        parts.trainer.fit(parts.module, parts.data)
        (log,) = recipe.parent.glob("out/**/metrics.csv")
        rows = [row for row in csv.DictReader(io.StringIO(log.read_text())) if row["loss/total"]]
    return [{"loss": float(row["loss/total"]), "grad_norm": float(row["optim/grad_norm"])} for row in rows]
