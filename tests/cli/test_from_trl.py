"""from-trl: every option of TRL is translated, noted or refused, and a recipe learns what TRL learned."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.translated import CASES, FIELDS, FIRST_STEPS, prepare, steps_of, translate

from lightning_rl.cli.main import main
from lightning_rl.translation.trl import RefusedError, UnreadableError, from_trl
from lightning_rl.translation.trl_options import OPTIONS, SECTIONS, VERSION, Option

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads(FIELDS.read_text())
MINIMAL = {
    "model_name_or_path": "some/model",
    "reward_funcs": ["my_rewards.right"],
    "dataset_name": "some/data",
    "max_steps": 100,
    "output_dir": "out",
}

# A value of each option that has a place in a recipe, and what else has to be set for it to count.
ROWS = "per_device_train_batch_size"
VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}
ADAPTER = {"use_peft": True}
ADAPTIVE = {"use_adaptive_entropy": True}
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (value, {}) for name, value in {
        "num_generations": 4, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.28, "delta": 4.0,
        "loss_type": "grpo", "importance_sampling_level": "sequence", "scale_rewards": "batch",
        "reward_weights": [0.5], "beta": 0.1, "mask_truncated_completions": True, "off_policy_mask_threshold": 0.5,
        "entropy_coef": 0.01, "use_adaptive_entropy": True, "router_aux_loss_coef": 0.01,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2, "generation_batch_size": 16, "max_steps": 7, "shuffle_dataset": False,
        "seed": 1, "data_seed": 1, "max_completion_length": 64, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}, "use_vllm": True, "learning_rate": 1e-5,
        "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "optim": "adamw_8bit",
        "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "bf16": False, "fp16": True,
        "gradient_checkpointing": False, "activation_checkpointing": False, "torch_compile": True,
        "use_liger_kernel": True, "use_cpu": True, "fsdp": "full_shard", "full_determinism": True,
        "model_init_kwargs": {"attn_implementation": "sdpa"}, "output_dir": "elsewhere", "logging_steps": 1,
        "logging_strategy": "no", "report_to": "tensorboard", "run_name": "first", "disable_tqdm": True,
        "save_strategy": "epoch", "save_steps": 50, "save_total_limit": 2, "reward_funcs": ["my_rewards.other"],
        "dataset_name": "other/data", "dataset_config": "main", "dataset_train_split": "train[:10]",
        "reward_model_name_or_path": "some/judge", "model_name_or_path": "other/model", "model_revision": "v2",
        "dtype": "bfloat16", "attn_implementation": "sdpa",
    }.items()},
    "sapo_temperature_pos": (0.9, {"loss_type": "sapo"}),
    "sapo_temperature_neg": (0.9, {"loss_type": "sapo"}),
    **{f"vespo_{name}_{sign}": (1.0, {"loss_type": "vespo"}) for name in ("k", "lambda") for sign in ("pos", "neg")},
    "use_bias_correction_kl": (False, {"beta": 0.1}),
    "entropy_target": (0.5, ADAPTIVE),
    "entropy_coef_delta": (0.01, ADAPTIVE),
    "steps_per_generation": (2, {"per_device_train_batch_size": 8}),
    "num_train_epochs": (2.5, {"max_steps": -1}),
    "vllm_mode": ("server", VLLM),
    "vllm_enable_sleep_mode": (True, VLLM),
    "vllm_gpu_memory_utilization": (0.6, VLLM),
    "vllm_max_model_length": (2048, VLLM),
    "vllm_tensor_parallel_size": (2, VLLM),
    "vllm_server_base_url": ("http://127.0.0.1:9000", SERVER),
    "vllm_server_host": ("10.0.0.1", SERVER),
    "vllm_server_port": (9000, SERVER),
    "vllm_server_timeout": (10.0, SERVER),
    "vllm_importance_sampling_correction": (False, VLLM),
    "vllm_importance_sampling_mode": ("token_truncate", VLLM),
    "vllm_importance_sampling_clip_max": (4.0, VLLM),
    "vllm_importance_sampling_clip_min": (0.5, VLLM),
    "vllm_importance_sampling_cap": (4.0, VLLM),
    "project": ("mine", {"report_to": "wandb"}),
    "lr_scheduler_kwargs": ({"min_lr_rate": 0.1}, {"lr_scheduler_type": "cosine_with_min_lr"}),
    "use_peft": (True, {}),
    "multi_objective_aggregation": ("normalize_then_sum", {}),
    **{name: (value, ADAPTER) for name, value in {
        "lora_r": 8, "lora_alpha": 8, "lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts"],
        "lora_modules_to_save": ["norm"], "use_rslora": True, "use_dora": True, "lora_task_type": "SEQ_CLS",
    }.items()},
}  # fmt: skip


def write(folder: Path, **values: Any) -> Path:
    """A configuration with everything that a recipe needs, and what is given."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **values}))
    return path


