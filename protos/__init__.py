"""The interfaces of the processes, and the code that all processes need to speak gRPC."""

import os

# gRPC writes notices about connections to standard error, in a different format than the program's lines. The
# variable is read when grpc is imported, so each package with programs imports this package first.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
