"""from-trl: every option of TRL is translated, explained or refused, and what is "same" learns the same."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from kit.translated import CASES, FIELDS, FIRST_STEPS, prepare, steps_of

from lightning_rl.cli.main import main
from lightning_rl.translation.option import Option, RefusedError
from lightning_rl.translation.recipe import Given, Recipe
from lightning_rl.translation.scripts import UnreadableError
from lightning_rl.translation.trl import from_trl
from lightning_rl.translation.trl_options import CONFIG, SCRIPT, TRAINER

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads(FIELDS.read_text())
EVERY = {**SCRIPT, **CONFIG, **TRAINER}
MINIMAL = {
    "model_name_or_path": "some/model",
    "reward_funcs": ["my_rewards.right"],
    "dataset_name": "some/data",
    "max_steps": 100,
    "output_dir": "out",
}

# A value of each option that is "same", and what else has to be set for it to count.
VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}
PEFT = {"use_peft": True}
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_generations": (4, {}),
    "num_iterations": (2, {}),
    "epsilon": (0.1, {}),
    "epsilon_high": (0.28, {}),
    "delta": (4.0, {}),
    "loss_type": ("grpo", {}),
    "importance_sampling_level": ("sequence", {}),
    "sapo_temperature_pos": (0.9, {"loss_type": "sapo"}),
    "sapo_temperature_neg": (0.9, {"loss_type": "sapo"}),
    "vespo_k_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (1.0, {"loss_type": "vespo"}),
    "vespo_k_neg": (1.0, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (1.0, {"loss_type": "vespo"}),
    "scale_rewards": ("batch", {}),
    "reward_weights": ([0.5], {}),
    "beta": (0.1, {}),
    "use_bias_correction_kl": (False, {"beta": 0.1}),
    "off_policy_mask_threshold": (0.5, {}),
    "per_device_train_batch_size": (16, {}),
    "gradient_accumulation_steps": (2, {}),
    "max_steps": (7, {}),
    "shuffle_dataset": (False, {}),
    "max_completion_length": (64, {}),
    "temperature": (0.7, {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "use_vllm": (True, {}),
    "vllm_mode": ("server", VLLM),
    "vllm_enable_sleep_mode": (True, VLLM),
    "vllm_gpu_memory_utilization": (0.6, VLLM),
    "vllm_max_model_length": (2048, VLLM),
    "vllm_tensor_parallel_size": (2, VLLM),
    "vllm_importance_sampling_correction": (False, VLLM),
    "vllm_importance_sampling_mode": ("token_truncate", VLLM),
    "vllm_importance_sampling_clip_max": (4.0, VLLM),
    "vllm_importance_sampling_clip_min": (0.5, VLLM),
    "vllm_importance_sampling_cap": (4.0, VLLM),
    "learning_rate": (1e-5, {}),
    "adam_beta1": (0.8, {}),
    "adam_beta2": (0.95, {}),
    "adam_epsilon": (1e-6, {}),
    "optim": ("adamw_8bit", {}),
    "max_grad_norm": (0.5, {}),
    "warmup_steps": (0.1, {}),
    "bf16": (False, {}),
    "fp16": (True, {}),
    "gradient_checkpointing": (False, {}),
    "activation_checkpointing": (False, {}),
    "use_cpu": (True, {}),
    "full_determinism": (True, {}),
    "model_init_kwargs": ({"attn_implementation": "sdpa"}, {}),
    "output_dir": ("elsewhere", {}),
    "run_name": ("first", {}),
    "disable_tqdm": (True, {}),
    "save_strategy": ("epoch", {}),
    "save_steps": (50, {}),
    "save_total_limit": (2, {}),
    "reward_funcs": (["my_rewards.other"], {}),
    "dataset_name": ("other/data", {}),
    "dataset_config": ("main", {}),
    "dataset_train_split": ("train[:10]", {}),
    "dataset_test_split": ("validation", {"eval_strategy": "steps"}),
    "reward_model_name_or_path": ("some/judge", {}),
    "model_name_or_path": ("other/model", {}),
    "model_revision": ("v2", {}),
    "dtype": ("bfloat16", {}),
    "attn_implementation": ("sdpa", {}),
    "use_peft": (True, {}),
    "lora_r": (8, PEFT),
    "lora_alpha": (8, PEFT),
    "lora_target_modules": (["q_proj"], PEFT),
    "lora_target_parameters": (["experts"], PEFT),
    "lora_modules_to_save": (["norm"], PEFT),
    "lora_task_type": ("SEQ_CLS", PEFT),
    "use_rslora": (True, PEFT),
    "use_dora": (True, PEFT),
}
# What the options of "different" that go somewhere need.
LEVEL = "importance_sampling_level"
ADAPTIVE = {"use_adaptive_entropy": True}
EVALUATES = {"eval_strategy": "steps"}
MOVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mask_truncated_completions": (True, {}),
    "entropy_coef": (0.01, {}),
    "use_adaptive_entropy": (True, {}),
    "entropy_target": (0.5, ADAPTIVE),
    "entropy_coef_delta": (0.01, ADAPTIVE),
    "steps_per_generation": (2, {"per_device_train_batch_size": 8}),
    "generation_batch_size": (16, {}),
    "num_train_epochs": (2.5, {"max_steps": -1}),
    "seed": (1, {}),
    "data_seed": (1, {}),
    "top_p": (0.9, {}),
    "top_k": (20, {}),
    "min_p": (0.1, {}),
    "vllm_server_base_url": ("http://127.0.0.1:9000", SERVER),
    "vllm_server_host": ("10.0.0.1", SERVER),
    "vllm_server_port": (9000, SERVER),
    "vllm_server_timeout": (10.0, SERVER),
    "weight_decay": (0.1, {}),
    "torch_compile": (True, {}),
    "use_liger_kernel": (True, {}),
    "lr_scheduler_type": ("cosine", {}),
    "fsdp": ("full_shard", {}),
    "num_generations_eval": (2, EVALUATES),
    "eval_strategy": ("epoch", {}),
    "eval_steps": (20, EVALUATES),
    "logging_steps": (1, {}),
    "logging_strategy": ("no", {}),
    "report_to": ("tensorboard", {}),
    "project": ("mine", {"report_to": "wandb"}),
    "log_completions": (True, {}),
    "num_completions_to_print": (2, {"log_completions": True}),
}


def write(folder: Path, name: str = "run.yaml", **values: Any) -> Path:
    """A configuration with everything that a recipe needs, and what is given."""
    path = folder / name
    path.write_text(
        json.dumps({**MINIMAL, **values}) if name.endswith("json") else yaml.safe_dump({**MINIMAL, **values})
    )
    return path


def other(option: Option) -> Any:
    """A value that is not the default."""
    if isinstance(option.default, bool):
        return not option.default
    return option.default + 1 if isinstance(option.default, int | float) else "another"


def body(recipe: Recipe) -> str:
    """The recipe without its notes."""
    return recipe.script().split('"""')[2]


