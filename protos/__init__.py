"""The interfaces of the processes, and what all of them need to speak over gRPC."""

import os

# gRPC writes notices about connections to standard error, in a form of its own between the lines of a program. The
# variable is read when grpc is imported: each package with programs imports this one before.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
