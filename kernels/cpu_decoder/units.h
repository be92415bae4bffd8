// Divides a step's attention into units: which query rows attend to which keys together.
#pragma once

#include <numeric>
#include <vector>

#include "matmul.h"

// Query rows (tokens times the heads that share a KV head) in a unit.
constexpr int UNIT_ROWS = 192;
// Keys processed at a time: a run.
constexpr int KEYS = 64;
// Sequences must share at least this many tokens to get a separate unit for the shared keys.
constexpr int SHARED_TOKENS = 64;
// Each thread should get at least this many units, so that no thread waits long for another thread's last unit.
constexpr int UNITS_PER_THREAD = 3;
// LEAST_KEYS keys justify a separate unit. The keys of a long context are divided into PARTS_PER_THREAD units per
// thread.
constexpr int64_t LEAST_KEYS = 256;
constexpr int PARTS_PER_THREAD = 16;

// One group of layers: the slots where this step's tokens are stored [T], and the block tables [S][width].
struct Group {
  const int64_t *slots;
  const int32_t *tables;
  int64_t width;
  int64_t window;  // 0 for full attention
};

struct Shape {
  int64_t q_heads, kv_heads, head_dim, block_size;
  int64_t per_kv() const { return q_heads / kv_heads; }
  // The block size is a power of two.
  int block_bits() const { return __builtin_ctzll(block_size); }
};

// A sequence whose attention scores are wanted. `weights`: the softmax weights of its last `rows` tokens for its `keys`
// keys, summed over these tokens and over the query heads of a KV head. `squares`: the sums of the squared weights, or
// null. Both are [layers][Hkv][keys].
// Unless `totals` is null, the weights are added to `totals` at the end of the step. `totals` has [layers][heads] rows
// of `capacity` each; a single head stands for all KV heads together. Each key from `first` on gets the maximum over
// `width` neighbours, beginning with this key.
struct Scored {
  int64_t sequence, rows, keys;
  float *weights, *squares, *totals;
  int64_t heads, capacity, first, width;
};

// The query rows of `count` tokens, from `first` on in Plan::order, against the keys [begin, end) of a sequence's
// table. The last `scored` tokens count for the entry `entry` of Scored. A sequence's last unit sees all keys of the
// sequence and writes the sums to the entry. The other units write partial sums to `sums`: [2][Hkv][end], weights and
// squares.
// If keys are divided among units, each unit writes its softmax to `part`, [count][Hq], for the merge.
struct Unit {
  int64_t first, count;
  int64_t sequence;
  int64_t begin, end;
  bool resumes, ends;
  int64_t scored = 0, entry = 0, sums = -1, part = -1;
  // The first key that any row of the unit sees; a run may begin before this key.
  int64_t least = 0;
};

// A token whose keys were divided: its `parts` softmaxes begin at `first` and lie `step` apart.
struct Merged {
  int64_t token, first, step, parts;
};

// The units of a step for one group, in two rounds: first the shared keys, then each sequence's own keys.
struct Plan {
  std::vector<int64_t> order;  // token rows
  std::vector<Unit> shared, own;
  std::vector<Merged> merged;
  int64_t sums = 0;  // floats that the partial sums take
  bool invariant;         // whether a token's rounding depends on nothing that is computed beside the token
  int64_t softmaxes = 0;  // number that units keep: of all tokens [T][Hq], then of parts
};

// Divides the keys of units that other threads would wait for (Dao et al. 2023, "Flash-Decoding"). Where a context is
// divided depends on the threads and on what else is in the step, and so does its rounding.
static inline void divide_keys(Plan &plan, const Shape &shape, int threads) {
  // Reading keys takes about as long as multiplying them with ROWS rows, the number of rows that fit in registers.
  auto cost = [&](const Unit &unit) {
    return std::max<int64_t>(ROWS, unit.count * shape.per_kv()) * (unit.end - unit.begin);
  };
  int64_t total = 0;
  for (const Unit &unit : plan.own) total += cost(unit) * shape.kv_heads;
  std::vector<Unit> divided;
  for (const Unit &unit : plan.own) {
    const int64_t keys = unit.end - unit.begin, share = cost(unit) * threads;
    int64_t parts = 1;
    // Units of nearly equal cost are not divided if there are enough of them.
    if (!unit.scored && share * UNITS_PER_THREAD > total)
      parts = std::clamp<int64_t>(share * PARTS_PER_THREAD / total, 1, std::max<int64_t>(1, keys / LEAST_KEYS));
    if (parts == 1) {
      divided.push_back(unit);
      continue;
    }
    const int64_t step = unit.count * shape.q_heads;
    for (int64_t i = 0; i < unit.count; i++)
      plan.merged.push_back({plan.order[unit.first + i], plan.softmaxes + i * shape.q_heads, step, parts});
    for (int64_t number = 0; number < parts; number++, plan.softmaxes += step) {
      Unit part = unit;
      part.begin = unit.begin + number * keys / parts;
      part.end = unit.begin + (number + 1) * keys / parts;
      part.resumes = unit.resumes && !number;
      part.ends = false;
      part.part = plan.softmaxes;
      divided.push_back(part);
    }
  }
  plan.own.swap(divided);
}

