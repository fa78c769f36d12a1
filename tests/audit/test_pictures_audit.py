"""The audit of a run with pictures: silent without a fault, and a finding for a picture that a row does not have."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit
from kit.vision import PROCESSORS, picture, vision_model
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW
from typing_extensions import override

from lightning_rl import FinishReason, ModelOptions, PromptDataModule, RLLightningModule, SamplingParams
from lightning_rl.audit import SignalAudit
from lightning_rl.data import Prompt, encoding
from lightning_rl.environments import (
    Action,
    Conversations,
    Environment,
    EnvironmentReward,
    Message,
    StepResult,
    TokenStep,
)
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.run_environments import Environments
from lightning_rl.evaluation.questions import Questions
from lightning_rl.fields import Items, Ragged
from lightning_rl.generation import transformers
from lightning_rl.policy import Layout, Microbatch, media, model, packing
from lightning_rl.policy.plan import Plan
from lightning_rl.policy.processor import PictureProcessor, processor_of
from lightning_rl.rollouts import ahead, collector
from lightning_rl.samples import Trajectory

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import vision_task as task


def findings(
    folder: Path,
    *,
    steps: int = 2,
    minibatches: int = 1,
    staleness: int = 0,
    resumes: bool = False,
    val_check_interval: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    module = RLLightningModule(
        policy=partial(task.untrained_policy, 0),
        tokenizer=task.color_processor(),
        rewards=task.color_named,
        sampling=SamplingParams(max_new_tokens=4),
        optimizer=partial(AdamW, lr=1e-3),
        group_size=4,
        minibatches_per_rollout=minibatches,
        max_staleness=staleness,
    )
    data = PromptDataModule(task.color_rows(32, seed=0), 8, **options)
    saves = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if staleness else []
    known: dict[str, Any] = {"default_root_dir": folder, "enable_checkpointing": bool(saves), "max_steps": steps}
    known |= {} if val_check_interval is None else {"val_check_interval": val_check_interval}
    ckpt_path = folder / "step=2.ckpt" if resumes else None
    fit(module, callbacks=[SignalAudit(), *saves], data=data, ckpt_path=ckpt_path, **known)
    files = list(folder.rglob("findings-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def rows_of_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the picture of the next group."""
    lay_out = collector.lay_out

    def roll_items(*given: Any, **options: Any) -> Any:
        rows = lay_out(*given, **options)
        items = {
            name: Ragged(value.values, value.counts.roll(4), value.begins.roll(4))
            for name, value in rows.prompt_items.items()
        }
        return rows.replace(prompt_items=items)

    monkeypatch.setattr(collector, "lay_out", roll_items)


def positions_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of pictures are counted as those of text."""
    arguments = media.media_arguments

    def flat(whole: Any, inputs: Any, positions: Any) -> Any:
        return {**arguments(whole, inputs, positions), "position_ids": positions.expand(3, *inputs.place.shape)}

    monkeypatch.setattr(model, "media_arguments", flat)


def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of a microbatch are in the order of rows reversed."""
    arguments = media.media_arguments

    def reversed_items(whole: Any, inputs: Any, positions: Any) -> Any:
        found = arguments(whole, inputs, positions)
        grids = len(found["image_grid_thw"])
        pixels = found["pixel_values"].view(grids, -1, found["pixel_values"].shape[-1]).flip(0)
        return {**found, "pixel_values": pixels.flatten(0, 1)}

    monkeypatch.setattr(model, "media_arguments", reversed_items)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_file_has_the_findings_of_the_rollout_and_of_its_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = media.media_arguments

    def brighter(whole: Any, inputs: Any, positions: Any) -> Any:
        found = arguments(whole, inputs, positions)
        factor = 2.0 if torch.is_grad_enabled() else 1.0
        return {**found, "pixel_values": found["pixel_values"] * factor}

    monkeypatch.setattr(model, "media_arguments", brighter)
    for _ in range(2):
        assert [each["check"] for each in findings(tmp_path)] == ["token_gradients", "first_forward"]