# The table is complete, and every line of it is true of the translation.


@pytest.mark.parametrize(("part", "options"), [("config", CONFIG), ("trainer", TRAINER), ("script", SCRIPT)])
def test_every_option_of_trl_is_in_the_table_with_its_default(part: str, options: dict[str, Option]) -> None:
    assert RECORD["trl"].startswith("1.16.")
    extra = {"datasets"} if part == "script" else set()  # of TRL's mixtures of data sets
    assert {*options} - extra == {*RECORD[part]} - ({"args"} & set())
    defaults = {name: option.default for name, option in options.items() if name not in extra}
    assert json.loads(json.dumps(defaults)) == RECORD[part]


def test_every_option_is_tried() -> None:
    same = {name for name, option in {**SCRIPT, **CONFIG}.items() if option.verdict == "same"}
    assert same == {*EXAMPLES}
    moved = {name for name, option in {**SCRIPT, **CONFIG}.items() if option.verdict == "different" and option.ours}
    inert = {"use_transformers_continuous_batching", "max_tool_calling_iterations", "lora_dropout"}  # see below
    assert moved - inert == {*MOVED}


@pytest.mark.parametrize("name", [*EXAMPLES, *MOVED])
def test_an_option_that_goes_somewhere_changes_the_recipe(name: str, tmp_path: Path) -> None:
    value, beside = {**EXAMPLES, **MOVED}[name]
    assert value != EVERY[name].default
    before, after = (from_trl(write(tmp_path, **{**beside, **further})) for further in ({}, {name: value}))
    assert body(before) != body(after)
    if name in MOVED:
        assert name in after.notes


@pytest.mark.parametrize("name", [name for name, option in {**SCRIPT, **CONFIG}.items() if option.verdict == "refused"])
def test_a_refused_option_is_refused_by_name_and_fine_at_its_default(name: str, tmp_path: Path) -> None:
    option = EVERY[name]
    from_trl(write(tmp_path, **{name: option.default}))
    with pytest.raises(RefusedError) as refused:
        from_trl(write(tmp_path, **{name: other(option)}))
    assert refused.value.reasons == {name: option.says}


