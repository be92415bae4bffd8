// A CPU decoder for the Llama family: one call computes a whole step, on threads that stay together from layer to
// layer.
//
// Hidden states, sums, norms, rotary embedding and attention are in float. Activations that are multiplied with weights
// have the model's type, unless floats are faster. Caches have their own type.
#pragma once

#include <chrono>

#include "adapters.h"
#include "attention.h"
#include "pooled.h"

struct Layer {
  const float *input_norm, *post_norm;  // [H]
  const float *q_norm, *k_norm;         // [D] or null
  Linear qkv, out, gate_up, down;
  void *k_cache, *v_cache;  // [N][B][Hkv][D]
  const float *k_scale, *v_scale;  // [Hkv][D], for 8-bit caches; else null
  int64_t group;
};

// The element type of caches.
enum Cached : int64_t { CACHED_FLOAT, CACHED_BF16, CACHED_INT8, CACHED_FLOAT8 };

struct Model {
  int64_t layers, hidden, intermediate, vocabulary;
  Shape shape;
  float epsilon, scale, rotary_scale;
  const float *frequencies;  // [D / 2]
  const float *final_norm;   // [H]
  const void *embedding;     // [V][H], or null if `table` is used: the output matrix, or a matrix in codes
  Stored embedding_stored;   // FLOATS or BF16
  Cached cached;
  Linear table, head;
  const Layer *layer;
};

struct Batch {
  int64_t tokens, sequences, groups, outputs;
  const int64_t *ids, *positions;  // [T]
  const int32_t *query_start;      // [S + 1]
  const Group *group;
  const int64_t *rows;          // [outputs], tokens whose logits are wanted
  const int64_t *cache_positions;  // [T]
  int64_t entries;
  const Scored *scored;  // [entries]
  int64_t invariant;  // whether rounding must depend neither on what else is in the step nor on the threads
  int64_t spans;
  const AdapterSpan *span;  // [spans], tokens with adapters
};

// A group with its own copies of slots and tables.
struct OwnGroup : Group {
  std::vector<int64_t> own_slots;
  std::vector<int32_t> own_tables;

  OwnGroup(const Group &group, int64_t tokens, int64_t sequences)
      : Group(group), own_slots(slots, slots + tokens), own_tables(tables, tables + sequences * width) {
    slots = own_slots.data();
    tables = own_tables.data();
  }
};

// out [n] = x / rms(x) * weight (Zhang and Sennrich 2019, equation 4).
template <class Out>
static inline void normalise(const float *x, const float *weight, int64_t n, float epsilon, Out *out) {
  Vec squares = {};
  for (int64_t i = 0; i < n; i += WIDTH) squares += load(x + i) * load(x + i);
  float scale = 1 / std::sqrt(sum(squares) / n + epsilon);
  for (int64_t i = 0; i < n; i += WIDTH) store(out + i, load(x + i) * scale * load(weight + i));
}

// What a step spends its time on.
enum Phase { REST, QKV, ROTARY_AND_STORE, ATTENTION, ATTENTION_OUTPUT, GATE_UP, DOWN, LOGITS, PHASES };

// Adds times to `seconds` [PHASES], unless `seconds` is null.
class Watch {
 public:
  explicit Watch(double *seconds) : seconds(seconds), last(Clock::now()) {}

