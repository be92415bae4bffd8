// Hit rates of ghost caches over their size.

import { colour, count, key, read, share, sized, word } from "./api.js";

const POLICIES = { retention: ["--c0", "retention, as in the pools"], lru: ["--c2", "LRU"], "segmented lru": ["--c1", "segmented LRU"] };

export class GhostCurve {
  constructor() {
    this.canvas = document.getElementById("curve");
    this.found = null;
    this.problem = "";
    document.getElementById("curve-legend").replaceChildren(
      ...Object.values(POLICIES).map(([name, text]) => key(name, text)), key("--mark", "the real cache"));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  async load(pool) {
    // A token of one tenant is refused each time.
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
      return;
    }
    const sizes = [...new Set(found.caches.map((one) => one.blocks))];
    const [left, right, top, bottom] = [42, width - 12, 8, height - 24];
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
    let free = 0;
    for (const blocks of sizes) {
      if (x(blocks) < free) continue;
      free = x(blocks) + 40;
      pen.textAlign = blocks === sizes[0] ? "left" : blocks === sizes.at(-1) ? "right" : "center";
      pen.fillText(`${Number((blocks / found.device_blocks).toPrecision(2))}×`, x(blocks), height - 6);
    }
    for (const [policy, [name]] of Object.entries(POLICIES).reverse()) {
      const points = found.caches.filter((one) => one.policy === policy);
      pen.strokeStyle = pen.fillStyle = colour(name);
      pen.lineWidth = 2;
      pen.beginPath();
      points.forEach((one) => pen.lineTo(x(one.blocks), y(one.hit_tokens / found.queried_tokens)));
      pen.stroke();
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
    const asNow = found.caches.filter((one) => one.policy === "retention");
    text.textContent = `Share of the last hour's ${count(found.queried_tokens)} prompt tokens that hit: measured `
      + `${share(found.hit_tokens, found.queried_tokens)}; `
      + asNow.map((one) => `${Number((one.blocks / found.device_blocks).toPrecision(2))}× `
        + share(one.hit_tokens, found.queried_tokens)).join(", ")
      + `. ${share(found.sample_rate, 1)} of the blocks are sampled.`;
  }
}