@pytest.mark.parametrize(
    "name",
    [name for name, option in {**SCRIPT, **CONFIG}.items() if option.verdict == "different" and not option.ours],
)
def test_an_option_that_goes_nowhere_is_explained(name: str, tmp_path: Path) -> None:
    if name == "router_aux_loss_coef":
        assert name in from_trl(write(tmp_path, router_aux_loss_coef=0.0)).notes
        return
    recipe = from_trl(write(tmp_path, **{name: other(EVERY[name])}))
    assert recipe.notes[name] == EVERY[name].says and body(recipe) == body(from_trl(write(tmp_path)))


def test_every_explanation_is_a_sentence_without_its_stop() -> None:
    for option in EVERY.values():
        assert (option.verdict == "same") is (not option.says), option
        assert not option.says.endswith(".") and not option.ours.endswith("."), option
        assert option.ours or option.says, option


# What is "same" learns the same.


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
def test_a_recipe_learns_what_trl_learnt(case: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(from_trl(prepare(tmp_path, case)).script())
    steps, record = steps_of(recipe), json.loads(FIRST_STEPS.read_text())[case]
    assert len(steps) == len(record) == 2
    for ours, theirs in zip(steps, record, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


# What depends on several options.


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 5, "importance_sampling_level": "sequence"}, LEVEL),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, LEVEL),
        ({"delta": 1.2}, "delta"),
        ({"loss_type": "new"}, "loss_type"),
        ({"scale_rewards": "std"}, "scale_rewards"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"per_device_train_batch_size": 3}, "per_device_train_batch_size"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation"),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "generation_batch_size"),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, "per_device_train_batch_size"),
        ({"optim": "lion"}, "optim"),
        ({"report_to": "all"}, "report_to"),
        ({"save_strategy": "best"}, "save_strategy"),
        ({"logging_steps": 0.1}, "logging_steps"),
        ({"reward_weights": [1.0, 1.0]}, "reward_weights"),
        ({"reward_funcs": ["accuracy"]}, "reward_funcs"),
        ({"reward_funcs": []}, "reward_funcs"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "model_init_kwargs"),
        ({"use_vllm": True, "vllm_importance_sampling_clip_max": 0.5}, "vllm_importance_sampling_clip_max"),
        ({"use_vllm": True, "loss_type": "vespo"}, "vllm_importance_sampling_mode"),
        ({"warmup_ratio": 0.1}, "warmup_ratio"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        from_trl(write(tmp_path, **options))
    assert [*refused.value.reasons] == [name]


def test_a_default_of_trl_is_written_out_where_ours_is_another(tmp_path: Path) -> None:
    text = from_trl(write(tmp_path)).script()
    for written in (
        "GRPO(epsilon=0.0001)", "max_new_tokens=512", "group_size=8", 'precision="bf16-mixed"', "seed=42",
        "activation_checkpointing=True", "partial(WarmupThenLinear, warmup=0, total=100)",
    ):  # fmt: skip
        assert written in text


def test_devices_multiply_the_rollout(tmp_path: Path) -> None:
    recipe = from_trl(write(tmp_path), Given(devices=4))
    assert recipe.data["prompts_per_rollout"] == 4 and recipe.trainer["strategy"] == "ddp"


def test_the_corrections_of_vllm_are_those_of_its_mode(tmp_path: Path) -> None:
    names = {
        mode: [
            call.path.rpartition(".")[2]
            for call in from_trl(write(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode)).trainer[
                "callbacks"
            ]
        ][:-1]
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    }
    assert names == {
        "token_truncate": ["TruncatedIS"],
        "token_mask": ["IcePop", "TruncatedIS"],
        "sequence_truncate": ["TruncatedIS"],
        "sequence_mask": ["SequenceRatioMask", "TruncatedIS"],
    }


# Scripts are read and never run.

SCRIPT_TEXT = """
import os
import re

from datasets import load_dataset
from my_rewards import accuracy, unused
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

open("ran", "w").close()
PATTERN = re.compile("####")
TEXT = "never needed"
dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.rename_column("question", "prompt")


@os.fspath
def never_called(): ...


def has_mark(completions, **kwargs):
    # a comment that stays
    return [float(bool(PATTERN.search(text))) for text in completions]


def main():
    rate = 2e-6
    options = {"num_generations": 4, "max_steps": 10}
    config = GRPOConfig("out", learning_rate=rate, reward_weights=[1.0, 0.5], **options)
    trainer = GRPOTrainer(
        "some/model", [accuracy, has_mark], config, dataset, peft_config=LoraConfig(r=8, target_modules="all-linear")
    )
    trainer.train()


main()
"""


def test_a_script_is_never_run_and_what_it_builds_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo.py").write_text(SCRIPT_TEXT)
    monkeypatch.chdir(tmp_path)
    text = from_trl(tmp_path / "grpo.py").script()
    assert not (tmp_path / "ran").exists()
    compile(text, "recipe.py", "exec")
    for written in (
        "lr=2e-06", "group_size=4", "max_steps=10", "# a comment that stays", 'PATTERN = re.compile("####")',
        'dataset = dataset.rename_column("question", "prompt")', "prompts=dataset", "from my_rewards import accuracy\n",
        '{"accuracy": accuracy, "has_mark": (has_mark, 0.5)}', "LoraConfig(r=8", "policy=policy",
        'tokenizer="some/model"',
    ):  # fmt: skip
        assert written in text, written
    for left_out in ("never", "unused", "open(", "import os", "GRPOTrainer", "rate ="):
        assert left_out not in text, left_out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "expected a GRPOConfig"),
        ("GRPOConfig(", "expected a script of Python"),
        ("GRPOConfig()\nGRPOConfig()", "got 2 in lines 1, 2"),
        ("GRPOConfig(**read())", "expected the options in line 1 to be written out"),
        ("GRPOConfig(beta=1, beta=2)", "expected beta once in line 1, got it twice"),
    ],
)
def test_a_script_that_cannot_be_read_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(text)
    with pytest.raises(UnreadableError, match=message.replace("(", r"\(")):
        from_trl(tmp_path / "grpo.py")


