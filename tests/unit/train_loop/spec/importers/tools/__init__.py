"""The rules of other tools, written from their own code, and random configurations of each."""
