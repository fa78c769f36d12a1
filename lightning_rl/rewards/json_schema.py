"""Reward for JSON that matches a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.answer_match import UnreadableReference, score_rows
from lightning_rl.rewards.optional_imports import require
from lightning_rl.rewards.text import column_of, texts_of
from lightning_rl.utils.arguments import check_text
from lightning_rl.utils.strict_json import parse_json

FENCE = "```"


@dataclass(frozen=True, kw_only=True)
class JSONSchema:
    """JSON reward: 1 if a completion is JSON that matches a schema, else 0.

    JSON in a Markdown code block counts too, that of the last block. Surrounding whitespace is ignored. NaN and
    Infinity are not JSON. A schema may refer to its own parts but not to other files.

    Args:
        schema: Schema of every row, or name of the column with the schema of each row.

    Raises:
        ImportError: If jsonschema is not installed.
        ValueError: If the schema is invalid.

    Example:
        >>> JSONSchema(schema={"required": ["age"]})(["?"] * 2, ['{"age": 4}', "{}"])
        [1.0, 0.0]
    """

    schema: Mapping[str, Any] | str

    def __post_init__(self) -> None:
        """Check the options."""
        require("jsonschema", extra="json")
        if isinstance(self.schema, str):
            check_text(schema=self.schema)
        else:
            _validator(self.schema)

    @property
    def columns_read(self) -> dict[str, str]:
        """Options by the columns that they name."""
        return {self.schema: "schema"} if isinstance(self.schema, str) else {}

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion; None where the column of schemas holds None."""
        texts = texts_of(completions)
        if not isinstance(self.schema, str):
            validator = _validator(self.schema)
            return [self._score(text, validator) for text in texts]
        schemas = column_of(columns, self.schema, len(texts), option="schema", reward=self)
        return score_rows(texts, schemas, self._score_row, column=self.schema, option="schema", reward=self)

    def _score_row(self, text: str, schema: Any) -> float:
        try:
            return self._score(text, _validator(json.loads(schema) if isinstance(schema, str) else schema))
        except (ValueError, RecursionError) as error:
            raise UnreadableReference(f"expected a JSON schema, got {schema!r:.200}: {error}") from error

    def _score(self, text: str, validator: Any) -> float:
        from referencing.exceptions import Unresolvable

        try:
            value = parse_json(self._json_of(text))
        except ValueError:  # not JSON, too many digits or nested too deeply
            return 0.0
        try:
            return float(validator.is_valid(value))
        except RecursionError:
            return 0.0
        except (re.error, Unresolvable) as error:
            raise ValueError(f"expected valid patterns and existing references in the schema: {error}") from error

    def _json_of(self, text: str) -> str:
        """Return the last code block, or the whole text if there is none."""
        block, opening, lines = text, None, text.splitlines()
        for number, line in enumerate(lines):
            if not line.lstrip().startswith(FENCE):
                continue
            if opening is not None:
                block = "\n".join(lines[opening + 1 : number])
            opening = number if opening is None else None
        return block


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"expected schema to be a JSON schema or the name of a column, got {schema!r:.200}")
    kind: Any = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"expected schema to be a JSON schema, got {schema!r:.200}: {error.message}") from error
    return kind(schema, registry=Registry())  # an empty registry fetches nothing
