"""Errors: one root, a hint each, and the exit codes of the command."""

import pytest

from autotune import errors
from autotune.errors import AutotuneError, Interrupted, OptionInvalid, StepFailed


def all_errors() -> list[type[AutotuneError]]:
    """Every deliberate error that the package has."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type)]


def test_every_error_has_one_root() -> None:
    """Whoever catches `AutotuneError` catches all that is raised on purpose."""
    assert all(issubclass(kind, AutotuneError) for kind in all_errors())
    assert len(all_errors()) > 8


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("AutotuneError", 1),
        ("WorkloadInvalid", 2),
        ("OptionInvalid", 2),
        ("OutFolderUnusable", 2),
        ("DeviceMissing", 2),
        ("NothingFits", 3),
        ("StepFailed", 4),
        ("NothingVerified", 5),
        ("NoLongerHolds", 6),
    ],
)
def test_an_error_knows_its_exit_code(name: str, code: int) -> None:
    """The exit codes are those of DESIGN 2.4, and the hint is kept."""
    error = getattr(errors, name)("said", hint="do this")

    assert (error.exit_code, str(error), error.hint) == (code, "said", "do this")


@pytest.mark.parametrize(("signal_number", "code"), [(2, 130), (15, 143)])
def test_an_interrupt_ends_with_the_shells_code(signal_number: int, code: int) -> None:
    """128 and the number of the signal."""
    assert Interrupted("ended", signal_number=signal_number).exit_code == code


def test_an_invalid_option_is_a_value_error() -> None:
    """Python users catch `ValueError` for a bad argument."""
    assert issubclass(OptionInvalid, ValueError)


def test_a_failed_step_brings_the_users_traceback() -> None:
    """The traceback is the user's own, apart from the message."""
    assert StepFailed("failed", user_traceback="Traceback …").user_traceback == "Traceback …"
