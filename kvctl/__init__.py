"""`kvctl`: the operators' client of a running stack. It talks to the services through their stubs only."""

# Before grpc.
import protos  # noqa: F401
