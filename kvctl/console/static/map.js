// The pool as a picture: one square per slot, drawn from columns of numbers.

import { colour, count, element, key, owner, pages, seconds, sized } from "./api.js";

const TIERS = { device: "--c0", host: "--c1", disk: "--c2" };
const OWNERS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
// Upper bounds of priorities and of seconds, and their names.
const PRIORITIES = [[34, "--c7", "below 35"], [35, "--c2", "35, the usual"], [69, "--c5", "36 to 69"],
  [89, "--c1", "70 to 89"], [100, "--c4", "90 to 100"]];
const AGES = [[0, "--c0", "in use"], [10, "--c6", "up to 10 s"], [60, "--c2", "1 min"],
  [600, "--c3", "10 min"], [3600, "--c1", "1 h"], [Infinity, "--c7", "longer"]];
// The opacity of blocks that are cached and not in use; style.css has the same value for the legend.
const PALE = 0.4;
const MODES = ["tier", "tenant", "priority", "age"];

export class BlockMap {
  constructor() {
    this.canvas = document.getElementById("map");
    this.detail = document.getElementById("block");
    this.mode = "tier";
    this.pool = null;
    this.cursor = 0;
    // Slots of the host tier with a write-through copy, which belong to blocks on the device.
    this.copies = 0;
    this.reset();
    const group = document.getElementById("colours");
    this.buttons = MODES.map((mode, index) => {
      const button = element("button", `${mode[0].toUpperCase()}${mode.slice(1)}`,
        { type: "button", role: "radio", title: `Key ${index + 1}` });
      button.addEventListener("click", () => this.choose(mode));
      return button;
    });
    group.append(...this.buttons);
    this.canvas.addEventListener("keydown", (event) => this.moved(event));
    this.canvas.addEventListener("click", (event) => this.clicked(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.choose("tier");
  }

  reset() {
    this.size = this.pool ? Math.max(...this.pool.tiers.map((tier) => tier.offset + tier.size)) : 0;
    // By block index.
    this.blocks = [];
    this.leases = new Map();
    // The number of the colour by block index, 0 for an empty slot.
    this.present = new Uint8Array(this.size + 1);
    this.priority = new Uint8Array(this.size + 1);
    this.idle = new Float32Array(this.size + 1);
    this.owner = new Uint16Array(this.size + 1);
    this.owners = [];
    this.scopes = [];
    this.blocksOf = [];
  }

  show(pool) {
    if (this.pool?.key !== pool.key) this.cursor = 0;
    this.pool = pool;
    this.reset();
    this.draw();
  }

  // All pages; blocks that are evicted in the meantime disappear with the next round.
  async load() {
    const { pool } = this;
    const [present, known, blocksOf, blocks] = [new Uint8Array(this.size + 1), new Map(), [], []];
    this.owners.forEach((name, index) => known.set(name, index));
    for await (const page of pages("blocks", { ...pool.at, pool: pool.pool_id })) {
      if (this.pool !== pool) return;
      const names = page.owners.map((scope) => {
        const name = owner(scope);
        if (!known.has(name)) {
          this.scopes[known.size] = scope;
          known.set(name, known.size);
        }
        return known.get(name);
      });
      for (const [tier, slot, key, parent, depth, tokens, references, priority, hits, idle, index] of page.rows) {
        const blockIndex = this.blockIndexOf(tier, slot);
        if (!blockIndex) continue;
        present[blockIndex] = references ? 2 : 1;
        this.priority[blockIndex] = priority;
        this.idle[blockIndex] = references ? 0 : Math.max(idle, 0.001);
        this.owner[blockIndex] = names[index];
        blocksOf[names[index]] = (blocksOf[names[index]] ?? 0) + 1;
        blocks[blockIndex] = { key, parent, depth, tokens, references, priority, hits, idle, owner: names[index] };
      }
    }
    this.present = present;
    this.blocks = blocks;
    this.owners = [...known.keys()];
    this.blocksOf = blocksOf;
    this.draw();
  }

  // 0 for a slot that this pool does not have.
  blockIndexOf(tier, slot) {
    const found = this.pool.tiers.find(({ number }) => number === tier);
    return found && slot <= found.size ? found.offset + slot : 0;
  }

  choose(mode) {
    this.mode = mode;
    MODES.forEach((one, index) => {
      this.buttons[index].setAttribute("aria-checked", one === mode);
      this.buttons[index].tabIndex = one === mode ? 0 : -1;
    });
    this.draw();
  }

  chooseByNumber(number) {
    if (MODES[number - 1]) this.choose(MODES[number - 1]);
  }

  keys() {
    switch (this.mode) {
      case "tier": return this.pool.tiers.map(({ tier }) => [TIERS[tier], tier]);
      case "tenant": {
        const blocks = (index) => this.blocksOf[index] ?? 0;
        const most = [...this.owners.keys()].sort((a, b) => blocks(b) - blocks(a));
        this.ownerColour = new Map(most.slice(0, OWNERS.length).map((index, rank) => [index, OWNERS[rank]]));
        const shown = [...this.ownerColour].map(([index, name]) => [name, this.owners[index]]);
        return most.length > OWNERS.length ? [...shown, ["--c7", `${most.length - OWNERS.length} others`]] : shown;
      }
      case "priority": return PRIORITIES.map(([, name, text]) => [name, text]);
      default: return AGES.map(([, name, text]) => [name, text]);
    }
  }

  // The legend for blocks in use; by age they have a colour of their own.
  shades() {
    if (this.mode === "age") return [];
    const [[name] = ["--c0"]] = this.keys();
    return [key(name, "strong: in use"), key(name, "pale: cached", true)];
  }

  nameOf(blockIndex) {
    const among = (bounds, value) => bounds.find(([bound]) => value <= bound)[1];
    switch (this.mode) {
      case "tier": return TIERS[this.pool.tiers.findLast((tier) => blockIndex > tier.offset).tier];
      case "tenant": return this.ownerColour.get(this.owner[blockIndex]) ?? "--c7";
      case "priority": return among(PRIORITIES, this.priority[blockIndex]);
      default: return among(AGES, this.idle[blockIndex]);
    }
  }

  draw() {
    if (!this.pool) return;
    const keys = this.keys();
    document.getElementById("legend").replaceChildren(
      ...keys.map(([name, text]) => key(name, text)), ...this.shades(), key("--empty", "empty"));
    const { pen, width, height } = sized(this.canvas);
    if (!width) return;
    // The largest square with which all slots fit.
    let side = Math.max(1, Math.sqrt((width * height) / Math.max(1, this.size)));
    while (side > 1 && Math.floor(width / side) * Math.floor(height / side) < this.size) side -= 0.05;
    this.side = Math.min(side, 32);
    this.columns = Math.max(1, Math.floor(width / this.side));
    const gap = this.side > 4 ? 1 : 0;
    const colours = new Map(["--empty", "--c7", ...keys.map(([name]) => name)].map((name) => [name, colour(name)]));
    const byColour = new Map([...colours.keys()].map((name) => [name, [[], []]]));
    const counts = this.pool.tiers.map(() => [0, 0]);
    for (let blockIndex = 1; blockIndex <= this.size; blockIndex += 1) {
      const state = this.present[blockIndex];
      if (state) counts[this.pool.tiers.findLastIndex(({ offset }) => blockIndex > offset)][state - 1] += 1;
      const isPale = state === 1 && this.mode !== "age";
      byColour.get(state ? this.nameOf(blockIndex) : "--empty")[Number(isPale)].push(blockIndex);
    }
    for (const [name, shades] of byColour) {
      pen.fillStyle = colours.get(name);
      shades.forEach((indexes, isPale) => {
        pen.globalAlpha = isPale ? PALE : 1;
        for (const blockIndex of indexes) {
          const [x, y] = this.at(blockIndex);
          pen.fillRect(x, y, this.side - gap, this.side - gap);
        }
      });
    }
    pen.globalAlpha = 1;
    if (this.cursor) {
      const [x, y] = this.at(this.cursor);
      pen.strokeStyle = colour("--text");
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, Math.max(4, this.side + 1), Math.max(4, this.side + 1));
    }
    const text = this.pool.tiers.map(({ tier, size }, index) => {
      const [cached, used] = counts[index];
      const copies = tier === "host" && this.copies ? `, ${count(this.copies)} copies of device blocks` : "";
      const empty = size - used - cached - (copies ? this.copies : 0);
      return `${tier} ${count(size)} blocks: ${count(used)} in use, ${count(cached)} cached${copies}, `
        + `${count(Math.max(0, empty))} empty`;
    }).join("; ");
    document.getElementById("map-count").textContent = text;
    this.canvas.setAttribute("aria-label", `Blocks of pool ${this.pool.pool_id}: ${text}`);
  }

  at(blockIndex) {
    return [((blockIndex - 1) % this.columns) * this.side, Math.floor((blockIndex - 1) / this.columns) * this.side];
  }

  moved(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns,
      Home: -this.size, End: this.size };
    if (!(event.key in steps) || !this.size) return;
    event.preventDefault();
    this.select(Math.min(this.size, Math.max(1, this.cursor + steps[event.key])));
  }

