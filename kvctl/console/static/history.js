// The services in the header, and their last ten minutes: the console keeps these for every viewer.

import { colour, count, element, read, seconds as duration, share, sized } from "./api.js";

const decimal = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (value) => share(value, 1);
// Each line: column, colour, name.
const FIGURES = [
  { id: "hit-rate", title: "Hit rate", format: percent, lines: [["hit_rate", "--c0", "hit rate"]] },
  { id: "blocks", title: "Device blocks", format: count,
    lines: [["used", "--c0", "in use"], ["cached", "--c2", "cached"]] },
  { id: "evictions", title: "Evictions per second", format: decimal,
    lines: [["evicted", "--c4", "evictions"]] },
  { id: "tokens", title: "Output tokens per second", format: decimal,
    lines: [["tokens", "--c3", "tokens"]] },
];
// How often the console looks, in milliseconds.
const LOOK = 3000;

export class StackView {
  constructor() {
    this.due = 0;
    this.found = null;
    // The token of a single tenant is refused each time.
    this.isRefused = false;
    this.section = document.getElementById("history-section");
    this.canvases = FIGURES.map(({ id, title, lines }) => {
      const figure = element("figure");
      const caption = element("figcaption", `${title} `);
      const canvas = element("canvas", "", { role: "img", id: `history-${id}` });
      caption.append(...lines.map(([name, line, text]) => {
        const value = element("span", "", { class: "now" });
        value.style.color = `var(${line})`;
        value.dataset.name = name;
        // The map says how many blocks there are: a second count, of another moment, would differ.
        if (lines.length > 1) value.textContent = text;
        return value;
      }));
      figure.append(caption, canvas);
      document.getElementById("history").append(figure);
      new ResizeObserver(() => this.draw()).observe(canvas);
      return canvas;
    });
  }

  // pool: the selected pool, or null.
  async load(shard, pool, now) {
    if (this.isRefused || now < this.due) return;
    this.due = now + LOOK;
    try {
      this.found = await read("stack", { shard, pool: pool?.pool_id ?? "", executor: pool?.executor_id ?? "" });
    } catch (error) {
      // The cache manager is away, which the header shows already.
      if (error.status !== 403) return;
      [this.found, this.isRefused] = [null, true];
    }
    this.show();
  }

  // Another pool has another history.
  reset() {
    this.due = 0;
  }

  show() {
    const { found } = this;
    this.section.hidden = !found?.history;
    document.getElementById("model").textContent = found ? [
      found.model?.name, found.model?.dtype,
      found.model?.cache && found.model.cache !== found.model.dtype ? `cache ${found.model.cache}` : "",
      found.version && `kvkeep ${found.version}`,
    ].filter(Boolean).join(" · ") : "";
    document.getElementById("parts").replaceChildren(...(found?.parts ?? []).map((part) => this.part(part)));
    document.getElementById("service").replaceChildren(...this.service().map(([name, value]) => {
      const made = element("span", `${name} `);
      made.append(element("b", value));
      return made;
    }));
    this.draw();
  }

  part({ name, state, detail }) {
    const text = { ok: "ok", away: "away", unknown: "not found" }[state];
    const since = this.found.started?.[name];
    const up = state === "ok" && since ? `up ${duration(Date.now() / 1000 - since)}` : text;
    const made = element("li", `${name} `, { class: state, title: detail || `${name}: ${text}` });
    made.append(element("span", up));
    return made;
  }

  service() {
    const { found } = this;
    if (!found) return [];
    const { loads, rates = {} } = found;
    const known = (value, format) => (value === undefined || value === null ? "–" : format(value));
    const milliseconds = (value) => known(value, (one) => `${decimal(1000 * one)} ms`);
    return [
      ["running", known(loads?.running, count)], ["waiting", known(loads?.waiting, count)],
      ["tokens/s", known(rates.output_tokens_per_second, decimal)],
      ["TTFT", milliseconds(rates.time_to_first_token_seconds)],
      ["ITL", milliseconds(rates.inter_token_latency_seconds)],
    ];
  }

  draw() {
    const history = this.found?.history;
    if (!history) return;
    FIGURES.forEach((figure, index) => this.figure(figure, this.canvases[index], history));
  }

  figure({ title, format, lines }, canvas, { seconds, ages, ...columns }) {
    const { pen, width, height } = sized(canvas);
    const known = lines.flatMap(([name]) => columns[name].filter((value) => value !== null));
    const texts = lines.map(([name, , text]) => {
      const values = columns[name].filter((value) => value !== null);
      const now = columns[name].at(-1) ?? null;
      const shown = canvas.parentElement.querySelector(`[data-name="${name}"]`);
      if (lines.length === 1) shown.textContent = now === null ? "–" : format(now);
      return values.length ? `${text} now ${now === null ? "unknown" : format(now)}, least `
        + `${format(Math.min(...values))}, most ${format(Math.max(...values))}` : `${text} unknown`;
    });
    canvas.setAttribute("aria-label", `${title} over the last ten minutes: ${texts.join("; ")}`);
    if (!width) return;
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 0];
    // A line that never changes is drawn at its height above 0.
    const [bottom, top] = low === high ? [0, Math.max(1, high)] : [low, high];
    const [left, right, above, below] = [48, width - 6, 8, height - 20];
    const x = (old) => right - (Math.min(old, seconds) / seconds) * (right - left);
    const y = (value) => below - ((value - bottom) / (top - bottom)) * (below - above);
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = colour("--quiet");
    pen.strokeStyle = colour("--line");
    pen.beginPath();
    for (const value of [bottom, top]) {
      pen.moveTo(left, y(value));
      pen.lineTo(right, y(value));
    }
    pen.stroke();
    pen.textAlign = "right";
    for (const value of known.length ? [bottom, top] : []) pen.fillText(format(value), left - 5, y(value) + 4);
    for (const [old, text, align] of [[600, "10 min ago", "left"], [300, "5", "center"], [0, "now", "right"]]) {
      pen.textAlign = align;
      pen.fillText(text, x(old), height - 4);
    }
    pen.lineWidth = 1.5;
    for (const [name, line] of lines) {
      pen.strokeStyle = pen.fillStyle = colour(line);
      pen.beginPath();
      let isOpen = false;
      columns[name].forEach((value, index) => {
        const isShown = value !== null && ages[index] <= seconds;
        if (isShown && isOpen) pen.lineTo(x(ages[index]), y(value));
        else if (isShown) pen.moveTo(x(ages[index]), y(value));
        isOpen = isShown;
      });
      pen.stroke();
    }
  }
}
