// Puts the parts together and keeps them up to date, one request at a time.

import { clock, count, durationOf, element, fill, owner, pages, read, seconds, share } from "./api.js";
import { GhostCurve } from "./curve.js";
import { EventList } from "./events.js";
import { FleetView } from "./fleet.js";
import { StackView } from "./history.js";
import { BlockMap } from "./map.js";
import { PrefixTree } from "./tree.js";

const MAX_ROWS = 500;
// Rows of the table of sequences.
const LONGEST = 20;
// How long a round waits for one of several shards, in milliseconds.
const PATIENCE = 2000;

const byId = (id) => document.getElementById(id);
const [map, tree, curve, stack] = [new BlockMap(), new PrefixTree(), new GhostCurve(), new StackView()];
const events = new EventList();
const state = { fleet: { shards: [] }, pools: [], pool: null };
const fleet = new FleetView((key) => choose(key));
// By shard: why it does not answer, and the reads in flight.
const [problems, reading] = [new Map(), new Map()];
// Which shard a read is about; with a single cache manager the page need not name it.
const at = (shard) => (state.fleet.shards.length > 1 ? { shard } : {});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  map.draw();
  curve.draw();
  stack.draw();
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

function choose(key) {
  state.pool = state.pools.find((pool) => pool.key === key) ?? state.pools[0] ?? null;
  if (!state.pool) return;
  byId("pool").value = state.pool.key;
  map.show(state.pool);
  tree.show(state.pool);
  stack.due = 0;
  showFleet();
  slow.due = 0;
}

function showFleet() {
  fleet.show(state.fleet, state.pools, state.pool?.key, problems);
}

// The shards, and a router's engines. Without a new answer the known ones stay.
async function loadFleet() {
  try {
    state.fleet = await read("fleet");
  } catch (error) {
    if (!state.fleet.shards.length) throw error;
    if (state.fleet.engines) state.fleet = { ...state.fleet, problem: error.message };
  }
}

// Reads all shards at once. A shard that hangs delays no other shard: reads of it go on over several rounds.
async function readShards() {
  const { shards } = state.fleet;
  for (const known of problems.keys()) if (!shards.includes(known)) problems.delete(known);
  await Promise.all(shards.map(async (shard) => {
    if (!reading.has(shard)) {
      reading.set(shard, readShard(shard)
        .then(() => problems.delete(shard), ({ message }) => problems.set(shard, message))
        .finally(() => reading.delete(shard)));
    }
    const patience = new Promise((resolve) => { setTimeout(resolve, PATIENCE); });
    await Promise.race(shards.length > 1 ? [reading.get(shard), patience] : [reading.get(shard)]);
    if (reading.has(shard) && !problems.has(shard)) problems.set(shard, "it takes long");
  }));
}

async function readShard(shard) {
  await loadPools(shard);
  await events.load(shard, state.fleet.shards);
}

// A pool with its tiers. A block index counts the slots of all tiers in one row.
function poolOf(shard, { pool_id, spec, lower_tiers: lower, queried_tokens, hit_tokens, ...device }) {
  const usage = (name) => lower.find(({ tier }) => tier === name) ?? {};
  let offset = 0;
  const tiers = [["device", spec.num_blocks, device], ["host", spec.host_blocks, usage("TIER_HOST")],
    ["disk", spec.disk_blocks, usage("TIER_DISK")]].map(([tier, size, counts], index) => {
    offset += size;
    return { tier, number: index + 1, offset: offset - size, size, total: counts.total_blocks ?? size,
      used: counts.used_blocks ?? 0, cached: counts.cached_blocks ?? 0, copies: counts.copy_blocks ?? 0 };
  });
  // Two shards may have pools of one name.
  const [name, key] = Object.keys(at(shard)).length ? [`${pool_id} at ${shard}`, `${shard} ${pool_id}`]
    : [pool_id, pool_id];
  return { pool_id, name, key, shard, at: at(shard), executor_id: pool_id.slice(0, pool_id.lastIndexOf("/")),
    tiers: tiers.filter(({ size }) => size), queried_tokens: Number(queried_tokens),
    hit_tokens: Number(hit_tokens) };
}

async function loadPools(shard) {
  const pools = (await read("pools", at(shard))).pools.map((pool) => poolOf(shard, pool));
  const { shards } = state.fleet;
  // In the order of the shards; the pools of a shard that does not answer stay as they were.
  const rank = ({ shard: one }) => shards.indexOf(one);
  const all = [...state.pools.filter((pool) => pool.shard !== shard && shards.includes(pool.shard)), ...pools];
  all.sort((a, b) => rank(a) - rank(b));
  const changed = JSON.stringify(all.map(shape)) !== JSON.stringify(state.pools.map(shape));
  state.pools = all;
  if (changed) {
    byId("pool").replaceChildren(...all.map(({ key, name }) => element("option", name, { value: key })));
    if (state.pool) choose(state.pool.key);
  } else if (state.pool) {
    state.pool = all.find((pool) => pool.key === state.pool.key);
  }
}

const shape = (pool) => [pool.key, pool.tiers.map(({ offset, size }) => [offset, size])];

function gauges() {
  if (!state.pool) return ["No executor is registered."];
  const { tiers, queried_tokens: queried, hit_tokens: hit } = state.pool;
  return [
    tiers.map(({ tier, total }) => `${tier} ${count(total)} blocks`).join(", "),
    `hit rate ${share(hit, queried)} of ${count(queried)} prompt tokens`,
  ];
}

