// Puts the parts together and keeps them up to date, one request at a time.

import { count, durationOf, element, fill, hex, owner, pages, read, seconds, share, word } from "./api.js";
import { GhostCurve } from "./curve.js";
import { BlockMap } from "./map.js";
import { PrefixTree } from "./tree.js";

const KEPT_EVENTS = 200;
const MAX_ROWS = 500;

const byId = (id) => document.getElementById(id);
const [map, tree, curve] = [new BlockMap(), new PrefixTree(), new GhostCurve()];
const state = { pools: [], pool: null, lastEvent: null, events: [], salts: [], quotas: [] };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  map.draw();
  curve.draw();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const wanted = () => localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");

function changeTheme() {
  localStorage.setItem("theme", wanted() === "dark" ? "light" : "dark");
  setTheme(wanted());
}

byId("theme").addEventListener("click", changeTheme);
dark.addEventListener("change", () => setTheme(wanted()));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input, select")) return;
  if (event.key === "t") changeTheme();
  else map.chooseByNumber(Number(event.key));
});
byId("pool").addEventListener("change", () => choose(byId("pool").value));

function choose(poolId) {
  state.pool = state.pools.find((pool) => pool.pool_id === poolId) ?? state.pools[0] ?? null;
  if (!state.pool) return;
  byId("pool").value = state.pool.pool_id;
  map.show(state.pool);
  tree.show(state.pool);
  slow.due = 0;
}

// A pool with its tiers. A block index counts the slots of all tiers in one row.
function poolOf({ pool_id, spec, lower_tiers: lower, queried_tokens, hit_tokens, ...device }) {
  const usage = (name) => lower.find(({ tier }) => tier === name) ?? {};
  let offset = 0;
  const tiers = [["device", spec.num_blocks, device], ["host", spec.host_blocks, usage("TIER_HOST")],
    ["disk", spec.disk_blocks, usage("TIER_DISK")]].map(([tier, size, counts], index) => {
    offset += size;
    return { tier, number: index + 1, offset: offset - size, size, total: counts.total_blocks ?? size,
      used: counts.used_blocks ?? 0, cached: counts.cached_blocks ?? 0 };
  });
  return { pool_id, executor_id: pool_id.slice(0, pool_id.lastIndexOf("/")), tiers: tiers.filter(({ size }) => size),
    queried_tokens: Number(queried_tokens), hit_tokens: Number(hit_tokens) };
}

async function loadPools() {
  const pools = (await read("pools")).pools.map(poolOf);
  const names = pools.map((pool) => pool.pool_id);
  const changed = names.join() !== state.pools.map((pool) => pool.pool_id).join()
    || JSON.stringify(pools.map(shape)) !== JSON.stringify(state.pools.map(shape));
  state.pools = pools;
  if (changed) {
    byId("pool").replaceChildren(...names.map((name) => element("option", name, { value: name })));
    choose(state.pool?.pool_id);
  } else if (state.pool) {
    state.pool = pools.find((pool) => pool.pool_id === state.pool.pool_id);
  }
  byId("gauges").replaceChildren(...gauges().map((text) => element("span", text)));
}

const shape = (pool) => [pool.pool_id, pool.tiers.map(({ offset, size }) => [offset, size])];

function gauges() {
  if (!state.pool) return ["No executor is registered."];
  const { tiers, queried_tokens: queried, hit_tokens: hit } = state.pool;
  return [
    ...tiers.map(({ tier, used, cached, total }) => `${tier}: ${count(used)} in use, ${count(cached)} cached`
      + ` of ${count(total)}`),
    `hit rate ${share(hit, queried)} of ${count(queried)} prompt tokens`,
  ];
}

async function loadEvents() {
  const found = await read("events", state.lastEvent === null ? {} : { after: state.lastEvent });
  // A manager that started again counts from the beginning.
  if (state.lastEvent !== null && found.last < state.lastEvent) state.events = [];
  state.lastEvent = found.last;
  if (!found.events.length && state.events.length) return;
  state.events = [...found.events.reverse(), ...state.events].slice(0, KEPT_EVENTS);
  fill(byId("events"), [
    ["number", (event) => count(Number(event.event_number)), true], ["what", ({ kind }) => word(kind, "EVENT_KIND_")],
    ["pool", ({ block, executor }) => executor?.executor_id ?? block.pool_id],
    ["slot", ({ block = {} }) => (block.slot ? `${word(block.tier, "TIER_")} ${block.slot}` : "")],
    ["key", ({ block }) => hex(block?.key ?? "").slice(0, 12)],
    ["tokens", ({ block }) => block?.num_tokens || "", true],
    ["priority", ({ block }) => (block?.key ? block.retention_priority : ""), true],
    ["cause", ({ removal_cause: cause }) => word(cause, "REMOVAL_CAUSE_").replace("unspecified", "")],
    ["holder", ({ lease }) => lease?.holder ?? ""],
  ], state.events, "Nothing has happened.");
}

