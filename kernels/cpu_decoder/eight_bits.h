// 8-bit caches, as kernels/quantization.py defines them: each element is divided by its scale, rounded to nearest (ties
// to even) and clamped to the type's range.
#pragma once

#include "vector.h"

// Integers, and float8_e4m3fn. Distinct types, so that no function confuses one with another.
enum class Int8 : int8_t {};
enum class Float8 : uint8_t {};

// The stored value is this factor times what `load` returns. The factor is applied together with the scale, because
// applying it to each element would cost one more instruction.
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

// Exponents have a bias of 7 here, but another bias where the same bits are read as a wider type. LOADED_UNIT and a
// power of 2 make up for the difference.
static inline Vec load(const Float8 *from) {
#if defined(__AVX512F__)
  // Reads the bits as a half, whose bias is 15. Sign extension made two sign bits; the upper one is in place, and the
  // lower one is cleared.
  __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)));
#else
  IntVec bits = __builtin_convertvector(*(const ByteVec *)from, IntVec);
  return (Vec)(((bits & 0x7f) << 20) | (bits & INT32_MIN)) * (0x1p120f / LOADED_UNIT<Float8>);
#endif
}

// Multiplies a value that was computed from loaded elements with their scales, from `scales` + `at` on, and
// LOADED_UNIT. If `scales` is null, the elements have no scales.
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
  // From 2^23 on, all floats are integers, so the addition rounds; 1.5 * 2^23 keeps the sums of negative values there.
  value = (value + 12582912.0f) - 12582912.0f;
  *(ByteVec *)to = __builtin_convertvector(__builtin_convertvector(value, IntVec), ByteVec);
#endif
}

static inline void store(Float8 *to, Vec value) {
  const IntVec bits = (IntVec)within(value, -448, 448), magnitude = bits & INT32_MAX;
  const Vec size = (Vec)magnitude;
  // Rounds to the upper 3 bits of the fraction.
  const IntVec normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  // Below the least exponent, the steps are 2^-9, like the steps of floats from 2^14 on, so the addition rounds.
  const IntVec small = (IntVec)(size + 0x1p14f) - (IntVec)(Vec{} + 0x1p14f);
  IntVec code = size < 0x1p-6f ? small : normal;
  code = size == size ? code : IntVec{} + 0x7f;
  *(ByteVec *)to = __builtin_convertvector(code | ((bits >> 24) & 0x80), ByteVec);
}
