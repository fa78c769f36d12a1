"""A description is plain, has every option and no secret, and is restored where that is safe."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from kit.support import tiny_policy, tiny_tokenizer
from properties.exports import CORRECTIONS, ESTIMATOR_EXAMPLES, LOSS_EXAMPLES, REDUCTION_EXAMPLES, VALUE_EXAMPLES
from torch.optim import AdamW
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from lightning_rl import (
    ClippedSurrogate,
    Evaluation,
    FakeEngine,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
    presets,
    warmup_then_linear,
)
from lightning_rl.callbacks import OPSM, ReferenceKL
from lightning_rl.data import PromptDataset
from lightning_rl.serialization import changes, describe, restore
from lightning_rl.signal.kl import k3
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import token_mean

DESCRIBED: list[Any] = [
    *CORRECTIONS,
    *ESTIMATOR_EXAMPLES.values(),
    *LOSS_EXAMPLES.values(),
    *VALUE_EXAMPLES.values(),
    SamplingParams(),
    Evaluation("held_out", [[2, 3]], samples=2),
    TransformersEngine(max_rows=4),
    FakeEngine(lambda _: (1,)),
    VLLMEngine(dtype=torch.bfloat16, max_num_seqs=8),
    VLLMServerEngine("http://127.0.0.1:8000"),
]
RESTORED: list[Any] = [*CORRECTIONS, *ESTIMATOR_EXAMPLES.values(), *LOSS_EXAMPLES.values(), *VALUE_EXAMPLES.values()]
RESTORED += REDUCTION_EXAMPLES.values()
PRESETS = [name for name, one in vars(presets).items() if inspect.isfunction(one) and name[0] != "_"]
PRESETS = [name for name in PRESETS if getattr(presets, name).__module__ == presets.__name__]
SECRETS = {"api_key"}


@dataclass(frozen=True)
class Judge:
    """Asks a server."""

    url: str
    api_key: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)


def test_plain_values_stay_and_others_become_plain() -> None:
    assert describe({"a": (1, 2.5), "b": Path("runs"), "c": torch.bfloat16, "d": {2, 1}, "e": None}) == {
        "a": [1, 2.5], "b": "runs", "c": "torch.bfloat16", "d": [1, 2], "e": None,
    }  # fmt: skip


def test_an_object_is_what_its_constructor_took() -> None:
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 0.5, "min_p": 0.0, "max_new_tokens": 8}
    assert describe(SamplingParams(top_p=0.5, max_new_tokens=8)) == {
        "class_path": "lightning_rl.samples.sampling_params.SamplingParams",
        "init_args": {**sampling, "stop": [], "eos_token_ids": None},
    }


def test_functions_have_names_and_options() -> None:
    assert describe(tiny_policy) == {"name": "kit.support.tiny_policy"}
    assert describe(partial(tiny_policy, 3)) == {"partial": "kit.support.tiny_policy", "args": [3], "keywords": {}}
    assert describe(len) == {"name": "builtins.len"}
    assert describe(str.strip) == describe("".strip) == {"name": "builtins.str.strip"}
    assert describe(AdamW) == {"name": "torch.optim.adamw.AdamW"}


def test_what_a_function_closes_over_belongs_to_it() -> None:
    def brevity(limit: int) -> Callable[[str], bool]:
        return lambda text: len(text) < limit

    described: Any = describe(brevity(7))
    assert described["closure"] == {"limit": 7}
    assert describe(brevity(7)) == describe(brevity(7)) != describe(brevity(8))


def test_models_and_tokenizers_are_named_and_not_kept() -> None:
    model = tiny_policy()
    assert describe(model) == {
        "class_path": "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM", "size": model.num_parameters(),
    }  # fmt: skip
    assert json.loads(json.dumps(describe(tiny_tokenizer()))) == describe(tiny_tokenizer())
    assert describe(torch.zeros(20, 30)) == {"class_path": "torch.Tensor", "size": [20, 30], "dtype": "torch.float32"}


def built_from(config: Any) -> Callable[[], Any]:
    return lambda: AutoModelForCausalLM.from_config(config)


CONFIGS: dict[str, Callable[[int], Any]] = {
    "llama": lambda size: LlamaConfig(hidden_size=size, num_hidden_layers=1, vocab_size=16, intermediate_size=16),
    "gpt2": lambda size: GPT2Config(n_embd=size, n_layer=1, vocab_size=16, bos_token_id=None, eos_token_id=1),
    "nested": lambda size: Gemma3Config(text_config={"hidden_size": size}),
    "of any model": lambda size: PreTrainedConfig(chunk_size_feed_forward=size),
}


@pytest.mark.parametrize("bind", [built_from, partial(partial, LlamaForCausalLM)], ids=["closure", "partial"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_configuration_of_a_model_is_its_options(kind: str, bind: Callable[[Any], Any]) -> None:
    build = CONFIGS[kind]
    assert describe(bind(build(32))) == describe(bind(build(32))) != describe(bind(build(64)))
    json.dumps(describe(bind(build(32))))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_is_built_and_saved_leaves_the_description_of_its_configuration(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind](32 if kind == "llama" else 24)
    before = describe(config)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert describe(config) == describe(AutoConfig.from_pretrained(tmp_path)) == before


class Named:
    """An object that is no tokenizer, although it has a name."""

    def __init__(self, name_or_path: str) -> None:
        self.name_or_path = name_or_path


class Slotted:
    """An object without a dict, with an option that it does not keep."""

    __slots__ = ("kept", "unset")

    def __init__(self, kept: int, unset: int = 0, **options: Any) -> None:
        del unset, options
        self.kept = kept


def unfinished() -> Callable[[], Any]:
    """A function whose closure has no value yet."""

    def later() -> Any:
        return value

    if not callable(later):
        value = 1
    return later


def test_any_object_of_a_user_is_described() -> None:
    assert describe(Named("a/b")) == {"class_path": f"{__name__}.Named", "init_args": {"name_or_path": "a/b"}}
    assert describe(Slotted(3)) == {"class_path": f"{__name__}.Slotted", "init_args": {"kept": 3}}
    assert describe(partial([].append, 1)) == {"partial": "builtins.list.append", "args": [1], "keywords": {}}
    assert describe(unfinished()) == {
        "name": f"{__name__}.unfinished.<locals>.later", "closure": {"value": "nothing"},
    }  # fmt: skip


def test_data_is_its_fingerprint_and_never_its_rows() -> None:
    named: Any = describe(Evaluation("held_out", PromptDataset([[2, 3], [4]])))
    assert named["init_args"]["prompts"]["fingerprint"] == PromptDataset([[2, 3], [4]]).fingerprint
    rows: Any = describe(datasets.Dataset.from_list([{"prompt": "a b"}] * 3))
    assert rows == {"class_path": "datasets.arrow_dataset.Dataset", "size": 3}


def test_a_long_list_is_its_length_and_a_hash() -> None:
    described: Any = describe(list(range(1000)))
    assert described["length"] == 1000 and described != describe([*range(999), 0])


def test_secrets_are_left_out() -> None:
    judge = Judge("http://127.0.0.1", api_key="sesame", headers={"Authorization": "sesame"})
    assert "sesame" not in json.dumps(describe({"judge": judge, "password": "sesame", "access_token": "sesame"}))
    assert describe(judge) == {
        "class_path": f"{__name__}.Judge", "init_args": {"url": "http://127.0.0.1"},
    }  # fmt: skip
    assert describe({"max_tokens_per_microbatch": 4096, "max_new_tokens": 8}) == {
        "max_tokens_per_microbatch": 4096,
        "max_new_tokens": 8,
    }


class Account(NamedTuple):
    """Name and password of a server."""

    user: str
    passwd: str


def asking(key: str) -> Callable[..., list[float]]:
    def ask(prompts: list[str], apikey: str = "") -> list[float]:
        return [len(key + apikey)] * len(prompts)

    return ask


HELD: list[Any] = [
    *(
        {name: "sesame-1"}
        for name in ("apikey", "api_key", "apiKey", "token", "hf_token", "passwd", "key", "bearer", "secrets", "dsn")
    ),
    {"headers": {"authorization": "sesame-1", "X-Api-Key": "sesame-1", "Cookie": "sesame-1"}},
    {"headers": [("Accept", "*/*"), ("X-Auth", "Bearer sesame-1")], "OPENAI_API_KEY": "sesame-1"},
    *(asking("sesame-1"), partial(asking("a"), ["a"], "sesame-1"), partial(asking, key="sesame-1")),
    *(Account("me", "sesame-1"), {"url": "https://me:sesame-1@10.0.0.1/v1"}),
    *({"url": "https://10.0.0.1/v1?model=a&api_key=sesame-1"}, {"name": "sk-proj-sesame-10123456789"}),
    *({"name": "AIzaSyA1b2C3d4E5f6G7h8I9j0K-sesame-1x2Y"}, ["xoxb-123456789012-sesame-1", "glpat-a1b2c3d4e5-sesame-1"]),
    *(["OPENAI_API_KEY=sesame-1"], "--api-key=sesame-1", ["--password", "sesame-1"], ("run", "--hf-token", "sesame-1")),
    *("{'api_key': 'sesame-1'}", '{\\"token\\": \\"a sesame-1\\"}', "Client(api_key=sesame-1)", "['--pw', 'sesame-1']"),
    *(
        "401 Authorization: Bearer sesame-1",
        "got Bearer sesame-1, no",
        "no password: sesame-1",
        "tool --password sesame-1",
    ),
    *("model=a,api_key=sesame-1", "f(x=1, token='sesame-1', y=2)", "for key: sesame-1"),
]


@pytest.mark.parametrize("place", range(len(HELD)))
def test_no_secret_is_described(place: int) -> None:
    assert "sesame-1" in repr(HELD[place]) or callable(HELD[place])
    assert "sesame-1" not in json.dumps(describe({"reward": HELD[place]}))


def test_names_of_tokens_and_columns_are_described() -> None:
    options = {"tokens": [1], "max_tokens": 8, "tokenizer": "gpt2", "eos_token": "<eos>", "token": 7, "key": "answer"}
    options |= {"answer_key": "label.text", "api_key_env": "OPENAI_API_KEY", "url": "http://10.0.0.1:8000/v1?key=a"}
    assert describe(options) == options
    texts = [
        "max_tokens=5",
        "token_mean",
        "eos_token: <eos>",
        "tokens: many",
        "token=151645",
        "key=answer",
        "KeyError: 'a-1'",
    ]
    texts += [
        "api_key=None",
        "if token == 'x1'",
        "api_key={key1}",
        "basic arithmetic in 12345678 steps",
        "--seed 12345",
    ]
    texts += [
        "expected --token to be a word",
        "sort(key=lambda x1: x1)",
        "http://10.0.0.1:8000/v1",
        "token 'ab1' is unknown",
    ]
    assert describe([*texts]) == texts


def test_a_circle_ends() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert describe(circle) == [{"class_path": "builtins.list"}]


@pytest.mark.parametrize("value", DESCRIBED, ids=lambda value: type(value).__name__)
def test_what_the_library_exports_keeps_every_option(value: Any) -> None:
    described: Any = describe(value)
    named = [
        parameter.name for parameter in inspect.signature(type(value)).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]  # fmt: skip
    assert set(named) - set(described["init_args"]) - SECRETS == set()
    assert "unknown" not in described
    json.dumps(described)


@pytest.mark.parametrize("value", RESTORED, ids=lambda value: getattr(value, "name", type(value).__name__))
def test_parts_of_the_library_are_restored(value: Any) -> None:
    description = json.loads(json.dumps(describe(value)))
    if "function" in description.get("init_args", {}):  # user code
        with pytest.raises(ValueError, match=r"lambda|per_row"):
            restore(description)
        twin = restore(description, unknown=lambda name: name)
        assert type(twin) is type(value)
    else:
        assert describe(restore(description)) == description


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_restored(preset: str) -> None:
    required = {"max_new_tokens": 8, "max_length": 8}
    recipe = getattr(presets, preset)
    made = recipe(**{name: required[name] for name in required.keys() & inspect.signature(recipe).parameters.keys()})
    parts = [made.options.get(name) for name in ("loss", "advantages", "reduction", "value_loss")]
    description = describe([*parts, *made.callbacks])
    assert describe(restore(description)) == description


@pytest.mark.parametrize(
    "value",
    [
        partial(AdamW, lr=0.1), warmup_then_linear(2, 9), SamplingParams(top_k=3), 1, None, "grpo", math.inf,
        [1, [2.5]], k3, {"key": [1, None]}, partial(token_mean, global_sum=local_sum),
        ReferenceKL(0.1, estimator=k3, as_loss=True),
    ],
)  # fmt: skip
def test_builders_and_plain_values_are_restored(value: Any) -> None:
    assert describe(restore(describe(value))) == describe(value)


def test_a_class_that_has_moved_is_the_one_of_older_checkpoints() -> None:
    now: Any = describe(SamplingParams(top_p=0.5))
    old = {**now, "class_path": "lightning_rl.generation.sampling_params.SamplingParams"}
    assert restore(old) == SamplingParams(top_p=0.5)
    assert list(changes({"sampling": old}, {"sampling": now})) == []


def test_restored_values_equal_the_described_ones() -> None:
    assert restore(describe(ClippedSurrogate(clip_high=0.28))) == ClippedSurrogate(clip_high=0.28)
    assert vars(restore(describe(OPSM(0.5)))) == vars(OPSM(0.5))
    assert math.isnan(restore(describe(math.nan)))


@pytest.mark.parametrize(
    "description",
    [
        {"name": "os.system"},
        {"partial": "os.system", "args": ["true"], "keywords": {}},
        {"class_path": "subprocess.Popen", "init_args": {"args": ["true"]}},
        {"name": "lightning_rl.optimizers.import_module"},
        {"partial": "lightning_rl.samples.seeds.hashlib.new", "args": [], "keywords": {}},
        {"class_path": "lightning_rl.optimizers.warmup_then_linear", "init_args": {"warmup": 1, "total": 2}},
        {"name": "kit.support.tiny_policy"},
        {"partial": "lightning_rl.processes.worker.answer", "args": [None, b"pickled"], "keywords": {}},
        {"class_path": "lightning_rl.processes.pool.Pool", "init_args": {"function": b"pickled"}},
        {"class_path": "lightning_rl.rewards.subprocess_reward.SubprocessReward", "init_args": {}},
        {"class_path": "lightning_rl.rewards.judge.Judge", "init_args": {"model": "m", "url": "http://127.0.0.1:9"}},
        {"class_path": "lightning_rl.generation.vllm.vllm_engine.VLLMEngine", "init_args": {}},
        {"name": "lightning_rl.losses.cispo.__import__"},
        {"class_path": "lightning_rl.losses.cispo.CISPO.__init__.__globals__", "init_args": {}},
        {"class_path": "lightning_rl.losses.cispo.CISPO", "init_args": {"no_such": 1}},
        {"class_path": "lightning_rl.losses.cispo.CISPO", "init_args": [1]},
        {"name": "../../processes.worker.answer"},
    ],
)
def test_nothing_else_is_imported_or_called(description: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"[\w.]+\.\w+"):
        restore({"inside": [description]})


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5, 0.25], dtype=torch.bfloat16), [0.5, 0.25]),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.ones(1, dtype=bool)[0], True),
        (np.array([[1, 2]]), [[1, 2]]),
    ],
)
def test_numbers_of_small_tensors_and_arrays_are_described(value: Any, plain: Any) -> None:
    described: Any = describe({"option": value})
    assert described == {"option": plain} and type(described["option"]) is type(plain)
