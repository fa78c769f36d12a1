"""Each problem is found, with its fix, and a clean recipe has none."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.conversations import talking_module
from kit.streaming_memory import peaks
from kit.support import (
    a_trainer,
    fit,
    parity_reward,
    tiny_model,
    tiny_module,
    tiny_policy,
    tiny_prompts,
    tiny_tokenizer,
)
from lightning.pytorch import Trainer
from tokenizers.processors import TemplateProcessing
from torch.optim import SGD, AdamW
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typing_extensions import override

from lightning_rl import PromptDataModule, RLCallback, RLLightningModule, TransformersEngine, VLLMEngine
from lightning_rl.callbacks import OPSM, ReferenceKL, TruncatedIS
from lightning_rl.cli.doctor import recipe_checks
from lightning_rl.cli.doctor.command import examine
from lightning_rl.cli.doctor.memory_checks import engine_room, too_much
from lightning_rl.cli.doctor.recipe_checks import bridges, kernels, tokenizer
from lightning_rl.cli.doctor.sample_checks import draw_samples
from lightning_rl.cli.main import main
from lightning_rl.cli.recipes import Recipe
from lightning_rl.generation import Request
from lightning_rl.generation.fake import FakeEngine
from lightning_rl.policy.memory import GIB, EngineRoom, MemoryPlan
from lightning_rl.run import memory_estimate
from lightning_rl.run.memory_estimate import memory_plan
from lightning_rl.run.run import Run
from lightning_rl.utils.finding import Finding

Subject = TypeVar("Subject")
CHATML = (
    "{% for message in messages %}<s> {{ message.role }} {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
FORGETFUL = CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else 'gone' }}")
OTHER_END = CHATML.replace("</s>", "b")


def module_of(**options: Any) -> RLLightningModule:
    """A module with room for its answers to end."""
    return tiny_module(**{"max_new_tokens": 32, **options})


def found(
    module: RLLightningModule | None = None, data: PromptDataModule | None = None, trainer: Trainer | None = None,
    *, limit: float = 30.0,
) -> list[Finding]:  # fmt: skip
    given = Recipe(trainer or a_trainer(), module or module_of(), data or tiny_prompts())
    return examine(given, prompts=8, limit=limit)


def problems(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.severity != "fact"]


def test_a_clean_recipe_has_facts_and_no_finding() -> None:
    findings = found()
    assert problems(findings) == []
    assert {one.check for one in findings} == {
        "versions", "batches", "policy", "eos", "memory", "samples", "reward", "groups", "engine",
    }  # fmt: skip


def test_a_prompt_and_a_response_are_shown_with_their_control_tokens() -> None:
    findings = found(module_of(tokenizer=templated(CHATML)), chats())
    (prompt,), (response,) = facts(findings, "prompt"), facts(findings, "response")
    assert prompt.startswith("6 tokens: '<unk> <unk> c </s>") and " tokens: '" in response


def test_an_eos_that_a_tokenizer_appends_to_prompts_is_a_warning() -> None:
    subject = tiny_tokenizer()
    end = [("</s>", 1)]
    subject.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=end)
    (one,) = problems(found(module_of(tokenizer=subject), PromptDataModule(["a b"] * 8, 4)))
    assert (one.check, one.severity) == ("prompt", "warning") and "prompt 0 ends with </s>" in one.observed


def test_a_quick_look_builds_no_policy() -> None:
    def policy() -> Any:
        pytest.fail("it was built")

    recipe = Recipe(a_trainer(), module_of(policy=policy), tiny_prompts())
    findings = examine(recipe, prompts=8, limit=30.0, quick=True)
    assert problems(findings) == [] and [one.check for one in findings] == ["versions", "batches", "setup"]


def broken(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(completions[row][99]) for row in range(len(prompts))]


def constant(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def mostly_nan(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [float("nan") if row % 2 else float(row) for row in range(len(prompts))]


def bare(prompts: Sequence[Any]) -> list[float]:
    return [0.0] * len(prompts)


def short(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0]


def hanging(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    time.sleep(60)
    return [0.0] * len(prompts)


class Elsewhere(TransformersEngine):
    """Samples from another distribution than it reports on."""

    off, rows = 1.0, 1  # nats, in each row whose number this divides

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> Any:
        return [
            type(one)(token_ids=one.token_ids, logprobs=None if one.logprobs is None
                      else one.logprobs - self.off * (row % self.rows == 0), finish=one.finish, version=one.version)
            for row, one in enumerate(super().generate_batch(requests, logprobs=logprobs))
        ]  # fmt: skip


class Refusing(RLCallback):
    """Cannot begin."""

    name = "refusing"

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        raise ValueError("expected a teacher, got none: pass teacher=")


CASES: dict[str, tuple[Callable[[], list[Finding]], str, str, str, str]] = {
    "minibatches_per_rollout": (
        lambda: found(module_of(minibatches_per_rollout=3)), "error", "batches",
        "are not divisible by minibatches_per_rollout x ranks = 3 x 1",
        "prompts_per_rollout=3 or 6",
    ),
    "left_over": (
        lambda: found(data=tiny_prompts(10, 4)), "warning", "batches", "2 of 10 prompts are left over", "add or drop",
    ),
    "cut": (
        lambda: found(module_of(epochs_per_rollout=2), trainer=a_trainer(max_steps=5)), "warning", "batches",
        "max_steps=5 ends within a rollout", "max_steps=4",
    ),
    "template_end": (
        lambda: found(module_of(tokenizer=templated(OTHER_END)), chats()), "error", "eos",
        "the chat template ends an answer with 3 (b)", "eos_token_ids=[1, 3]",
    ),
    "raising": (
        lambda: found(module_of(rewards=broken, tokenizer=tiny_tokenizer())), "error", "reward",
        "broken raised IndexError", "None where it does not apply",
    ),
    "signature": (
        lambda: found(module_of(rewards=bare)), "error", "setup", "expected reward bare to accept",
        "follow the message",
    ),
    "hanging": (
        lambda: found(module_of(rewards=hanging), limit=0.2), "error", "reward", "did not return within 0.2 s",
        "add a timeout",
    ),
    "number": (
        lambda: found(module_of(rewards=short)), "error", "reward", "returned 1 values for 32", "one value for each",
    ),
    "nan": (
        lambda: found(module_of(rewards=mostly_nan)), "warning", "reward", "no finite number for 16 of 32",
        "a finite number",
    ),
    "flat": (
        lambda: found(module_of(rewards=constant)), "warning", "groups", "100% of the groups have no gradient",
        "DynamicSampling()",
    ),
    "truncation": (
        lambda: found(module_of(max_new_tokens=1)), "warning", "samples", "do not end within max_new_tokens=1",
        "max_new_tokens=2 or more",
    ),
    "context": (
        lambda: found(module_of(max_new_tokens=62)), "error", "setup", "expected prompts of at most 2 tokens",
        "follow the message",
    ),
    "engine": (
        lambda: found(module_of(engine=Elsewhere())), "error", "engine", "differ by 1 nats",
        "check that the engine loads synced weights",
    ),
    "refused": (
        lambda: found(trainer=a_trainer([Refusing()])), "error", "setup", "ValueError: expected a teacher, got none",
        "follow the message",
    ),
    "dead_knob": (
        lambda: found(trainer=a_trainer([OPSM()])), "warning", "setup", "OPSM has no effect", "follow the message",
    ),
    "ranks": (
        lambda: found(trainer=a_trainer(devices=2, strategy="ddp")), "warning", "setup", "would start 2 ranks",
        "torchrun --nproc_per_node 2",
    ),
}  # fmt: skip


def chats() -> PromptDataModule:
    return PromptDataModule([{"prompt": [{"role": "user", "content": "c"}]}] * 8, 4)


def templated(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": ["b"]})
    return tokenizer


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_found_with_its_fix(case: str) -> None:
    look, severity, check, what, fix = CASES[case]
    named = [one for one in problems(look()) if one.check == check]
    assert [one.severity for one in named] == [severity], named
    assert what in named[0].observed
    assert fix in named[0].cure


@pytest.mark.parametrize(
    ("off", "rows", "says"),
    [(0.0, 1, ""), (2e-4, 1, "0.0002 nats per token"), (1e-3, 32, "0.001 in one row"), (1e-4, 32, "")],
)
def test_an_engine_that_runs_the_policy_itself_differs_by_rounding_alone(off: float, rows: int, says: str) -> None:
    engine = Elsewhere()
    engine.off, engine.rows = off, rows
    findings = problems(found(module_of(policy=partial(tiny_model, "qwen2", dtype=torch.float32), engine=engine)))
    assert [(one.check, one.severity) for one in findings] == [("engine", "warning")] * bool(says)
    assert all(
        says in one.observed and "beyond rounding (0.0001, in one row 0.0005)" in one.observed for one in findings
    )


def test_a_wrong_eos_of_which_the_fit_warns_is_one_finding() -> None:
    findings = problems(found(module_of(tokenizer=templated(OTHER_END)), chats()))
    assert [(one.check, "does not end a response" in one.observed) for one in findings].count(("eos", True)) == 1
    assert not any(one.check == "setup" for one in findings)


def facts(findings: list[Finding], check: str) -> list[str]:
    return [one.observed for one in findings if one.check == check and one.severity == "fact"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bridges_of_each_family_of_templates_are_told(name: str) -> None:
    """Thinking models among them: what rewrites earlier answers is no matter, and no warning."""
    close, family = sorted(close_of(name)), FAMILIES[name]
    run = SimpleNamespace(sampling=SimpleNamespace(eos_token_ids=close))
    stream = SimpleNamespace(template_options={}, prompts=SimpleNamespace(examples=lambda _: []))
    options = SimpleNamespace(tokenizer=tokenizer_of(name))
    module: Any = SimpleNamespace(options=options, run=run, data_module=stream)
    kinds = {"user": family.user, "tool": family.tool, "two tools": family.two_tools}
    findings = list(bridges(module))
    right = ", ".join(kind for kind, wrong in kinds.items() if not wrong) or "none"
    first, *others = facts(findings, "template")
    assert first == f"messages that can follow an answer: {right}"
    assert [other.split(": ")[0] for other in others] == [
        f"{kind} messages cannot follow an answer" for kind, wrong in kinds.items() if wrong
    ]
    assert problems(findings) == []


def test_the_bridge_is_checked_with_the_variables_of_the_rows() -> None:
    rows = [SimpleNamespace(variables={"enable_thinking": on, "tools": []}) for on in (False, True, False)]
    data = SimpleNamespace(template_options={}, prompts=SimpleNamespace(examples=lambda _: rows))
    run = SimpleNamespace(sampling=SimpleNamespace(eos_token_ids=sorted(close_of("qwen3"))))
    module: Any = SimpleNamespace(options=SimpleNamespace(tokenizer=tokenizer_of("qwen3")), run=run, data_module=data)
    assert [said.rpartition(": ")[0] for said in facts(list(bridges(module)), "template")] == [
        f"messages that can follow an answer of rows with chat_template_kwargs={{'enable_thinking': {on}}}"
        for on in (False, True)
    ]


def test_what_no_message_can_follow_is_said_with_the_reason() -> None:
    assert facts(found(module_of(tokenizer=tokenizer_of("cohere2"), eos_token_ids=[7])), "template") == [
        "messages that can follow an answer: user",
        "tool messages cannot follow an answer: the template drops the text of a tool message",
        "two tools messages cannot follow an answer: the template drops the text of a tool message",
    ]
    assert facts(found(module_of(tokenizer=templated(FORGETFUL))), "template")[:2] == [
        "messages that can follow an answer: none",
        "user messages cannot follow an answer: the template does not write the text of an answer: it has to write "
        "each message's content",
    ]
    assert facts(found(module_of(tokenizer=tiny_tokenizer())), "template") == []


@pytest.mark.parametrize(("kind", "warned"), [("qwen2", True), ("llama", False)])
def test_a_tokenizer_that_is_read_with_the_rules_of_another_is_found(kind: str, warned: bool, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    loaded, whole = AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    problems = [one.observed for one in tokenizer(module_of(tokenizer=loaded))]
    assert warned == any("encodes '12345 + 6.78 = ?' as [" in one for one in problems) == (len(problems) == 1)
    assert list(tokenizer(module_of(tokenizer=whole))) == list(tokenizer(module_of(tokenizer=tiny_tokenizer()))) == []


def test_a_package_outside_its_window_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recipe_checks, "requires", lambda _: ["torch>=99", "numpy<1", 'vllm>=0.32; extra == "vllm"', "nowhere"]
    )
    named = problems(found())[:-1]
    assert [one.check for one in named] == ["versions"] * 3
    assert named[0].observed.startswith("expected torch >=99, got ")
    assert [one.cure for one in named] == ["pip install 'torch>=99'", "pip install 'numpy<1'", "pip install 'nowhere'"]


def built(examine_module: Callable[[RLLightningModule], Subject], **options: Any) -> Subject:
    """Return the result of a function of the module at the start of its fit."""
    seen: list[Subject] = []

    class Looking(RLCallback):
        name = "looking"

        @override
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(examine_module(pl_module))
            trainer.should_stop = True

    corrections = [Looking(), *options.pop("callbacks", [])]
    trainer = a_trainer(corrections, limit_train_batches=1, precision=options.pop("precision", "32-true"))
    trainer.fit(module_of(**options), tiny_prompts(4, 4))
    return seen[0]


def plan_of(**options: Any) -> MemoryPlan:
    return built(lambda module: memory_plan(module.run, 3), **options)


PARAMETERS = sum(weight.numel() for weight in tiny_policy().parameters())


def test_memory_follows_the_formulas() -> None:
    plan = plan_of(optimizer=partial(AdamW, lr=1e-3))
    assert plan.weights == plan.gradients == 4 * PARAMETERS
    assert plan.optimizer == 8 * PARAMETERS
    assert plan.engine == 2 * 2 * 2 * 8 * 4 * 16 * (3 + 32)  # k and v, layers, heads, size, bytes, rows, tokens
    assert (plan.reference, plan.replica, plan.buckets, plan.gathered, plan.asleep, plan.context) == (0,) * 6
    assert plan.phases()["update"] == plan.weights + plan.optimizer + plan.gradients + plan.activations


def test_memory_follows_the_options() -> None:
    plain = plan_of(optimizer=partial(SGD, lr=1e-3))
    assert plain.optimizer == 0
    assert plan_of(callbacks=[ReferenceKL(as_loss=True)]).reference == plain.weights
    full, selective = (plan_of(activation_checkpointing=mode).activations for mode in ("full", "selective"))
    assert full < selective < plain.activations
    compiled = {
        name: plan_of(activation_checkpointing=name, compile="eager").activations for name in (False, "selective")
    }
    assert compiled[False] == compiled["selective"] == plain.activations, "compiled layers keep products by themselves"
    assert plan_of(max_tokens_per_microbatch=64).activations < plain.activations
    mixed = plan_of(precision="bf16-mixed")
    assert mixed.weights == plain.weights
    assert mixed.engine == 3 / 4 * plain.engine  # rotary embeddings make float32 of keys
    assert mixed.activations < plain.activations


def test_activation_checkpointing_is_selective_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = partial(plan_of, max_tokens_per_microbatch=10**6)
    needed = plan(activation_checkpointing="selective").phases()["update"]
    for usable, mode in ((needed, "selective"), (needed - 1, "full")):
        monkeypatch.setattr(memory_estimate, "usable_memory", lambda *_, usable=usable: usable)
        assert plan(activation_checkpointing=True) == plan(activation_checkpointing=mode)
        assert plan(activation_checkpointing=True).checkpointing == mode


@pytest.mark.parametrize(
    ("device", "options", "advised"),
    [
        ("cuda", {}, "liger=True or compile=True"),
        ("cuda", {"policy": partial(tiny_model, "qwen3_moe")}, "liger=True"),
        ("cuda", {"compile": "eager"}, None),
        ("cuda", {"consistency": "bitwise"}, None),
        ("cpu", {}, None),
    ],
)
def test_fused_kernels_are_advised_on_a_gpu(
    device: str, options: dict[str, Any], advised: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_module(**options)
    module.policy = module.models.build_policy()
    monkeypatch.setattr(type(module), "device", torch.device(device))
    found = [one.observed for one in kernels(module)]
    assert len(found) == bool(advised) and all(text.startswith(f"ModelOptions({advised}) ") for text in found)


def test_activations_are_those_of_the_largest_microbatch() -> None:
    """The token budget, unless a row of 35 tokens is longer, or the 16 rows of a minibatch are shorter."""

    def activations(max_tokens: int, **options: Any) -> float:
        return plan_of(max_tokens_per_microbatch=max_tokens, **options).activations

    row, half, whole, beyond = (activations(size) for size in (1, 35 * 8, 35 * 16, 10**6))
    assert row == activations(35) < half < activations(35 * 16 - 1) < whole == beyond
    assert activations(10**6, minibatches_per_rollout=2) == half


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3}


class MeasuredStep(RLCallback):
    """Estimate memory from samples at the start of a fit, and count the bytes of the first optimizer step."""

    name = "measured_step"

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        samples, step = draw_samples(pl_module, 4, 30.0).rollout, pl_module.training_step
        self.plan = memory_plan(pl_module.run, 3, samples)

        def measured(*arguments: Any) -> Any:
            outputs: list[Any] = []
            self.bytes = peaks(lambda: outputs.append(step(*arguments)))[0]
            trainer.should_stop = True
            return outputs[0]

        pl_module.training_step = measured


@pytest.mark.parametrize(("budget", "packing"), [(4096, True), (80, True), (80, False)])
def test_the_memory_of_conversations_is_that_of_sampled_ones(budget: int, *, packing: bool) -> None:
    """One microbatch that is not full, or several, which begin with the gradients of the first."""
    options: dict[str, Any] = {"policy": partial(tiny_policy, **WIDE), "optimizer": partial(SGD, lr=1e-3)}
    measured = MeasuredStep()
    module = talking_module(**options, packing=packing, max_tokens_per_microbatch=budget)
    fit(module, callbacks=[measured], data=tiny_prompts(8, 8))
    estimated = measured.plan.gradients + measured.plan.activations
    assert 1 / 1.3 < estimated / measured.bytes < 1.3


def test_a_rollout_that_is_generated_meanwhile_lies_beside_the_update() -> None:
    plan = plan_of(max_staleness=1, callbacks=[TruncatedIS()])
    assert plan.replica == plan.weights
    assert plan.asleep == plan.engine > 0


def test_a_server_takes_nothing_of_the_trainers_device() -> None:
    assert plan_of(engine=FakeEngine(lambda _: [1])).engine == 0


def plan_of_7b(**parts: Any) -> MemoryPlan:
    """Qwen2.5-7B under bf16-mixed beside a VLLMEngine on one device of 141 GB."""
    weights = 4 * 7.616e9
    plan = MemoryPlan(
        weights=weights, gradients=weights, optimizer=2 * weights, activations=1e9, scoring=1e9, engine=0.4 * H200,
        asleep=GIB,
    )  # fmt: skip
    return replace(plan, **parts)


H200 = 150.1e9


def test_a_phase_that_does_not_fit_is_an_error_with_its_fix() -> None:
    plan = plan_of_7b(activations=30e9, engine=1e9)
    named = list(too_much(plan, H200))
    assert [one.observed for one in named] == ["update needs about 143.43 GiB, the device has 139.79 GiB"]
    assert "activation_checkpointing=True" in named[0].cure


def test_a_vllm_that_leaves_no_room_for_the_optimizer_is_named_with_the_share_to_pass() -> None:
    plan = plan_of_7b()
    room = EngineRoom(total=H200, resident=plan.resident, weights=2 * 7.616e9, cache=57344 * 32768)
    (named,) = too_much(plan, H200, room)
    assert named.observed == "generate needs about 142.03 GiB, the device has 139.79 GiB"
    assert named.cure == "pass gpu_memory_utilization=0.33 to VLLMEngine"
    assert list(too_much(plan_of_7b(engine=0.33 * H200), H200, room)) == []


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 2), ("32-true", 4)])
def test_a_vllm_has_its_share_of_the_device(precision: str, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights have the dtype in which the run computes; asleep, only what vLLM keeps is left of the share."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))

    def seen(module: RLLightningModule) -> tuple[MemoryPlan, EngineRoom | None]:
        module.run.options = replace(module.options, engine=VLLMEngine(max_model_len=48, sleeps=True))
        with monkeypatch.context() as patch:
            patch.setattr(Run, "device", torch.device("cuda"))
            plan = memory_plan(module.run, 3)
            module.options.engine.close()
            return plan, engine_room(module, plan, 80 * GIB)

    plan, room = built(seen, precision=precision)
    assert plan.engine == 0.4 * 80 * GIB
    assert (plan.asleep, plan.context) == (GIB, GIB)
    assert room == EngineRoom(
        total=80 * GIB, resident=12 * PARAMETERS, weights=itemsize * PARAMETERS, cache=2 * 2 * 16 * itemsize * 48
    )


@pytest.mark.parametrize(
    ("options", "code", "last", "said"),
    [
        ("max_new_tokens=32", 0, "errors=0 warnings=0", ["parity_reward: mean"]),
        (
            "minibatches_per_rollout=3", 1, "errors=1 warnings=1",
            ["ERROR: 4 prompts are not divisible", "fix: prompts_per_rollout=3 or 6"],
        ),
    ],
)  # fmt: skip
def test_the_command_exits_with_1_if_there_is_an_error(
    options: str, code: int, last: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"from kit.support import fit, tiny_module\nfit(tiny_module({options}))\n")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(recipe)])
    printed = capsys.readouterr().out
    assert (ended.value.code, printed.splitlines()[-1]) == (code, last), printed
    assert all(part in printed for part in said)


@pytest.mark.nightly
def test_the_quickstart_is_clean(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.py"
    command = [sys.executable, "-m", "lightning_rl", "doctor", str(recipe)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "errors=0 warnings=0"
    assert list(tmp_path.iterdir()) == []


def test_a_script_without_a_fit_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("1 + 1\n")
    with pytest.raises(SystemExit, match=r"to call Trainer\.fit, but it ended without"):
        main(["doctor", str(recipe)])


def test_the_samples_reach_the_rewards_with_their_columns() -> None:
    seen: list[Any] = []

    def listening(prompts: Any, completions: Any, *, completion_ids: Any, answer: Any) -> list[float]:
        seen.append((prompts, answer))
        return parity_reward(prompts, completions, completion_ids=completion_ids)

    rows = [{"prompt": [2, 3], "answer": str(place)} for place in range(8)]
    assert problems(found(module_of(rewards=listening), PromptDataModule(rows, 4, shuffle=False))) == []
    assert seen[0][1] == [str(place) for place in range(8) for _ in range(4)]


def test_the_reward_of_an_environment_is_judged_like_any_other() -> None:
    told = facts(found(talking_module(eos_token_ids=(1, 5, 6, 7, 8, 9))), "reward")
    assert len(told) == 1 and told[0].startswith("EnvironmentReward: mean")
