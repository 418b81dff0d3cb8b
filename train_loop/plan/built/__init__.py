"""Choices for a run: FSDP units, dtypes, kernels and optimizer, for plans and events. Torch-free."""
