"""Types and shapes of the package are checked while its tests run."""

import inspect
from collections.abc import Callable

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from ecinn import equations

Row = Float[Tensor, " n"]


def test_the_package_is_checked() -> None:
    z, mu = torch.zeros(4, 3), torch.zeros(2, 3)
    assert equations.linear_logits(z, mu).shape == (4, 2)
    with pytest.raises(BeartypeCallHintViolation):
        equations.linear_logits(z, torch.zeros(2, 5))
    with pytest.raises(BeartypeCallHintViolation):
        equations.linear_logits(z.long(), mu)
    with pytest.raises(BeartypeCallHintViolation):
        equations.linear_logits(z, "mu")


def checked(function: Callable) -> Callable:
    return jaxtyping.jaxtyped(typechecker=beartype)(function)


def scaled(x: Row, factor: float = 2.0) -> Row:
    return (x * factor)[: int(factor)]


def test_results_have_the_sizes_of_arguments() -> None:
    function = checked(scaled)
    assert function(torch.ones(2)).tolist() == [2, 2]
    assert function(torch.ones(3), factor=3.0).tolist() == [3, 3, 3]
    assert inspect.signature(function) == inspect.signature(scaled)
    with pytest.raises(BeartypeCallHintViolation):
        function(torch.ones(3))
    with pytest.raises(BeartypeCallHintViolation):
        function(torch.ones(2), factor="2")


def test_sizes_hold_for_one_call_only() -> None:
    @checked
    def outer(x: Row) -> int:
        return len(inner(x[1:]))

    @checked
    def inner(x: Row) -> Row:
        return x

    assert outer(torch.ones(3)) == 2
    with pytest.raises(TypeError, match="missing"):
        outer()


def test_shapes_may_name_arguments() -> None:
    Longer = Float[Tensor, "{n}+1"]

    @checked
    def zeros(n: int) -> Longer:
        return torch.zeros(max(n, 2) + 1)

    assert zeros(2).shape == (3,)
    with pytest.raises(jaxtyping.TypeCheckError):
        zeros(1)
