// The functions of the decoder that others call.

#include "step.h"

#if defined(__AVX512BF16__)
// The least time, of several tries, to multiply a few rows with a tile in bfloat16.
template <class T>
static double seconds_of() {
  constexpr int64_t k = 256, times = 20;
  std::vector<T> a(ROWS * k);
  std::vector<Bfloat16> b(k * TILE);
  alignas(64) float out[ROWS * TILE] = {};
  double least = INFINITY;
  for (int i = 0; i < 20; i++) {
    double seconds[PHASES] = {};
    Watch watch(seconds);
    for (int64_t j = 0; j < times; j++) multiply<ROWS, true>(a.data(), k, b.data(), k, out, TILE, Ahead<0>{});
    // Else the result would be unused, and the compiler would drop the computation.
    asm volatile("" : : "r"(out) : "memory");
    watch.lap(REST);
    least = std::min(least, seconds[REST]);
  }
  return least;
}
#endif

extern "C" {

int64_t decoder_tile() { return TILE; }
int64_t decoder_width() { return WIDTH; }
int64_t decoder_phases() { return PHASES; }

// Whether bfloat16 is multiplied by bfloat16 instructions: if they exist, and if they take less time than widening to
// float. Some processors with these instructions compute twice as much with them as in floats, and some half as much.
int decoder_prefers_products() {
#if defined(__AVX512BF16__)
  return seconds_of<Bfloat16>() < seconds_of<float>();
#else
  return 0;
#endif
}

// Returns null if there is no memory.
void *decoder_allocate(int64_t bytes) { return large_pages(bytes); }

void decoder_free(void *memory) { std::free(memory); }

int decoder_can_squeeze() { return CAN_SQUEEZE; }

// The most bytes that a matrix takes, a multiple of 64.
int64_t decoder_packed_bytes(int64_t n, int64_t k, Stored stored) {
  const int64_t tiles = (n + TILE - 1) / TILE;
  int64_t bytes = tiles * tile_bytes(stored, k);
#if CAN_SQUEEZE
  if (is_squeezed(stored)) bytes += squeezed_begin(tiles) + tiles * squeezed_head(k * TILE / GROUP);
#endif
  return (bytes + 63) / 64 * 64;
}

// Packs a matrix [n][k] of floats or bfloat16 for multiplications. Returns how many bytes the packed matrix takes, or 0
// if the matrix cannot be stored as `stored`.
int64_t decoder_pack(void *to, const void *from, int64_t n, int64_t k, Stored stored) {
  if (stored == FLOATS) pack((float *)to, (const float *)from, n, k);
  if (stored == BF16) pack((Bfloat16 *)to, (const Bfloat16 *)from, n, k);
  bool can = true;
  with_code(stored, [&]<int BITS, bool ROUNDED>() {
    can = encode<ROUNDED>((Coded<BITS> *)to, (const std::conditional_t<ROUNDED, Bfloat16, float> *)from, n, k);
  });
  if (!can) return 0;
#if CAN_SQUEEZE
  if (stored == SQUEEZED_2) return squeeze_matrix<2>(to, (const Bfloat16 *)from, n, k);
  if (stored == SQUEEZED_3) return squeeze_matrix<3>(to, (const float *)from, n, k);
  if (stored == SQUEEZED_4) return squeeze_matrix<4>(to, (const float *)from, n, k);
#endif
  return decoder_packed_bytes(n, k, stored);
}

// Packs a matrix [n][k] of a GGUF file's blocks as codes, of floats or of weights that are rounded to bfloat16. Returns
// the same as decoder_pack.
int64_t decoder_pack_blocks(void *to, const void *from, int64_t n, int64_t k, BlockKind kind, Stored stored) {
  bool can = false;
  if (kind == Q4_0) can = lay_out<Q4_0>((Coded<4> *)to, (const Block<Q4_0> *)from, n, k);
  if (kind == Q4_1) can = lay_out<Q4_1>((Coded<4> *)to, (const Block<Q4_1> *)from, n, k);
  if (kind == Q8_0) can = lay_out<Q8_0>((Coded<8> *)to, (const Block<Q8_0> *)from, n, k);
  return can ? decoder_packed_bytes(n, k, stored) : 0;
}

// Returns an adapter with its own copy of the matrices, MATRICES for each layer, in floats or rounded to bfloat16.
// Returns null if there is no memory for the copy.
std::shared_ptr<const Adapter> *decoder_adapter(const AdapterMatrix *matrices, int64_t count, int halves) {
  try {
    return new std::shared_ptr<const Adapter>(std::make_shared<const Adapter>(matrices, count, halves));
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

// Steps that use the adapter may still run.
void decoder_drop_adapter(std::shared_ptr<const Adapter> *adapter) { delete adapter; }

PhasePool *decoder_team(const Model *model, int size) {
  int64_t most = model->head.tiles();
  for (int64_t i = 0; i < model->layers; i++) {
    const Layer &layer = model->layer[i];
    for (const Linear *linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      most = std::max(most, linear->tiles());
  }
  return new PhasePool(size, most);
}

void decoder_disband(PhasePool *team) { delete team; }

// Runs a step that multiplies in floats or, for a bfloat16 model with `products`, by instructions that take two
// bfloat16 numbers at a time.
void decoder_step(const Model *model, const Batch *batch, float *logits, PhasePool *team, double *seconds,
                  int products) {
  auto run = [&](auto step) { team->run(std::make_shared<std::function<void()>>([step] { step->work(); })); };
  auto make = [&]<class T>() { run(std::make_shared<Step<T>>(*model, *batch, logits, *team, seconds)); };
#if defined(__AVX512BF16__)
  if (products) return make.template operator()<Bfloat16>();
#endif
  make.template operator()<float>();
}
}