def other(option: Option) -> Any:
    """A value that is not the default."""
    if isinstance(option.default, bool):
        return not option.default
    return option.default + 1 if isinstance(option.default, int | float) else "another"


def body(source: str) -> str:
    """A recipe without its docstring."""
    return source.split('"""')[2]


# The table.


@pytest.mark.parametrize("part", ["config", "script"])
def test_every_option_of_trl_is_in_the_table_with_its_default(part: str) -> None:
    assert RECORD["trl"].startswith("1.16.")
    script = SECTIONS["Further options of trl grpo"]
    options = script if part == "script" else {name: OPTIONS[name] for name in OPTIONS if name not in script}
    defaults = {name: option.default for name, option in options.items() if name != "datasets"}  # of TRL's mixtures
    assert json.loads(json.dumps(defaults)) == RECORD[part]


@pytest.mark.nightly
def test_an_option_with_a_place_changes_the_recipe(tmp_path: Path) -> None:
    always_on = "use_transformers_continuous_batching"
    assert {*EXAMPLES} == {name for name, option in OPTIONS.items() if option.ours} - {always_on}
    for name, (value, beside) in EXAMPLES.items():
        before, _ = from_trl(write(tmp_path, **beside))
        after, notes = from_trl(write(tmp_path, **{**beside, name: value}))
        assert body(before) != body(after), name
        assert name in notes or OPTIONS[name].verdict == "same", name
        compile(after, "recipe.py", "exec")


def test_an_option_without_a_place_is_noted(tmp_path: Path) -> None:
    plain = body(from_trl(write(tmp_path))[0])
    for name, option in OPTIONS.items():
        if option.verdict == "different" and not option.ours:
            source, notes = from_trl(write(tmp_path, **{name: other(option)}))
            assert notes[name] == option.note and f"* {name}: " in source and body(source) == plain, name


def test_a_refused_option_is_refused_by_name_and_fine_at_its_default(tmp_path: Path) -> None:
    for name, option in OPTIONS.items():
        if option.verdict == "refused":
            from_trl(write(tmp_path, **{name: option.default}))
            with pytest.raises(RefusedError) as refused:
                from_trl(write(tmp_path, **{name: other(option)}))
            assert refused.value.reasons == {name: option.note}


