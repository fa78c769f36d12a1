"""JSONSchema: accepted or not, in a code block or not, however the text is broken."""

from typing import Any

import pytest

from lightning_rl.rewards import JSONSchema

PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
NODE = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"age": 4}', 1.0),
        (' {"age": 4}\n', 1.0),
        ('{"age": -1}', 0.0),
        ('{"age": "4"}', 0.0),
        ("{}", 0.0),
        ("", 0.0),
        ("age: 4", 0.0),
        ('{"age": 4} and more', 0.0),
        ('```json\n{"age": 4}\n```', 1.0),
        ('Here:\n```\n{"age": 4}\n```\nDone.', 1.0),
        ('```json\n{"age": "x"}\n```\n```json\n{"age": 4}\n```', 1.0),
        ('```json\n{"age": 4}\n```\n```json\n{"age": "x"}\n```', 0.0),
        ('```json\n{"age": 4}', 0.0),
        ('{"age": NaN}', 0.0),
        ('{"age": Infinity}', 0.0),
        ('{"age": 1e999999999}', 0.0),
        ('{"age": ' + "1" * 10**6 + "}", 0.0),
        ('{"age": 4, "a": "\0"}', 0.0),
        ("[" * 10**5, 0.0),
        ("[" * 10**5 + "]" * 10**5, 0.0),
        ('{"a":' * 10**5 + "1" + "}" * 10**5, 0.0),
        ("```json\n" * 10**5, 0.0),
    ],
)
def test_table(completion: str, value: float) -> None:
    assert JSONSchema(schema=PERSON)(["?"], [completion]) == [value]


def test_deep_json_costs_no_stack_where_the_schema_goes_as_deep() -> None:
    deep = "[" * 10**5 + "]" * 10**5
    assert JSONSchema(schema=NODE)(["?"] * 2, [deep, "[[[]]]"]) == [0.0, 1.0]


def test_a_schema_for_each_row() -> None:
    schemas = [PERSON, '{"type": "array"}', None]
    assert JSONSchema(schema="schema")(["?"] * 3, ['{"age": 4}', "{}", "{}"], schema=schemas) == [1.0, 0.0, None]


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected schema to be a JSON schema, got \{'type': 'thing'\}"):
        JSONSchema(schema={"type": "thing"})


def test_a_schema_fetches_nothing() -> None:
    schema: dict[str, Any] = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(Exception, match=r"http://127\.0\.0\.1:9/schema\.json"):
        JSONSchema(schema=schema)(["?"], ["{}"])
