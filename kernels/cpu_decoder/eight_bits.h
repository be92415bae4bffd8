// Caches of 8 bits, which hold what kernels/quantization.py says: a number over its head's scale, to nearest, ties to
// even, and at most the type's largest.
#pragma once

#include "vector.h"

// Whole numbers, and float8_e4m3fn. Types of their own, so that no function takes one for another.
enum class Int8 : int8_t {};
enum class Float8 : uint8_t {};

// So many times what `load` returns is what was stored. It goes where the scale goes: a factor of each number would cost
// an instruction more.
template <class C>
constexpr float LOADED_UNIT = std::is_same_v<C, Float8> ? 256.0f : 1.0f;

typedef int8_t ByteVec __attribute__((vector_size(WIDTH), aligned(1), may_alias));

static inline Vec load(const Int8 *from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const ByteVec *)from, IntVec), Vec);
#endif
}

// Exponents have a bias of 7 here, and another one where the same bits are read as a wider type, which the unit and a
// power of 2 make good.
static inline Vec load(const Float8 *from) {
#if defined(__AVX512F__)
  // As a half, whose bias is 15. The sign was extended to two bits, of which the upper one is in its place.
  __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)));
#else
  IntVec bits = __builtin_convertvector(*(const ByteVec *)from, IntVec);
  return (Vec)(((bits & 0x7f) << 20) | (bits & INT32_MIN)) * (0x1p120f / LOADED_UNIT<Float8>);
#endif
}

// What was computed of numbers as they were loaded, by their `scales`, of which it begins at `at`; null has none.
template <class C>
static inline Vec scaled(Vec value, const float *scales, int64_t at) {
  return scales ? value * load(scales + at) * LOADED_UNIT<C> : value;
}

static inline Vec within(Vec value, float least, float most) {
  value = value < least ? Vec{} + least : value;
  return value > most ? Vec{} + most : value;
}

static inline void store(Int8 *to, Vec value) {
  value = within(value, -128, 127);
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)value)));
#else
  // From 2^23 on floats are whole numbers, so that the sum rounds; 1.5 times that keeps negative ones there.
  value = (value + 12582912.0f) - 12582912.0f;
  *(ByteVec *)to = __builtin_convertvector(__builtin_convertvector(value, IntVec), ByteVec);
#endif
}

static inline void store(Float8 *to, Vec value) {
  const IntVec bits = (IntVec)within(value, -448, 448), magnitude = bits & INT32_MAX;
  const Vec size = (Vec)magnitude;
  // The upper 3 bits of the fraction stay.
  const IntVec normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  // Below the least exponent steps are 2^-9, as those of floats from 2^14 on, so that the sum rounds.
  const IntVec small = (IntVec)(size + 0x1p14f) - (IntVec)(Vec{} + 0x1p14f);
  IntVec code = size < 0x1p-6f ? small : normal;
  code = size == size ? code : IntVec{} + 0x7f;
  *(ByteVec *)to = __builtin_convertvector(code | ((bits >> 24) & 0x80), ByteVec);
}
