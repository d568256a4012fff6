"""Every error raised on purpose, each with a hint of what to do and the exit code it ends with.

```
AutotuneError                1  a defect of autotune, unless a subclass says otherwise
├── WorkloadInvalid          2  the script, model, loader or loss cannot be tuned as it is
├── OptionInvalid            2  an option, a knob or a size that means nothing
├── OutFolderUnusable        2  the results could not be written there
├── DeviceMissing            2  the device that was asked for is not there
├── NothingFits              3  no configuration stays within the memory limit
├── StepFailed               4  the user's own step fails at the baseline
├── NothingVerified          5  time or trials ended before a configuration was verified
├── NoLongerHolds            6  a saved configuration does not fit, or is not as fast as it was
└── Interrupted            130  SIGINT; 143 for SIGTERM
```
"""


class AutotuneError(Exception):
    """The root of all deliberate errors.

    Args:
        message: What was seen, and what was expected.
        hint: What to do next; empty where the message says it all.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class WorkloadInvalid(AutotuneError):
    """The script, the model, the loader or the loss cannot be tuned as it is."""

    exit_code = 2


class OptionInvalid(AutotuneError, ValueError):
    """An option, a knob or a size means nothing, or contradicts another."""

    exit_code = 2


class OutFolderUnusable(AutotuneError):
    """The results could not be written to the folder that was named."""

    exit_code = 2


class DeviceMissing(AutotuneError):
    """The device that was asked for is not there."""

    exit_code = 2


class NothingFits(AutotuneError):
    """No configuration stays within the memory limit."""

    exit_code = 3


class StepFailed(AutotuneError):
    """The user's own step fails at the baseline, for another reason than memory.

    Args:
        message: One sentence.
        user_traceback: The user's own traceback, shown as it is.
        hint: What to do next.
    """

    exit_code = 4

    def __init__(self, message: str, *, user_traceback: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.user_traceback = user_traceback


class NothingVerified(AutotuneError):
    """Time or trials ended before any configuration was verified."""

    exit_code = 5


class NoLongerHolds(AutotuneError):
    """A saved configuration does not fit any more, or is not as fast as it was."""

    exit_code = 6


class Interrupted(AutotuneError):
    """SIGINT or SIGTERM arrived.

    Args:
        message: What was kept, and how to go on.
        signal_number: The signal; the exit code is 128 plus this.
    """

    def __init__(self, message: str, *, signal_number: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number