def test_the_page_is_that_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("coming_from_trl_page", ROOT / "docs" / "coming_from_trl.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "coming_from_trl.md").read_text()
    assert f"{script.BEGIN}{script.table()}{script.END}" in page, "run python docs/coming_from_trl.py"
    assert f"`GRPOConfig` of TRL {VERSION}." in page
    assert [name for name in (*OPTIONS, *RECORD["trainer"]) if f"`{name}`" not in page] == []


# What a recipe learns.


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
def test_a_recipe_learns_what_trl_learned(case: str, tmp_path: Path) -> None:
    steps, record = steps_of(translate(prepare(tmp_path, case), case)), json.loads(FIRST_STEPS.read_text())[case]
    assert len(steps) == len(record) == 2
    for ours, theirs in zip(steps, record, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


# What depends on several options.


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"delta": 1.2}, "delta"),
        ({"loss_type": "new"}, "loss_type"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"per_device_train_batch_size": 3}, "per_device_train_batch_size"),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, "per_device_train_batch_size"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation"),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "generation_batch_size"),
        ({"logging_steps": 0.1}, "logging_steps"),
        ({"reward_weights": [1.0, 1.0]}, "reward_weights"),
        ({"reward_funcs": ["unknown"]}, "reward_funcs"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "model_init_kwargs"),
        ({**VLLM, "vllm_importance_sampling_clip_max": 0.5}, "vllm_importance_sampling_clip_max"),
        ({**VLLM, "loss_type": "vespo"}, "vllm_importance_sampling_mode"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        from_trl(write(tmp_path, **options))
    assert [*refused.value.reasons] == [name]


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"max_prompt_length": 64}, True), ({"torch_dtype": "bfloat16"}, True), ({}, False),
        ({"max_prompt_length": 64, "beta": 0.0}, False), ({"max_prompt_length": 64, "beta": 0.1}, False),
    ],
)  # fmt: skip
def test_a_file_of_an_older_version_without_beta_has_a_note_of_its_default(
    options: dict[str, Any], noted: bool, tmp_path: Path
) -> None:
    source, notes = from_trl(write(tmp_path, **options))
    assert ("add ReferenceKL(beta=0.04, as_loss=True)" in notes.get("beta", "")) is noted
    assert ("had beta=0.04 by default" in " ".join(source.split())) is noted


@pytest.mark.parametrize(
    ("rows", "accumulation", "group", "devices", "sizes", "taken"),
    [(16, 16, 7, 7, [14, 21], 14), (1, 1, 6, 1, [6], 6), (16, 1, 6, 1, [12, 18], 12), (13, 2, 8, 3, [12, 16], 8)],
)
def test_a_refused_batch_names_sizes_that_work(
    rows: int, accumulation: int, group: int, devices: int, sizes: list[int], taken: int, tmp_path: Path
) -> None:
    options = {ROWS: rows, "gradient_accumulation_steps": accumulation, "num_generations": group}
    with pytest.raises(RefusedError) as refused:
        from_trl(write(tmp_path, **options), devices)
    cure = f": set it to {' or '.join(map(str, sizes))}, or --ignore it for {taken}"
    assert refused.value.reasons[ROWS].endswith(cure)
    for size in sizes:
        from_trl(write(tmp_path, **{**options, ROWS: size}), devices)
    source, notes = from_trl(write(tmp_path, **options), devices, ignore=[ROWS])
    assert notes[ROWS].startswith("left out by --ignore")
    assert f"prompts_per_rollout={taken * accumulation * devices // group}," in source


def test_a_default_of_trl_is_written_out_where_ours_is_another(tmp_path: Path) -> None:
    source, _ = from_trl(write(tmp_path), devices=4)
    for written in (
        "GRPO(epsilon=0.0001)", "max_new_tokens=512", "group_size=8", 'precision="bf16-mixed"', "seed=42",
        "activation_checkpointing=True", "partial(WarmupThenLinear, warmup=0, total=100)", "prompts_per_rollout=4",
        'strategy="ddp"',
    ):  # fmt: skip
        assert written in source


@pytest.mark.parametrize(
    ("mode", "corrections"),
    [
        ("token_truncate", ["TruncatedIS"]),
        ("token_mask", ["IcePop", "TruncatedIS"]),
        ("sequence_truncate", ["TruncatedIS"]),
        ("sequence_mask", ["SequenceRatioMask", "TruncatedIS"]),
    ],
)
def test_the_corrections_of_vllm_are_those_of_its_mode(mode: str, corrections: list[str], tmp_path: Path) -> None:
    source, _ = from_trl(write(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode))
    lines = source.split("callbacks=[\n")[1].split("    ],")[0].splitlines()
    assert [line.strip().partition("(")[0] for line in lines] == [*corrections, "ModelCheckpoint"]


