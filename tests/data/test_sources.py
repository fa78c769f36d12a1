"""The same rows from every source, in the same order; what is no source is refused with what to pass instead."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from kit.support import tiny_tokenizer

from lightning_rl import PromptDataModule
from lightning_rl.data import Prompt, PromptDataset

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT / "recipes" / "data" / "gsm8k"
ROWS = [{"prompt": "a b", "answer": "1"}, {"prompt": "c", "answer": "2,5"}, {"prompt": "d e f", "answer": 'say "x"\n3'}]
PROMPTS = [Prompt(0, (2, 3), "a b", {"answer": "1"}), Prompt(1, (4,), "c", {"answer": "2,5"})]
PROMPTS += [Prompt(2, (5, 6, 7), "d e f", {"answer": 'say "x"\n3'})]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def json_lines(folder: Path) -> Path:
    return written(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))


def csv_text(delimiter: str) -> str:
    lines = [["prompt", "answer"], ["a b", "1"], [], ["c", '"2,5"'], ["d e f", '"say ""x""\n3"']]
    return "".join(delimiter.join(line) + "\n" for line in lines)


def parquet(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def to_disk(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: ROWS,
    "tuple": lambda _: tuple(ROWS),
    "generator": lambda _: (row for row in ROWS),
    "iterator": lambda _: iter(ROWS),
    "map": lambda _: map(dict, ROWS),
    "object-with-length-and-items": lambda _: Indexed(),
    "numpy-array": lambda _: np.array(ROWS, dtype=object),
    "Dataset": lambda _: datasets.Dataset.from_list(ROWS),
    "Dataset-in-another-format": lambda _: datasets.Dataset.from_list(ROWS).with_format("numpy"),
    "Dataset-selection": lambda _: datasets.Dataset.from_list([*ROWS[::-1], *ROWS]).select([2, 4, 0]),
    "jsonl": json_lines,
    "jsonl-as-str": lambda folder: str(json_lines(folder)),
    "ndjson": lambda folder: json_lines(folder).rename(folder / "rows.ndjson"),
    "json": lambda folder: written(folder / "rows.json", json.dumps(ROWS, indent=1)),
    "csv": lambda folder: written(folder / "rows.csv", csv_text(",")),
    "csv-with-byte-order-mark": lambda folder: written(folder / "rows.csv", "\ufeff" + csv_text(",")),
    "tsv": lambda folder: written(folder / "rows.tsv", csv_text("\t")),
    "parquet": parquet,
    "folder-saved-to-disk": to_disk,
}


class Indexed:
    """Has a length and an item for each number, and nothing else."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(ROWS)

    def __getitem__(self, number: int) -> Any:
        """A row."""
        return ROWS[number]


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_prompts(kind: str, tmp_path: Path) -> None:
    rows = PromptDataset(SOURCES[kind](tmp_path))
    rows.connect(tiny_tokenizer())
    prompts = [rows.prompt(number) for number in range(len(rows))]
    assert prompts == PROMPTS and rows.prompts([2, 0]) == [PROMPTS[2], PROMPTS[0]]


def hub_folder(folder: Path) -> None:
    """Write a copy of openai/gsm8k into the current folder: two configurations with two splits each."""
    card = ["---", "configs:"]
    for name in ("main", "socratic"):
        card += [f"- config_name: {name}", "  data_files:"]
        for split, source in (("train", "train.jsonl"), ("test", "test.jsonl")):
            lines = (GSM8K / source).read_text(encoding="utf-8").splitlines()[:5]
            written(folder / "openai" / "gsm8k" / name / source, "\n".join(lines))
            card += [f"  - split: {split}", f"    path: {name}/{source}"]
    written(folder / "openai" / "gsm8k" / "README.md", "\n".join([*card, "---", ""]))


