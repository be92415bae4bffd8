// The newest events of all shards. Events of many blocks by one request are one row.

import { clock, count, element, fill, hex, narrow, read, word } from "./api.js";

// The most events of each kind and shard: many events of one kind do not remove events of other kinds.
const KEPT = 200;
const MAX_ROWS = 200;
// The most slots that a row names.
const MAX_SLOTS = 4;

const kindOf = ({ kind }) => word(kind, "EVENT_KIND_");
const poolOf = ({ block, executor }) => executor?.executor_id ?? block.pool_id;

export class EventList {
  constructor() {
    this.table = document.getElementById("events");
    this.kind = document.getElementById("kind");
    this.button = document.getElementById("pause");
    this.events = [];
    this.last = new Map();
    this.shards = [];
    // Events that came since the reader has paused the list; null while it is not paused.
    this.missed = null;
    this.kind.addEventListener("change", () => this.draw());
    // The list is drawn again only with new events, and there may be none.
    narrow.addEventListener("change", () => this.draw());
    this.button.addEventListener("click", () => this.pause());
  }

  pause() {
    this.missed = this.missed === null ? 0 : null;
    this.button.setAttribute("aria-pressed", this.missed !== null);
    document.getElementById("paused").textContent = "";
    this.draw();
  }

  async load(shard, shards) {
    const last = this.last.get(shard);
    const found = await read("events", {
      ...(shards.length > 1 ? { shard } : {}), ...(last === undefined ? {} : { after: last }),
    });
    this.shards = shards;
    // A manager that started again counts from the beginning.
    if (found.last < last) this.events = this.events.filter((event) => event.shard !== shard);
    this.last.set(shard, found.last);
    const isShown = this.table.rows.length > 0;
    if (!found.events.length && isShown) return;
    // Events carry no time of their own. Those of the first answer may be old.
    const time = `${last === undefined ? "before " : ""}${clock(new Date())}`;
    const events = found.events.reverse().map((event) => ({ ...event, shard, time }));
    const seen = new Map();
    this.events = [...events, ...this.events].filter((event) => {
      const name = `${event.shard} ${event.kind}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      return seen.get(name) <= Math.ceil(KEPT / shards.length);
    });
    if (this.missed === null || !isShown) {
      this.draw();
    } else {
      this.missed += events.length;
      document.getElementById("paused").textContent = `${count(this.missed)} events since`;
    }
  }

  // The kinds that have occurred, for the list of kinds.
  kinds() {
    const known = [...this.kind.options].map(({ value }) => value);
    const found = new Set(this.events.map(kindOf));
    const added = [...found].filter((kind) => !known.includes(kind));
    this.kind.append(...added.sort().map((kind) => element("option", kind, { value: kind })));
  }

  draw() {
    this.kinds();
    const rows = [];
    for (const event of this.events) {
      if (this.kind.value && kindOf(event) !== this.kind.value) continue;
      const name = [event.shard, event.kind, event.time, poolOf(event), event.removal_cause, event.for_sequence_id,
        event.lease?.holder, event.block?.retention_priority].join();
      if (rows.at(-1)?.name === name) rows.at(-1).events.push(event);
      else if (rows.length === MAX_ROWS) break;
      else rows.push({ name, event, events: [event] });
    }
    fill(this.table, [
      ...(this.shards.length > 1 ? [["shard", ({ event }) => event.shard]] : []),
      ["time", ({ event }) => event.time, "short"],
      ["number", ({ events }) => range(events.map((event) => Number(event.event_number))), "number"],
      ["what", ({ event, events }) => kindOf(event) + (events.length > 1 ? ` × ${events.length}` : ""), "short"],
      ["pool", ({ event }) => poolOf(event), "short"],
      ["slot", ({ events }) => slots(events)],
      ["key", ({ event, events }) => (events.length > 1 ? "" : hex(event.block?.key ?? "").slice(0, 12)), "short"],
      ["tokens", ({ events }) => events.reduce((sum, { block }) => sum + (block?.num_tokens ?? 0), 0) || "", "number"],
      ["priority", ({ event: { block } }) => (block?.key ? block.retention_priority : ""), "number"],
      ["cause", ({ event }) => word(event.removal_cause, "REMOVAL_CAUSE_").replace("unspecified", "")],
      ["holder", ({ event: { lease } }) => lease?.holder ?? "", "name"],
    ], rows, "Nothing has happened.");
  }
}

// Numbers from the newest to the oldest.
function range(numbers) {
  return numbers.length > 1 ? `${count(numbers.at(-1))}–${count(numbers[0])}` : count(numbers[0]);
}

function slots(events) {
  const named = events.map(({ block }) => block).filter((block) => block?.slot);
  if (!named.length) return "";
  const more = named.length > MAX_SLOTS ? ` and ${named.length - MAX_SLOTS} more` : "";
  const numbers = named.slice(0, MAX_SLOTS).map(({ slot }) => slot).join(", ");
  return `${word(named[0].tier, "TIER_")} ${numbers}${more}`;
}