  clicked(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const column = Math.min(this.columns - 1, Math.floor(x / this.side));
    const blockIndex = Math.floor(y / this.side) * this.columns + column + 1;
    if (blockIndex >= 1 && blockIndex <= this.size) this.select(blockIndex);
  }

  select(blockIndex) {
    this.cursor = blockIndex;
    this.draw();
    this.describe();
  }

  // The chosen block in words.
  describe() {
    const blockIndex = this.cursor;
    if (!blockIndex) return;
    const found = this.blocks[blockIndex];
    const leases = (this.leases.get(blockIndex) ?? []).map(({ holder, priority, remaining }) => (
      `${holder} ${priority}, ${seconds(remaining)}`));
    this.detail.textContent = !found ? `Slot ${blockIndex}: empty` : [
      `Slot ${blockIndex}, ${this.pool.tiers.findLast((tier) => blockIndex > tier.offset).tier}`,
      found.key ? `key ${found.key.slice(0, 12)}…` : "not in the index",
      `block ${count(found.depth)} of its chain, ${found.tokens} tokens`,
      `references ${found.references}, ${count(found.hits)} hits`,
      `priority ${found.priority}`,
      found.references ? "in use" : `last used ${seconds(found.idle)} ago`,
      owner(this.scopes[found.owner]),
      ...leases,
    ].join(" · ");
  }
}
