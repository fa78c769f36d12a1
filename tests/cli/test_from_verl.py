"""from-verl: the options of a GRPO run are verl's own, and each is translated, explained or refused by name."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rl.cli.main import main
from lightning_rl.translation.option import RefusedError
from lightning_rl.translation.recipe import Given, Recipe
from lightning_rl.translation.scripts import UnreadableError
from lightning_rl.translation.verl import flat, from_verl
from lightning_rl.translation.verl_options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MINIMAL = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": "some/model",
    f"{ROLLOUT}name": "vllm",
    f"{ROLLOUT}n": 8,
    "trainer.logger": ["console"],
    "trainer.total_training_steps": 10,
    "reward.custom_reward_function.path": "score.py",
}
KL = {f"{ACTOR}use_kl_loss": True}
CORRECTED = {"algorithm.rollout_correction.rollout_is": "token"}
TESTED = {"trainer.test_freq": 5}
NORM = {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"}
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "algorithm.adv_estimator": ("rloo", {}),
    "algorithm.norm_adv_by_std_in_grpo": (False, {}),
    "algorithm.filter_groups.enable": (True, {}),
    "algorithm.rollout_correction.rollout_is": ("sequence", {}),
    "algorithm.rollout_correction.rollout_is_threshold": (5.0, CORRECTED),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (True, CORRECTED),
    f"{ACTOR}ppo_mini_batch_size": (128, {}),
    f"{ACTOR}ppo_epochs": (2, {}),
    f"{ACTOR}ppo_max_token_len_per_gpu": (8192, {}),
    f"{ACTOR}policy_loss.loss_mode": ("gspo", {}),
    f"{ACTOR}clip_ratio": (0.1, {f"{ACTOR}clip_ratio_low": None}),
    f"{ACTOR}clip_ratio_low": (0.1, {}),
    f"{ACTOR}clip_ratio_high": (0.28, {}),
    f"{ACTOR}clip_ratio_c": (10.0, {}),
    f"{ACTOR}loss_agg_mode": ("seq-mean-token-mean", {}),
    f"{ACTOR}loss_scale_factor": (100, NORM),
    f"{ACTOR}entropy_coeff": (0.01, {}),
    f"{ACTOR}use_kl_loss": (True, {}),
    f"{ACTOR}kl_loss_coef": (0.1, KL),
    f"{ACTOR}kl_loss_type": ("k2", KL),
    f"{ACTOR}optim.lr": (1e-5, {}),
    f"{ACTOR}optim.weight_decay": (0.1, {}),
    f"{ACTOR}optim.betas": ([0.9, 0.95], {}),
    f"{ACTOR}optim.clip_grad": (0.5, {}),
    f"{ACTOR}optim.lr_warmup_steps": (10, {}),
    "actor_rollout_ref.model.path": ("other/model", {}),
    "actor_rollout_ref.model.tokenizer_path": ("other/tokenizer", {}),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (False, {}),
    "actor_rollout_ref.model.use_liger": (True, {}),
    f"{ROLLOUT}name": ("hf", {}),
    f"{ROLLOUT}n": (4, {}),
    f"{ROLLOUT}temperature": (0.7, {}),
    f"{ROLLOUT}top_p": (0.9, {}),
    f"{ROLLOUT}top_k": (20, {}),
    f"{ROLLOUT}gpu_memory_utilization": (0.6, {}),
    f"{ROLLOUT}tensor_model_parallel_size": (1, {}),
    f"{ROLLOUT}max_model_len": (4096, {}),
    f"{ROLLOUT}free_cache_engine": (False, {}),
    f"{ROLLOUT}val_kwargs.n": (4, {**TESTED, f"{ROLLOUT}val_kwargs.temperature": 1.0}),
    f"{ROLLOUT}val_kwargs.temperature": (1.0, TESTED),
    f"{ROLLOUT}val_kwargs.top_p": (0.9, TESTED),
    "data.train_files": ("train.parquet", {}),
    "data.val_files": ("test.parquet", TESTED),
    "data.prompt_key": ("question", {}),
    "data.train_batch_size": (512, {}),
    "data.max_response_length": (1024, {}),
    "data.max_prompt_length": (1024, {}),
    "data.filter_overlong_prompts": (True, {}),
    "data.shuffle": (False, {}),
    "data.seed": (1, {}),
    "data.apply_chat_template_kwargs": ({"enable_thinking": False}, {}),
    "reward.custom_reward_function.path": ("other_score.py", {}),
    "reward.custom_reward_function.name": ("score", {}),
    "trainer.total_epochs": (2, {"trainer.total_training_steps": None}),
    "trainer.total_training_steps": (20, {}),
    "trainer.nnodes": (2, {}),
    "trainer.n_gpus_per_node": (4, {}),
    "trainer.save_freq": (20, {}),
    "trainer.test_freq": (5, {}),
    "trainer.logger": (["console", "wandb"], {}),
    "trainer.project_name": ("mine", {}),
    "trainer.experiment_name": ("first", {}),
    "trainer.default_local_dir": ("elsewhere", {"trainer.save_freq": 20}),
}


def translate(folder: Path, **values: Any) -> Recipe:
    """The recipe of a file with everything that a recipe needs, and what is given."""
    (folder / "run.yaml").write_text(yaml.safe_dump({**MINIMAL, **values}))
    return from_verl(folder / "run.yaml")


def other(default: Any) -> Any:
    """A value that is not the default."""
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "another"


def test_every_option_is_one_of_verl_with_its_default() -> None:
    record = json.loads((ROOT / "tests/data/verl/options.json").read_text())
    assert record["verl"].startswith("0.9.")
    defaults = {name: option.default for name, option in OPTIONS.items()}
    assert defaults == {name: record["options"][name] for name in OPTIONS}


def test_every_option_is_tried() -> None:
    moved = {name for name, option in OPTIONS.items() if option.verdict != "refused" and option.ours}
    assert moved - {f"{ACTOR}strategy"} == {*EXAMPLES}  # fsdp and fsdp2 are one strategy here


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_option_that_goes_somewhere_changes_the_recipe(name: str, tmp_path: Path) -> None:
    value, beside = EXAMPLES[name]
    before, after = (translate(tmp_path, **{**beside, **further}) for further in ({}, {name: value}))
    assert before.script().split('"""', 2)[2] != after.script().split('"""', 2)[2]
    compile(after.script(), "recipe.py", "exec")
    if OPTIONS[name].verdict == "different" and value != "k2":
        assert name in after.notes


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.verdict == "refused"])
def test_a_refused_option_is_refused_by_name_and_fine_at_its_default(name: str, tmp_path: Path) -> None:
    translate(tmp_path, **{name: OPTIONS[name].default})
    with pytest.raises(RefusedError) as refused:
        translate(tmp_path, **{name: other(OPTIONS[name].default)})
    assert refused.value.reasons == {name: OPTIONS[name].says}


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.verdict == "different" and not option.ours]
)
def test_an_option_that_goes_nowhere_is_explained(name: str, tmp_path: Path) -> None:
    assert translate(tmp_path, **{name: other(OPTIONS[name].default)}).notes[name] == OPTIONS[name].says


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"algorithm.adv_estimator": "gae"}, "algorithm.adv_estimator"),
        ({f"{ACTOR}policy_loss.loss_mode": "clip_cov"}, f"{ACTOR}policy_loss.loss_mode"),
        ({f"{ACTOR}loss_agg_mode": "token-sum"}, f"{ACTOR}loss_agg_mode"),
        ({f"{ACTOR}ppo_mini_batch_size": 300}, f"{ACTOR}ppo_mini_batch_size"),
        ({f"{ACTOR}strategy": "megatron"}, f"{ACTOR}strategy"),
        ({**KL, f"{ACTOR}kl_loss_type": "k3+"}, f"{ACTOR}kl_loss_type"),
        ({f"{ROLLOUT}name": "sglang"}, f"{ROLLOUT}name"),
        ({"data.train_files": ["a.parquet", "b.parquet"]}, "data.train_files"),
        ({"reward.custom_reward_function.path": None}, "reward.custom_reward_function.path"),
        ({"trainer.logger": ["swanlab"]}, "trainer.logger"),
        ({"algorithm.rollout_correction.rollout_is": "batch"}, "algorithm.rollout_correction.rollout_is"),
        ({"critic.optim.lr": 1e-5}, "critic.optim.lr"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        translate(tmp_path, **options)
    assert [*refused.value.reasons] == [name]


def test_what_verl_leaves_open_has_to_be_said(tmp_path: Path) -> None:
    options = {name: value for name, value in MINIMAL.items() if name != f"{ROLLOUT}name"}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump({**options, "data.train_batch_size": 32}))
    with pytest.raises(RefusedError) as refused:
        from_verl(tmp_path / "verl.yaml")
    assert refused.value.reasons == {
        f"{ROLLOUT}name": "missing: vllm or hf, for verl has no default",
        f"{ACTOR}ppo_mini_batch_size": "expected a part of data.train_batch_size=32, got 256",
    }


@pytest.mark.parametrize(
    ("name", "value"), [(f"{ROLLOUT}n", 0), (f"{ACTOR}ppo_mini_batch_size", 0), ("trainer.save_freq", "often")]
)
def test_a_value_of_another_kind_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump({**MINIMAL, name: value}))
    with pytest.raises(RefusedError, match=f"{name}: expected a"):
        from_verl(tmp_path / "verl.yaml")


def test_overrides_count_more_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MINIMAL))
    recipe = from_verl(tmp_path / "run.yaml", ["data.train_batch_size=512", f"+{ROLLOUT}n=16", "data.seed=null"])
    assert (recipe.data["prompts_per_rollout"], recipe.module["group_size"]) == (512, 16)
    with pytest.raises(UnreadableError, match="name=value"):
        from_verl(tmp_path / "run.yaml", ["data.seed"])


def test_nested_options_are_read_by_their_dotted_names() -> None:
    nested = {"defaults": ["x"], "data": {"seed": 1, "apply_chat_template_kwargs": {"a": 1}, "_target_": "y"}}
    assert flat(nested) == {"data.seed": 1, "data.apply_chat_template_kwargs": {"a": 1}}


def test_the_reward_of_verl_gets_what_verl_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': data_source == 'd' and solution_str == ground_truth and extra_info == {'i': 1}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "score", raising=False)
    text = translate(tmp_path).script()
    start, end = text.index("from score import"), text.index("data = ")
    namespace: dict[str, Any] = {}
    exec("from lightning_rl.rewards import text_of\n" + text[start:end], namespace)
    said = [[{"role": "assistant", "content": "4"}], "5"]
    scores = namespace["verl_score"](
        ["?", "?"], said, data_source=["d", "d"], reward_model=[{"ground_truth": "4"}] * 2, extra_info=[{"i": 1}] * 2
    )
    assert scores == [1.0, 0.0]
    sys.modules.pop("score", None)


def test_a_reward_can_be_given(tmp_path: Path) -> None:
    options = {**MINIMAL, "reward.custom_reward_function.path": None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    recipe = from_verl(tmp_path / "run.yaml", given=Given(rewards=("my_rewards.right",)))
    assert "rewards=right" in recipe.script()


def test_the_command_writes_a_recipe_and_names_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(SystemExit) as ended:
        main(["from-verl", str(tmp_path / "run.yaml"), "--", f"{ACTOR}clip_ratio_high=0.28"])
    assert ended.value.code == 0 and "clip_high=0.28" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"refused data\.truncation: a prompt is never cut"):
        main(["from-verl", str(tmp_path / "run.yaml"), "--", "data.truncation=left"])


def test_the_page_is_what_the_table_says() -> None:
    spec = importlib.util.spec_from_file_location("coming_from_verl_page", ROOT / "docs" / "coming_from_verl.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "coming_from_verl.md").read_text()
    assert page == script.page(), "run python docs/coming_from_verl.py"
