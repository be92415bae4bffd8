// The prefix tree, opened piece by piece.

import { count, element, owner, read } from "./api.js";

export class PrefixTree {
  constructor() {
    this.root = document.getElementById("tree");
    this.pool = null;
    this.open = new Set();
    this.focused = "";
    this.root.addEventListener("keydown", (event) => this.pressed(event));
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest("[role=treeitem]");
      if (row) this.toggle(row);
    });
  }

  show(pool) {
    if (this.pool?.pool_id !== pool.pool_id) this.open.clear();
    this.pool = pool;
  }

  async load() {
    const rows = await this.rows("", 1);
    const inside = this.root.contains(document.activeElement);
    this.root.replaceChildren(...rows);
    if (!rows.length) this.root.append(element("p", "Nothing is cached.", { class: "quiet" }));
    const row = rows.find((one) => one.dataset.end === this.focused) ?? rows[0];
    if (row?.matches("[role=treeitem]")) row.tabIndex = 0;
    if (inside) row?.focus();
  }

  async rows(key, level) {
    const { nodes, more } = await read("tree", { pool: this.pool.pool_id, key });
    const rows = [];
    for (const node of nodes) {
      rows.push(this.row(node, level));
      if (node.branches && this.open.has(node.end)) rows.push(...await this.rows(node.end, level + 1));
    }
    if (more > 0) rows.push(element("p", `and ${count(more)} more or so`, { class: "quiet" }));
    return rows;
  }

  row(node, level) {
    const blocks = node.blocks === 1 ? "1 block" : `${count(node.blocks)} blocks`;
    const hits = node.hits === node.end_hits ? count(node.hits) : `${count(node.hits)} to ${count(node.end_hits)}`;
    const parts = level === 1 ? [owner(node)] : [];
    parts.push(`found ${hits}×`, `${blocks}, ${count(node.tokens)} tokens`, `priority ${node.priority}`);
    if (node.references) parts.push("in use");
    if (node.branches) parts.push(`${count(node.branches)} branches`);
    const row = element("div", `${node.key.slice(0, 8)} · ${parts.join(" · ")}`,
      { role: "treeitem", "aria-level": level, tabindex: -1 });
    row.style.paddingLeft = `${level * 1.1 - 0.9}rem`;
    row.dataset.end = node.end;
    if (node.branches) row.setAttribute("aria-expanded", this.open.has(node.end));
    return row;
  }

  async toggle(row) {
    this.focused = row.dataset.end;
    row.focus();
    if (!row.hasAttribute("aria-expanded")) return;
    if (!this.open.delete(row.dataset.end)) this.open.add(row.dataset.end);
    await this.load();
  }

  pressed(event) {
    const rows = [...this.root.querySelectorAll("[role=treeitem]")];
    const at = rows.indexOf(document.activeElement);
    if (at < 0) return;
    const row = rows[at];
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      if (!rows[to]) return;
      row.tabIndex = -1;
      rows[to].tabIndex = 0;
      rows[to].focus();
      this.focused = rows[to].dataset.end;
      return;
    }
    const open = row.getAttribute("aria-expanded");
    const wanted = { ArrowRight: "false", ArrowLeft: "true" }[event.key];
    if (open !== null && (open === wanted || event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      this.toggle(row);
    }
  }
}
