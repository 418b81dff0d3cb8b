"""The guarantees of a model at toy size, measured on real ranks of this machine."""
