"""`python -m scheduler.router`: runs the router until SIGTERM."""

import sys

from protos.rpc.startup import process_parser


def main() -> int:
    process_parser(
        "python -m scheduler.router",
        "Runs the router until SIGTERM: it serves generation over gRPC (KVKEEP_ROUTER_ADDRESS) and OpenAI's API over\n"
        "HTTP (KVKEEP_ROUTER_HTTP_ADDRESS), and sends each request to one of several engines (KVKEEP_ROUTER_ENGINES).",
    ).parse_args()
    # Imported late, so that --help takes no seconds.
    from scheduler.router.process import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