async function loadTenants() {
  const found = await read("tenants", { ...state.pool.at, pool: state.pool.pool_id });
  const rows = map.owners.map((name, index) => ({ name, ...map.scopes[index], blocks: map.blocksOf[index] ?? 0,
    queried: 0, hit: 0, quota: "" })).filter((row) => row.blocks);
  // Lookups are counted by salt, and a quota is of a tenant or a salt: a row has them if it is the only matching row.
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
    ["account", (one) => one.name, "name"], ["blocks", (one) => count(one.blocks), "number"],
    ["queried tokens", (one) => count(one.queried), "number"],
    ["hit rate", (one) => share(one.hit, one.queried), "number"],
    ["quota in device blocks", (one) => one.quota],
  ], sorted.slice(0, MAX_ROWS), "No blocks yet.");
}

// Leases by holder, priority and time left.
async function loadLeases() {
  const { holds } = await read("holds", state.pool.at);
  const rows = holds.map((hold) => ({
    what: hold.pin ? "pin" : "hold", holder: hold.owner, blocks: hold.num_blocks, priority: "",
    remaining: durationOf(hold.remaining_duration), executor: hold.executor_id,
  }));
  const [groups, leases] = [new Map(), new Map()];
  const { pool_id: pool, executor_id: executor } = state.pool;
  for await (const page of pages("leases", { ...state.pool.at, pool })) {
    for (const lease of page.leases) {
      const name = [lease.holder, lease.priority, seconds(lease.remaining), lease.started].join();
      const group = groups.get(name) ?? groups.set(name, { ...lease, what: "lease", blocks: 0, executor }).get(name);
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
  // Entries of operators come first; then the entries that end first.
  const rank = ({ what }) => ["pin", "hold", "lease"].indexOf(what);
  const left = (row) => (row.remaining ?? Infinity);
  const several = new Set(state.pools.map(({ executor_id: id }) => id)).size > 1;
  fill(byId("leases"), [
    ["what", (row) => row.what, "short"], ["holder", (row) => row.holder, "name"],
    ["blocks", (row) => count(row.blocks), "number"], ["priority", (row) => row.priority, "number"],
    ["time left", (row) => seconds(row.remaining) + (waits(row) ? " from release" : ""), "short"],
    ...(several ? [["executor", (row) => row.executor, "short"]] : []),
  ], rows.sort((a, b) => rank(a) - rank(b) || left(a) - left(b)), "Nothing is kept.");
}

// The longest live sequences, and the contiguous memory that all sequences would need. In tokens.
async function loadSequences() {
  const rows = [];
  for await (const page of pages("sequences", { ...state.pool.at, executor: state.pool.executor_id })) {
    rows.push(...page.rows.map(([name, tokens, slots, blocks, evicts]) => (
      // How many tokens are kept after an eviction is not known here.
      { name, tokens, slots, blocks, empty: evicts ? null : slots - tokens })));
  }
  const sum = (found, key) => found.reduce((total, row) => total + row[key], 0);
  const counted = rows.filter((row) => row.empty !== null);
  const all = counted.length === rows.length;
  const longest = stack.found?.model?.longest;
  byId("sequences-text").textContent = rows.length ? [
    `${count(rows.length)} ${rows.length === 1 ? "sequence has" : "sequences have"} blocks for ${count(sum(rows, "slots"))} tokens; `
      + `${count(sum(counted, "empty"))} of ${all ? "these" : `the ${count(sum(counted, "slots"))}`} slots`
      + `${all ? "" : " of sequences that keep all tokens"} have no token.`,
    longest ? `Contiguous memory for the longest output of each would hold ${count(rows.length * longest)} tokens.` : "",
  ].filter(Boolean).join(" ") : "";
  fill(byId("sequences"), [
    ["sequence", (row) => row.name, "name"], ["tokens", (row) => count(row.tokens), "number"],
    ["blocks", (row) => count(row.blocks), "number"],
    ["slots without a token", (row) => (row.empty === null ? "evicts tokens" : count(row.empty)), "number"],
  ], rows.sort((a, b) => b.tokens - a.tokens).slice(0, LONGEST), "No sequence is running.");
}

// Views that read many blocks are updated less often.
const slow = { due: 0, async run() {
  await map.load();
  tree.load(map);
  await curve.load(state.pool);
  await loadTenants();
  await loadLeases();
  await loadSequences();
} };

async function round() {
  const begin = performance.now();
  try {
    await loadFleet();
    await readShards();
    const { shards } = state.fleet;
    // The first pool in order, whichever shard has answered first.
    if (!state.pool) choose();
    if (!shards.length) throw new Error("none is known yet");
    const asked = shards.find((shard) => !problems.has(shard)) ?? shards[0];
    await stack.load(state.pool && !problems.has(state.pool.shard) ? state.pool.shard : asked, state.pool, begin);
    map.copies = state.pool?.tiers.find(({ tier }) => tier === "host")?.copies ?? 0;
    // With one cache manager there is nothing else to show.
    if (shards.length === 1 && problems.size) throw new Error(problems.get(shards[0]));
    if (state.pool && !problems.has(state.pool.shard) && begin >= slow.due) {
      await slow.run();
      const took = performance.now() - begin;
      slow.due = performance.now() + Math.max(2000, 5 * took);
    }
    const silent = [...problems].map(([shard, problem]) => `${shard} does not answer: ${problem}`);
    if (state.fleet.problem) silent.push(`The router does not answer: ${state.fleet.problem}`);
    byId("state").className = silent.length ? "failed" : "";
    byId("state").textContent = silent.join(" · ") || `as of ${clock(new Date())}`;
    document.body.dataset.loaded = "yes";
  } catch (error) {
    byId("state").className = "failed";
    byId("state").textContent = `The cache manager does not answer: ${error.message}`;
  }
  byId("gauges").replaceChildren(...gauges().map((text) => element("span", text)));
  showFleet();
  setTimeout(round, document.hidden ? 10000 : 1000);
}

setTheme(wanted());
round();
