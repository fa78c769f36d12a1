"""Files: where each row stands, and what a broken one says."""

from pathlib import Path

import pytest

from lightning_rl.data import PromptDataset
from lightning_rl.data.file_readers import read_csv, read_json, read_json_lines
from lightning_rl.data.rows import MemoryRows


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def places(rows: MemoryRows) -> list[str]:
    return [rows.place(number).rpartition(", ")[2] for number in range(len(rows))]


def test_rows_of_json_lines_know_their_lines(tmp_path: Path) -> None:
    rows = read_json_lines(written(tmp_path / "a.jsonl", '\n{"prompt": "a"}\r\n \n[4, 5]\n"\u00e9"'))
    assert rows.take([2, 0, 1]) == ["\u00e9", {"prompt": "a"}, [4, 5]]
    assert places(rows) == ["line 2", "line 4", "line 5"] and rows.place(0) == f"{tmp_path / 'a.jsonl'}, line 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b'{"prompt": "a"}\n\n{"prompt": "b"\n',
            r"""got '\{"prompt": "b"' in .*a\.jsonl, line 3 \(Expecting ',' del.*""",
        ),
        (
            b'{"prompt": "a"},\n',
            r"got '\{\"prompt\": \"a\"\},' in .*a\.jsonl, line 1 \(Extra data.*: write each row as one",
        ),
        (b'[\n{"prompt": "a"}\n]\n', r"got '\[' in .*a\.jsonl, line 1 "),
        (
            b'{"prompt": "a"}\n"\xff"\n',
            r"in UTF-8, got .* in .*a\.jsonl, line 2 \('utf-8' codec .* byte 0xff.*save it as UTF-8",
        ),
        (
            b"1\n" + b"[" * 10**5,
            r"got .* in .*a\.jsonl, line 2 \(expected JSON that is less deeply nested\): write null",
        ),
        (b'{"prompt": Infinity}', r"got .* in .*a\.jsonl, line 1 \(expected JSON, got Infinity\): write null"),
    ],
    ids=["cut-off", "comma-behind", "a-list-over-lines", "not-utf-8", "deep", "infinity"],
)
def test_a_broken_line_is_named(text: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"expected one JSON value on each line, {message}"):
        PromptDataset(written(tmp_path / "a.jsonl", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": ["a"], "answer": [1]}',
            r'a JSON list of rows, got a dict with the entries "prompt", "answer": write',
        ),
        ("3", r"a JSON list of rows, got a int: write \[\{"),
        (
            '[\n{"prompt": "a"},\n{"prompt": }\n]',
            r"one JSON list of rows, got an error \(Expecting value: line 3 column 12",
        ),
        (
            '{"prompt": "a"}\n{"prompt": "b"}',
            r"one JSON list of rows, got an error \(Extra data: line 2 column 1 .*\): rename a file with one value",
        ),
        ("[" * 10**5, r"one JSON list of rows, got an error \(expected JSON that is less deeply nested\): write"),
        ("[NaN]", r"one JSON list of rows, got an error \(expected JSON, got NaN\): write null"),
    ],
    ids=["columns", "number", "broken", "json-lines", "deep", "nan"],
)
def test_json_holds_one_list(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"a\.json to hold {message}"):
        read_json(written(tmp_path / "a.json", text))


def test_items_of_json_are_named_in_errors(tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", '[{"prompt": [2]}, {"prompt": 3.5}]')
    with pytest.raises(ValueError, match=r"got a float \(3\.5\) in prompt 1 \(.*a\.json, item 1, column prompt\)"):
        PromptDataset(file).prompt(1)


def test_csv_keeps_text_as_it_stands(tmp_path: Path) -> None:
    text = 'prompt,answer,level\r\n a ,007,NA\r\n\r\n"x, ""y""\nz\u2028w",1e3,\r\nlast,"",null'
    rows = read_csv(written(tmp_path / "a.csv", text))
    assert rows.take(range(3)) == [
        {"prompt": " a ", "answer": "007", "level": "NA"},
        {"prompt": 'x, "y"\nz\u2028w', "answer": "1e3", "level": ""},
        {"prompt": "last", "answer": "", "level": "null"},
    ]
    assert places(rows) == ["line 2", "line 4", "line 6"], "a row is where it begins"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prompt,answer\na,1\nb,2,3\n",
            r'2 values for the columns "prompt", "answer", got 3 in .*a\.csv, line 3: quote',
        ),
        ("prompt,answer\na\n", r"got 1 in .*a\.csv, line 2"),
        ('prompt,answer\na,1\n"b,2\n', r"got an error in .*a\.csv, line 3 \(unexpected end of data\): quote a value"),
        ('prompt,answer\n"a"b,2\n', r"""in .*a\.csv, line 2 \(',' expected after '"'\)"""),
        ("prompt,prompt\na,1\n", r'a unique name for each column, got "prompt", "prompt" in .*a\.csv, line 1'),
        ("prompt,,\na,1,2\n", r'a unique name for each column, got "prompt", "", "" in .*a\.csv, line 1'),
        (b"prompt\n\xff\n", r"in UTF-8, got an error in .*a\.csv, line 2 \('utf-8' codec"),
        ("", r"expected at least one prompt, got none in .*a\.csv"),
        ("prompt,answer\n", r"expected at least one prompt, got none in .*a\.csv"),
    ],
    ids=["more", "fewer", "open-quote", "quote-inside", "twice", "no-name", "not-utf-8", "empty", "header-alone"],
)
def test_a_broken_csv_names_line_and_columns(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataset(written(tmp_path / "a.csv", text))
