"""`python -m scheduler`: runs the scheduler until SIGTERM."""

import sys

from protos.rpc.startup import process_parser


def main() -> int:
    process_parser(
        "python -m scheduler",
        "Runs the scheduler until SIGTERM: it serves generation over gRPC (KVKEEP_SCHEDULER_ADDRESS) and OpenAI's API\n"
        "over HTTP (KVKEEP_SCHEDULER_HTTP_ADDRESS), and decides what the executor computes next.",
    ).parse_args()
    # Imported late, so that --help takes no seconds.
    from scheduler.process import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
