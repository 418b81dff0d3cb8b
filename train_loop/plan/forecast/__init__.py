"""A plan on a device: memory, throughput, and changes with which it fits. Torch-free."""
