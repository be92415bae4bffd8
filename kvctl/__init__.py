"""`kvctl`: the operators' client of a running stack. It talks to the services through their stubs only."""

# This import comes before the import of grpc.
import protos  # noqa: F401
