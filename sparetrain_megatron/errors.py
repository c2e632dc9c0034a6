"""Errors that end a run on purpose, and the exit codes that tell them apart."""

EXIT_USAGE = 2
"""Wrong use: a bad flag, a missing script, something that is refused at start."""

EXIT_ABORTED = 75
"""A mismatch was found and the user had asked to stop on the first one."""

EXIT_EXHAUSTED = 76
"""A mismatch came back in every allowed repetition of its iteration."""


class SparetrainError(Exception):
    """Base of all errors that this package raises on purpose.

    The launcher prints the message alone, without a traceback, and exits with `exit_code`.
    """

    exit_code: int = 1


class UsageError(SparetrainError):
    """The user asked for something wrong, contradictory or not supported.

    The message names the flag (or field) and says what to do.
    """

    exit_code = EXIT_USAGE


class RunAborted(SparetrainError):
    """Training stops after a mismatch because `--sparetrain-on-mismatch abort` says so."""

    exit_code = EXIT_ABORTED


class RetriesExhausted(SparetrainError):
    """Training stops because an iteration mismatched in every allowed repetition."""

    exit_code = EXIT_EXHAUSTED
