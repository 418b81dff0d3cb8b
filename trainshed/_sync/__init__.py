# Generated from trainshed/_async/__init__.py by `make client`; do not edit.

"""The synchronous client."""
