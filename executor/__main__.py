"""`python -m executor`: loads the model, registers with the cache manager, serves steps."""

import os
import sys

# Before torch is imported: OpenMP threads that spin while they wait would starve the other processes of a
# small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from executor.launch import settings_from
from executor.process import main

sys.exit(main(settings_from(os.environ)))
