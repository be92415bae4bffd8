"""The facts of vectors/, checked with the evictors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.eviction.areas import Areas, Blocks, anchor_of, distances, important, pool, spared, without
from executor.eviction.base import KvShape, KvView, scored_rows
from executor.eviction.engine import rotation_deltas
from executor.eviction.rkv import AdaptiveRkv, filtered, heaviest, key_diversity, least_diverse, least_needed
from kernels.scores import SequenceScores
from protos.kvcommon.eviction import Anchor, Kind, Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from tests.support.rotary import frequencies
from tests.unit.executor.eviction.driving import CPU

FOLDER = Path(__file__).parent / "vectors"


def cases(name: str, of: str | None = None) -> list[Any]:
    read = json.loads((FOLDER / f"{name}.json").read_text())
    return [pytest.param(case, id=case["id"]) for case in read if of is None or case["of"] == of]


def test_all_are_here() -> None:
    ids = [case["id"] for path in FOLDER.glob("*.json") for case in json.loads(path.read_text())]
    assert len(ids) == len(set(ids)) == 81


def made(kind: Kind, sizes: list[int], layers: int = 1, pooled: int = 0, **more: Any) -> Blocks:
    """An evictor; sizes: start, recent, maximum, block. All queries count if `more` does not say otherwise."""
    start, recent, maximum, size = sizes
    fields = {
        "during_prefill": False,
        "compacted": False,
        "score_window": 0,
        "mass": 0.9,
        "mass_steps": 8,
        "crush": None,
        "seed": 0,
    }
    chosen = Policy(kind, size, start, recent, maximum, size, **{**fields, **more})
    return (AdaptiveRkv if kind is Kind.ADAPTIVE_RKV else Areas)(chosen, KvShape(layers, 1, CPU), pooled)


def contents(slots: int, layers: int = 1) -> KvView:
    """Of a sequence that has evicted nothing; it has no keys."""
    positions = torch.arange(slots).expand(layers, 1, -1)
    return KvView(positions, slots, lambda: torch.empty(layers, 1, 0, 4))


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-5, atol=1e-4)


def register(blocks: Blocks, slots: int, scores: list[list[float]], missing: list[int]) -> int:
    """One step; answers how many slots there are now."""
    size, start = blocks.policy.block_size, blocks.policy.start
    weights = torch.tensor(scores)[:, None]
    present = [slot for slot in range(weights.shape[-1] + size * len(missing)) if slot // size not in missing]
    now = max(present[-1] + 1, slots)
    width = blocks.pooled
    if missing and isinstance(blocks, Areas):
        # No attention of ours leaves blocks out: what there is is pooled by itself, and put at its index.
        weights = torch.cat([weights[..., :start], pool(weights[..., start:], width)], -1)
        blocks.pooled = 0
    spread = torch.zeros(*weights.shape[:-1], now)
    spread[..., present] = weights
    blocks.observe(SequenceScores(spread, None, now if not slots else now - slots), now - slots)
    blocks.pooled = width
    return now


@pytest.mark.parametrize("case", cases("scores"))
def test_scores(case: dict[str, Any]) -> None:
    size = 2
    for layer, expected in enumerate(case["scores"]):
        start = size * case["start_blocks"]
        steps = {"mass_steps": case["mass_steps"]} if "mass_steps" in case else {}
        blocks = made(Kind[case["kind"]], [start, size, 100, size], pooled=case["pooled"], **steps)
        slots = 0
        for scores, *missing in case["steps"]:
            slots = register(blocks, slots, [scores[layer]], missing[0] if missing else [])
        held, now = contents(slots), slots
        if "evicted" in case:
            gone = case["evicted"][layer]
            index = torch.tensor([[[slot for slot in range(slots) if slot // size not in gone]]])
            assert float(blocks.scores(slots).abs().sum()) > 0
            blocks.reindex(index)
            held, now = KvView(held.positions.gather(-1, index), slots, held.keys), index.shape[-1]
        close(blocks.scores(now)[0, start:], expected)
        if "counts" in case:
            assert isinstance(blocks, Areas)
            assert blocks.counts(held)[0, start:].tolist() == case["counts"][layer]


@pytest.mark.parametrize("case", cases("counts"))
def test_counts(case: dict[str, Any]) -> None:
    blocks = made(Kind.NORM_SUM, [0, 2, 100, 2], score_window=case["window"])
    assert isinstance(blocks, Areas)
    before = 0
    for slots, rows in case["steps"]:
        blocks.observe(SequenceScores(torch.ones(1, 1, slots), None, rows), slots - before)
        before = slots
    assert blocks.counts(contents(before))[0].tolist() == case["counts"]


@pytest.mark.parametrize("case", cases("rows"))
def test_rows(case: dict[str, Any]) -> None:
    chosen = made(Kind.NORM_SUM, [2, 2, 100, 2], score_window=case["window"]).policy
    assert scored_rows(chosen, case["prompt"], case["computed"], case["new"]) == case["rows"]


@pytest.mark.parametrize("case", cases("areas"))
def test_areas(case: dict[str, Any]) -> None:
    blocks, tokens = made(Kind.NORM_SUM, [32, 32, 192, 4]), case["tokens"]
    evicts = blocks.policy.kept_after(tokens, tokens, tokens) < tokens
    area = blocks.evictable(tokens) if evicts else range(0)
    assert [area.start, area.stop] == case["blocks"]


def scores_of(text: Any, slots: int, size: int) -> Tensor:
    """[slots]: the notation of evictions.json."""
    places = torch.arange(slots, dtype=torch.float64)
    scores = torch.zeros(slots, dtype=torch.float64)
    if isinstance(text, dict):
        scores[text["from"] : text["from"] + len(text["values"])] = torch.tensor(text["values"], dtype=torch.float64)
    elif "^" in text:
        shape, power = text.split("^")
        scores = (places if shape == "rising" else slots - 1 - places) ** float(power)
    else:
        base, _, zeros = text.partition(" but 0 in ")
        scores += float(base)
        for block in map(int, filter(None, zeros.split(","))):
            scores[block * size : (block + 1) * size] = 0
    return scores.float()


class Sequence:
    """Without keys; all of its tokens up to the end of the first step are its prompt."""

    def __init__(self, case: dict[str, Any]) -> None:
        crush = (
            common.KvCrush(budget_blocks=case["crush"][0], anchor=Anchor[case["crush"][1]]) if "crush" in case else None
        )
        start, recent, maximum, size = case["sizes"]
        kind = Kind[case.get("kind", "NORM_SUM")]
        message = common.EvictionPolicy(
            kind=kind.value, start_tokens=start, recent_tokens=recent, max_cache_tokens=maximum, kvcrush=crush
        )
        if kind is Kind.ADAPTIVE_RKV:
            message.adaptive_rkv.window_steps = case["mass_steps"]
            message.adaptive_rkv.attention_mass = case.get("mass", 0.9)
        else:
            message.score_window_tokens = 0
        chosen = parse(message, Layout(size, (None,), True))
        assert chosen is not None
        layers = case["layers"]
        made_of = AdaptiveRkv if kind is Kind.ADAPTIVE_RKV else Areas
        self.blocks = made_of(chosen, KvShape(layers, 1, CPU), pooled=0)
        self.positions = torch.empty(layers, 1, 0, dtype=torch.int64)
        self.computed = self.prompt = 0

    def compute(self, step: dict[str, Any]) -> None:
        layers, _, before = self.positions.shape
        slots, size = step["tokens"], self.blocks.policy.block_size
        new = slots - before
        more = torch.arange(self.computed, self.computed + new).expand(layers, 1, -1)
        self.positions = torch.cat([self.positions, more], -1)
        self.computed += new
        self.prompt = self.prompt or self.computed
        scores = torch.stack([scores_of(text, slots, size) for text in step["scores"]])
        self.blocks.observe(SequenceScores(scores[:, None].expand(layers, -1, -1), None, new), new)

    def evict(self, diversity: list[float] | None) -> list[list[int]]:
        """Blocks that go of each layer."""
        layers, _, slots = self.positions.shape
        size = self.blocks.policy.block_size
        count = self.blocks.policy.kept_after(slots, self.computed, self.prompt)
        if count == slots:
            return [[] for _ in range(layers)]
        if diversity is not None:
            return self.least_needed(torch.tensor(diversity), (slots - count) // size)
        held = KvView(self.positions, self.computed, contents(slots, layers).keys)
        index = self.blocks.keep(held, count)
        self.blocks.reindex(index)
        self.positions = self.positions.gather(-1, index)
        stays = [set(layer[0]) for layer in index.tolist()]
        lost = [sorted(set(range(slots)) - kept) for kept in stays]
        assert all(slot // size * size in slots for slots in lost for slot in slots)
        return [sorted({slot // size for slot in slots}) for slots in lost]

    def least_needed(self, diversity: Tensor, count: int) -> list[list[int]]:
        """With numbers that no keys have."""
        slots, size = self.positions.shape[-1], self.blocks.policy.block_size
        area = self.blocks.evictable(slots)
        worth = self.blocks.of_blocks(self.blocks.scores(slots), area).sum(-1)
        matrix = diversity[None, :, None].expand(len(worth), -1, len(area) * size)
        gone = area.start + least_needed(worth, matrix, self.blocks.policy.mass, count)
        return gone.sort(-1).values.tolist()


@pytest.mark.parametrize("case", cases("evictions"))
def test_evictions(case: dict[str, Any]) -> None:
    sequence = Sequence(case)
    gone: list[list[int]] = []
    for step in case["steps"]:
        sequence.compute(step)
        if "keys" in step:
            with pytest.raises(ValueError, match="keys for 0 of 16 slots"):
                sequence.evict(None)
            continue
        gone = sequence.evict(step.get("diversity"))
        if "evicted" in step:
            assert gone == step["evicted"]
    for layer, plain in enumerate(case.get("without_crush", [])):
        assert set(gone[layer]) <= set(plain)
        assert len(gone[layer]) == len(plain) - case["fewer"]


@pytest.mark.parametrize("case", cases("settings"))
def test_settings(case: dict[str, Any]) -> None:
    start, recent, maximum, size = case["sizes"]
    message = common.EvictionPolicy(
        kind=Kind.NORM_SUM.value, start_tokens=start, recent_tokens=recent, max_cache_tokens=maximum
    )
    layout = Layout(size, (None,) if case.get("layers", 1) else (), True)
    if case["valid"]:
        assert parse(message, layout) is not None
    else:
        with pytest.raises(InvalidField):
            parse(message, layout)


@pytest.mark.parametrize("case", cases("rotation"))
def test_rotation(case: dict[str, Any]) -> None:
    size = case["block_size"]

    def turned() -> tuple[Tensor, Tensor, Tensor]:
        """Block numbers, positions and radians per position of the blocks that stay; a row per token."""
        slots = without(torch.tensor([case["evicted"]]), case["blocks"] * size, size)[0]
        after, places = rotation_deltas(slots)
        return after, places, frequencies(case["head_dim"], case["theta"])

    if case.get("error"):
        with pytest.raises((RuntimeError, ValueError), match=r"out of bounds|theta must be positive"):
            turned()
        return
    after, places, radians = turned()
    blocks = {int(number) // size: int(place) for number, place in zip(after, places, strict=True) if place}
    assert int((places > 0).sum()) == len(blocks) * size
    if "rotated" in case:
        assert len(blocks) == case["rotated"]
    else:
        assert {str(block): place for block, place in blocks.items()} == {
            block: places for block, (places, _, _) in case["turns"].items()
        }
        for place, cosines, sines in case["turns"].values():
            close((place * radians).cos(), cosines)
            close(-(place * radians).sin(), sines)


@pytest.mark.parametrize("case", cases("diversity", "heaviest"))
def test_heaviest(case: dict[str, Any]) -> None:
    certain = heaviest(torch.tensor([case["worth"]]), case["mass"], case["most"])[0]
    assert int(certain.sum()) == case["kept"]
    assert (~certain).nonzero().flatten().tolist() == case["candidates"]


def mask(numbers: list[int], length: int) -> Tensor:
    return torch.tensor([[number in numbers for number in range(length)]])


@pytest.mark.parametrize("case", cases("diversity", "filtered"))
def test_filtered(case: dict[str, Any]) -> None:
    matrix = torch.tensor([case["diversity"]])
    close(filtered(matrix, mask(case["candidates"], matrix.shape[1]))[0], case["mean"])


@pytest.mark.parametrize("case", cases("diversity", "least_diverse"))
def test_least_diverse(case: dict[str, Any]) -> None:
    candidates, values = set(case["candidates"]), torch.tensor([case["diversity"]])
    certain = ~mask(case["candidates"], values.shape[1])
    gone = least_diverse(values, certain, len(candidates) - case["keep"])
    assert sorted(candidates - set(gone[0].tolist())) == case["kept"]


@pytest.mark.parametrize("case", cases("diversity", "key_diversity"))
def test_key_diversity(case: dict[str, Any]) -> None:
    keys = torch.tensor(case["keys"], dtype=torch.float32)[:, slice(*case["tokens"])]
    size = case["block_size"]
    close(key_diversity(keys, size), case["rows"])


def bits(text: str, size: int) -> Tensor:
    """[1, N, size]."""
    return torch.tensor([bit == "1" for bit in text]).view(1, -1, size)


@pytest.mark.parametrize("case", cases("crush", "anchor"))
def test_anchor(case: dict[str, Any]) -> None:
    size = case["block_size"]
    found = anchor_of(Anchor[case["anchor"]], bits(case["bits"], size), torch.Generator())
    assert torch.equal(found, bits(case["pattern"], size)[0])


@pytest.mark.parametrize("case", cases("crush", "distances"))
def test_distances(case: dict[str, Any]) -> None:
    size = len(case["pattern"])
    found = distances(bits(case["bits"], size), bits(case["pattern"], size)[0])
    assert found[0].tolist() == case["distances"]


@pytest.mark.parametrize("case", cases("crush", "spared"))
def test_spared(case: dict[str, Any]) -> None:
    found = spared(torch.tensor([case["distances"]]), case["budget"])[0].tolist()
    assert sorted(case["going"][place] for place in found) == case["kept"]


@pytest.mark.parametrize("case", cases("crush", "important"))
def test_important(case: dict[str, Any]) -> None:
    scores = torch.tensor([case["scores"]])
    high = important(scores)
    assert int(high.sum()) == case["ones"]
    assert float(scores[high].min()) >= float(scores[~high].max())
