"""What holds for every policy of token eviction in the runner, alone and in company, on every path of a model."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from executor.errors import CapacityExceededError, InvalidStepError, UnknownSequenceError
from executor.models.forward import Model
from executor.step import Evicted, Step, StepOutput
from protos.kvcommon.eviction import AREAS, Kind, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.unit.executor.conftest import BLOCK_SIZE, PATHS, Driver, load, save_model
from tests.unit.executor.tiny_models import VOCAB

KINDS = [kind for kind in Kind if kind is not Kind.NONE]
PROMPT = torch.randint(VOCAB, (37,), generator=torch.Generator().manual_seed(3)).tolist()
OUTPUT = 24


def small(kind: Kind, budget: int = 20) -> dict[str, Any]:
    """A policy of this kind that keeps about so many tokens."""
    fields: dict[str, Any] = {"kind": kind.value, "seed": 5}
    if kind is Kind.SLIDING_WINDOW:
        return fields | {"start_tokens": 2, "recent_tokens": budget - 2}
    fields["max_cache_tokens"] = budget
    if kind is Kind.LAST:
        return fields
    if kind is Kind.SNAPKV:
        return fields | {"score_window_tokens": 4}
    if kind in AREAS:
        return fields | {"start_tokens": 4, "recent_tokens": 8}
    return fields | {"start_tokens": 1, "recent_tokens": 3, "period_tokens": 4}


VARIANTS: dict[str, dict[str, Any]] = {
    **{kind.name.lower(): small(kind) for kind in KINDS},
    "kvcrush": small(Kind.NORM_SUM) | {"kvcrush": common.KvCrush(budget_blocks=2)},
    "all rows": small(Kind.NORM_SUM) | {"score_window_tokens": 0},
    "window alone": {"kind": Kind.SLIDING_WINDOW.value, "recent_tokens": 20},
    "window in periods": small(Kind.SLIDING_WINDOW) | {"period_tokens": 7},
    "batch-max": small(Kind.AVERAGE) | {"during_prefill": True, "start_tokens": 0, "recent_tokens": 0},
    "keys in the prompt": small(Kind.KEYDIFF) | {"during_prefill": True},
    "one by one": small(Kind.TOVA) | {"period_tokens": 1},
    "compacted window": small(Kind.SLIDING_WINDOW) | {"positions": 2},
    "compacted blocks": small(Kind.SUM) | {"positions": 2},
    "compacted heads": small(Kind.H2O) | {"positions": 2},
}


@pytest.fixture(scope="module", params=PATHS)
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Model:
    return PATHS[request.param](model_folder("llama, compiled"))


@dataclass
class Client:
    """One sequence as scheduler and cache manager would run it."""

    handle: int
    policy: Policy
    chunk: int = 9
    computed: int = 0
    kept: int = 0
    evicts: bool = False
    stays: bool = False
    evicted: int = 0

    def next(self, driver: Driver, tokens: list[int]) -> dict[str, Any]:
        """What the next step says of it."""
        changes: dict[str, Any] = {}
        if not self.computed:
            changes["joining"] = replace(driver.new_sequence(self.handle, tokens, room=OUTPUT), policy=self.policy)
        left = self.policy.kept_after(self.kept, self.computed, len(tokens))
        if left < self.kept and not self.evicts:
            self.evicts = True
            most = self.policy.most_kept or self.policy.maximum + OUTPUT
            changes["evicting"] = () if self.stays else driver.blocks(most)[0]
        self.evicted += self.kept - left
        self.kept = left
        count = 1
        if self.computed < len(tokens):
            room = self.policy.room(self.kept, self.computed, len(tokens))
            count = min(self.chunk, len(tokens) - self.computed, self.chunk if room is None else room)
            changes["chunk"] = count
        self.kept += count
        self.computed += count
        return changes

    def step(self, driver: Driver) -> StepOutput:
        """The next step of this sequence alone, whose prompt is PROMPT."""
        changes = self.next(driver, PROMPT)
        return driver.step(
            new_sequences=(changes["joining"],) if "joining" in changes else (),
            chunks={self.handle: changes["chunk"]} if "chunk" in changes else {},
            evicting={self.handle: changes["evicting"]} if "evicting" in changes else {},
        )


def run(
    model: Model,
    prompts: dict[int, list[int]],
    policies: dict[int, Policy | None],
    output: int = OUTPUT,
    **fields: Any,
) -> Any:
    """So many tokens of all in one running set, by handle, and what was evicted."""
    driver = Driver(model, num_blocks=400)
    clients = {handle: Client(handle, policy, **fields) for handle, policy in policies.items() if policy}
    outputs: dict[int, list[int]] = {handle: [] for handle in prompts}
    evicted: list[Evicted] = []
    plain = {handle: len(tokens) for handle, tokens in prompts.items() if policies[handle] is None}
    step = 0
    while any(len(tokens) < output for tokens in outputs.values()):
        joining, chunks, evicting, idle = [], {}, {}, set()
        for handle, tokens in prompts.items():
            if len(outputs[handle]) >= output:
                idle.add(handle)
            elif handle in clients:
                changes = clients[handle].next(driver, tokens)
                joining += [changes["joining"]] if "joining" in changes else []
                chunks |= {handle: changes["chunk"]} if "chunk" in changes else {}
                evicting |= {handle: changes["evicting"]} if "evicting" in changes else {}
            elif plain[handle]:
                joining += [driver.new_sequence(handle, tokens, room=OUTPUT)] if plain[handle] == len(tokens) else []
                chunks[handle] = min(9, plain[handle])
                plain[handle] -= chunks[handle]
        step += 1
        made = Step(step, new_sequences=tuple(joining), chunks=chunks, idle=frozenset(idle), evicting=evicting)
        outcome = driver.runner.launch(made).result()
        evicted += outcome.evicted
        for sampled in outcome.sampled:
            outputs[sampled.sequence].append(sampled.token_id)
    for client in clients.values():
        assert client.evicted == sum(one.tokens for one in evicted if one.sequence == client.handle)
    return outputs, evicted


def policy_of(model: Model, fields: dict[str, Any]) -> Policy:
    chosen = parse(common.EvictionPolicy(**fields), Driver(model, num_blocks=1).runner.layout)
    assert chosen is not None
    return chosen


# LAST keeps one token whatever the budget.
@pytest.mark.parametrize("name", [name for name, fields in VARIANTS.items() if fields["kind"] != Kind.LAST.value])
def test_a_budget_above_the_length_changes_nothing(model: Model, name: str) -> None:
    fields = dict(VARIANTS[name])
    if fields["kind"] == Kind.SLIDING_WINDOW.value:
        fields["recent_tokens"] = 100
    else:
        fields["max_cache_tokens"] = 100
    (outputs, evicted), (plain, _) = (run(model, {1: PROMPT}, {1: one}) for one in (policy_of(model, fields), None))
    assert evicted == []
    assert outputs == plain


@pytest.mark.parametrize("name", VARIANTS)
def test_company_changes_neither_decisions_nor_output(model: Model, name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    alone, evicted = run(model, {1: PROMPT}, {1: chosen})
    assert sum(one.tokens for one in evicted) > 0
    if chosen.uses_scores:
        assert all(one.mass is not None and 0 < one.mass <= 1 for one in evicted)
    others = {
        2: policy_of(model, VARIANTS["tova"]),
        3: None,
        4: policy_of(model, VARIANTS["window alone"]),
        5: policy_of(model, VARIANTS["norm_sum"]),
    }
    prompts = {1: PROMPT, 2: PROMPT[:11], 3: PROMPT[::-1], 4: PROMPT[5:], 5: PROMPT[7:20]}
    together, evictions = run(model, prompts, {1: chosen, **others})
    assert together[1] == alone[1]
    assert [one.tokens for one in evictions if one.sequence == 1] == [one.tokens for one in evicted]
    assert together[3] == run(model, {3: PROMPT[::-1]}, {3: None})[0][3]


@pytest.mark.parametrize("name", VARIANTS)
def test_staying_in_own_blocks_is_the_same_as_moving(model: Model, name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    (stayed, evicted), (moved, expected) = (run(model, {1: PROMPT}, {1: chosen}, stays=one) for one in (True, False))
    assert stayed == moved
    assert [one.tokens for one in evicted] == [one.tokens for one in expected]
    # In another order of slots, sums round differently.
    assert [one.mass for one in evicted] == pytest.approx([one.mass for one in expected])


@pytest.mark.parametrize("name", ["sliding_window", "window alone"])
def test_a_window_computes_what_a_mask_does(model: Model, model_folder: Callable[[str], Path], name: str) -> None:
    chosen = policy_of(model, VARIANTS[name])
    outputs, _ = run(model, {1: PROMPT}, {1: chosen})
    reference = AutoModelForCausalLM.from_pretrained(
        model_folder("llama, compiled"), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = PROMPT + outputs[1][:-1]
    row, column = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
    seen = column <= row
    # Behind the prompt, what a token no longer saw nobody sees again.
    window = (column < chosen.start) | (column >= row - chosen.recent)
    seen &= window | (row < len(PROMPT))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    logits = reference(input_ids=torch.tensor([tokens]), attention_mask=mask).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == outputs[1]


@pytest.mark.parametrize("name", ["compacted window", "compacted blocks"])
def test_compacted_positions_are_those_of_the_kept_tokens_alone(tmp_path: Path, name: str) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    model = load(save_model(config, tmp_path / "one layer"))
    chosen = policy_of(model, VARIANTS[name])
    driver = Driver(model, num_blocks=400)
    client = Client(1, chosen)
    outputs: list[int] = []
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "one layer", dtype=torch.float32)
    while len(outputs) < OUTPUT:
        outcome = client.step(driver)
        if not outcome.sampled:
            continue
        # With one layer a key depends on its token and its place only: what is kept, computed alone, says the same.
        known = PROMPT + outputs
        kept = kept_positions(driver, client.kept)
        logits = reference(input_ids=torch.tensor([[known[place] for place in kept]])).logits[0, -1]
        assert outcome.sampled[0].token_id == int(logits.argmax())
        outputs.append(outcome.sampled[0].token_id)
    assert client.evicted > 0


def kept_positions(driver: Driver, kept: int) -> list[int]:
    """Which tokens a sequence keeps, in order, as its policy's state says."""
    positions = driver.runner._eviction.positions(next(iter(driver.runner._sequences)))
    assert positions.shape[-1] == kept
    return positions[0, 0].sort().values.tolist()


