"""The texts that reports and loops are filled into; they decide nothing."""

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

_ENVIRONMENT = Environment(
    loader=PackageLoader("autotune.output", "templates"),
    autoescape=select_autoescape(enabled_extensions=("html.jinja",), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(name: str, **view: object) -> str:
    """Return a template filled with a view; in HTML every value is escaped.

    Args:
        name: The template's file name.
        view: What it shows, already in words.
    """
    return _ENVIRONMENT.get_template(name).render(**view)
