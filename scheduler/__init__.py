"""Decides what runs next, and serves the public generation API."""

# Before grpc.
import protos  # noqa: F401