@pytest.mark.parametrize("compacted", [True, False])
def test_only_compacted_positions_go_beyond_the_models_length(tiny: Model, compacted: bool) -> None:
    fields = small(Kind.SLIDING_WINDOW) | {"period_tokens": 8, "positions": 2 if compacted else 1}
    driver, client = Driver(tiny), Client(1, policy_of(tiny, fields), chunk=len(PROMPT))
    length = tiny.max_positions
    while client.computed < length:
        assert client.step(driver).sampled
    beyond = nullcontext() if compacted else pytest.raises(CapacityExceededError, match=f"the model takes {length}")
    for _ in range(39 if compacted else 1):
        with beyond:
            assert client.step(driver).sampled


def test_steps_that_evict_wrongly_are_refused_and_change_nothing(tiny: Model) -> None:
    driver = Driver(tiny)
    chosen = policy_of(tiny, small(Kind.SLIDING_WINDOW))
    with_policy = replace(driver.new_sequence(1, PROMPT), policy=chosen)
    driver.step(new_sequences=(with_policy, driver.new_sequence(2, PROMPT)), chunks={1: 37, 2: 37})
    blocks = driver.blocks(24)[0]
    for evicting, error, field in (
        ({3: blocks}, UnknownSequenceError, "evicting_sequences"),
        ({2: blocks}, InvalidStepError, "evicting_sequences"),
        ({1: (0,)}, InvalidStepError, "evicting_slots"),
        ({1: (999,)}, InvalidStepError, "evicting_slots"),
        ({1: blocks[:3]}, InvalidStepError, "evicting_slots"),
        ({1: blocks[:5]}, CapacityExceededError, "table_slots"),
    ):
        with pytest.raises(error) as caught:
            driver.step(evicting=evicting)
        assert list(caught.value.fields) == [field]
    with pytest.raises(InvalidStepError, match="must compute"):
        driver.step(evicting={1: blocks}, idle=frozenset({1}))
    assert driver.step(evicting={1: blocks}).evicted == (Evicted(1, 17, None),)
    with pytest.raises(InvalidStepError):
        driver.step(evicting={1: driver.blocks(24)[0]})
    assert BLOCK_SIZE == 4
