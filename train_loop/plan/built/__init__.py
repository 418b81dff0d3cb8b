"""What was chosen for a run: its FSDP units, dtypes, kernels and optimizer, as plans and events say it. Torch-free."""
