"""Templates filled with words: they place what a view holds, and decide nothing."""

import html
import re

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def markdown(text: object) -> str:
    r"""Return a text so that Markdown shows it as it is, on one line.

    >>> markdown("a|b *c*")
    'a\\|b \\*c\\*'
    """
    line = " ".join(str(text).split())
    escaped = re.sub(r"([\\`*_{}\[\]|#~$!])", r"\\\1", line)
    return html.escape(escaped, quote=False)


def fenced(text: str) -> str:
    """Return a text as a Markdown code block, whatever it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


_ENVIRONMENT = Environment(
    loader=PackageLoader("autotune.output", "templates"),
    autoescape=select_autoescape(enabled_extensions=("html.jinja",), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"markdown": markdown, "fenced": fenced}


def render(template: str, /, **view: object) -> str:
    """Return a template filled with a view; in HTML every value is escaped.

    Args:
        template: Its file name.
        view: What it shows, already in words.
    """
    return _ENVIRONMENT.get_template(template).render(**view)
