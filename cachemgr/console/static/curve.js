// Hit rates of ghost caches over their size.

import { colour, count, key, read, share, sized } from "./api.js";

const POLICIES = { retention: ["--c0", "as it is"], least_recently_used: ["--c2", "least recently used"],
  reused_last: ["--c1", "what was found again last"] };

export class GhostCurve {
  constructor() {
    this.canvas = document.getElementById("curve");
    this.found = null;
    document.getElementById("curve-legend").replaceChildren(
      ...Object.values(POLICIES).map(([name, text]) => key(name, text)), key("--mark", "the real cache"));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  async load(pool) {
    this.found = await read("ghosts", { executor: pool.executor_id });
    this.draw();
  }

  draw() {
    const { pen, width, height } = sized(this.canvas);
    const text = document.getElementById("ghosts-text");
    const { found } = this;
    if (!found?.caches.length || !found.queried_tokens) {
      const on = found?.caches.length;
      text.textContent = on ? "No prompt in the last hour." : "Ghost caches are off for this executor.";
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
    text.textContent = `Share of the last hour's ${count(found.queried_tokens)} prompt tokens that is found: really `
      + `${share(found.hit_tokens, found.queried_tokens)}; `
      + asNow.map((one) => `${Number((one.blocks / found.device_blocks).toPrecision(2))}× `
        + share(one.hit_tokens, found.queried_tokens)).join(", ")
      + `. ${share(found.sample_rate, 1)} of the blocks are followed.`;
  }
}
