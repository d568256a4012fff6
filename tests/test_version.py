"""The version, in one place."""

from importlib.metadata import version

import autotune


def test_the_package_says_the_version_that_is_installed() -> None:
    """The distribution takes its version from the package."""
    assert autotune.__version__ == version("torch-autotune")


def test_promised_names_are_there() -> None:
    """Every name of `__all__` can be had, and no other is promised."""
    assert all(hasattr(autotune, name) for name in autotune.__all__)
    assert dir(autotune) == sorted(autotune.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As for any module."""
    assert not hasattr(autotune, "find_batch_size")