def test_a_value_that_is_not_written_out_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("GRPOConfig(learning_rate=args.lr, beta=compute())")
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py", Given(model="m", rewards=("a.b",), prompts="p.jsonl"))
    assert [*refused.value.reasons] == ["learning_rate", "beta"]


def test_what_a_configuration_does_not_say_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("GRPOConfig(max_steps=5)")
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py")
    assert {*refused.value.reasons} == {"model", "reward_funcs", "train_dataset"}
    recipe = from_trl(tmp_path / "grpo.py", Given(model="m", rewards=("a.b",), prompts="p.jsonl"))
    assert recipe.module["policy"] == "m" and recipe.data["prompts"] == "p.jsonl"


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    texts = [from_trl(write(tmp_path, name)).script() for name in ("run.yaml", "run.json")]
    assert texts[0].replace("run.yaml", "run.json") == texts[1]


def test_a_recipe_is_laid_out_as_our_formatter_would(tmp_path: Path) -> None:
    text = from_trl(write(tmp_path, log_completions=True, eval_strategy="steps", use_vllm=True, beta=0.1)).script()
    assert max(map(len, text.splitlines())) <= 120
    assert '"some/data"' in text and "'" not in text.split('"""')[2]


# The command.


def run(*arguments: Any) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["from-trl", *map(str, arguments)])
    return ended.value.code


def test_the_command_writes_a_recipe_and_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert run(path) == 0 and "RLLightningModule(" in capsys.readouterr().out
    assert run(path, "--output", tmp_path / "recipe.py", "--yaml", tmp_path / "lightning.yaml") == 0
    assert capsys.readouterr().out == ""
    compile((tmp_path / "recipe.py").read_text(), "recipe.py", "exec")
    config = yaml.safe_load((tmp_path / "lightning.yaml").read_text())
    assert config["model"]["advantages"] == {"class_path": "lightning_rl.GRPO", "init_args": {"epsilon": 1e-4}}
    assert config["trainer"]["max_steps"] == 100


def test_the_command_names_every_refusal_and_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, repetition_penalty=1.1, cast_lm_head_to_fp32=True)
    said = run(path, "--output", tmp_path / "recipe.py")
    assert "refused repetition_penalty: " in said and "refused cast_lm_head_to_fp32: " in said
    assert not (tmp_path / "recipe.py").exists()


def test_code_has_no_form_in_yaml(tmp_path: Path) -> None:
    said = run(write(tmp_path, max_steps=-1), "--yaml", tmp_path / "lightning.yaml", "--output", tmp_path / "recipe.py")
    assert "expected values for YAML" in said and not (tmp_path / "recipe.py").exists()


def test_no_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert "none.py to be a file, got none" in run(tmp_path / "none.py")
    assert "none.yaml to be a file, got none" in run(tmp_path / "none.yaml")