# Scripts, YAML and JSON.


def test_a_script_is_never_run_and_its_names_are_followed(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text(
        f'open("{tmp_path}/ran", "w").close()\nrate = 2e-6\noptions = {{"num_generations": 4, "max_steps": 10}}\n'
        'config = trl.GRPOConfig("out", learning_rate=rate, **options)\n'
    )
    source, _ = from_trl(script, 1, "some/model", ["my_rewards.right"], "rows.jsonl")
    assert not (tmp_path / "ran").exists()
    for written in ("lr=2e-06", "group_size=4", "max_steps=10", 'save_dir="out"', "from my_rewards import right\n"):
        assert written in source


def test_values_that_are_computed_or_missing_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("GRPOConfig(learning_rate=args.lr, beta=compute())")
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py")
    assert [*refused.value.reasons] == ["learning_rate", "beta"]
    (tmp_path / "grpo.py").write_text("GRPOConfig()")
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py")
    assert {*refused.value.reasons} == {"model_name_or_path", "reward_funcs", "dataset_name"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.py", "x = 1", r"expected one GRPOConfig\(...\), got 0"),
        ("run.py", "GRPOTrainer(args=parsed)", "got args=parsed: pass the YAML file of the run"),
        ("run.ipynb", "{}", "got an error"),
        ("run.py", "GRPOConfig(", "got an error"),
        ("run.py", "GRPOConfig(**read())", r"expected literal options, got \*\*read"),
        ("run.yaml", "[1]", "to hold options by name, got list"),
        ("run.sh", "accelerate launch grpo.py --beta 0", "got str: write the options of a command as YAML"),
        ("run.yaml", None, "run.yaml"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UnreadableError, match=message):
        from_trl(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("learning_rate: 2e-6", "lr=2e-06"),
        ("epsilon: 3e-4", "clip_low=0.0003"),
        ("off_policy_mask_threshold: 5e-1", "OPSM(delta=0.5)"),
        ("reward_weights: [5e-1]", "(right, 0.5)"),
        ('bf16: "false"', 'precision="32-true"'),
        ('gradient_checkpointing: "False"', "max_tokens_per_microbatch=4096)"),
        ('run_name: "1e3"', 'name="1e3"'),
    ],
)
def test_a_text_of_yaml_has_the_type_of_its_option(line: str, written: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(f"{path.read_text()}\n{line}\n")
    assert written in from_trl(path)[0]
    path.write_text(f"{path.read_text()}\nbeta: much\n")
    with pytest.raises(RefusedError, match="beta: expected a number, got 'much'"):
        from_trl(path)


@pytest.mark.parametrize(("kind", "noted"), [("linear", True), ("cosine", False), ("constant_with_warmup", False)])
def test_the_first_step_of_a_warmup_is_noted_where_it_differs(kind: str, noted: bool, tmp_path: Path) -> None:
    _, notes = from_trl(write(tmp_path, lr_scheduler_type=kind, warmup_steps=5))
    assert ("warmup_steps" in notes, "lr_scheduler_type" in notes) == (noted, False)


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"torch_dtype": "bfloat16"}, 'dtype="bfloat16"'),
        ({"warmup_ratio": 0.1}, "WarmupThenLinear, warmup=10, total=100"),
        ({"max_prompt_length": 256}, 'max_prompt_tokens=256,\n    too_long="drop"'),
        ({"system_prompt": "Think."}, 'system="Think."'),
        ({"dataset_prompt_column": "problem"}, 'columns={"prompt": "problem"}'),
        ({"chat_template": "{{ 1 }}"}, 'AutoTokenizer.from_pretrained("some/model", chat_template="{{ 1 }}")'),
        ({"use_peft": True, "lora_r": 8}, "LoraConfig(r=8, lora_alpha=32"),
        ({"reward_funcs": ["accuracy"]}, 'MathMatch(answer="solution")'),
        ({"reward_funcs": ["cosine"], "cosine_max_len": 9}, "max_len=9"),
        ({"report_to": "trackio"}, "CSVLogger"),
        ({"optim": "paged_adamw_8bit"}, "adamw_8bit("),
        ({"attn_implementation": "flash_attention_2"}, 'policy="some/model"'),
    ],
)
def test_names_of_older_versions_and_of_open_r1_are_translated(
    options: dict[str, Any], written: str, tmp_path: Path
) -> None:
    assert written in from_trl(write(tmp_path, **options))[0]