  // Adds the time since the last lap to this phase.
  void lap(Phase phase) {
    if (!seconds) return;
    auto now = Clock::now();
    seconds[phase] += std::chrono::duration<double>(now - last).count();
    last = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double *seconds;
  Clock::time_point last;
};

// T is the type that is multiplied with weights, C the type that the caches hold. Attention multiplies pairs of
// bfloat16 only if the cache holds bfloat16: converting 8-bit elements to bfloat16 takes as long as converting them to
// floats.
template <class T, class C>
using Attended = std::conditional_t<std::is_same_v<C, Bfloat16>, T, float>;

// Owns copies of what it needs from the batch, because a thread that lost its core may still run after the step is
// over.
template <class T>
class Step {
 public:
  // `seconds` [PHASES] receives the times that the constructing thread sees.
  Step(const Model &model, const Batch &batch, float *logits, PhasePool &team, double *seconds)
      : model(model), shape(model.shape), logits(logits), team(team), seconds(seconds), tokens(batch.tokens),
        ids(batch.ids, batch.ids + tokens), positions(batch.positions, batch.positions + tokens),
        cache_positions(batch.cache_positions, batch.cache_positions + tokens),
        rows(batch.rows, batch.rows + batch.outputs), scored(batch.scored, batch.scored + batch.entries),
        hidden(tokens * model.hidden), qkv(tokens * width()),
        cosines(tokens * shape.head_dim / 2), sines(cosines.size()),
        normal(std::max<int64_t>(tokens, rows.size()) * model.hidden), attended(tokens * model.layer[0].out.k),
        activated(tokens * model.intermediate), additions(batch.span, batch.spans, tokens, widest()) {
    int64_t most_sums = 0, most_softmaxes = 0;
    for (int64_t g = 0; g < batch.groups; g++) {
      groups.emplace_back(batch.group[g], tokens, batch.sequences);
      plans.push_back(plan_units(shape, groups[g], batch.sequences, batch.query_start, cache_positions.data(), scored,
                                 team.size, batch.invariant));
      if (!plans[g].shared.empty() || !plans[g].merged.empty())
        most_softmaxes = std::max(most_softmaxes, plans[g].softmaxes);
      most_sums = std::max(most_sums, plans[g].sums);
    }
    sums.resize(most_sums);
    state.make(most_softmaxes, shape.head_dim);
  }

  // What every thread of the team runs.
  void work() {
    switch (model.cached) {
      case CACHED_FLOAT: return compute<float>();
      case CACHED_BF16: return compute<Bfloat16>();
      case CACHED_INT8: return compute<Int8>();
      case CACHED_FLOAT8: return compute<Float8>();
    }
  }

 private:
  template <class C>
  void compute() {
    Watch watch(std::this_thread::get_id() == first ? seconds : nullptr);
    Scratch<Attended<T, C>> scratch(shape);
    each_row(tokens, [&](int64_t row) { begin(row); });
    for (int64_t number = 0; number < model.layers; number++) {
      const Layer &layer = model.layer[number];
      each_row(tokens, [&](int64_t row) {
        normalise(&hidden[row * model.hidden], layer.input_norm, model.hidden, model.epsilon, &normal[row * model.hidden]);
      });
      watch.lap(REST);
      multiply_layer(number, QKV_MATRIX, normal.data(), layer.qkv, write_to(qkv.data(), width(), width()));
      watch.lap(QKV);
      each_row(tokens, [&](int64_t row) { rotate_and_store<C>(layer, row); });
      watch.lap(ROTARY_AND_STORE);
      attend_all<C>(number, scratch);
      add_sums(number);
      watch.lap(ATTENTION);
      multiply_layer(number, OUT_MATRIX, attended.data(), layer.out, add_to_hidden());
      watch.lap(ATTENTION_OUTPUT);
      each_row(tokens, [&](int64_t row) {
        normalise(&hidden[row * model.hidden], layer.post_norm, model.hidden, model.epsilon, &normal[row * model.hidden]);
      });
      watch.lap(REST);
      multiply_layer(number, GATE_UP_MATRIX, normal.data(), layer.gate_up, activate());
      watch.lap(GATE_UP);
      multiply_layer(number, DOWN_MATRIX, activated.data(), layer.down, add_to_hidden());
      watch.lap(DOWN);
    }
    each_row(int64_t(rows.size()), [&](int64_t row) {
      const float *last = &hidden[rows[row] * model.hidden];
      normalise(last, model.final_norm, model.hidden, model.epsilon, &normal[row * model.hidden]);
    });
    matmul(team, normal.data(), int64_t(rows.size()), model.head, write_to(logits, model.vocabulary, model.vocabulary));
    watch.lap(LOGITS);
    add_totals();
    watch.lap(ATTENTION);
  }

  // Columns of the widest matrix of a layer.
  int64_t widest() const {
    const Layer &layer = model.layer[0];
    return std::max({layer.qkv.n, layer.out.n, layer.gate_up.n, layer.down.n});
  }