def test_a_data_set_of_the_hub_is_named_with_its_configuration_split_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = PromptDataModule(
        "openai/gsm8k",
        5,
        name="main",
        split="train",
        validation_split="test",
        columns={"prompt": "question"},
        shuffle=False,
    )
    data.connect(tiny_tokenizer(), None)
    first = data.take(1)[0]
    assert first.content.startswith("Natalia sold clips") and first.columns["answer"].endswith("#### 72")
    assert data.validation is not None
    held_out = data.validation.prompt(0)
    assert held_out.content.startswith("Janet") and held_out.columns["answer"].endswith("#### 18")
    assert len(data.prompts.prompts(range(5))) == len(data.validation) == 5  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "main"}, r'splits "train", "test": choose with split="train"'),
        ({"split": "train"}, r"load_dataset\('openai/gsm8k', name=None, split='train'\) can read.*(?s:.)*Config name"),
        ({"name": "main", "split": "dev"}, r"split='dev'\) can read, but it raised ValueError: Unknown split \"dev\""),
        ({"name": "mian", "split": "train"}, r"name='mian'.* BuilderConfig 'mian' not found"),
    ],
)
def test_a_data_set_of_the_hub_that_leaves_a_choice_says_which(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        PromptDataset("openai/gsm8k", **options)


def test_a_name_that_nobody_has_is_refused_by_what_was_looked_for() -> None:
    with pytest.raises(
        ValueError, match=r"datasets\.load_dataset\('openai/gsm9k', name=None, split='train'\) can read"
    ):
        PromptDataset("openai/gsm9k", split="train")


@pytest.mark.parametrize("streaming", [False, True], ids=["DatasetDict", "IterableDatasetDict"])
def test_splits_are_chosen_by_name(streaming: bool) -> None:
    table = datasets.Dataset.from_list(ROWS)
    splits: Any = datasets.DatasetDict({"train": table, "test": datasets.Dataset.from_list(ROWS[1:2])})
    if streaming:
        splits = datasets.IterableDatasetDict({name: part.to_iterable_dataset() for name, part in splits.items()})
    kind = type(splits).__name__
    with pytest.raises(ValueError, match=rf'got a {kind} with the splits "train", "test": choose with split="train"'):
        PromptDataModule(splits, 1)
    with pytest.raises(ValueError, match='one of the splits "train", "test", got split="dev"'):
        PromptDataModule(splits, 1, split="dev")
    data = PromptDataModule(splits, 1, split="test", epoch_length=1, shuffle=False)
    data.connect(tiny_tokenizer(), None)
    assert data.take(1)[0].content == "c"


EMPTY = datasets.Dataset.from_dict({"prompt": []})
COLUMNS = {"prompt": ["a", "b"], "answer": [1, 2]}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (COLUMNS, r'got a mapping with "prompt", "answer": .*Dataset\.from_dict\(columns\)'),
        ({"a", "b"}, r"expected ordered rows, got a set: pass sorted\(rows\)"),
        (b"ab", r"expected a list of prompts, a file, .*, got b'ab' \(bytes\)"),
        (7, r"expected a list of prompts, a file, .*, got 7 \(int\)"),
        (None, r"expected a list of prompts, .* got None"),
        ("what is 2 + 2?", r'got \'what is 2 \+ 2\?\': write a single prompt as a list, \["\.\.\."\]'),
        ([], "expected at least one prompt, got none"),
        (iter([]), "expected at least one prompt, got none"),
        (EMPTY, "expected at least one prompt, got none"),
        (pandas.DataFrame(COLUMNS), r'got a DataFrame: pass frame\.to_dict\("records"\)'),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_pass(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataset(source)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for source in (tmp_path / "rows.jsonl", str(tmp_path / "rows.csv"), tmp_path / "folder"):
        with pytest.raises(FileNotFoundError, match=rf"expected a file .*, got {source}.*: check"):
            PromptDataset(source)


def test_a_file_of_another_kind_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.txt", "a\nb\n")
    with pytest.raises(ValueError, match=r'name ends in "\.jsonl", .*"\.parquet", got .*rows\.txt: rename it'):
        PromptDataset(file)


def test_options_of_the_hub_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'expected name="main" with the name of a data set, got a list'):
        PromptDataset([[2]], name="main")
    with pytest.raises(ValueError, match=r'expected split="train" with a data set that has splits, got a list'):
        PromptDataset([[2]], split="train")
    with pytest.raises(ValueError, match=r"no name= and no split= with a file, got name=None, split='test'"):
        PromptDataset(json_lines(tmp_path), split="test")


def test_a_table_stays_in_its_file(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS * 50).save_to_disk(tmp_path / "saved")
    table = datasets.load_from_disk(str(tmp_path / "saved"))
    rows = PromptDataset(table)
    rows.connect(tiny_tokenizer())
    (held,) = [value for value in vars(rows.rows).values() if isinstance(value, datasets.Dataset)]
    assert held.cache_files == table.cache_files != [] and len(rows) == 150


def test_without_the_package_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'to read some/name, got none: pip install "lightning-rl\[data\]"'):
        PromptDataset("some/name", split="train")
    assert len(PromptDataset(json_lines(tmp_path))) == 3


def test_a_folder_whose_data_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": [2]}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": 1\n')
    with pytest.raises(ValueError, match=r"got '{\"prompt\": 1' in .*b\.jsonl, line 1"):
        PromptDataset(tmp_path)


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"data_files='.*a\.parquet'\) can read, but it raised ArrowInvalid"):
        PromptDataset(tmp_path / "a.parquet")


def two_files(folder: Path) -> list[Path]:
    first = written(folder / "part-0.jsonl", json.dumps(ROWS[0]) + "\n")
    datasets.Dataset.from_list(ROWS[1:]).to_parquet(folder / "part-1.parquet")
    return [first, folder / "part-1.parquet"]