@pytest.mark.parametrize(
    ("value", "read"),
    [("1024*2", "2048"), ("limit - 2**0 - 1", None), ("limit // 3", "4"), ("-(-7)", "7"), ("sum([1])", None)],
)
def test_arithmetic_of_literals_is_read(value: str, read: str | None, tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(f"limit: int = 12\nGRPOConfig(max_completion_length={value})")
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py")
    assert ("max_completion_length" in refused.value.reasons) == (read is None)
    if read is not None:
        source, _ = from_trl(tmp_path / "grpo.py", 1, "some/model", ["my_rewards.right"], "rows.jsonl")
        assert f"max_new_tokens={read}" in source


TRAINER = """from datasets import load_dataset
from scores import plain, scaled
limit = 3
def short(completions, **columns):
    return [float(len(text) < limit) for text in completions]
rows = load_dataset("some/data", "main")
config = GRPOConfig(max_steps=10)
config.num_generations = 4
GRPOTrainer(model="some/model", reward_funcs=[short, plain, scaled(2), "some/judge"], args=config,
            train_dataset=rows["train"])
"""


def test_the_arguments_of_the_trainer_are_read_with_the_definitions_that_its_rewards_use(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(TRAINER)
    source, _ = from_trl(tmp_path / "grpo.py")
    for written in (
        '"short": short, "plain": plain, "scaled": scaled(2), "judge": RewardModel(model="some/judge")', "limit = 3\n",
        "from scores import plain, scaled\n", "def short(", 'policy="some/model"', 'prompts="some/data"', 'name="main"',
        'split="train"', "group_size=4", "max_steps=10",
    ):  # fmt: skip
        assert written in source
    assert "load_dataset" not in source
    source, _ = from_trl(tmp_path / "grpo.py", 1, "other/model", ["my_rewards.right"], "rows.jsonl")
    assert "def short(" not in source and "rewards=right" in source and 'policy="other/model"' in source
    assert 'prompts="rows.jsonl"' in source and "name=" not in source


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("rows[", "rows.map(clean)["), "dataset_name"),
        (('"some/model"', "build()"), "model_name_or_path"),
        (("args=config", "args=config, tools=[search]"), "tools"),
        (("limit", "steps"), "reward_funcs"),
    ],
)
def test_arguments_of_the_trainer_that_need_a_run_are_refused(
    change: tuple[str, str], name: str, tmp_path: Path
) -> None:
    (tmp_path / "grpo.py").write_text(TRAINER.replace(*change))
    with pytest.raises(RefusedError) as refused:
        from_trl(tmp_path / "grpo.py")
    assert [*refused.value.reasons] == [name]


SCRIPT = """from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
import os, wandb
def reward(completions, **columns):
    return [float(len(tokenizer(text))) for text in completions]
model = AutoModelForCausalLM.from_pretrained("some/model")
tokenizer = AutoTokenizer.from_pretrained("some/model")
{before}
args = GRPOConfig(max_steps=10, report_to="wandb")
{configured}
trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, reward_funcs=reward, args=args, train_dataset=load_dataset("some/data")
)
{after}
trainer.train()
{trained}
"""
FREEZE = "def freeze():\n    for part in model.parameters():\n        part.requires_grad = False\nfreeze()"


