"""torch's settings of a run: the precision of fp32 products, and deterministic algorithms."""

import pytest
import torch

from tests.support.builders.specs import spec
from train_loop.errors import ModelError, UserError
from train_loop.loop.numerics import numerics


def settings() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


def test_settings_of_a_spec_hold_within_the_context_only() -> None:
    before = settings()
    with numerics(spec(strategy={"matmul_precision": "high"}, training={"deterministic": True})):
        assert settings() == ("high", True)
        with numerics(spec()):
            assert settings() == ("highest", False)
        assert settings() == ("high", True)
    assert settings() == before


def put() -> None:
    """Call an operation that depends on the order of threads if two indices are equal."""
    torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def put_in_a_model() -> None:
    try:
        put()
    except RuntimeError as error:
        raise ModelError(f"Model cannot be called: {error}") from error


@pytest.mark.parametrize("call", [put, put_in_a_model])
def test_operation_without_a_deterministic_kernel_is_named(call: object) -> None:
    assert callable(call)
    before = settings()
    with pytest.raises(UserError) as raised, numerics(spec(training={"deterministic": True})):
        call()
    assert str(raised.value) == (
        "training.deterministic: true, but put_ has no deterministic kernel on this device; set "
        "training.deterministic: false, or choose a model or settings that do not use it"
    )
    assert settings() == before


def test_other_errors_and_other_runs_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^own$"), numerics(spec(training={"deterministic": True})):
        raise RuntimeError("own")
    with numerics(spec()):
        put()
