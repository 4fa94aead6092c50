//! The inverse DCT with AVX2.

use std::arch::x86_64::*;

use super::*;

/// As `dequantise_portable`.
#[inline]
#[target_feature(enable = "avx2")]
pub fn dequantise(block: &mut Block, steps: &Block) -> u32 {
    let mut sums = _mm256_setzero_si256();
    for (values, steps) in block.0.chunks_exact_mut(16).zip(steps.0.chunks_exact(16)) {
        // SAFETY: the slices have 32 bytes, and loads and stores need no alignment.
        unsafe {
            let value = _mm256_loadu_si256(values.as_ptr().cast());
            let step = _mm256_loadu_si256(steps.as_ptr().cast());
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_abs_epi16(value), step));
            _mm256_storeu_si256(values.as_mut_ptr().cast(), _mm256_mullo_epi16(value, step));
        }
    }
    let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
    (_mm_cvtsi128_si32(sums) as u32).wrapping_add(_mm_extract_epi32::<1>(sums) as u32)
}

/// As `idct_portable`.
#[inline]
#[target_feature(enable = "avx2")]
pub fn idct(block: &Block, samples: &mut [u8], stride: usize) {
    let rows: [__m128i; 8] = std::array::from_fn(|row| {
        let values: &[i16; 8] = block.0[8 * row..8 * row + 8].first_chunk().expect("8 values");
        // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
        unsafe { _mm_loadu_si128(values.as_ptr().cast()) }
    });
    idct_rows(rows, samples, stride);
}

/// As `idct` for the rows of a block.
#[inline]
#[target_feature(enable = "avx2")]
pub fn idct_rows(rows: [__m128i; 8], samples: &mut [u8], stride: usize) {
    let columns = transpose(pass::<11>(rows));
    let rows = transpose(pass::<18>(columns));
    let center = _mm_set1_epi8(-128);
    for pair in 0..4 {
        // Saturated as signed bytes around 0, then shifted to 0 to 255.
        let two = _mm_add_epi8(_mm_packs_epi16(rows[2 * pair], rows[2 * pair + 1]), center);
        let (upper, lower) = (_mm_cvtsi128_si64(two), _mm_extract_epi64(two, 1));
        let at = 2 * pair * stride;
        samples[at..at + 8].copy_from_slice(&upper.to_le_bytes());
        samples[at + stride..at + stride + 8].copy_from_slice(&lower.to_le_bytes());
    }
}

/// Pairs of the words of two registers.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs(a: __m128i, b: __m128i) -> __m256i {
    _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b))
}

/// Factors of the words of each pair.
#[inline]
#[target_feature(enable = "avx2")]
fn factors(a: i32, b: i32) -> __m256i {
    _mm256_set1_epi32((a & 0xFFFF) | b << 16)
}

/// One-dimensional transform of 8 columns, divided by 2^SHIFT.
#[inline]
#[target_feature(enable = "avx2")]
fn pass<const SHIFT: i32>(input: [__m128i; 8]) -> [__m128i; 8] {
    let p26 = pairs(input[2], input[6]);
    let tmp3 = _mm256_madd_epi16(p26, factors(F_0_541 + F_0_765, F_0_541));
    let tmp2 = _mm256_madd_epi16(p26, factors(F_0_541, F_0_541 - F_1_847));
    let even = _mm256_slli_epi32(_mm256_cvtepi16_epi32(_mm_add_epi16(input[0], input[4])), 13);
    let odd = _mm256_slli_epi32(_mm256_cvtepi16_epi32(_mm_sub_epi16(input[0], input[4])), 13);
    let round = _mm256_set1_epi32(1 << (SHIFT - 1));
    let (even, odd) = (_mm256_add_epi32(even, round), _mm256_add_epi32(odd, round));
    let (tmp10, tmp13) = (_mm256_add_epi32(even, tmp3), _mm256_sub_epi32(even, tmp3));
    let (tmp11, tmp12) = (_mm256_add_epi32(odd, tmp2), _mm256_sub_epi32(odd, tmp2));

    let p34 = pairs(_mm_add_epi16(input[7], input[3]), _mm_add_epi16(input[5], input[1]));
    let z3 = _mm256_madd_epi16(p34, factors(F_1_175 - F_1_961, F_1_175));
    let z4 = _mm256_madd_epi16(p34, factors(F_1_175, F_1_175 - F_0_390));
    let p71 = pairs(input[7], input[1]);
    let p53 = pairs(input[5], input[3]);
    let tmp0 = _mm256_add_epi32(_mm256_madd_epi16(p71, factors(F_0_298 - F_0_899, -F_0_899)), z3);
    let tmp3 = _mm256_add_epi32(_mm256_madd_epi16(p71, factors(-F_0_899, F_1_501 - F_0_899)), z4);
    let tmp1 = _mm256_add_epi32(_mm256_madd_epi16(p53, factors(F_2_053 - F_2_562, -F_2_562)), z4);
    let tmp2 = _mm256_add_epi32(_mm256_madd_epi16(p53, factors(-F_2_562, F_3_072 - F_2_562)), z3);

    let (r0, r1) = narrow::<SHIFT>(_mm256_add_epi32(tmp10, tmp3), _mm256_add_epi32(tmp11, tmp2));
    let (r2, r3) = narrow::<SHIFT>(_mm256_add_epi32(tmp12, tmp1), _mm256_add_epi32(tmp13, tmp0));
    let (r4, r5) = narrow::<SHIFT>(_mm256_sub_epi32(tmp13, tmp0), _mm256_sub_epi32(tmp12, tmp1));
    let (r6, r7) = narrow::<SHIFT>(_mm256_sub_epi32(tmp11, tmp2), _mm256_sub_epi32(tmp10, tmp3));
    [r0, r1, r2, r3, r4, r5, r6, r7]
}

/// Divide by 2^SHIFT and narrow to words.
#[inline]
#[target_feature(enable = "avx2")]
fn narrow<const SHIFT: i32>(a: __m256i, b: __m256i) -> (__m128i, __m128i) {
    let both = _mm256_packs_epi32(_mm256_srai_epi32::<SHIFT>(a), _mm256_srai_epi32::<SHIFT>(b));
    let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(both);
    (_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both))
}

#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: [__m128i; 8]) -> [__m128i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    let (ab0, ab1) = (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
    let (cd0, cd1) = (_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d));
    let (ef0, ef1) = (_mm_unpacklo_epi16(e, f), _mm_unpackhi_epi16(e, f));
    let (gh0, gh1) = (_mm_unpacklo_epi16(g, h), _mm_unpackhi_epi16(g, h));
    let (q0, q1) = (_mm_unpacklo_epi32(ab0, cd0), _mm_unpackhi_epi32(ab0, cd0));
    let (q2, q3) = (_mm_unpacklo_epi32(ab1, cd1), _mm_unpackhi_epi32(ab1, cd1));
    let (q4, q5) = (_mm_unpacklo_epi32(ef0, gh0), _mm_unpackhi_epi32(ef0, gh0));
    let (q6, q7) = (_mm_unpacklo_epi32(ef1, gh1), _mm_unpackhi_epi32(ef1, gh1));
    [
        _mm_unpacklo_epi64(q0, q4),
        _mm_unpackhi_epi64(q0, q4),
        _mm_unpacklo_epi64(q1, q5),
        _mm_unpackhi_epi64(q1, q5),
        _mm_unpacklo_epi64(q2, q6),
        _mm_unpackhi_epi64(q2, q6),
        _mm_unpacklo_epi64(q3, q7),
        _mm_unpackhi_epi64(q3, q7),
    ]
}
