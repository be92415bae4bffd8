"""No policy waits for the device: on the meta device, which has no values, any value that is read is an error."""

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor import transfer
from protos.kvcommon.eviction import Anchor, Kind
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.eviction.driving import KINDS, ROTATED, evictions, policy

META = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Uploads(TorchDispatchMode):
    """Fails at copies to the device but those of executor.transfer, which copies from pinned memory without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        source = args[-1] if func is COPIES[1] else args[0] if args else None
        if func in COPIES and made.is_meta and not source.is_meta:
            self.count += 1
            assert kwargs.get("non_blocking"), f"{tuple(source.shape)} are copied while the host waits"
            callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
            assert transfer.__file__ in callers, f"{tuple(source.shape)} are not pinned"
        return made


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    with Uploads() as mode:
        yield mode


def test_a_copy_for_which_the_host_waits_is_noticed(uploads: Uploads) -> None:
    transfer.sent(torch.zeros(2), META)
    with pytest.raises(AssertionError, match="are not pinned"):
        torch.zeros(2).to(META, non_blocking=True)
    with pytest.raises(AssertionError, match="while the host waits"):
        torch.zeros(2).to(META)
    with pytest.raises(AssertionError, match="while the host waits"):
        torch.empty(2, device=META).copy_(torch.zeros(2))
    assert uploads.count == 4


@pytest.mark.usefixtures("uploads")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_policy_waits_for_the_device(kind: Kind) -> None:
    assert evictions(policy(kind), META)


@pytest.mark.usefixtures("uploads")
@pytest.mark.parametrize("anchor", Anchor, ids=lambda anchor: anchor.name)
def test_no_anchor_waits_for_the_device(anchor: Anchor) -> None:
    crush = common.KvCrush(budget_blocks=1, anchor=anchor.value)
    assert evictions(policy(Kind.SUM, kvcrush=crush, max_cache_tokens=16), META)


@pytest.mark.usefixtures("uploads")
@pytest.mark.parametrize("kind", ROTATED, ids=lambda kind: kind.name)
def test_rotating_keys_does_not_wait_for_the_device(kind: Kind) -> None:
    assert evictions(policy(kind, positions=common.EVICTION_POSITIONS_COMPACTED), META) > 1
