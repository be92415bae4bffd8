"""What the stack costs and gains, measured."""

# Before grpc.
import protos  # noqa: F401
