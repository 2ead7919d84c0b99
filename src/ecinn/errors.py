"""Errors that say what was wrong and what to do, in one line."""


class EcinnError(Exception):
    """Something failed inside: a full disk, a training run that diverged."""

    exit_code = 1


class InputError(EcinnError, ValueError):
    """What was given cannot be used; the message says what to give instead."""

    exit_code = 2


class InterruptedRunError(EcinnError):
    """A person stopped it; the message says how to go on."""

    exit_code = 130
