"""A scheduler in small, over the manager's own calls: the jobs of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protos.kvcache.v1 import kvcache_pb2 as pb
from tests.conformance.backends import Backend
from tests.conformance.player import Player


def blocks_of(answer: Any) -> dict[str, int]:
    """Estimates over all groups, by their short names."""
    return {
        "reusable": sum(estimate.reusable_blocks for estimate in answer.estimates),
        "next_step": sum(estimate.next_step_blocks for estimate in answer.estimates),
        "completion": sum(estimate.completion_blocks for estimate in answer.estimates),
    }


@dataclass
class Job:
    """A request: after a preemption, its prompt includes the tokens generated so far."""

    number: int
    tokens: list[int]
    left: int
    runs: list[list[int]] = field(default_factory=list)
    attempt: int = 0
    resumed: list[dict[str, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"job {self.number}.{self.attempt}"

    def note(self, step: int) -> None:
        """It ran in this step."""
        if self.runs and self.runs[-1][1] == step - 1:
            self.runs[-1][1] = step
        else:
            self.runs.append([step, step])


def simulate(
    backend: Backend, player: Player, policy: str, requests: list[list[int]], chunk: int | None
) -> dict[str, Any]:
    """Runs requests of [prompt tokens, new tokens] to their ends, all tokens of a prompt different.

    In a step every running sequence computes a chunk of its prompt, or all it knows, and then has a new token. With
    "max_utilisation" all start that fit, and the latest is preempted when another cannot go on; it resumes when the
    others have ended, its prompt in one step. With "no_evict" only those start that fit to their end.
    """
    waiting = [
        Job(number, list(range(1000 * number, 1000 * number + prompt)), new)
        for number, (prompt, new) in enumerate(requests)
    ]
    jobs, running, step = list(waiting), [], 0
    while waiting or running:
        while waiting and not (running and waiting[0].resumed):
            if not _start(backend, player, waiting[0], running, policy):
                break
            running.append(waiting.pop(0))
        assert running, "no job can start"
        step += 1
        assert step < 1000
        running = _extend_or_preempt(backend, player, running, waiting)
        for job in list(running):
            _compute(player, job, chunk)
            job.note(step)
            if not job.left:
                player.release(job.name)
                running.remove(job)
    return {
        "runs": [job.runs for job in jobs],
        "resumed": [job.resumed for job in jobs],
        "steps": step,
    }


def _start(backend: Backend, player: Player, job: Job, running: list[Job], policy: str) -> bool:
    if policy == "no_evict":
        admission = player.admission(job.name, job.tokens)
        preview = backend.call(
            "PreviewAdmission", pb.PreviewAdmissionRequest(admission=admission, max_new_tokens=job.left)
        )
        promised = sum(_to_completion(player, other) for other in running)
        free = backend.call("ListPools", pb.ListPoolsRequest()).pools[0].free_blocks
        if blocks_of(preview)["completion"] + promised > free:
            return False
    return player.add(job.name, job.tokens).admitted


def _to_completion(player: Player, job: Job) -> int:
    """Blocks that a running job will still allocate. No pool of these cases has a window."""
    live = player.sequences[job.name]
    return max(0, -(-(len(live.tokens) + job.left) // player.block_size) - len(live.tables[0]))


def _extend_or_preempt(backend: Backend, player: Player, running: list[Job], waiting: list[Job]) -> list[Job]:
    """Every job gets a block for its newest token before any computes; the latest is preempted for it."""
    kept: list[Job] = []
    todo = list(running)
    while todo:
        job = todo.pop(0)
        while player.ask_again(job.name):
            latest = todo.pop() if todo else job
            _preempt(player, latest, waiting)
            if latest is job:
                break
        else:
            kept.append(job)
    return kept


def _preempt(player: Player, job: Job, waiting: list[Job]) -> None:
    player.release(job.name)
    job.attempt += 1
    job.resumed.append({"prompt": len(job.tokens), "left": job.left})
    waiting.insert(0, job)


def _compute(player: Player, job: Job, chunk: int | None) -> None:
    live = player.sequences[job.name]
    unknown = len(live.tokens) - live.computed
    if chunk and not job.resumed and unknown > chunk:
        player.compute(job.name, live.computed + chunk)
        return
    token = 1000 * job.number + len(job.tokens)
    player.append(job.name, [token])
    job.tokens.append(token)
    job.left -= 1