  int64_t width() const { return (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim; }

  template <class Row>
  void each_row(int64_t count, const Row &row) {
    constexpr int64_t together = 4;
    team.each((count + together - 1) / together, [&](int64_t part) {
      for (int64_t i = part * together; i < std::min(count, (part + 1) * together); i++) row(i);
    });
  }

  // Multiplies all tokens with a matrix of a layer, including what their adapters add.
  template <class Finish>
  void multiply_layer(int64_t number, Matrix matrix, const T *a, const Linear &linear, const Finish &finish) {
    if (!additions.adds_to(number, matrix)) return matmul(team, a, tokens, linear, finish);
    const int64_t queries = shape.q_heads * shape.head_dim / HALF, keys = shape.kv_heads * shape.head_dim / HALF;
    auto part = [=](int64_t half) -> int64_t {
      if (matrix == QKV_MATRIX) return (half >= queries) + (half >= queries + keys);
      return matrix == GATE_UP_MATRIX ? half % 2 : 0;
    };
    additions.prepare(team, number, matrix, a, linear, part);
    matmul(team, a, tokens, linear, finish, [&](int64_t row, int64_t rows, int64_t tile, float *sums) {
      additions.add(number, matrix, row, rows, tile, sums, part);
    });
  }

  void begin(int64_t row) {
    int64_t id = ids[row], half = shape.head_dim / 2;
    float *into = &hidden[row * model.hidden];
    auto copy = [&](const auto *from) {
      for (int64_t i = 0; i < model.hidden; i++) into[i] = widen(from[id * model.hidden + i]);
    };
    if (!model.embedding)
      row_of(model.table, id, into);
    else if (model.embedding_stored == BF16)
      copy((const Bfloat16 *)model.embedding);
    else
      copy((const float *)model.embedding);
    for (int64_t i = 0; i < half; i++) {
      float angle = float(positions[row]) * model.frequencies[i];
      cosines[row * half + i] = std::cos(angle) * model.rotary_scale;
      sines[row * half + i] = std::sin(angle) * model.rotary_scale;
    }
  }

  // Rotary position embedding: rotates the first half of a head against the second half (Su et al. 2021, section
  // 3.4.2).
  void rotate(float *head, int64_t row) const {
    int64_t half = shape.head_dim / 2;
    const float *cosine = &cosines[row * half], *sine = &sines[row * half];
    for (int64_t i = 0; i < half; i += WIDTH) {
      Vec a = load(head + i), b = load(head + half + i);
      store(head + i, a * load(cosine + i) - b * load(sine + i));
      store(head + half + i, b * load(cosine + i) + a * load(sine + i));
    }
  }

  // Keys in the cache lack their scale, and so would the logits: the query is multiplied with the keys' scale instead.
  template <class C>
  void rotate_and_store(const Layer &layer, int64_t row) {
    const int64_t dim = shape.head_dim;
    float *query = &qkv[row * width()], *key = query + shape.q_heads * dim, *value = key + shape.kv_heads * dim;
    for (int64_t head = 0; head < shape.q_heads + shape.kv_heads; head++) {
      const float *norm = head < shape.q_heads ? layer.q_norm : layer.k_norm;
      if (norm) normalise(query + head * dim, norm, dim, model.epsilon, query + head * dim);
      rotate(query + head * dim, row);
    }
    for (int64_t head = 0; head < shape.q_heads; head++) {
      const float *scales = layer.k_scale ? layer.k_scale + head / shape.per_kv() * dim : nullptr;
      for (int64_t i = 0; i < dim; i += WIDTH)
        store(query + head * dim + i, scaled<C>(load(query + head * dim + i) * model.scale, scales, i));
    }
    int64_t slot = groups[layer.group].slots[row], size = shape.kv_heads * dim;
    if (slot < 0) return;
    keep(key, layer.k_scale, (C *)layer.k_cache + slot * size);
    keep(value, layer.v_scale, (C *)layer.v_cache + slot * size);
  }

  template <class C>
  void keep(const float *from, const float *scales, C *to) {
    for (int64_t i = 0; i < shape.kv_heads * shape.head_dim; i += WIDTH)
      store(to + i, scales ? load(from + i) / load(scales + i) : load(from + i));
  }

  // Where a unit leaves its sums for a KV head.
  Sums sums_of(const Unit &unit, int64_t number, int64_t head) {
    if (!unit.scored) return {};
    const Scored &entry = scored[unit.entry];
    const int64_t at = (number * shape.kv_heads + head) * entry.keys;
    if (unit.sums < 0) return {entry.weights + at, entry.squares ? entry.squares + at : nullptr};
    float *part = &sums[unit.sums + head * unit.end];
    return {part, entry.squares ? part + shape.kv_heads * unit.end : nullptr};
  }

  // Sums the scores of the units of each sequence, always in the same order.
  void add_sums(int64_t number) {
    const Plan &plan = plans[model.layer[number].group];
    if (!plan.sums) return;
    team.each(int64_t(scored.size()) * shape.kv_heads, [&](int64_t piece) {
      const int64_t entry = piece / shape.kv_heads, head = piece % shape.kv_heads;
      for (const Unit &unit : plan.own) {
        if (unit.sums < 0 || unit.entry != entry) continue;
        Unit last = unit;
        last.sums = -1;
        const Sums part = sums_of(unit, number, head), all = sums_of(last, number, head);
        for (int64_t i = 0; i < unit.end; i++) all.weights[i] += part.weights[i];
        for (int64_t i = 0; all.squares && i < unit.end; i++) all.squares[i] += part.squares[i];
      }
    });
  }

  template <class C>
  void attend_all(int64_t number, Scratch<Attended<T, C>> &scratch) {
    const Layer &layer = model.layer[number];
    const Plan &plan = plans[layer.group];
    for (const auto *units : {&plan.shared, &plan.own}) {
      if (units->empty()) continue;
      const int64_t count = units->size() * shape.kv_heads;
      auto piece = [&](int64_t i) { return Piece{&(*units)[i / shape.kv_heads], i % shape.kv_heads}; };
      team.each(count, [&](int64_t i) {
        // `next` is the piece that this thread will most likely take next.
        Piece now = piece(i), next = i + 1 < count ? piece(i + 1) : Piece{};
        attend(shape, groups[layer.group], plan, now, next.unit ? &next : nullptr, cache_positions.data(), qkv.data(),
               width(), (const C *)layer.k_cache, (const C *)layer.v_cache, layer.v_scale, state,
               attended.data(), sums_of(*now.unit, number, now.head), scratch);
      });
    }
    each_row(int64_t(plan.merged.size()), [&](int64_t i) {
      merge<C>(shape, plan.merged[i], layer.v_scale, state, &attended[plan.merged[i].token * layer.out.k]);
    });
  }

  // Adds the scores to the accumulators of the sequences that have accumulators.
  void add_totals() {
    if (std::none_of(scored.begin(), scored.end(), [](const Scored &entry) { return entry.totals; })) return;
    team.each(int64_t(scored.size()) * model.layers, [&](int64_t piece) {
      const Scored &entry = scored[piece / model.layers];
      if (!entry.totals) return;
      const int64_t layer = piece % model.layers, together = shape.kv_heads / entry.heads;
      for (int64_t head = 0; head < entry.heads; head++)
        pooled_add(entry.weights + (layer * shape.kv_heads + head * together) * entry.keys, together, entry.keys,
                   entry.totals + (layer * entry.heads + head) * entry.capacity, entry.first, entry.width);
    });
  }

  auto write_to(float *to, int64_t stride, int64_t columns) {
    return [=](int64_t row, int64_t count, int64_t tile, const float *sums) {
      int64_t some = std::min<int64_t>(TILE, columns - tile * TILE);
      for (int64_t i = 0; i < count; i++) memcpy(to + (row + i) * stride + tile * TILE, sums + i * TILE, some * 4);
    };
  }

  auto add_to_hidden() {
    return [this](int64_t row, int64_t count, int64_t tile, const float *sums) {
      for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < TILE; c += WIDTH) {
          float *into = &hidden[(row + i) * model.hidden + tile * TILE + c];
          store(into, load(into) + load(sums + i * TILE + c));
        }
    };
  }

  // silu(gate) * up: the first half of a tile holds gate columns, the second half the same columns of the up
  // projection.
  auto activate() {
    return [this](int64_t row, int64_t count, int64_t tile, const float *sums) {
      constexpr int half = TILE / 2;
      for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < half; c += WIDTH) {
          Vec gate = load(sums + i * TILE + c), up = load(sums + i * TILE + half + c);
          store(&activated[(row + i) * model.intermediate + tile * half + c], gate / (1.0f + exponential(-gate)) * up);
        }
    };
  }

  const Model &model;
  const Shape &shape;
  float *logits;
  PhasePool &team;
  double *seconds;
  const std::thread::id first = std::this_thread::get_id();
  int64_t tokens;
  std::vector<int64_t> ids, positions, cache_positions, rows;
  std::vector<Scored> scored;
  std::vector<OwnGroup> groups;
  Lines<float> hidden, qkv, cosines, sines;
  Lines<T> normal, attended, activated;
  std::vector<Plan> plans;
  std::vector<float> sums;
  Softmax state;
  Additions additions;
};