# The page.


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coming_from_trl_page", ROOT / "docs" / "coming_from_trl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_table_says(script: ModuleType) -> None:
    page = (ROOT / "docs" / "coming_from_trl.md").read_text()
    assert page == script.page(), "run python docs/coming_from_trl.py"
    assert all(f"| `{name}` |" in page for name in EVERY)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_generations", "eight", "expected a number, got 'eight'"),
        ("num_generations", 0, "expected at least 1, got 0"),
        ("gradient_accumulation_steps", 0, "expected at least 1, got 0"),
        ("max_completion_length", -5, "expected at least 1, got -5"),
        ("max_steps", 2.5, "expected a whole number, got 2.5"),
        ("learning_rate", "fast", "expected a number, got 'fast'"),
        ("learning_rate", float("nan"), "expected a number, got nan"),
        ("beta", [1, 2], r"expected a number, got \[1, 2\]"),
        ("reward_funcs", {"a": 1}, "expected names of functions, got {'a': 1}"),
        ("reward_weights", 0.5, "expected a list, got 0.5"),
        ("disable_dropout", "maybe", "expected true or false, got 'maybe'"),
        ("bf16", "false", "expected true or false, got 'false'"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, name: value}))
    with pytest.raises(RefusedError, match=f"{name}: {reason}"):
        from_trl(path)


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(f"{yaml.safe_dump(MINIMAL)}\nlearning_rate: 2e-6\n")
    assert "lr=2e-06" in from_trl(path).script()


def test_options_below_args_are_refused_and_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "args": {"beta": 1}}))
    with pytest.raises(RefusedError, match="args: expected its options beside the others"):
        from_trl(path)


def test_a_reward_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "reward_funcs": None}))
    with pytest.raises(RefusedError, match=r"expected module\.function, got 'a b\.c'"):
        from_trl(path, Given(rewards=("a b.c",)))


def test_no_process_is_too_few(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(RefusedError, match="--devices: expected at least 1, got -3"):
        from_trl(path, Given(devices=-3))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("twice.yaml", "beta: 1\nbeta: 2\n", "beta stands there twice"),
        ("twice.json", '{"beta": 1, "beta": 2}', "beta stands there twice"),
        ("empty.yaml", "", "expected .* to hold options by name, got nothing"),
        ("list.yaml", "[1]", "expected .* to hold options by name, got list"),
        ("number.yaml", "1: 2", "got 1 as a name"),
        ("none.yaml", None, "expected .* to be a file, got none"),
    ],
)
def test_a_file_that_holds_no_options_or_one_of_them_twice_says_so(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UnreadableError, match=message):
        from_trl(tmp_path / name)


def test_what_is_merged_into_a_mapping_may_be_said_once_more(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(f"base: &base {{beta: 1}}\nargs: {{<<: *base, beta: 2}}\n{yaml.safe_dump(MINIMAL)}")
    with pytest.raises(RefusedError, match="args: expected its options beside the others"):
        from_trl(path)


@pytest.mark.parametrize("name", ["deep.yaml", "deep.json", "deep.py"])
def test_a_file_that_nests_too_deeply_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x = " + "-" * 5000 + "1" if name == "deep.py" else "[" * 100_000)
    with pytest.raises(UnreadableError, match="got an error"):
        from_trl(tmp_path / name)


def test_a_configuration_is_never_overwritten_by_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(SystemExit, match="expected another file"):
        main(["from-trl", str(path), "--output", str(path)])
    with pytest.raises(SystemExit, match="expected another file"):
        main(["from-trl", str(path), "--output", str(tmp_path)])
    assert yaml.safe_load(path.read_text()) == MINIMAL
    with pytest.raises(SystemExit, match="0"):
        main(["from-trl", str(path), "--output", str(tmp_path / "new" / "recipe.py")])
    assert (tmp_path / "new" / "recipe.py").is_file()


def test_the_command_says_where_it_wrote_and_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, recipe = tmp_path / "config.yaml", tmp_path / "recipe.py"
    path.write_text("model_name_or_path: m\nlearning_rate: 1e-6\n")
    run(path, "--output", recipe, "--reward", "rewards.score", "--prompts", "rows.jsonl")
    said = capsys.readouterr()
    assert said.out == "" and f"lightning-rl doctor {recipe}\n" in said.err
    assert said.err.startswith(f"{recipe}: 2 options translated, ")


@pytest.mark.parametrize(
    ("name", "near"),
    [("scale_rewrds", "scale_rewards"), ("temperaturee", "temperature"), ("warmup_ratio", "warmup_steps")],
)
def test_an_unknown_option_is_refused_with_the_one_that_is_near(tmp_path: Path, name: str, near: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{name}: 0.1\n")
    with pytest.raises(SystemExit, match=rf"refused {name}: no option of TRL .*; did you mean {near}\?"):
        main(["from-trl", str(path)])
