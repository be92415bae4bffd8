"""`kvctl weights`: replaces an executor's weights, for people who train the model."""

from typing import Annotated

import typer

from kvctl.options import Yes
from kvctl.session import Session, confirm, verb
from kvctl.verbs.adapters import Engine
from kvctl.verbs.engines import engine_address
from protos.generation.v1 import generation_pb2 as pb

# Reading the files of a large model may take this time.
LOAD_SECONDS = 1800.0

app = typer.Typer(help="Compute with other weights.")


@verb(app, "update", "kvctl weights update step-1200 checkpoints/step-1200 --yes")
def update(
    session: Session,
    version: Annotated[str, typer.Argument(help="Version of the weights, which is part of the keys of blocks.")],
    path: Annotated[str, typer.Argument(help="Folder of a model of the same shape, as the executor sees it.")],
    engine: Engine = "",
    yes: Yes = False,
) -> None:
    """Compute with the weights of a folder below the folder that KVKEEP_EXECUTOR_WEIGHTS_DIR names."""
    confirm(f"Compute with the weights {version}? Running requests go on with them.", yes=yes)
    _update(session, pb.UpdateWeightsRequest(weight_version=version, path=path), engine)


@verb(app, "reset", "kvctl weights reset --yes")
def reset(session: Session, engine: Engine = "", yes: Yes = False) -> None:
    """Compute with the weights that the executor was started with."""
    confirm("Compute with the weights of the start? Running requests go on with them.", yes=yes)
    _update(session, pb.UpdateWeightsRequest(), engine)


def _update(session: Session, request: pb.UpdateWeightsRequest, engine: str) -> None:
    operation = session.operation(engine_address(session, engine))
    answer = operation.call(operation.stub.UpdateWeights, request, at_least=LOAD_SECONDS)
    weights = f"the weights {request.weight_version or 'of the start'}"
    session.show(
        answer, lambda _wide: f"computing with {weights}; {answer.other_blocks} cached blocks of other weights stay"
    )
