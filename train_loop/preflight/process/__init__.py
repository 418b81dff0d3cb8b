"""The processes in which checks run, and their limits."""
