"""A checkpoint becomes a module or a Hugging Face folder without a fit; code has to be given again, by name."""

import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.chats import read_calls
from kit.conversations import Echo, Rewriting
from kit.support import fit, parity_reward, tiny_module, tiny_policy, tiny_prompts, tiny_tokenizer, weights_of
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import SGD
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl import (
    GAE,
    GSPO,
    Conversations,
    Critic,
    Evaluation,
    ModelOptions,
    PromptDataModule,
    Rewards,
    RLLightningModule,
    SamplingParams,
    ValueLoss,
)
from lightning_rl.checkpointing import restore_options
from lightning_rl.cli.main import main
from lightning_rl.rewards import ExactMatch
from lightning_rl.serialization import describe, path_of

AGAIN: dict[str, Any] = {"policy": tiny_policy, "rewards": parity_reward}


def saved(folder: Path, data: PromptDataModule | None = None, **options: Any) -> tuple[RLLightningModule, Path]:
    """A module after a short fit, and its checkpoint."""
    module = tiny_module(**options)
    fit(module, limit_train_batches=2, data=data).save_checkpoint(folder / "whole.ckpt")
    return module, folder / "whole.ckpt"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLLightningModule, Path]:
    """A module with every option at its default, and its checkpoint."""
    return saved(tmp_path_factory.mktemp("plain"))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pretrained(folder: Path) -> str:
    """A local model by its path, with its tokenizer."""
    tiny_policy(seed=5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_weights_and_options_come_back(tmp_path: Path) -> None:
    module, path = saved(
        tmp_path, loss=GSPO(clip_high=0.1), reduction="sequence_mean", group_size=2, temperature=0.7, seed=4
    )
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN)
    assert equal(weights_of(loaded), weights_of(module))
    assert describe(loaded.options) == describe(module.options)
    assert loaded.options.sampling == SamplingParams(max_new_tokens=8, temperature=0.7)


def test_only_code_has_to_be_given_again(plain: tuple[RLLightningModule, Path]) -> None:
    _, path = plain
    expected = "expected policy= to be passed, because a checkpoint stores no code: policy was kit.support.tiny_policy"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        RLLightningModule.load_from_checkpoint(path)


@pytest.mark.filterwarnings("ignore:.*the environment gave rewards")
def test_code_that_an_export_does_not_need_is_asked_for_where_it_is_used(tmp_path: Path) -> None:
    evaluation = Evaluation("own", [[2, 3]], rewards=parity_reward)
    code: dict[str, Any] = {"environment": Echo, "tokenizer": tiny_tokenizer(), "evaluation": evaluation}
    module, path = saved(tmp_path, **code, data=PromptDataModule(["a b"] * 4, 2))
    loaded = RLLightningModule.load_from_checkpoint(path, policy=tiny_policy, tokenizer=tiny_tokenizer())
    assert equal(weights_of(loaded), weights_of(module))
    loaded.save_pretrained(tmp_path / "export")
    with pytest.raises(ValueError, match=r"^expected environment= to be passed.*: environment was .*Echo$"):
        loaded.generate(["a"])
    with pytest.raises(ValueError, match=r"^expected rewards= and environment= and evaluation= to be passed, because"):
        fit(loaded, data=PromptDataModule(["a b"] * 4, 2))


class Named(RLLightningModule):
    """Has a further option."""

    def __init__(self, share: float, **options: Any) -> None:
        super().__init__(**options)
        self.share = share
        self.save_hyperparameters("share")


def test_options_are_hyperparameters_as_plain_values_that_no_checkpoint_repeats(tmp_path: Path) -> None:
    module = Named(0.5, **AGAIN, group_size=2, sampling=SamplingParams(max_new_tokens=2))
    assert module.hparams["share"] == 0.5
    assert (module.hparams.group_size, module.hparams["policy"]) == (2, {"name": "kit.support.tiny_policy"})
    fit(module, limit_train_batches=1).save_checkpoint(tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)["hyper_parameters"] == {"share": 0.5}
    assert "hyper_parameters" not in torch.load(saved(tmp_path)[1], weights_only=True)