def test_a_run_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    assert findings(tmp_path, minibatches=2) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_picture_with_exchanged_colors_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels_of = encoding.pixels_of
    monkeypatch.setattr(encoding, "pixels_of", lambda value, name: pixels_of(value, name).flip(-1))
    held_out = task.color_rows(8, seed=9)
    found = {each["check"]: each["observed"] for each in findings(tmp_path, validation=held_out)}
    assert list(found) == ["picture_source"] and found["picture_source"].endswith("of the validation set")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_evaluation_that_asks_for_the_pictures_of_the_next_question_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Questions.open

    def roll(self: Questions, *given: Any) -> list[Trajectory]:
        made = opens(self, *given)
        media = [each.request.media for each in made]
        pairs = zip(made, [*media[1:], media[0]], strict=True)
        return [replace(each, request=replace(each.request, media=other)) for each, other in pairs]

    held_out = task.color_rows(8, seed=9)
    assert findings(tmp_path, minibatches=2, validation=held_out, val_check_interval=1) == []
    monkeypatch.setattr(Questions, "open", roll)
    found = findings(tmp_path, minibatches=2, validation=held_out, val_check_interval=1)
    assert {(each["check"], each["culprit"]) for each in found} == {
        ("logged_evaluations", "the requests of evaluation validation")
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_engine_that_counts_on_from_the_number_of_placeholders_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities differ by 2e-4 on average, two hundred times as much as by rounding."""
    read = transformers._Decode._read_prompts  # noqa: SLF001

    def of_text(self: Any, prompts: Any, lengths: torch.Tensor) -> Any:
        return *read(self, prompts, lengths)[:-1], lengths

    monkeypatch.setattr(transformers._Decode, "_read_prompts", of_text)  # noqa: SLF001
    found = findings(tmp_path)
    assert {each["check"] for each in found} == {"weight_sync"}
    assert {each["culprit"] for each in found} == {"engine TransformersEngine"}
    assert "within 0.0001 nats" in found[0]["expected"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pictures_that_are_not_selected_with_their_rows_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = Items.select

    def in_order(self: Items, value: Any, rows: Any, width: int) -> Any:
        return select(self, value, rows.sort().values if self.shared else rows, width)

    monkeypatch.setattr(Items, "select", in_order)
    (found,) = findings(tmp_path, minibatches=2)
    assert found["check"] == "weight_sync" and found["culprit"].endswith("the rows of its microbatches")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_samples_that_a_resumed_run_loads_with_the_pictures_of_neighbors_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = ahead.trajectories_of_state

    def shift(state: Any, prompts: Sequence[Any]) -> Any:
        media = {each.index: other.media for each, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True)}
        return [
            replace(one, request=replace(one.request, media=media[one.prompt.index])) for one in restore(state, prompts)
        ]

    assert findings(tmp_path, steps=4, staleness=1) == []
    monkeypatch.setattr(ahead, "trajectories_of_state", shift)
    found = findings(tmp_path, steps=4, staleness=1, resumes=True)
    assert {each["check"] for each in found} == {"prompt_source"} and found[0]["rollout"] == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_picture_of_another_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of_neighbors(monkeypatch)
    found = findings(tmp_path)
    assert {each["check"] for each in found} == {"prompt_source"}
    assert all("pictures and token types of its requests" in each["cure"] for each in found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_replies_with_the_pixels_of_others_are_not_the_engines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = collector.lay_out

    def reverse(*given: Any, **named: Any) -> Any:
        rows = lay_out(*given, **named)
        pixels = rows.response_items["pixel_values"]
        pixels = Ragged(pixels.values.flip(0), pixels.counts, pixels.begins)
        return rows.replace(response_items={**rows.response_items, "pixel_values": pixels})

    monkeypatch.setattr(collector, "lay_out", reverse)
    found = findings_of_turns(tmp_path, Shots)
    assert {each["check"] for each in found} == {"prompt_source"}
    assert all(each["cure"].startswith("lay out each row with the pictures") for each in found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_engine_that_reads_pictures_in_another_order_is_told_of_order_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media_of = transformers.media_of_prompts

    def reverse(parts: Sequence[Any], *given: Any) -> Any:
        def flip(each: Any) -> Any:
            return each and replace(each, items={name: value.flip(0) for name, value in each.items.items()})

        return media_of([*map(flip, parts)], *given)

    monkeypatch.setattr(transformers, "media_of_prompts", reverse)
    (found,) = [each for each in findings_of_turns(tmp_path, Shots) if each["check"] == "weight_sync"][:1]
    assert found["culprit"] == "engine TransformersEngine" and "number and order of pictures" in found["cure"]


@pytest.mark.parametrize("fault", [positions_of_text, another_order])
def test_pictures_at_other_positions_or_in_another_order_are_refused_at_setup(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(ValueError, match="as alone with pictures"):
        findings(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["media.items.pixel_values", "media.types.mm_token_type_ids", "position_ids"])
def test_inputs_of_a_later_step_that_are_not_those_of_its_rows_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Plan.step

    def roll(layout: Layout) -> Layout:
        shown, key = layout.media, name.rpartition(".")[2]
        assert shown is not None
        if key == "position_ids":
            return replace(layout, position_ids=layout.position_ids.roll(1, -1))
        if key in shown.types:
            return replace(layout, media=replace(shown, types={**shown.types, key: shown.types[key].roll(1, 1)}))
        return replace(layout, media=replace(shown, items={**shown.items, key: shown.items[key].roll(1, 0)}))

    def of_another(self: Plan, number: int) -> tuple[Microbatch, ...]:
        own = step(self, number)
        return own if number % 2 == 0 else tuple(replace(each, layout=roll(each.layout)) for each in own)

    monkeypatch.setattr(Plan, "step", of_another)
    found = [each for each in findings(tmp_path, minibatches=2) if each["check"] == "step_rows"]
    assert len(found) == 1 and name in found[0]["observed"]


def detach_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings get no gradient from rows with pictures."""
    hidden_states = model._hidden_states  # noqa: SLF001

    def without(backbone: Any, layout: Layout, *given: Any, whole: Any = None) -> Any:
        if layout.media is None or whole is None:
            return hidden_states(backbone, layout, *given, whole=whole)
        embeddings = whole.get_input_embeddings()
        handle = embeddings.register_forward_hook(lambda _module, _inputs, output: output.detach())
        with handle:
            return hidden_states(backbone, layout, *given, whole=whole)

    monkeypatch.setattr(model, "_hidden_states", without)


class Shots(Environment):
    """Shows a picture of one of the row's colors after each of two answers."""

    opens = rewrites = False

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.shots, self.turn = row["shots"], 0
        return [self.show()] if self.opens else ()

    def show(self) -> Message:
        """Return a message with a picture."""
        shown = picture(self.shots[self.turn], (84, 56))
        return {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "what color"}]}

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        if self.turn == 3:
            return StepResult(done=True, reward=0.1 * len(answer.token_ids))
        return StepResult(rewritten=[self.show()]) if self.rewrites else StepResult(messages=[self.show()])


