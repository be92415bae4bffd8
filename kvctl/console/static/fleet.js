// The shards and engines of a fleet, above the selected pool. With a single cache manager and no router, the page has
// neither.

import { count, element, fill, share } from "./api.js";

export class FleetView {
  // choose: called with the key of a pool.
  constructor(choose) {
    this.choose = choose;
    this.sections = new Map();
  }

  // Sections exist only if there is something to show: an empty card would suggest that something is missing.
  section(id, title, note) {
    if (!this.sections.has(id)) {
      const made = element("section", "", { id, class: "wide", "aria-labelledby": `${id}-title` });
      const scroll = element("div", "", { class: "scroll" });
      scroll.append(element("table"));
      made.append(element("h2", title, { id: `${id}-title` }), element("p", note, { class: "quiet" }), scroll);
      const before = id === "engines" ? this.sections.get("shards") ?? null : null;
      if (before) before.after(made);
      else document.querySelector("main").prepend(made);
      this.sections.set(id, made);
    }
    return this.sections.get(id);
  }

  leave(id) {
    this.sections.get(id)?.remove();
    this.sections.delete(id);
  }

  // problems: by shard, why it does not answer.
  show({ shards, engines, policy, problem }, pools, chosen, problems) {
    if (shards.length > 1) this.showShards(shards, pools, chosen, problems);
    else this.leave("shards");
    if (engines || problem) this.showEngines(engines ?? [], policy, problem);
    else this.leave("engines");
  }

  showShards(shards, pools, chosen, problems) {
    const section = this.section("shards", "Shards",
      "Each cache manager with its pools. A pool's name shows its blocks below.");
    const rows = shards.flatMap((shard) => {
      const own = pools.filter((pool) => pool.shard === shard);
      return own.length ? own.map((pool) => ({ shard, pool, problem: problems.get(shard) }))
        : [{ shard, pool: null, problem: problems.get(shard) }];
    });
    const device = ({ pool }, of) => (pool ? of(pool.tiers[0]) : "");
    // The focus stays where it is when the table is drawn again.
    const focused = section.contains(document.activeElement) ? document.activeElement.dataset.pool : null;
    fill(section.querySelector("table"), [
      ["shard", (row) => row.shard],
      ["pool", (row) => (row.pool ? this.button(row.pool, row.pool.key === chosen) : "no executor is registered")],
      ["in use", (row) => device(row, ({ used }) => count(used)), "number"],
      ["cached", (row) => device(row, ({ cached }) => count(cached)), "number"],
      ["device blocks", (row) => device(row, ({ total }) => count(total)), "number"],
      ["hit rate", ({ pool }) => (pool ? share(pool.hit_tokens, pool.queried_tokens) : ""), "number"],
      ["state", (row) => this.state(!row.problem, row.problem ? `does not answer: ${row.problem}` : "answers")],
    ], rows, "No cache manager is known.");
    if (focused) section.querySelector(`[data-pool="${CSS.escape(focused)}"]`)?.focus();
  }

  button(pool, isChosen) {
    const made = element("button", pool.pool_id, { type: "button", "aria-pressed": isChosen });
    made.dataset.pool = pool.key;
    made.addEventListener("click", () => this.choose(pool.key));
    return made;
  }

  // A word without line breaks.
  short(text) {
    return element("span", text, { class: "short" });
  }

  state(isGood, text) {
    return element("span", text, isGood ? {} : { class: "failed" });
  }

  showEngines(engines, policy, problem) {
    const section = this.section("engines", "Engines", "");
    section.querySelector("p").textContent = problem ? `The router does not say: ${problem}`
      : `Chosen by the policy ${policy}. Sent and cached are as of this router's start.`;
    const loads = (engine, of) => (engine.loads ? of(engine.loads) : "");
    fill(section.querySelector("table"), [
      ["engine", (one) => one.address], ["executor", (one) => this.short(one.executor_id)],
      ["shard", (one) => one.cachemgr_admin_address],
      ["state", (one) => this.state(one.ready, one.ready ? "ready" : `away: ${one.obstacle}`)],
      ["running", (one) => loads(one, (load) => `${load.running_requests} of ${load.max_running_requests}`), "number"],
      ["waiting", (one) => loads(one, (load) => count(load.waiting_requests)), "number"],
      ["tokens to compute", (one) => loads(one, (load) => count(Number(load.queued_prompt_tokens))), "number"],
      ["sent requests", (one) => count(Number(one.routed_requests)), "number"],
      ["expected cached", (one) => share(Number(one.expected_cached_tokens), Number(one.routed_tokens)), "number"],
      ["view", (one) => this.short(one.view_complete ? "complete" : "incomplete")],
    ], engines, "No engine is known.");
  }
}