class Renamed(Named):
    """Leaves the further option to its base class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


class Fixed(Named):
    """Sets the further option itself."""

    def __init__(self, policy: Any, rewards: Any, tokenizer: Any = None, sampling: Any = None, **options: Any) -> None:
        further = {**options, "share": 0.25}
        super().__init__(policy=policy, rewards=rewards, tokenizer=tokenizer, sampling=sampling, **further)


@pytest.mark.parametrize(
    ("kind", "given", "share"),
    [(Named, {}, 0.5), (Named, {"share": 0.75}, 0.75), (Renamed, {}, 0.5), (Fixed, {}, 0.25)],
)
def test_hyperparameters_of_a_subclass_come_back(
    kind: type[Named], given: dict[str, Any], share: float, tmp_path: Path
) -> None:
    module = kind(share=0.5, **AGAIN, sampling=SamplingParams(max_new_tokens=2))
    fit(module, limit_train_batches=1).save_checkpoint(tmp_path / "own.ckpt")
    assert kind.load_from_checkpoint(tmp_path / "own.ckpt", **AGAIN, **given).share == share


def with_rate(rate: float, **options: Any) -> dict[str, Any]:
    """Options of which a subclass builds one from an argument."""
    return {**AGAIN, "sampling": SamplingParams(max_new_tokens=2), "optimizer": partial(SGD, lr=rate), **options}


class Rated(RLLightningModule):
    """Has an own argument beside the options."""

    def __init__(self, rate: float = 0.5, **options: Any) -> None:
        options.setdefault("group_size", 2)
        super().__init__(**with_rate(rate, **options))


class RatedAlone(RLLightningModule):
    """Has no argument but its own."""

    def __init__(self, rate: float, decay: Sequence[float] = ()) -> None:
        super().__init__(**with_rate(rate))
        self.decay = decay


class RatedByPosition(RLLightningModule):
    """Passes positional arguments on."""

    def __init__(self, rate: float, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, optimizer=partial(SGD, lr=rate), sampling=SamplingParams(max_new_tokens=2), **options)


class Doubled(Rated):
    """Computes the argument of its base class."""

    def __init__(self, half: float, **options: Any) -> None:
        super().__init__(2 * half, **options)

    @classmethod
    def of(cls, half: float) -> "Doubled":
        """Return a module by a factory."""
        return cls(half)


@pytest.mark.parametrize(
    ("make", "given", "rate"),
    [
        (lambda: Rated(rate=0.25), {}, 0.25),
        (lambda: Rated(rate=0.25), {"rate": 0.125}, 0.125),
        (lambda: Rated(0.25, **AGAIN), {**AGAIN, "rate": 0.125}, 0.125),
        (lambda: RatedAlone(0.25, decay=(0.5, 0.75)), {}, 0.25),
        (lambda: RatedAlone(0.25, decay=(0.5, 0.75)), {"rate": 0.125}, 0.125),
        (lambda: RatedByPosition(0.25, tiny_policy, parity_reward, group_size=2), AGAIN, 0.25),
        (lambda: RatedByPosition(0.25, tiny_policy, parity_reward, group_size=2), {**AGAIN, "rate": 0.125}, 0.125),
        (lambda: Doubled(0.125), {}, 0.25),
        (lambda: Doubled.of(0.125), {"half": 0.25}, 0.5),
    ],
)
def test_arguments_of_a_subclass_come_back_and_those_that_are_passed_decide(
    make: Callable[[], RLLightningModule], given: dict[str, Any], rate: float, tmp_path: Path
) -> None:
    module = make()
    fit(module, limit_train_batches=1).save_checkpoint(tmp_path / "own.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "own.ckpt", **given)
    assert describe(loaded.options.optimizer) == describe(partial(SGD, lr=rate))
    assert loaded.options.group_size == module.options.group_size
    assert getattr(loaded, "decay", ()) == getattr(module, "decay", ())
    assert equal(weights_of(loaded), weights_of(module))
    assert RLLightningModule.load_from_checkpoint(tmp_path / "own.ckpt", **AGAIN).options.group_size in (2, 8)


@pytest.mark.parametrize(
    "value", [Path("a"), SimpleNamespace(rate=1), parity_reward, torch.zeros(2), ["planted.it", Path("a")]]
)
def test_arguments_of_a_subclass_that_are_no_plain_values_have_to_be_given_again(value: Any, tmp_path: Path) -> None:
    fit(RatedAlone(0.25, value), limit_train_batches=1).save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(
        ValueError, match=r"^expected decay= to be passed, because a checkpoint stores no code: decay was "
    ):
        RatedAlone.load_from_checkpoint(tmp_path / "own.ckpt")
    assert RatedAlone.load_from_checkpoint(tmp_path / "own.ckpt", decay=value).decay is value


@pytest.mark.parametrize("name", ["rate", "policy"])
def test_a_dotted_name_in_the_arguments_of_a_subclass_is_not_imported(name: str, tmp_path: Path) -> None:
    fit(Rated(0.25, **AGAIN), limit_train_batches=1).save_checkpoint(tmp_path / "own.ckpt")
    checkpoint = torch.load(tmp_path / "own.ckpt", weights_only=True)
    checkpoint["lightning_rl"]["constructor_arguments"][name] = "planted.it"
    torch.save(checkpoint, tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=rf"expected .*{name}= .*planted\.it"):
        Rated.load_from_checkpoint(tmp_path / "own.ckpt")


def test_hyperparameters_of_a_base_class_include_those_of_its_subclass() -> None:
    class Base(RLLightningModule):
        def __init__(self, share: float, **options: Any) -> None:
            super().__init__(**with_rate(share), **options)
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, half: float) -> None:
            super().__init__(share=2 * half)

    assert (Derived(0.5).hparams.half, Derived(0.5).hparams.share) == (0.5, 1.0)


def test_a_policy_by_path_and_its_tokenizer_need_nothing(tmp_path: Path) -> None:
    module, path = saved(tmp_path, policy=pretrained(tmp_path / "policy"))
    loaded = RLLightningModule.load_from_checkpoint(path, rewards=parity_reward)
    assert equal(weights_of(loaded), weights_of(module))
    assert describe(loaded.options) == describe(module.options)
    assert loaded.options.tokenizer is not None and loaded.options.tokenizer.name_or_path == str(tmp_path / "policy")
    assert loaded.generate(["a b", "c"]) == module.generate(["a b", "c"])


def test_options_replace_those_of_the_run(plain: tuple[RLLightningModule, Path]) -> None:
    _, path = plain
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN, group_size=2, loss="reinforce")
    assert loaded.options.group_size == 2 and type(loaded.algorithm.loss).__name__ == "Reinforce"


@pytest.mark.parametrize("option", ["policy", "tokenizer", "loss"])
def test_a_dotted_name_in_a_checkpoint_is_not_imported(
    option: str, plain: tuple[RLLightningModule, Path], tmp_path: Path
) -> None:
    path = tmp_path / "planted.ckpt"
    checkpoint = torch.load(plain[1], weights_only=True)
    described = {"path": "planted.it"} if option == "tokenizer" else "planted.it"
    checkpoint["lightning_rl"]["configuration"]["module"][option] = described
    torch.save(checkpoint, path)
    given = {name: value for name, value in AGAIN.items() if name != option}
    with pytest.raises(ValueError, match=rf"expected {option}= to be passed.*{option} was planted\.it"):
        fit(RLLightningModule.load_from_checkpoint(path, **given))


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("critic", {"source": "planted.it"}),
        ("environment", {"source": "planted.it"}),
        ("environment", {"source": {"a": "planted.it"}}),
        ("environment", {"source": ["planted.it"]}),
        ("environment", {"source": {"name": "planted.it"}}),
        ("environment", {"source": {"name": "lightning_rl.rewards.text.text_of"}, "tool_parser": "planted.it"}),
        ("rewards", {"functions": "planted.it"}),
        ("rewards", {"functions": {"a": "planted.it"}}),
        ("rewards", {"functions": {"a": ["planted.it", 1.0]}}),
        ("rewards", {"functions": {"a": [{"name": "planted.it"}, 1.0]}}),
    ],
)
def test_a_dotted_name_nested_in_the_options_of_a_checkpoint_is_not_imported(
    option: str,
    arguments: dict[str, Any],
    plain: tuple[RLLightningModule, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef it(*_, **__): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = {"critic": Critic, "environment": Conversations, "rewards": Rewards}[option]
    checkpoint = torch.load(plain[1], weights_only=True)
    module = checkpoint["lightning_rl"]["configuration"]["module"]
    module |= {
        "rewards": describe(Rewards(ExactMatch())),
        option: {"class_path": path_of(kind), "init_args": arguments},
    }
    torch.save(checkpoint, tmp_path / "planted.ckpt")
    with pytest.raises(ValueError, match=r"planted\.it"):
        fit(RLLightningModule.load_from_checkpoint(tmp_path / "planted.ckpt", policy=tiny_policy))
    assert not (tmp_path / "ran").exists() and "planted" not in sys.modules


def test_options_of_groups_come_back(tmp_path: Path) -> None:
    critic = Critic("shared", loss=ValueLoss(coef=0.3))
    _, path = saved(tmp_path, critic=critic, advantages="gae", packing=False, reward_timeout=9.0)
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN)
    assert loaded.options.critic == critic and loaded.models.options == ModelOptions(packing=False)
    assert (loaded.options.rewards.timeout, loaded.options.rewards.weights) == (9.0, {"parity_reward": 1.0})
    rewards = Rewards({"exact": (ExactMatch(), 0.5)}, max_failure_rate=None)
    again = restore_options({"rewards": describe(rewards)}, {})[0]["rewards"]
    assert (again.sources, again.max_failure_rate) == (rewards.sources, None)


def test_a_source_alone_keeps_the_other_options_of_the_run() -> None:
    described = {"environment": describe(Conversations(Echo, tool_parser="hermes", max_turns=3))}
    assert restore_options(described, {}) == ({}, {"environment": "kit.conversations.Echo"})
    again = Conversations(Rewriting, tool_parser="hermes", max_turns=3)
    assert restore_options(described, {"environment": Rewriting})[0]["environment"] == again
    for given in (None, Conversations(Rewriting)):
        assert restore_options(described, {"environment": given})[0]["environment"] == given
    described = {"environment": describe(Conversations(Echo, tool_parser=read_calls))}
    with pytest.raises(ValueError, match=r"expected environment.tool_parser= to be passed.*kit.chats.read_calls"):
        restore_options(described, {"environment": Echo})


def test_it_exports_without_a_trainer(tmp_path: Path) -> None:
    module, path = saved(tmp_path, policy=pretrained(tmp_path / "policy"))
    RLLightningModule.load_from_checkpoint(path, rewards=parity_reward).save_pretrained(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    trained = module.required_policy.model
    assert equal(dict(exported.named_parameters()), dict(trained.named_parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "export").eos_token == "</s>"  # pyrefly: ignore[missing-attribute]


def test_it_exports_a_critic_too(tmp_path: Path) -> None:
    module, path = saved(tmp_path, critic=partial(tiny_policy, 7), advantages=GAE(), group_size=1)
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN, critic=partial(tiny_policy, 7))
    loaded.save_pretrained(tmp_path / "export")
    assert (tmp_path / "export" / "critic" / "value_head.safetensors").is_file()
    assert equal(weights_of(loaded), weights_of(module))


def test_a_loaded_module_evaluates_and_trains(plain: tuple[RLLightningModule, Path]) -> None:
    module, path = plain
    data = partial(tiny_prompts, validation=[[2, 3], [4, 5]])
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN)
    trainer = fit(loaded, data=data(), limit_train_batches=1, num_sanity_val_steps=0)
    assert trainer.global_step == 1 and not equal(weights_of(loaded), weights_of(module))
    fresh = RLLightningModule.load_from_checkpoint(path, **AGAIN)
    assert trainer.validate(fresh, data(), verbose=False) == trainer.validate(module, data(), verbose=False)


def test_generating_ahead_decodes_with_a_copy(plain: tuple[RLLightningModule, Path]) -> None:
    _, path = plain
    loaded = RLLightningModule.load_from_checkpoint(path, **AGAIN, max_staleness=1, loss="reinforce")
    with pytest.warns(UserWarning, match="max_staleness"):
        fit(loaded, limit_train_batches=2)
    assert loaded.models.replica is not None and loaded.models.replica is not loaded.required_policy.model


def test_a_run_resumes_from_it_as_before(plain: tuple[RLLightningModule, Path]) -> None:
    module, path = plain
    resumed = tiny_module()
    trainer = fit(resumed, ckpt_path=path, limit_train_batches=2)
    assert trainer.global_step == 2 and equal(weights_of(resumed), weights_of(module))


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got .*nowhere\.ckpt, which does not exist$"):
        RLLightningModule.load_from_checkpoint(tmp_path / "nowhere.ckpt")
    with pytest.raises(SystemExit, match=r"got .*nowhere\.ckpt, which does not exist$"):
        main(["export", str(tmp_path / "nowhere.ckpt"), str(tmp_path / "export")])


@pytest.mark.parametrize(("inside", "cure"), [(".metadata", "consolidate_checkpoint"), ("checkpoint/", "DeepSpeed")])
def test_a_folder_is_refused_with_the_cure(inside: str, cure: str, tmp_path: Path) -> None:
    (tmp_path / "sharded.ckpt").mkdir()
    if inside.endswith("/"):
        (tmp_path / "sharded.ckpt" / inside).mkdir()
    else:
        (tmp_path / "sharded.ckpt" / inside).write_bytes(pickle.dumps(Metadata({})))
    with pytest.raises(ValueError, match=rf"expected a single-file checkpoint, got the folder .*{cure}"):
        RLLightningModule.load_from_checkpoint(tmp_path / "sharded.ckpt")


def command(*arguments: object) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    return ended.value.code


def test_the_command_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, path = saved(tmp_path, policy=pretrained(tmp_path / "policy"))
    assert command(path, tmp_path / "export") == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert equal(dict(exported.named_parameters()), dict(module.required_policy.model.named_parameters()))


def test_the_command_takes_code_again_by_its_name(plain: tuple[RLLightningModule, Path], tmp_path: Path) -> None:
    _, path = plain
    assert command(path, tmp_path / "export") == (
        "expected --policy to be passed, because a checkpoint stores no code: policy was kit.support.tiny_policy"
    )
    assert command(path, tmp_path / "export", "--policy", "kit.support:tiny_policy") == 0
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:.*the environment gave rewards")
def test_the_command_needs_no_environment(tmp_path: Path) -> None:
    options = {"policy": pretrained(tmp_path / "policy"), "rewards": parity_reward}
    _, path = saved(tmp_path, environment=Echo, **options)
    assert command(path, tmp_path / "export") == 0


def test_options_of_the_data_are_not_those_of_the_module(tmp_path: Path) -> None:
    module = tiny_module()
    trainer = fit(module, data=PromptDataModule([[2, 3], [4]], 2, seed=9), limit_train_batches=1)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    assert RLLightningModule.load_from_checkpoint(tmp_path / "whole.ckpt", **AGAIN).options.seed == 0
