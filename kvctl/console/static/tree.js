// The prefix tree, opened piece by piece. A chain without branches is one row.

import { count, element, owner } from "./api.js";

// The most children of a node that are shown, the children with the most hits first.
const MAX_CHILDREN = 100;
const hitsOf = (hits) => (hits === 1 ? "1 hit" : `${count(hits)} hits`);
const byHits = (a, b) => b.hits - a.hits || b.references - a.references || a.idle - b.idle;

export class PrefixTree {
  constructor() {
    this.root = document.getElementById("tree");
    this.pool = null;
    this.children = new Map();
    this.scopes = [];
    this.open = new Set();
    this.focused = "";
    this.root.addEventListener("keydown", (event) => this.pressed(event));
    this.root.addEventListener("click", (event) => {
      const row = event.target.closest("[role=treeitem]");
      if (row) this.toggle(row);
    });
  }

  show(pool) {
    if (this.pool?.key !== pool.key) this.open.clear();
    this.pool = pool;
  }

  load({ blocks, scopes }) {
    this.children = new Map();
    this.scopes = scopes;
    blocks.filter(({ key }) => key).forEach((block) => {
      const siblings = this.children.get(block.parent);
      if (siblings) siblings.push(block);
      else this.children.set(block.parent, [block]);
    });
    this.draw();
  }

  draw() {
    const rows = this.rows("", 1);
    const inside = this.root.contains(document.activeElement);
    this.root.replaceChildren(...rows);
    if (!rows.length) this.root.append(element("p", "Nothing is cached.", { class: "quiet" }));
    const row = rows.find((one) => one.dataset.end === this.focused) ?? rows[0];
    if (row?.matches("[role=treeitem]")) row.tabIndex = 0;
    if (inside) row?.focus();
  }

  rows(key, level) {
    const children = this.childrenOf(key).toSorted(byHits);
    const rows = [];
    for (const node of children.slice(0, MAX_CHILDREN).map((child) => this.chain(child))) {
      rows.push(this.row(node, level));
      if (node.branches && this.open.has(node.end)) rows.push(...this.rows(node.end, level + 1));
    }
    const more = children.length - MAX_CHILDREN;
    if (more > 0) rows.push(element("p", `and ${count(more)} more`, { class: "quiet" }));
    return rows;
  }

  childrenOf(key) {
    return this.children.get(key) ?? [];
  }

  chain(first) {
    let [last, blocks, { tokens }] = [first, 1, first];
    for (let next = this.childrenOf(last.key); next.length === 1; next = this.childrenOf(last.key)) {
      [last] = next;
      blocks += 1;
      tokens += last.tokens;
    }
    return { ...first, end: last.key, end_hits: last.hits, blocks, tokens,
      branches: this.childrenOf(last.key).length };
  }

  row(node, level) {
    const blocks = node.blocks === 1 ? "1 block" : `${count(node.blocks)} blocks`;
    const hits = node.hits === node.end_hits ? hitsOf(node.hits)
      : `${hitsOf(node.hits)} at its head, ${count(node.end_hits)} at its end`;
    const parts = level === 1 ? [owner(this.scopes[node.owner])] : [];
    parts.push(hits, `${blocks}, ${count(node.tokens)} tokens`, `priority ${node.priority}`);
    if (node.references) parts.push("in use");
    if (node.branches) parts.push(`${count(node.branches)} ${node.branches === 1 ? "branch" : "branches"}`);
    const row = element("div", `${node.key.slice(0, 8)} · ${parts.join(" · ")}`,
      { role: "treeitem", "aria-level": level, tabindex: -1 });
    row.style.paddingLeft = `${level * 1.1 - 0.9}rem`;
    row.dataset.end = node.end;
    if (node.branches) {
      row.setAttribute("aria-expanded", this.open.has(node.end));
      row.title = this.open.has(node.end) ? "Click, Enter or ← closes it" : "Click, Enter or → opens it";
    }
    return row;
  }

  toggle(row) {
    this.focused = row.dataset.end;
    row.focus();
    if (!row.hasAttribute("aria-expanded")) return;
    if (!this.open.delete(row.dataset.end)) this.open.add(row.dataset.end);
    this.draw();
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
