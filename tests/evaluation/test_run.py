"""Evaluations in a Trainer: figures by hand, files, callbacks, limits, stages, predictions."""

import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import a_trainer, fit, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_rl import Evaluation, FakeEngine, PromptDataModule, RLLightningModule, SamplingParams, TransformersEngine
from lightning_rl.data import PromptDataset
from lightning_rl.generation import Request
from lightning_rl.samples.seeds import EVALUATION

EOS, A, B = 1, 2, 3
SCRIPT = {  # by evaluation, prompt and sample; the reward is 1 for an odd number of tokens
    "greedy": {0: [[A, EOS]], 1: [[A, B, EOS]]},
    "several": {
        0: [[A, A, EOS], [A, A, EOS], [B, EOS], [B, EOS]],
        1: [[B, EOS], [B, EOS], [B, EOS], [A, A, EOS]],
        2: [[B, B, B, B, B, B, B, B]] * 4,
    },
}


def several(**options: Any) -> Evaluation:
    sampling = SamplingParams(temperature=0.7, max_new_tokens=8)
    defaults: dict[str, Any] = {"samples": 4, "sampling": sampling, "answer": lambda text: text[:1] or None}
    return Evaluation("several", [[4], [5], [6]], **{**defaults, **options})


def scripted(request: Request) -> Sequence[int]:
    place = request.sample_id % EVALUATION
    if request.sampling.temperature == 0:
        return SCRIPT["greedy"][place][0]
    return SCRIPT["several"][place // 4][place % 4]


def scripted_module(evaluation: Any, **options: Any) -> RLLightningModule:
    return tiny_module(engine=FakeEngine(scripted), tokenizer=tiny_tokenizer(), evaluation=evaluation, **options)


GREEDY = Evaluation("greedy", [[2], [3]])
EXPECTED = {
    "greedy/pass@1": 1 / 2, "greedy/reward/task": 1 / 2, "greedy/length/mean": 5 / 2, "greedy/length/truncated": 0,
    "several/pass@1": (1 / 2 + 1 / 4 + 0) / 3, "several/pass@4": 2 / 3, "several/avg@4": (1 / 2 + 1 / 4) / 3,
    "several/maj@4": (1 / 2 + 0 + 0) / 3, "several/length/mean": (10 + 9 + 32) / 12,
    "several/length/truncated": 4 / 12, "several/reward/parity_reward": 3 / 12, "several/reward/missing": 0,
}  # fmt: skip


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("size", [1, 2, 256])
def test_a_greedy_evaluation_and_pass_at_k_in_one_run_draw_each_sample_once(stage: str, size: int) -> None:
    module = scripted_module([GREEDY, several()])
    data = tiny_prompts(validation_batch_size=size)
    trainer = a_trainer()
    run = trainer.validate if stage == "val" else trainer.test
    (figures,) = run(module, data, verbose=False)
    assert {name: figures[f"{stage}/{name}"] for name in EXPECTED} == pytest.approx(EXPECTED, abs=1e-6)
    assert all(name.startswith((f"{stage}/greedy/", f"{stage}/several/")) for name in figures)
    engine = module.options.engine
    assert isinstance(engine, FakeEngine)
    asked = [request.sample_id for request in engine.requests]
    assert sorted(asked) == [0, 1, *range(EVALUATION, EVALUATION + 12)]


def test_the_requests_of_a_batch_go_to_the_engine_together() -> None:
    calls: list[int] = []

    class Counting(FakeEngine):
        def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> Any:
            calls.append(len(requests))
            return super().generate_batch(requests, logprobs=logprobs)

    module = tiny_module(engine=Counting(scripted), tokenizer=tiny_tokenizer(), evaluation=[GREEDY, several()])
    a_trainer().validate(module, tiny_prompts(validation_batch_size=2), verbose=False)
    assert calls == [2 + 2 * 4, 4]


def test_evaluations_need_no_data_module_but_in_a_fit() -> None:
    module = scripted_module(GREEDY)
    (figures,) = a_trainer().validate(module, verbose=False)
    assert figures["val/greedy/pass@1"] == 0.5
    with pytest.raises(TypeError, match=r"expected Trainer\.fit"):
        a_trainer(max_epochs=1).fit(scripted_module(GREEDY))


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(ValueError, match=r'expected prompts to evaluate in stage "val", got none: pass validation='):
        a_trainer().validate(tiny_module(), tiny_prompts(), verbose=False)
    module = scripted_module(Evaluation("greedy", [[2]], stages=("test",)))
    with pytest.raises(ValueError, match=r'stage "val", got none'):
        a_trainer().validate(module, tiny_prompts(), verbose=False)
    module = tiny_module(evaluation=Evaluation("greedy", [[2]], stages=("test",)))
    assert fit(module, max_steps=1).limit_val_batches == 1.0, "a fit goes without, and gives the limit back"


def test_validation_prompts_of_the_data_module_keep_their_names_beside_evaluations() -> None:
    data = tiny_prompts(validation=[[2], [3]])
    (alone,) = a_trainer().validate(scripted_module(()), data, verbose=False)
    figures = {"val/reward/task": 0.5, "val/reward/parity_reward": 0.5, "val/reward/failed": 0, "val/length/mean": 2.5}
    assert alone == figures
    (both,) = a_trainer().validate(scripted_module(several()), data, verbose=False)
    assert {name: both[name] for name in alone} == alone
    assert {name for name in both if name.count("/") < 3 and name not in alone} >= {"val/several/pass@4"}


def test_large_rewards_keep_their_digits() -> None:
    def large(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [1e12 + 0.25] * len(prompts)

    module = scripted_module(Evaluation("large", [[2, 3]], rewards=large, correct=1e12 + 0.25))
    (figures,) = a_trainer().validate(module)
    assert figures["val/large/reward/task"] == 1e12 + 0.25 and figures["val/large/pass@1"] == 1.0


@pytest.mark.parametrize(("correct", "solved", "cure"), [(100.0, "no", "lower"), (0.0, "every", "raise")])
def test_a_threshold_that_divides_no_scores_is_warned_of_once(correct: float, solved: str, cure: str) -> None:
    module = scripted_module([GREEDY, several(correct=correct)])
    text = (
        f"expected some samples of evaluation 'several' to be solved and others not, got {solved} sample with a score "
        f"of at least correct={correct:g}: {cure} correct= if the scores, 0 to 1, have another scale"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        a_trainer().validate(module, verbose=False)
    a_trainer().validate(module, verbose=False)


def test_rewards_of_an_evaluation_are_its_own_and_missing_ones_count_nowhere() -> None:
    def half(prompts: Any, completions: Any, **_: Any) -> list[float | None]:
        return [0.5 if text.startswith("a") else None for text in completions]

    module = scripted_module(several(rewards={"half": half}, correct=0.5, answer=None))
    unmeasured = r"got NaN for val/several/pass@4, val/several/avg@4: too few samples"
    with pytest.warns(UserWarning, match="no reward function applies"), pytest.warns(UserWarning, match=unmeasured):
        (figures,) = a_trainer().validate(module, verbose=False)
    assert figures["val/several/reward/half"] == 0.5 and figures["val/several/reward/missing"] == pytest.approx(9 / 12)
    assert figures["val/several/pass@1"] == 1.0 and math.isnan(figures["val/several/pass@4"])
    assert figures["val/several/reward/failed"] == 0
    assert not any("maj@" in name or "parity" in name for name in figures)


@pytest.mark.filterwarnings(
    "ignore:rows get no reward:UserWarning", "ignore:expected a value for each metric:UserWarning"
)
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("kind", ["evaluation", "data module"])
def test_a_validation_whose_rewards_fail_is_nan_to_callbacks_and_the_run_goes_on(
    tmp_path: Path, bad: int, kind: str
) -> None:
    validations: list[int] = []

    def judge(prompts: Any, completions: Any, **_: Any) -> list[float]:
        if len(completions) == 2:
            validations.append(1)
            if len(validations) == bad:
                raise ValueError("the judge is down")
        return [float(place % 2) for place, _ in enumerate(completions)]

    key = "val/e/pass@1" if kind == "evaluation" else "val/reward/task"
    figures: list[float] = []

    class Keep(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            del pl_module
            figures.append(float(trainer.callback_metrics[key]))

    saving = ModelCheckpoint(tmp_path / "best", monitor=key, mode="max", filename="{step}")
    prompts = [[2], [3]]
    module = tiny_module(rewards=judge, evaluation=Evaluation("e", prompts) if kind == "evaluation" else ())
    data = tiny_prompts(validation=None if kind == "evaluation" else prompts)
    trainer = fit(
        module, data=data, callbacks=[saving, Keep()], logger=CSVLogger(tmp_path, "runs"), enable_checkpointing=True,
        val_check_interval=1, num_sanity_val_steps=0, max_steps=3,
    )  # fmt: skip
    assert trainer.global_step == 3
    assert [math.isnan(value) for value in figures] == [number == bad for number in (1, 2, 3)]
    assert [value for value in figures if not math.isnan(value)] == [0.5, 0.5]
    assert saving.best_model_score == 0.5 and Path(saving.best_model_path).name != f"step={bad}.ckpt"
    name = "e" if kind == "evaluation" else "validation"
    (file,) = (tmp_path / "runs" / "version_0" / "failed_rewards").iterdir()
    assert file.name == f"{name}-step_{bad:06d}-rank-0.jsonl" and len(file.read_text().splitlines()) == 2


def test_early_stopping_ends_a_run_at_a_figure_that_is_nan(tmp_path: Path) -> None:
    def judge(prompts: Any, completions: Any, **_: Any) -> list[float]:
        raise ValueError("the judge is down")

    stopping = EarlyStopping("val/e/pass@1", mode="max", patience=9, check_on_train_epoch_end=False)
    module = tiny_module(evaluation=Evaluation("e", [[2], [3]], rewards=judge))
    failed = pytest.warns(UserWarning, match=r"judge failed on 2\. First, reward judge raised.*the judge is down")
    with failed, pytest.warns(UserWarning, match=r"got NaN for val/e/pass@1, .* check_finite=False"):
        trainer = fit(module, callbacks=[stopping], val_check_interval=1, default_root_dir=tmp_path)
    assert trainer.global_step == 1 and trainer.callback_metrics["val/e/reward/failed"] == 2


def unread(text: str) -> Any:
    if text.startswith("b"):
        raise ValueError("no number in it, api_key=sesame")
    return [text] if text == "a a" else text


@pytest.mark.parametrize(
    ("answer", "failed", "match"),
    [
        (
            unread,
            12,
            r'answer of evaluation "several" failed on 12 samples.* it returned \[.a a.\], a list, .* a tuple',
        ),
        (lambda text: [text], 12, "a list, which cannot be counted as a vote"),
        (
            lambda text: unread(text) and 1 if text.startswith("b") else text,
            9,
            r"raised ValueError: no number in it, api_key=\*\*\* for",
        ),
    ],
)
def test_an_answer_that_fails_costs_its_sample_the_vote(answer: Any, failed: int, match: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (figures,) = a_trainer().validate(scripted_module(several(answer=answer)), verbose=False)
    said = [str(warning.message) for warning in caught if "answer of evaluation" in str(warning.message)]
    assert len(said) == 1 and re.search(match, said[0], re.DOTALL)
    assert figures["val/several/answer/failed"] == failed
    assert figures["val/several/pass@1"] == pytest.approx((1 / 2 + 1 / 4 + 0) / 3), "all else is counted"
    if failed == 12:
        assert math.isnan(figures["val/several/maj@4"])
    else:  # the answers that are left: two of the first prompt, all odd and solved, and one of the second
        assert figures["val/several/maj@4"] == pytest.approx((1 + 1) / 2)


def test_the_bar_has_room_for_one_figure_of_each_evaluation() -> None:
    module = scripted_module([GREEDY, several(pass_at=4)])
    trainer = a_trainer()
    trainer.validate(module, tiny_prompts(validation=[[2]]), verbose=False)
    shown = {name for name in trainer.progress_bar_metrics if name.startswith("val/")}
    assert shown == {"val/reward/task", "val/greedy/pass@1", "val/several/pass@4"}


def test_samples_are_kept_beside_the_logger(tmp_path: Path) -> None:
    module = scripted_module([GREEDY, several(), Evaluation("unkept", [[2]], save=False)])
    trainer = a_trainer(logger=CSVLogger(tmp_path, "runs"))
    trainer.validate(module, tiny_prompts(validation=[{"prompt": [2], "answer": "a"}]), verbose=False)
    folder = tmp_path / "runs" / "version_0" / "evaluations"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["greedy/validate.jsonl", "several/validate.jsonl", "validation/validate.jsonl"]
    lines = [json.loads(line) for line in (folder / files[1]).read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2] and [line["prompt"] for line in lines] == [[4], [5], [6]]
    completion = {"text": "a a", "finish": "stop", "length": 3, "reward": 1.0, "rewards": {"parity_reward": 1.0}}
    assert lines[0]["completions"][0] == {**completion, "solved": True, "answer": "a"}
    assert [c["finish"] for c in lines[2]["completions"]] == ["length"] * 4
    (line,) = [json.loads(text) for text in (folder / files[2]).read_text().splitlines()]
    assert line["columns"] == {"answer": "a"} and line["completions"][0]["text"] == "a"


def test_without_a_logger_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_trainer(default_root_dir=tmp_path).validate(scripted_module(GREEDY), verbose=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")  # without its callbacks
def test_a_fit_validates_at_its_steps_and_checkpoints_by_a_figure(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "best", monitor="val/greedy/pass@1", mode="max", filename="{step}")
    module = tiny_module(evaluation=Evaluation("greedy", [[2], [3]]), seed=3)
    trainer = fit(
        module, callbacks=[saving], logger=CSVLogger(tmp_path, "runs"), enable_checkpointing=True,
        val_check_interval=1, num_sanity_val_steps=1,
    )  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "runs" / "version_0" / "evaluations" / "greedy").iterdir())
    assert names == [f"step_{step:06d}.jsonl" for step in range(1, 5)], "the sanity check wrote none"
    (figures,) = trainer.validate(module, tiny_prompts(), ckpt_path=saving.best_model_path, verbose=False)
    assert figures["val/greedy/pass@1"] == saving.best_model_score
    assert (tmp_path / "runs" / "version_0" / "evaluations" / "greedy" / "validate.jsonl").is_file()
    (tested,) = a_trainer().test(
        tiny_module(evaluation=Evaluation("greedy", [[2], [3]]), seed=3), tiny_prompts(),
        ckpt_path=saving.best_model_path, verbose=False,
    )  # fmt: skip
    assert tested["test/greedy/pass@1"] == figures["val/greedy/pass@1"]


def level_reward(prompts: Any, completions: Any, *, level: list[int], **_: Any) -> list[int]:
    return level


def test_prompts_may_be_a_data_set_with_options_of_its_own() -> None:
    rows = [{"question": [4] * 9, "level": 0}, {"question": [4], "level": 1}, {"question": [5], "level": 2}]
    prompts = PromptDataset(rows, columns={"prompt": "question"}, max_prompt_tokens=3, too_long="drop")
    engine = FakeEngine(lambda request: [request.prefix_ids[0], EOS])
    module = tiny_module(engine=engine, evaluation=Evaluation("kept", prompts, rewards=level_reward, correct=2))
    (figures,) = a_trainer().validate(module, tiny_prompts(validation=prompts), verbose=False)
    assert figures["val/kept/reward/task"] == 1.5 and figures["val/kept/pass@1"] == 0.5
    assert [request.prefix_ids for request in engine.requests] == [(4,), (5,)] * 2


def test_a_limit_of_batches_cuts_each_evaluation_and_the_bar_knows_the_total() -> None:
    module = scripted_module([GREEDY, several()])
    trainer = a_trainer(limit_val_batches=1)
    (figures,) = trainer.validate(module, tiny_prompts(validation_batch_size=1), verbose=False)
    assert trainer.num_val_batches == [1]
    assert figures["val/greedy/pass@1"] == 0.0 and figures["val/several/pass@1"] == 0.5
    trainer = a_trainer()
    trainer.validate(module, tiny_prompts(validation_batch_size=1), verbose=False)
    assert trainer.num_val_batches == [3]


def test_seeds_depend_on_run_name_prompt_and_sample_alone() -> None:
    def seeds(size: int, samples: int = 4, **options: Any) -> list[tuple[int, int]]:
        engine = FakeEngine(lambda _: [A, EOS])
        evaluation = Evaluation(options.pop("name", "several"), [[4], [5], [6]], samples=samples)
        module = tiny_module(engine=engine, evaluation=evaluation, **options)
        a_trainer().validate(module, tiny_prompts(validation_batch_size=size), verbose=False)
        return sorted((request.sample_id, request.seed) for request in engine.requests)

    first = seeds(1)
    assert seeds(2) == first and len({seed for _, seed in first}) == 12
    assert not {seed for _, seed in seeds(2, seed=1)} & {seed for _, seed in first}
    assert not {seed for _, seed in seeds(2, name="other")} & {seed for _, seed in first}
    assert {seed for _, seed in seeds(2, samples=2)} < {seed for _, seed in first}


@pytest.mark.parametrize("options", [{"max_tokens_per_microbatch": 7}, {"size": 1}, {"size": 3}, {"max_rows": 2}])
def test_figures_do_not_depend_on_token_budget_batches_or_rows(options: dict[str, Any]) -> None:
    def figures(size: int = 256, max_rows: int = 512, **others: Any) -> dict[str, float]:
        module = tiny_module(
            policy=lambda: tiny_policy(dtype=torch.float64), engine=TransformersEngine(max_rows=max_rows),
            evaluation=[
                Evaluation("greedy", [[2 + n] for n in range(5)]),
                Evaluation("several", [[2 + n, 3] for n in range(7)], samples=3,
                           sampling=SamplingParams(max_new_tokens=5)),
            ], **others,
        )  # fmt: skip
        return dict(a_trainer().validate(module, tiny_prompts(validation_batch_size=size), verbose=False)[0])

    assert figures(**options) == figures()


def test_an_evaluation_changes_nothing_that_trains() -> None:
    def weights(evaluation: Any) -> dict[str, torch.Tensor]:
        module = tiny_module(evaluation=evaluation)
        fit(module, val_check_interval=1)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    plain, evaluated = weights(()), weights([GREEDY, Evaluation("several", [[4]], samples=3)])
    assert plain.keys() == evaluated.keys() and all(torch.equal(plain[name], evaluated[name]) for name in plain)


def test_predict_returns_and_writes_a_completion_of_each_prompt(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request: [*request.prefix_ids[:1], EOS])
    module = tiny_module(engine=engine, tokenizer=tiny_tokenizer())
    rows = [{"prompt": "a b", "id": 7}, {"prompt": "c", "id": 8}, {"prompt": "d", "id": 9}]
    data = PromptDataModule(rows, 1, validation_batch_size=2)
    batches = a_trainer(default_root_dir=tmp_path).predict(module, data)
    assert batches is not None and [len(batch) for batch in batches] == [2, 1]
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert lines == [record for batch in batches for record in batch]
    assert lines[0] == {
        "index": 0, "prompt": "a b", "columns": {"id": 7},
        "completions": [{"text": "a", "finish": "stop", "length": 2}],
    }  # fmt: skip
    assert [line["completions"][0]["text"] for line in lines] == ["a", "c", "d"]