def write_script(folder: Path, place: str, source: str, *changes: tuple[str, str]) -> Path:
    """A script with statements at a place, and other changes."""
    text = SCRIPT.format(**{"before": "", "configured": "", "after": "", "trained": ""} | {place: source})
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "grpo.py").write_text(text)
    return folder / "grpo.py"


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("before", "tokenizer.chat_template = 'X'"),
        ("before", "tokenizer.add_special_tokens({'additional_special_tokens': ['<think>']})"),
        ("before", "model = PeftModel.from_pretrained(model, 'adapter', is_trainable=True)"),
        ("before", "for part in model.parameters():\n    part.requires_grad_(False)"),
        ("before", FREEZE),
        ("before", "model.to(torch.float16)"),
        ("before", "model = model.to('cuda')\nmodel = prepare(model)"),
        ("before", "tokenizer.eos_token = 'X'; tokenizer.pad_token = 'X'"),
        ("before", "GRPOTrainer.compute_loss = None"),
        ("before", "if os.environ.get('LORA'):\n    model = get_peft_model(model, LoraConfig(r=4))"),
        ("configured", "setattr(args, 'beta', 0.1)"),
        ("configured", "args.set_optimizer(name='sgd')"),
        ("configured", "args.learning_rate *= 3"),
        ("configured", "model += adapter"),
        ("configured", "if os.environ.get('DEBUG'):\n    args.beta = 0.2"),
        ("after", "trainer.args.beta = 0.2"),
        ("after", "args.beta = 0.2"),
        ("after", "trainer.add_callback(Printer())"),
        ("after", "trainer.train(resume_from_checkpoint=True)"),
    ],
)
def test_a_statement_that_is_not_translated_is_refused_until_it_is_ignored(
    place: str, source: str, tmp_path: Path
) -> None:
    plain = from_trl(write_script(tmp_path, place, ""))[0]
    path = write_script(tmp_path, place, source)
    with pytest.raises(RefusedError) as refused:
        from_trl(path)
    ((name, reason),) = refused.value.reasons.items()
    assert name.startswith("line") and "not translated: " in reason
    recipe, notes = from_trl(path, ignore=[name])
    assert notes[name] == f"left out by --ignore; {reason}" and f"* {name}: left out" in recipe
    assert body(recipe) == body(plain)


