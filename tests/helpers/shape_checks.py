"""Check types and shapes in tests at a fraction of the cost of jaxtyping's own decorator.

`--jaxtyping-packages` decorates every function with `jaxtyping.jaxtyped`, which binds the
arguments and checks them twice. Importing this module, before the package, replaces that
decorator by one that makes the same checks once.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping

_usual = jaxtyping.jaxtyped
_ONE_CALL = _usual("context")
"""Within it, a name in shapes stands for one size."""


def jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator; classes, generators and what it does not know are left to jaxtyping."""

    def decorate(function: Any) -> Any:
        if not isinstance(function, types.FunctionType) or inspect.isgeneratorfunction(function):
            return _usual(function, typechecker=typechecker)
        kinds = {_kind(annotation) for annotation in function.__annotations__.values()}
        if "unknown" in kinds:
            return _usual(function, typechecker=typechecker)
        checked = typechecker(function)
        if "array" not in kinds:
            return checked

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with _ONE_CALL:
                return checked(*args, **kwargs)

        return wrapped

    return decorate


def _kind(annotation: Any) -> str:
    """Return "array", "plain", or "unknown": a string, or a shape that names an argument."""
    if isinstance(annotation, str | typing.ForwardRef):
        return "unknown"
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return "unknown" if "{" in annotation.dim_str else "array"
    if typing.get_origin(annotation) is typing.Literal:
        return "plain"
    if isinstance(annotation, list):  # the parameters of a Callable
        parts: typing.Sequence[Any] = annotation
    else:
        parts = typing.get_args(annotation)
    kinds = {_kind(part) for part in parts}
    return "unknown" if "unknown" in kinds else "array" if "array" in kinds else "plain"


jaxtyping.jaxtyped = jaxtyped  # type: ignore[assignment]
