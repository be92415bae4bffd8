"""`python -m executor`: loads the model, registers with the cache manager, serves steps."""

import os
import sys

# Before torch is imported: OpenMP threads that spin while they wait would starve the other processes of a
# small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from protos.rpc.startup import process_parser

if __name__ == "__main__":
    process_parser(
        "python -m executor",
        "Runs the executor until SIGTERM: it loads the model (KVKEEP_EXECUTOR_MODEL), registers with the cache\n"
        "manager and computes the steps that the scheduler sends it.",
    ).parse_args()
    # Imported late, so that --help takes no seconds.
    from executor.process import main
    from executor.settings import settings_from

    sys.exit(main(settings_from(os.environ)))
