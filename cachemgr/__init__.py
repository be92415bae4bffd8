# Before grpc is imported, since grpc then reads variables that this package sets.
import protos  # noqa: F401
