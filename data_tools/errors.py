"""Exceptions of the data tools; the exit codes are those of the trainer (2 bad usage, 3 bad data)."""

import os


class DataToolError(Exception):
    """What was found, where, what is allowed, and `-> what to do`."""

    exit_code = 3


class UsageError(DataToolError):
    exit_code = 2


class BadDocument(DataToolError):
    """One unusable document. `--skip-bad` counts it and goes on."""

    def __init__(self, where: str, reason: str):
        self.where = where
        self.reason = reason
        super().__init__(where, reason)  # both arguments, so that it survives pickling between processes

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} -> repair the input, or pass --skip-bad to count and skip such documents"


def describe_os_error(error: OSError, output: os.PathLike) -> str:
    """For a fault of the system; one that names no file came from writing the output."""
    return f"{error.filename or output}: {error.strerror or error} -> check the path, its permissions and free space"
