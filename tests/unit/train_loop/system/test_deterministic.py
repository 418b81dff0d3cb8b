"""Variables of runs with deterministic algorithms."""

from train_loop.system.deterministic import deterministic_settings


def test_variables_of_the_operator_take_precedence() -> None:
    assert deterministic_settings({}) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
    }
    assert "CUBLAS_WORKSPACE_CONFIG" not in deterministic_settings({"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