// cache_positions: [T], of the tokens along their tables. invariant: the rounding of a token that is not scored depends
// on nothing that is computed beside the token. For this, runs of keys begin at the same keys for all tokens, and
// contexts are not divided.
static Plan plan_units(const Shape &shape, const Group &group, int64_t sequences, const int32_t *query_start,
                       const int64_t *cache_positions, const std::vector<Scored> &scored, int threads,
                       bool invariant) {
  Plan plan;
  plan.invariant = invariant;
  std::vector<int64_t> entry_of(sequences, -1);
  for (size_t entry = 0; entry < scored.size(); entry++) entry_of[scored[entry].sequence] = entry;
  auto table = [&](int64_t s) { return group.tables + s * group.width; };
  auto length = [&](int64_t s) { return cache_positions[query_start[s + 1] - 1] + 1; };
  std::vector<int64_t> sorted(sequences);
  std::iota(sorted.begin(), sorted.end(), 0);
  auto common = [&](int64_t a, int64_t b) {
    // A scored sequence attends to all keys in one unit.
    if (entry_of[a] >= 0 || entry_of[b] >= 0) return int64_t(0);
    int64_t most = std::min(length(a), length(b)) / shape.block_size, i = 0;
    while (i < most && table(a)[i] == table(b)[i]) i++;
    const int64_t keys = i * shape.block_size;
    return invariant ? keys / KEYS * KEYS : keys;
  };
  if (!group.window)
    std::sort(sorted.begin(), sorted.end(), [&](int64_t a, int64_t b) {
      // Scored sequences come first, so that none of them lies between two sequences that share keys.
      if ((entry_of[a] >= 0) != (entry_of[b] >= 0)) return entry_of[a] >= 0;
      return std::lexicographical_compare(table(a), table(a) + (length(a) + shape.block_size - 1) / shape.block_size,
                                          table(b), table(b) + (length(b) + shape.block_size - 1) / shape.block_size);
    });
  // Each multiplication should have its full number of rows, even if there are too few rows for all threads.
  int64_t even = query_start[sequences] * shape.q_heads / (threads * UNITS_PER_THREAD);
  int64_t limit = std::max<int64_t>(1, std::clamp<int64_t>(even, 2 * ROWS, UNIT_ROWS) / shape.per_kv());
  auto cut = [&](std::vector<Unit> &units, Unit whole) {
    // Even parts, because a thread that has none left waits for the longest part.
    int64_t parts = (whole.count + limit - 1) / limit;
    for (int64_t part = 0; part < parts; part++) {
      Unit unit = whole;
      int64_t from = part * whole.count / parts, to = (part + 1) * whole.count / parts;
      unit.first = whole.first + from;
      unit.count = to - from;
      int64_t least = INT64_MAX, most = 0;
      for (int64_t i = unit.first; i < unit.first + unit.count; i++) {
        least = std::min(least, cache_positions[plan.order[i]]);
        most = std::max(most, cache_positions[plan.order[i]]);
      }
      unit.end = std::min(unit.end, most + 1);
      if (group.window) unit.begin = std::max(unit.begin, least - group.window + 1);
      unit.least = unit.begin;
      if (invariant) unit.begin -= unit.begin % KEYS;
      unit.scored = std::clamp<int64_t>(to - (whole.count - whole.scored), 0, unit.count);
      if (unit.scored && to < whole.count) {
        unit.sums = plan.sums;
        plan.sums += 2 * shape.kv_heads * unit.end;
      }
      units.push_back(unit);
    }
  };
  for (int64_t i = 0; i < sequences;) {
    int64_t together = 1, shared = 0;
    while (!group.window && i + together < sequences) {
      int64_t with_next = common(sorted[i], sorted[i + together]);
      if (together > 1) with_next = std::min(with_next, shared);
      if (with_next < SHARED_TOKENS || (together > 1 && with_next < shared / 2)) break;
      shared = with_next;
      together++;
    }
    int64_t first = plan.order.size();
    for (int64_t j = i; j < i + together; j++) {
      int64_t s = sorted[j], start = plan.order.size();
      for (int64_t row = query_start[s]; row < query_start[s + 1]; row++) plan.order.push_back(row);
      int64_t entry = entry_of[s];
      Unit whole{start, int64_t(plan.order.size()) - start, s, shared, length(s), shared > 0, true};
      if (entry >= 0) whole.scored = scored[entry].rows, whole.entry = entry;
      cut(plan.own, whole);
    }
    if (shared) cut(plan.shared, {first, int64_t(plan.order.size()) - first, sorted[i], 0, shared, false, false});
    i += together;
  }
  plan.softmaxes = query_start[sequences] * shape.q_heads;
  if (!invariant) divide_keys(plan, shape, threads);
  for (auto *units : {&plan.shared, &plan.own}) {
    std::stable_sort(units->begin(), units->end(), [](const Unit &a, const Unit &b) {
      return a.count * (a.end - a.begin) > b.count * (b.end - b.begin);
    });
    // Deals the units out so that every thread's share has units of all sizes, the longest first.
    std::vector<Unit> dealt;
    for (int thread = 0; thread < threads; thread++)
      for (size_t i = thread; i < units->size(); i += threads) dealt.push_back((*units)[i]);
    units->swap(dealt);
  }
  return plan;
}
