"""Sizes of a model: those of its config, and those that are counted when it is built. Torch-free."""