@pytest.mark.parametrize(
    ("place", "source", "noted"),
    [
        ("before", "if tokenizer.pad_token is None:\n    tokenizer.pad_token = tokenizer.eos_token", True),
        ("before", "print(model)", True),
        ("before", "model.train()", True),
        ("trained", "trainer.save_model('out')", True),
        ("configured", "debug = False\nif debug:\n    args.beta = 0.2", False),
    ],
)
def test_a_statement_without_an_effect_on_training_is_at_most_noted(
    place: str, source: str, noted: bool, tmp_path: Path
) -> None:
    plain, before = from_trl(write_script(tmp_path, place, ""))
    recipe, notes = from_trl(write_script(tmp_path, place, source))
    assert body(recipe) == body(plain)
    assert len({*notes} - {*before}) == noted


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (
            "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))",
            '(r=8, target_modules="all-linear")',
        ),
        (
            "lora = LoraConfig(bias='all', init_lora_weights='pissa', task_type=TaskType.CAUSAL_LM)\n"
            "lora_model = model = get_peft_model(model, peft_config=lora)",
            '(bias="all", init_lora_weights="pissa", task_type="CAUSAL_LM")',
        ),
        (
            "rank = 8\nmodel = FastLanguageModel.get_peft_model(model, r=rank, target_modules=['q'], random_state=1)",
            '(r=8, lora_alpha=16, target_modules=["q"])',
        ),
    ],
)
def test_an_adapter_has_the_options_of_the_script_and_no_others(source: str, written: str, tmp_path: Path) -> None:
    assert f"LoraConfig{written}" in from_trl(write_script(tmp_path, "before", source))[0]
    with pytest.raises(RefusedError) as refused:
        from_trl(write_script(tmp_path, "before", "model = get_peft_model(model, LoraConfig(r=rank()))"))
    assert refused.value.reasons == {"peft_config": "expected literal options, got r=rank()"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('el")', 'el", generation_config=get())'), {"generation_config"}),
        (("reward_funcs", "tools=[search], reward_funcs"), {"tools"}),
        (("max_steps=10", "max_steps=10, **more()"), None),
        (("GRPOTrainer(", "Changed("), {"Changed"}),
        (('Tokenizer.from_pretrained("some/model")', "Tokenizer.load()"), {"processing_class"}),
        (("AutoModelForCausalLM.from", "AutoPeftModelForCausalLM.from"), {"model_name_or_path"}),
    ],
)
def test_arguments_that_are_not_translated_are_refused_by_name(
    change: tuple[str, str], expected: set[str] | None, tmp_path: Path
) -> None:
    source = "class Changed(GRPOTrainer):\n    def compute_loss(self): ..." if expected == {"Changed"} else ""
    path = write_script(tmp_path, "before", source, change)
    with pytest.raises(RefusedError if expected else UnreadableError) as refused:
        from_trl(path)
    if isinstance(refused.value, RefusedError):
        assert {*refused.value.reasons} == expected
        assert not any("literal" in reason for name, reason in refused.value.reasons.items() if name == "tools")


def test_arguments_of_from_pretrained_and_projects_of_wandb_are_in_the_recipe(tmp_path: Path) -> None:
    changes = [('LM.from_pretrained("some/model"', 'LM.from_pretrained("some/model", revision="v2", device_map="auto"')]
    changes += [('Tokenizer.from_pretrained("some/model"', 'Tokenizer.from_pretrained("other"')]
    source = 'os.environ["WANDB_PROJECT"] = "first"\nwandb.init(project="mine", config=args)'
    recipe, notes = from_trl(write_script(tmp_path, "configured", source, *changes))
    assert '"some/model", revision="v2")' in recipe and 'tokenizer="other"' in recipe and 'project="mine"' in recipe
    assert "device_map" in notes


# The command.


def test_the_command_writes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, recipe = write(tmp_path, weight_decay=0.1), tmp_path / "new" / "recipe.py"
    for arguments, code in (([str(path)], 0), ([str(path), "--output", str(recipe)], 0)):
        with pytest.raises(SystemExit) as ended:
            main(["from-trl", *arguments])
        assert ended.value.code == code
    said = capsys.readouterr()
    assert said.out == recipe.read_text()
    assert said.err == f"{recipe}: 1 notes in its docstring; check with: lightning-rl doctor {recipe}\n"
    with pytest.raises(SystemExit, match="expected a file to write to"):
        main(["from-trl", str(path), "--output", str(path)])


def test_the_command_names_every_refusal_and_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, repetition_penalty=1.1, scale_rewrds=True)
    with pytest.raises(SystemExit) as ended:
        main(["from-trl", str(path), "--output", str(tmp_path / "recipe.py")])
    assert "refused repetition_penalty: " in str(ended.value.code)
    assert "refused scale_rewrds: no option of TRL" in str(ended.value.code)
    assert "did you mean scale_rewards?" in str(ended.value.code)
    assert "--ignore repetition_penalty scale_rewrds" in str(ended.value.code)
    assert not (tmp_path / "recipe.py").exists()
    with pytest.raises(SystemExit) as ended:
        main(["from-trl", str(path), "--ignore", "repetition_penalty", "scale_rewrds", "--output", f"{path}.py"])
    assert ended.value.code == 0