FILES: dict[str, Callable[[Path], Any]] = {
    "paths": two_files,
    "strings": lambda folder: [str(path) for path in two_files(folder)],
    "tuple": lambda folder: tuple(two_files(folder)),
    "generator": lambda folder: iter(two_files(folder)),
    "glob": lambda folder: str(two_files(folder)[0].with_name("part-*")),
    "glob-as-path": lambda folder: two_files(folder)[0].with_name("part-?.*"),
    "list-of-globs": lambda folder: [str(two_files(folder)[0].with_name("*.jsonl")), str(folder / "*.parquet")],
    "home": lambda folder: ["~/" + path.relative_to(folder).as_posix() for path in two_files(folder)],
    "glob-at-home": lambda folder: two_files(folder) and "~/part-*",
}


@pytest.mark.parametrize("kind", FILES)
def test_several_files_are_read_one_after_another(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = PromptDataset(FILES[kind](tmp_path))
    assert rows.fingerprint == PromptDataset(ROWS).fingerprint
    rows.connect(tiny_tokenizer())
    assert rows.prompts([2, 0, 1]) == [PROMPTS[2], PROMPTS[0], PROMPTS[1]]


def test_a_row_of_several_files_is_named_with_its_file(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", '{"prompt": "a"}\n')
    second = written(tmp_path / "b.jsonl", '{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"got none in prompt 2 \(.*b\.jsonl, line 2\), which has \"question\""):
        PromptDataset([first, second])
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": ""}]).to_parquet(tmp_path / "c.parquet")
    rows = PromptDataset([first, tmp_path / "c.parquet"])
    with pytest.raises(ValueError, match=r"prompt 2 \(.*c\.parquet, row 1, column prompt\) to have at least one token"):
        rows.connect(tiny_tokenizer())


@pytest.mark.parametrize(
    "source",
    [
        ["none.jsonl"],
        [Path("none")],
        "none/*.jsonl",
        ["none-*.parquet"],
        "~/none.csv",
        ["data.jsonl.gz"],
        [Path("a.txt")],
        ["train.parquet", "test"],
        ["openai/gsm8k", "allenai/ai2_arc"],
        ["data/*", "more/**/part-?"],
    ],
    ids=str,
)
def test_names_of_files_are_no_prompts(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "a.txt", "data.jsonl.gz"):
        written(tmp_path / name, "")
    with pytest.raises((FileNotFoundError, ValueError), match=r"expected (a file|files|a list of files|rows)"):
        PromptDataset(source)


def test_a_question_about_a_file_is_a_prompt() -> None:
    PromptDataset(["3/4", "Is a/b a file?"])
    rows = PromptDataset(["a b rows.json", "c"])
    rows.connect(tiny_tokenizer())
    assert rows.prompt(1).token_ids == (4,)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 132\n"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("where", ["file", "list", "folder"])
def test_a_pointer_of_git_lfs_is_named(suffix: str, where: str, tmp_path: Path) -> None:
    file = written(tmp_path / f"rows{suffix}", POINTER)
    source: Any = {"file": file, "list": [file], "folder": tmp_path}[where]
    with pytest.raises(ValueError, match=rf"got a Git LFS pointer in .*rows\{suffix}: run git lfs pull"):
        PromptDataset(source, split="train" if where == "folder" else None)


@pytest.mark.parametrize("row", ["a \ud800", [{"role": "user", "content": "a \udfff"}]], ids=["string", "chat"])
def test_half_a_surrogate_pair_is_named_with_its_row(row: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    file = written(tmp_path / "a.jsonl", '{"prompt": "a"}\n' + json.dumps({"prompt": row}) + "\n")
    for source in ([{"prompt": "a"}, {"prompt": row}], file):
        with pytest.raises(ValueError, match=r"prompt 1 .*\\ud.*half of a surrogate pair"):
            PromptDataset(source).connect(tokenizer)


def test_half_a_surrogate_pair_of_a_tool_is_named_with_its_column() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    row = {"prompt": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "description": "\ud83d"}]}
    with pytest.raises(ValueError, match=r"in tools of prompt 0 .*half of a surrogate pair"):
        PromptDataset([row]).connect(tokenizer)


def test_rows_of_pandas_are_those_of_the_table(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a b"}], "tests": [{"inputs": ["1", "2"]}], "n": [1, 2]},
        {"prompt": [{"role": "user", "content": "c"}], "tests": [], "n": []},
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    frame = pandas.read_parquet(tmp_path / "a.parquet").to_dict("records")
    assert isinstance(frame[0]["prompt"], np.ndarray) and isinstance(frame[0]["tests"][0]["inputs"], np.ndarray)
    read = [PromptDataset(source) for source in (frame, table, rows)]
    for each in read:
        each.connect(tokenizer)
    assert read[0].prompts([0, 1]) == read[1].prompts([0, 1]) == read[2].prompts([0, 1])
    assert len({each.fingerprint for each in read}) == 1


def test_token_ids_in_an_array_are_token_ids() -> None:
    rows = PromptDataset([{"prompt": np.array([3, 4])}, np.array([5])])
    rows.connect(None)
    assert [prompt.token_ids for prompt in rows.prompts([0, 1])] == [(3, 4), (5,)]
