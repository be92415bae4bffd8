# Before grpc.
import protos  # noqa: F401