async function loadTenants() {
  const found = await read("tenants", { pool: state.pool.pool_id });
  const rows = map.owners.map((name, index) => ({ name, ...map.scopes[index], blocks: map.blocksOf[index] ?? 0,
    queried: 0, hit: 0, quota: "" })).filter((row) => row.blocks);
  // Lookups are counted by salt and quotas are of a tenant or a salt: where that is one row, it is that row's.
  const rowOf = (names, isMeant) => {
    const meant = rows.filter(isMeant);
    if (meant.length === 1) return meant[0];
    return rows[rows.push({ ...names, name: owner(names), blocks: 0, queried: 0, hit: 0, quota: "" }) - 1];
  };
  for (const { salt = null, tokens } of found.salts.filter(({ others }) => !others)) {
    const counted = { queried: Number(tokens.queried_tokens), hit: Number(tokens.hit_tokens) };
    Object.assign(rowOf({ tenant: null, salt }, (row) => row.salt === salt), counted);
  }
  for (const { quota, device_blocks: blocks } of found.quotas.filter((one) => one.pool_id === state.pool.pool_id)) {
    const { tenant_id: tenant = null, salt = null, device_floor_blocks: floor, device_ceiling_blocks: ceiling } = quota;
    const most = ceiling === undefined ? "no ceiling" : `at most ${count(ceiling)}`;
    const row = rowOf({ tenant, salt }, (one) => (tenant === null ? one.salt === salt : one.tenant === tenant));
    row.quota = `at least ${count(floor)}, ${most}; has ${count(blocks)}`;
  }
  const sorted = rows.sort((a, b) => b.blocks - a.blocks || b.queried - a.queried);
  fill(byId("tenants"), [
    ["account", (one) => one.name], ["blocks", (one) => count(one.blocks), true],
    ["queried tokens", (one) => count(one.queried), true], ["hit rate", (one) => share(one.hit, one.queried), true],
    ["quota in device blocks", (one) => one.quota],
  ], sorted.slice(0, MAX_ROWS), "No blocks yet.");
}

// Leases by holder, priority and time left.
async function loadLeases() {
  const { holds } = await read("holds");
  const rows = holds.map((hold) => ({
    what: hold.pin ? "pin" : "hold", holder: hold.owner, blocks: hold.num_blocks, priority: "",
    remaining: durationOf(hold.remaining_duration), where: hold.executor_id,
  }));
  const [groups, leases] = [new Map(), new Map()];
  const { pool_id: pool } = state.pool;
  for await (const page of pages("leases", { pool })) {
    for (const lease of page.leases) {
      const name = [lease.holder, lease.priority, seconds(lease.remaining), lease.started].join();
      const group = groups.get(name) ?? groups.set(name, { ...lease, what: "lease", blocks: 0, where: pool }).get(name);
      group.blocks += lease.slots.length;
      for (const [tier, slot] of lease.slots) {
        const blockIndex = map.blockIndexOf(tier, slot);
        leases.set(blockIndex, [...(leases.get(blockIndex) ?? []), lease]);
      }
    }
    if (groups.size >= MAX_ROWS) break;
  }
  map.leases = leases;
  map.describe();
  rows.push(...groups.values());
  const waits = (row) => row.started === false && row.remaining !== null;
  const left = (row) => (row.remaining ?? Infinity);
  fill(byId("leases"), [
    ["what", (row) => row.what], ["holder", (row) => row.holder], ["blocks", (row) => count(row.blocks), true],
    ["priority", (row) => row.priority, true],
    ["time left", (row) => seconds(row.remaining) + (waits(row) ? ", from release" : ""), true],
    ["where", (row) => row.where],
  ], rows.sort((a, b) => left(a) - left(b)), "Nothing is kept.");
}

// What reads many blocks comes less often.
const slow = { due: 0, async run() {
  await map.load();
  tree.load(map);
  await curve.load(state.pool);
  await loadTenants();
  await loadLeases();
} };

async function round() {
  const begin = performance.now();
  try {
    await loadPools();
    await loadEvents();
    if (state.pool) {
      if (begin >= slow.due) {
        await slow.run();
        const took = performance.now() - begin;
        slow.due = performance.now() + Math.max(2000, 5 * took);
      }
    }
    byId("state").className = "";
    byId("state").textContent = `as of ${new Date().toLocaleTimeString()}`;
    document.body.dataset.loaded = "yes";
  } catch (error) {
    byId("state").className = "failed";
    byId("state").textContent = `The cache manager does not answer: ${error.message}`;
  }
  setTimeout(round, document.hidden ? 10000 : 1000);
}

setTheme(wanted());
round();
