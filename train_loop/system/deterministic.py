"""Variables by which libraries compute the same bits each time."""

from collections.abc import Mapping

_VARIABLES = {
    # cuBLAS sums in other orders if streams share its workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # transformers passes it to flash attention, whose backward pass otherwise adds atomically.
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}


def deterministic_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank sets before CUDA starts, except for variables of the operator."""
    return {name: value for name, value in _VARIABLES.items() if name not in environment}
