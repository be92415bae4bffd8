"""What the stack costs and gains, measured."""

# This import comes before the import of grpc.
import protos  # noqa: F401
