"""The date that chat templates write as today's: one for a run, kept in its checkpoints.

transformers gives templates a function ``strftime_now`` of the present, and passes them plain data alone. So a macro of
the same name, which reads the parts of a moment from a mapping, comes before the template.
"""

from datetime import datetime
from typing import Any

DIRECTIVES = [*"aAbBcdeDfFgGHIjmMpSTuUVwWxXyYzZ", *(f"-{letter}" for letter in "demHIjMS")]
MACRO = (
    "{% macro strftime_now(form) %}{% for part in form.split('%') %}{% if loop.first %}{{ part }}"
    "{% elif part[:2] in template_date %}{{ template_date[part[:2]] }}{{ part[2:] }}"
    "{% else %}{{ template_date[part[:1]] }}{{ part[1:] }}{% endif %}{% endfor %}{% endmacro %}{{ '' }}"
)


class TemplateDate:
    """Moment that chat templates write.

    Args:
        moment: Moment in ISO format; None for that of the first use.

    Example:
        >>> TemplateDate("2026-01-02").text("%d %b %Y")
        '02 Jan 2026'
    """

    def __init__(self, moment: str | None = None) -> None:
        self.moment = moment

    def text(self, form: str) -> str:
        """Return the moment in a form of ``strftime``."""
        self.moment = self.moment or now()
        return datetime.fromisoformat(self.moment).strftime(form)

    def options(self, tokenizer: Any, **options: Any) -> dict[str, Any]:
        """Return arguments of ``apply_chat_template`` for a template that writes a date, changed by ``options``."""
        if not writes_date(tokenizer):
            return options
        template = tokenizer.get_chat_template(tools=options.get("tools"))
        date = {directive: self.text(f"%{directive}") for directive in DIRECTIVES}
        return {"chat_template": MACRO + template, "template_date": date, **options}


def now() -> str:
    """Return the local time in ISO format."""
    return datetime.now().isoformat(timespec="seconds")


def writes_date(tokenizer: Any) -> bool:
    """Return True if the chat template of a tokenizer writes today's date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


TODAY = TemplateDate()
"""Date of all templates of this process, as transformers has one for all."""
FIXED = TemplateDate("2000-01-01")
"""Date for hashes of prompts, which are those of every day."""
