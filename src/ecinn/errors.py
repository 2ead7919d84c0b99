"""Errors whose one-line message says what is wrong and what to do."""

import re


class EcinnError(Exception):
    """An internal failure, such as a full disk or a training run that diverged."""

    exit_code = 1


class InputError(EcinnError, ValueError):
    """The input cannot be used; the message says what to give instead."""

    exit_code = 2


class InterruptedRunError(EcinnError):
    """The user stopped a run; the message says how to resume it."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type.

    TorchScript begins with a traceback: of its messages, the line of the exception is returned.
    """
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [name]
    if "TorchScript interpreter" in lines[0]:
        lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)] or lines
        return lines[-1].removeprefix(f"{name}: ")
    return lines[0]
