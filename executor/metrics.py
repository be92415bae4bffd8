"""What the executor tells Prometheus."""

from prometheus_client import Counter, Histogram

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

STEP_SECONDS = Histogram("kvkeep_executor_step_seconds", "Time of a step's work on the device.", buckets=_BUCKETS)
IDLE_SECONDS = Counter("kvkeep_executor_idle_seconds", "Time in which the device had nothing to do between steps.")
TOKENS = Counter("kvkeep_executor_tokens", "Tokens computed.")
SAMPLED = Counter("kvkeep_executor_sampled_tokens", "Tokens sampled.")
FAILED_STEPS = Counter("kvkeep_executor_failed_steps", "Steps on which the model failed.")
