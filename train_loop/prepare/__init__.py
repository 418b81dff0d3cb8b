"""The command `python -m train_loop.prepare`, which prepares a spec's data for a run without the service."""
