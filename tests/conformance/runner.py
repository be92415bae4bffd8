"""Runs the steps of a case: one method per operation, one check per expectation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance import notation, scheduling
from tests.conformance.backends import BACKENDS, Backend, Refused
from tests.conformance.cases import Part
from tests.conformance.observer import Observer
from tests.conformance.player import EXECUTOR, Player

WORDS = {"add", "fork", "compute", "append", "truncate", "release", "advance", "preview", "follow"}
WORDS |= {"pin", "unpin", "schedule", "read_events", "expect"}


class Clock:
    """Time that only steps move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(part: Part, backend_name: str, folder: Path) -> None:
    """Runs one part of a case from the beginning."""
    clock = Clock()
    backend = BACKENDS[backend_name](part.setup.get("manager", {}), clock, folder)
    try:
        runner = Runner(part.setup, backend, clock)
        for number, step in enumerate(part.steps):
            try:
                runner.step(step)
            except (AssertionError, Refused) as error:
                error.add_note(f"in step {number}: {step}")
                raise
    finally:
        backend.close()


class Runner:
    """One executor and one scheduler that follow a case."""

    def __init__(self, setup: dict[str, Any], backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        pools = [
            pb.PoolSpec(
                group=group,
                num_blocks=pool["blocks"],
                attention_window=pool.get("window"),
                host_blocks=pool.get("host", 0),
                disk_blocks=pool.get("disk", 0),
                num_layers=1,
                num_kv_heads=1,
                head_dim=8,
                dtype="float32",
                block_bytes=64 * setup["block_size"],
            )
            for group, pool in enumerate(setup["pools"])
        ]
        self.player = Player(backend, setup["block_size"], pools, reuse=setup.get("reuse", True))
        self.observer = Observer(backend, self.player)
        self._holds: dict[str, str] = {}

    def step(self, step: dict[str, Any]) -> None:
        """Does a step, compares its answer and the state, and checks the manager."""
        expected = dict(step.get("expect", {}))
        (word, *_) = [word for word in step if word in WORDS]
        refusal = expected.pop("error", ""), expected.pop("field", "")
        given = self._do(word, step, *refusal)
        for key, value in expected.items():
            found = given[key] if key in given else self.observer.look(key, value)
            assert found == value, f"{key}: expected {value}, found {found}"
        assert list(self._backend.call("CheckPool", pb.CheckPoolRequest()).violations) == []
        self._backend.verify()

    def _do(self, word: str, step: dict[str, Any], code: str, field: str) -> dict[str, Any]:
        """What the operation gave; nothing when it is refused as it should be."""
        if word == "expect":
            return {}
        if not code:
            return getattr(self, f"_{word}")(step[word], step) or {}
        with pytest.raises(Refused) as refused:
            getattr(self, f"_{word}")(step[word], step)
        assert (refused.value.code, list(refused.value.fields)) == (code, [field])
        return {}

    # Sequences

    def _options(self, step: dict[str, Any]) -> dict[str, Any]:
        options = {new: step[old] for old, new in (("salt", "salt"), ("adapter", "adapter_id")) if old in step}
        if "session" in step:
            options["session_id"] = step["session"]
        if "retention" in step:
            options["retention"] = notation.retention(step["retention"])
        if "extra" in step:
            options["extra_keys"] = notation.extra_keys(step["extra"])
        return options

    def _add(self, name: str, step: dict[str, Any]) -> dict[str, Any]:
        answer = self.player.add(name, notation.tokens(step["tokens"]), **self._options(step))
        given = self._admitted(name, answer, step)
        if answer.admitted:
            blocks, cached = len(answer.block_tables[0].slots), answer.cached_tokens
            reused = cached // self.player.block_size
            given |= {"blocks": blocks, "cached": cached, "reused_blocks": reused, "new_blocks": blocks - reused}
        return given

    def _fork(self, name: str, step: dict[str, Any]) -> dict[str, Any]:
        return self._admitted(step["as"], self.player.fork(name, step["as"]), step)

    def _admitted(self, name: str, answer: Any, step: dict[str, Any]) -> dict[str, Any]:
        assert answer.admitted == step.get("expect", {}).get("admitted", True), f"{answer.missing_blocks} missing"
        copied = [transfer.num_tokens for transfer in answer.transfers if transfer.source_tier == pb.TIER_DEVICE]
        return {"admitted": answer.admitted, "copied": copied}

    def _compute(self, name: str, step: dict[str, Any]) -> None:
        self.player.compute(name)

    def _append(self, name: str, step: dict[str, Any]) -> None:
        short = self.player.append(name, notation.tokens(step["tokens"]))
        assert short == step.get("expect", {}).get("short", 0)

    def _truncate(self, name: str, step: dict[str, Any]) -> None:
        assert self.player.truncate(name, step["to"]).found

    def _release(self, names: str | list[str], step: dict[str, Any]) -> None:
        for name in [names] if isinstance(names, str) else names:
            self.player.release(name, stored=step.get("stored", True))

    # Time, pins and events

    def _advance(self, seconds: float, step: dict[str, Any]) -> None:
        self._clock.now += seconds
        # Any call that changes something ends the leases whose time is over.
        renewal = pb.RenewExecutorRequest(
            executor_id=EXECUTOR, executor_epoch=1, manager_epoch=self.player.manager_epoch
        )
        self._backend.call("RenewExecutor", renewal)

    def _read_events(self, _: bool, step: dict[str, Any]) -> None:
        self.observer.read_events()

    def _pin(self, name: str, step: dict[str, Any]) -> dict[str, Any]:
        prefix = pb.PrefixSelector(executor_id=EXECUTOR, token_ids=notation.tokens(step["tokens"]))
        request = pb.PinPrefixRequest(prefix=prefix, owner=name, duration=notation.duration(step["seconds"]))
        answer = self._backend.call("PinPrefix", request)
        self._holds[name] = answer.hold_name
        return {"pinned": answer.receipt.num_blocks}

    def _unpin(self, name: str, step: dict[str, Any]) -> dict[str, Any]:
        answer = self._backend.call("ReleaseHold", pb.ReleaseHoldRequest(name=self._holds[name]))
        return {"freed": answer.freed_blocks}

    # Estimates

    def _preview(self, text: str, step: dict[str, Any]) -> dict[str, Any]:
        admission = self.player.admission("preview", notation.tokens(text), **self._options(step))
        request = pb.PreviewAdmissionRequest(admission=admission, max_new_tokens=step["max_new"])
        answer = self._backend.call("PreviewAdmission", request)
        return {"cached": answer.cached_tokens, **scheduling.blocks_of(answer)}

    def _follow(self, name: str, step: dict[str, Any]) -> None:
        """Generates tokens; in the end the sequence must have taken the blocks that the preview announced."""
        used = self.observer.used()
        self.player.append(name, [7] * step["new"])
        assert self.observer.used() == used + step["completion"] - step["taken"]

    def _schedule(self, policy: str, step: dict[str, Any]) -> dict[str, Any]:
        return scheduling.simulate(self._backend, self.player, policy, step["requests"], step.get("chunk"))
