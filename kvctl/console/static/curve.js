// Hit rates of ghost caches over their size.

import { colour, count, fill, key, read, share, sized, word } from "./api.js";

// Colour, name, and dashes, so that a line below another line can be seen.
const POLICIES = { retention: ["--c0", "retention, as in the pools", []], lru: ["--c2", "LRU, dashed", [7, 5]],
  "segmented lru": ["--c1", "segmented LRU, dotted", [2, 4]] };
const times = (blocks, now) => `${Number((blocks / now).toPrecision(2))}×`;

export class GhostCurve {
  constructor() {
    this.canvas = document.getElementById("curve");
    this.details = document.getElementById("ghosts-details");
    this.found = null;
    this.problem = "";
    document.getElementById("curve-legend").replaceChildren(
      ...Object.values(POLICIES).map(([name, text]) => key(name, text)), key("--mark", "the real cache"));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  async load(pool) {
    // The token of a single tenant is refused each time.
    if (this.problem) return;
    try {
      this.found = this.figures(await read("ghosts", { ...pool.at, executor: pool.executor_id }));
    } catch (error) {
      if (error.status !== 403) throw error;
      [this.found, this.problem] = [null, error.message];
    }
    this.draw();
  }

  figures({ caches, tokens, device_blocks, sample_rate }) {
    return {
      caches: caches.map(({ policy, total_blocks, hit_tokens }) => (
        { policy: word(policy, "GHOST_POLICY_"), blocks: total_blocks, hit_tokens: Number(hit_tokens) })),
      queried_tokens: Number(tokens?.queried_tokens ?? 0),
      hit_tokens: Number(tokens?.hit_tokens ?? 0),
      device_blocks,
      sample_rate,
    };
  }

  draw() {
    const { pen, width, height } = sized(this.canvas);
    const text = document.getElementById("ghosts-text");
    const { found } = this;
    if (!found?.caches.length || !found.queried_tokens) {
      const on = found?.caches.length;
      const off = found ? "Ghost caches are off for this executor." : this.problem;
      text.textContent = on ? "No prompt in the last hour." : off;
      this.details.hidden = true;
      return;
    }
    const sizes = [...new Set(found.caches.map((one) => one.blocks))];
    const [left, right, top, bottom] = [42, width - 12, 22, height - 40];
    const span = Math.log(sizes.at(-1) / sizes[0]) || 1;
    const x = (blocks) => left + (Math.log(blocks / sizes[0]) / span) * (right - left);
    const y = (rate) => bottom - rate * (bottom - top);
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = colour("--quiet");
    pen.strokeStyle = colour("--line");
    for (const rate of [0, 0.25, 0.5, 0.75, 1]) {
      pen.beginPath();
      pen.moveTo(left, y(rate));
      pen.lineTo(right, y(rate));
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(`${100 * rate} %`, left - 6, y(rate) + 4);
    }
    pen.textAlign = "left";
    pen.fillText("Hit rate", 0, 12);
    pen.textAlign = "right";
    pen.fillText("Size of the cache, × device blocks of today", right, height - 6);
    let free = 0;
    for (const blocks of sizes) {
      pen.beginPath();
      pen.moveTo(x(blocks), bottom);
      pen.lineTo(x(blocks), bottom + 5);
      pen.stroke();
      if (x(blocks) < free) continue;
      free = x(blocks) + 40;
      pen.textAlign = blocks === sizes[0] ? "left" : blocks === sizes.at(-1) ? "right" : "center";
      pen.fillText(times(blocks, found.device_blocks), x(blocks), bottom + 18);
    }
    for (const [policy, [name, , dashes]] of Object.entries(POLICIES)) {
      const points = found.caches.filter((one) => one.policy === policy);
      pen.strokeStyle = pen.fillStyle = colour(name);
      pen.lineWidth = 2;
      pen.beginPath();
      points.forEach((one) => pen.lineTo(x(one.blocks), y(one.hit_tokens / found.queried_tokens)));
      pen.setLineDash(dashes);
      pen.stroke();
      pen.setLineDash([]);
      for (const one of points) {
        pen.beginPath();
        pen.arc(x(one.blocks), y(one.hit_tokens / found.queried_tokens), 3, 0, 7);
        pen.fill();
      }
    }
    pen.strokeStyle = colour("--mark");
    pen.beginPath();
    pen.arc(x(found.device_blocks), y(found.hit_tokens / found.queried_tokens), 6, 0, 7);
    pen.stroke();
    text.textContent = `Of the last hour's ${count(found.queried_tokens)} prompt tokens `
      + `${share(found.hit_tokens, found.queried_tokens)} had a hit. ${share(found.sample_rate, 1)} of the blocks are sampled.`;
    const rate = (policy) => (blocks) => {
      const cache = found.caches.find((one) => one.policy === policy && one.blocks === blocks);
      return cache ? share(cache.hit_tokens, found.queried_tokens) : "";
    };
    this.details.hidden = false;
    fill(document.getElementById("ghosts"), [
      ["size", (blocks) => times(blocks, found.device_blocks), "number"], ["blocks", count, "number"],
      ...Object.keys(POLICIES).map((policy) => [policy.replace("lru", "LRU"), rate(policy), "number"]),
    ], sizes, "");
  }
}
