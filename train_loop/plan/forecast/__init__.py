"""What a plan means on a device: whether it fits, how fast it is, and what would make it fit. Torch-free."""
