"""The asynchronous client. `make client` generates the synchronous one, `trainshed/_sync`, from it."""
