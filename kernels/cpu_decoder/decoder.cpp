// What others call of the decoder.

#include <cstdlib>
#include <sys/mman.h>

#include "step.h"

#if defined(__AVX512BF16__)
// The least that a few rows times a tile in bfloat16 took of several tries.
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

// Whether bfloat16 is multiplied by instructions for it: where there are some, and they take less time than widening
// it does. Of processors that have them, some do twice as much with them as in floats, and some half as much.
int decoder_prefers_products() {
#if defined(__AVX512BF16__)
  return seconds_of<Bfloat16>() < seconds_of<float>();
#else
  return 0;
#endif
}

// Memory in large pages where the system gives them, as a walk through all weights meets each page once; null when
// there is none.
void *decoder_allocate(int64_t bytes) {
  constexpr int64_t page = 2 << 20;
  bytes = (bytes + page - 1) / page * page;
  void *memory = std::aligned_alloc(page, bytes);
#if defined(MADV_HUGEPAGE)
  if (memory) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

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

// Lays a matrix [n][k] out for multiplications: of floats, or in bfloat16. Returns how many bytes that takes, 0 when it
// cannot be stored so.
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

// A step over caches in floats, or in bfloat16; what comes from those is multiplied in floats, too, unless `products`
// are wanted, which take two numbers in bfloat16 at a time.
void decoder_step(const Model *model, const Batch *batch, float *logits, PhasePool *team, double *seconds, int is_bfloat16,
                  int products) {
  auto run = [&](auto step) { team->run(std::make_shared<std::function<void()>>([step] { step->work(); })); };
  auto make = [&]<class T, class C>() { run(std::make_shared<Step<T, C>>(*model, *batch, logits, *team, seconds)); };
#if defined(__AVX512BF16__)
  if (is_bfloat16 && products) return make.template operator()<Bfloat16, Bfloat16>();
#endif
  if (is_bfloat16) return make.template operator()<float, Bfloat16>();
  make.template operator()<float, float>();
}
}
