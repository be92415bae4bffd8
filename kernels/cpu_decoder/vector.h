// SIMD vectors of floats for this machine, and the few functions on them that compilers do not provide.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif

// A tile is TILE columns of a matrix.
constexpr int VECTORS = 2;
constexpr int TILE = VECTORS * WIDTH;

typedef float Vec __attribute__((vector_size(WIDTH * 4), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4), aligned(4)));
typedef uint32_t UnsignedVec __attribute__((vector_size(WIDTH * 4), aligned(4)));
// Also serves to view pairs of bfloat16, one pair per lane.
typedef int32_t PairVec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(WIDTH * 2), aligned(2)));

// The upper half of a float. A distinct type, so that no function confuses a bfloat16 with a float.
enum class Bfloat16 : uint16_t {};

static inline Vec load(const float *from) { return *(const Vec *)from; }

static inline Vec load(const Bfloat16 *from) {
#if defined(__AVX512F__)
  // A single instruction; compilers emit five for the plain expression.
  return (Vec)((IntVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#else
  return (Vec)(__builtin_convertvector(*(const HalfVec *)from, IntVec) << 16);
#endif
}

static inline void store(float *to, Vec value) { *(Vec *)to = value; }

static inline void store(Bfloat16 *to, Vec value) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
  // Rounds to nearest, ties to even. The addition would carry out of the fraction of some NaNs.
  IntVec bits = (IntVec)value;
  bits = value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : IntVec{} + 0x7fc0;
  *(HalfVec *)to = __builtin_convertvector(bits, HalfVec);
#endif
}

// Allocates memory aligned to cache lines, because a vector that spans two lines takes as long as two vectors.
template <class X>
struct LineAllocator {
  using value_type = X;
  X *allocate(size_t count) { return (X *)::operator new(count * sizeof(X), std::align_val_t(64)); }
  void deallocate(X *from, size_t) { ::operator delete(from, std::align_val_t(64)); }
  bool operator==(const LineAllocator &) const { return true; }
};

template <class X>
using Lines = std::vector<X, LineAllocator<X>>;

static inline float widen(float value) { return value; }

static inline float widen(Bfloat16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

static inline float sum(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float total = 0;
  for (int i = 0; i < WIDTH; i++) total += value[i];
  return total;
#endif
}

static inline float largest(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float most = value[0];
  for (int i = 1; i < WIDTH; i++) most = value[i] > most ? value[i] : most;
  return most;
#endif
}

// e^x within 2 units in the last place; 0 for x below -87, including minus infinity.
// Uses Cody and Waite's range reduction, then a polynomial of degree 6 (Cephes, expf).
static inline Vec exponential(Vec x) {
  const Vec least = Vec{} - 87.0f;
#if defined(__AVX512F__)
  __mmask16 tiny = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_LT_OQ);
  Vec n = (Vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  IntVec tiny = x < least;
  x = x < least ? least : x;
  x = x > 88.0f ? Vec{} + 88.0f : x;
  // Adding and subtracting 1.5 * 2^23 rounds to an integer.
  Vec n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
#endif
  x -= n * 0.693359375f;
  x -= n * -2.12194440e-4f;
  Vec y = x * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(~tiny, (__m512)y, (__m512)n);
#else
  Vec scale = (Vec)((__builtin_convertvector(n, IntVec) + 127) << 23);
  y = y * scale;
  return tiny ? Vec{} : y;
#endif
}
