"""Errors whose one-line message says what is wrong and what to do."""


class EcinnError(Exception):
    """An internal failure, such as a full disk or a training run that diverged."""

    exit_code = 1


class InputError(EcinnError, ValueError):
    """The input cannot be used; the message says what to give instead."""

    exit_code = 2


class InterruptedRunError(EcinnError):
    """The user stopped a run; the message says how to resume it."""

    exit_code = 130