class Opens(Shots):
    """Shows a picture before the first answer too."""

    opens = True


class Places(Shots):
    """Begins with another message, in which a place stands for the picture of the row."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        super().reset(row, seed)
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red"}]}]


class Rewrites(Shots):
    """Shows each picture in a new context."""

    rewrites = True


class Words(Shots):
    """Shows no picture but that of the row."""

    @override
    def show(self) -> Message:
        return {"role": "user", "content": "what color"}


class SharedScreen(Shots):
    """Shows the colors of the conversation that began last."""

    screen: Sequence[str] = ()

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        SharedScreen.screen = row["shots"]
        return super().reset(row, seed)

    @override
    def show(self) -> Message:
        self.shots = SharedScreen.screen
        return super().show()


def findings_of_turns(folder: Path, environment: type[Environment], family: str = "qwen2_5_vl") -> list[dict[str, Any]]:
    module = RLLightningModule(
        policy=partial(vision_model, family),
        tokenizer=PROCESSORS[family](),
        environment=Conversations(environment, max_turn_tokens=3),
        rewards=EnvironmentReward(),
        sampling=SamplingParams(max_new_tokens=9),
        optimizer=partial(AdamW, lr=1e-3),
        group_size=4,
        model=ModelOptions(packing=family != "gemma3"),
    )
    colors = ("red", "green", "blue", "white")
    shots = [[colors[(place + turn * (1 + place // 4)) % 4] for turn in range(3)] for place in range(12)]
    rows = [
        {"prompt": [{"role": "user", "content": "what color"}], "images": [picture(each[0])], "shots": each}
        for each in shots
    ]
    fit(module, callbacks=[SignalAudit()], data=PromptDataModule(rows, 6), max_steps=2, default_root_dir=folder)
    return [json.loads(line) for file in folder.rglob("findings-*.jsonl") for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("environment", "family"),
    [
        (Words, "qwen2_5_vl"),
        (Places, "qwen2_5_vl"),
        (Shots, "internvl"),
        (Opens, "llava_next"),
        (Rewrites, "qwen3_vl"),
        (Opens, "gemma3"),
    ],
)
def test_pictures_of_turns_give_no_finding(environment: type[Environment], family: str, tmp_path: Path) -> None:
    assert findings_of_turns(tmp_path, environment, family) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_screen_that_conversations_share_is_the_environments_fault(tmp_path: Path) -> None:
    found = [each for each in findings_of_turns(tmp_path, SharedScreen) if each["check"] == "environment_replays"]
    assert [(each["culprit"], each["observed"]) for each in found] == [
        ("environment SharedScreen", "other pictures when it is repeated")
    ]


def first_screen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later turn has the picture of the first reply."""
    reply = MessageEnvironment.step

    def first(self: MessageEnvironment, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        step = reply(self, token_ids, finish)
        if step.media is None:
            return step
        kept = vars(self).setdefault("kept", step.media)
        return replace(step, media=replace(step.media, pictures=kept.pictures, items=kept.items))

    monkeypatch.setattr(MessageEnvironment, "step", first)


def reverse_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads the pictures of a conversation from the last one to the first."""
    media_of = Trajectory.media_of

    def reversed_pictures(self: Trajectory, *given: Any) -> Any:
        found = media_of(self, *given)
        return found and replace(found, pictures=found.pictures[::-1])

    monkeypatch.setattr(Trajectory, "media_of", reversed_pictures)


def pictures_of_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every conversation begins with the pictures of the row that was opened last."""
    opens, in_tokens, last = Environments.open, Environments.in_tokens, dict[str, Any]()

    def note(self: Environments, wanted: Trajectory, model: str = "") -> Any:
        last["media"] = wanted.prompt.media
        return opens(self, wanted, model)

    def begin(self: Environments, made: Any, prompt: Prompt) -> Any:
        return in_tokens(self, made, replace(prompt, media=last.get("media", prompt.media)))

    monkeypatch.setattr(Environments, "open", note)
    monkeypatch.setattr(Environments, "in_tokens", begin)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("fault", "environment"),
    [
        (first_screen_again, Shots),
        (reverse_turns, Shots),
        (pictures_of_the_last_row, Shots),
        (pictures_of_the_last_row, Places),
    ],
)
def test_a_turn_with_other_pictures_than_its_environment_showed_is_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    environment: type[Environment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    (found,) = [each for each in findings_of_turns(tmp_path, environment) if each["check"] == "environment_replays"]
    assert found["culprit"].startswith("stage generate") and found["observed"].endswith(": pictures")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pictures_that_the_processor_does_not_get_as_they_are_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = PictureProcessor._call  # noqa: SLF001

    def halve(self: Any, text: str, pictures: Any, name: str) -> Any:
        return call(self, text, [picture[::2, ::2] for picture in pictures], name)

    monkeypatch.setattr(PictureProcessor, "_call", halve)
    (found,) = findings(tmp_path)
    assert found["check"] == "picture_source" and "the processor of pictures" in found["culprit"]
    assert found["observed"] == "other input_ids in prompt 0 of the training data"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_output_of_the_processor_that_is_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = PictureProcessor._call  # noqa: SLF001

    def negate(self: Any, *given: Any) -> Any:
        return {name: value.neg() if value.is_floating_point() else value for name, value in call(self, *given).items()}

    monkeypatch.setattr(PictureProcessor, "_call", negate)
    (found,) = findings(tmp_path)
    assert found["observed"] == "other pixel_values in prompt 0 of the training data"


def rescale_pictures_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of environments are scaled to [0, 1] twice."""
    expand = PictureProcessor.expand

    def rescale(self: PictureProcessor, *given: Any) -> Any:
        part, factor = self.processor.image_processor, self.processor.image_processor.rescale_factor
        part.rescale_factor = factor / 255
        try:
            return expand(self, *given)
        finally:
            part.rescale_factor = factor

    monkeypatch.setattr(PictureProcessor, "expand", rescale)


def blur_pictures_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor gets other pictures of environments than those that are recorded."""
    expand = PictureProcessor.expand

    def blur(self: PictureProcessor, token_ids: Any, pictures: Any, name: str) -> Any:
        ids, found = expand(self, token_ids, [picture // 16 * 16 for picture in pictures], name)
        return ids, found and replace(found, pictures=tuple(pictures))

    monkeypatch.setattr(PictureProcessor, "expand", blur)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", [rescale_pictures_of_conversations, blur_pictures_of_conversations])
@pytest.mark.parametrize(("environment", "family"), [(Shots, "qwen2_5_vl"), (Opens, "gemma3")])
def test_pictures_of_conversations_that_the_processor_reads_otherwise_are_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    environment: type[Environment],
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    (found,) = findings_of_turns(tmp_path, environment, family)
    assert found["check"] == "picture_source" and found["observed"].endswith("of the conversations")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_options_of_the_processor_that_change_during_a_run_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = collector.Collector.open

    def change(self: Any, *given: Any, **options: Any) -> Any:
        processor: Any = processor_of(self.tokenizer)
        processor.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
        return opens(self, *given, **options)

    monkeypatch.setattr(collector.Collector, "open", change)
    (found,) = findings(tmp_path)
    assert found["check"] == "picture_source" and "the processor of pictures" in found["culprit"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("run", [findings, partial(findings_of_turns, environment=Shots)], ids=["prompts", "replies"])
def test_embeddings_without_a_gradient_from_rows_with_pictures_are_found(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach_embeddings(monkeypatch)
    found = {each["check"]: each["observed"] for each in run(tmp_path)}
    assert "a gradient of the embeddings" in found["token_gradients"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pictures_that_the_trainer_alone_leaves_out_are_not_the_engines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = packing.media_inputs

    def of_first_row(sequences: Any, *given: Any, **options: Any) -> Any:
        has_some = any(int(value.counts[0]) for value in sequences.rows.prompt_items.values())
        return inputs(sequences, *given, **options) if has_some else None

    monkeypatch.setattr(packing, "media_inputs", of_first_row)
    module = RLLightningModule(
        policy=partial(vision_model, "qwen2_5_vl"),
        tokenizer=PROCESSORS["qwen2_5_vl"](),
        rewards=task.color_named,
        sampling=SamplingParams(max_new_tokens=6),
        optimizer=partial(AdamW, lr=1e-3),
        group_size=4,
    )
    words = {"prompt": [{"role": "user", "content": "one two three " * 8}], "answer": "red"}
    shown = {"prompt": [{"role": "user", "content": "what color"}], "images": [picture("red")], "answer": "red"}
    audit, data = SignalAudit(1), PromptDataModule([words, shown] * 8, 8)
    fit(module, callbacks=[audit], data=data, max_steps=2, default_root_dir=tmp_path)
    found = [each.culprit for each in audit.findings if each.check == "weight_sync"]
    assert found and all("the policy's forward on several rows" in each for each in found)
