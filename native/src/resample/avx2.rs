//! Resampling with AVX2.

use std::arch::x86_64::*;

use super::*;

/// Load 16 bytes at an offset.
#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], at: usize) -> __m128i {
    let bytes: &[u8; 16] = bytes[at..].first_chunk().expect("16 bytes");
    // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// The words of two weights, in every pair of words.
#[inline]
#[target_feature(enable = "avx2")]
fn pair(weights: &[i16], at: usize) -> __m256i {
    let [first, second] = *weights[at..].first_chunk().expect("two weights");
    _mm256_set1_epi32((first as u16 as i32) | i32::from(second) << 16)
}

/// Sums of products with the upper halves of the weights and with the lower ones, rounded and cut to 8 bits, in words.
#[inline]
#[target_feature(enable = "avx2")]
fn finish(high: __m256i, low: __m256i) -> __m256i {
    let sum = _mm256_add_epi32(_mm256_slli_epi32::<LOW>(high), low);
    _mm256_srai_epi32::<PRECISION>(_mm256_add_epi32(sum, _mm256_set1_epi32(ROUND)))
}

/// As `horizontal_portable`, for a pixel of four rows at a time.
#[inline]
#[target_feature(enable = "avx2")]
pub fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
    // SAFETY: the constants have 16 bytes.
    let [first_two, second_two] =
        PIXEL_PAIRS.map(|mask| _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) }));
    let count = axis.outputs();
    for slot in 0..count {
        let at = if mirror { count - 1 - slot } else { slot };
        let (first, taps) = axis.bounds[at];
        let taps = (taps as usize).next_multiple_of(GROUP);
        let highs = axis.high[at * axis.taps..][..taps].chunks_exact(GROUP);
        let lows = axis.low[at * axis.taps..][..taps].chunks_exact(GROUP);
        // Of rows 0 and 1, and of rows 2 and 3.
        let (mut high, mut low) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
        for (group, (highs, lows)) in highs.zip(lows).enumerate() {
            let from = 4 * (first as usize + GROUP * group);
            let [high0, high2, low0, low2] = [pair(highs, 0), pair(highs, 2), pair(lows, 0), pair(lows, 2)];
            for half in 0..2 {
                let four = _mm256_set_m128i(load(rows[2 * half + 1], from), load(rows[2 * half], from));
                let words = _mm256_shuffle_epi8(four, first_two);
                high[half] = _mm256_add_epi32(high[half], _mm256_madd_epi16(words, high0));
                low[half] = _mm256_add_epi32(low[half], _mm256_madd_epi16(words, low0));
                let words = _mm256_shuffle_epi8(four, second_two);
                high[half] = _mm256_add_epi32(high[half], _mm256_madd_epi16(words, high2));
                low[half] = _mm256_add_epi32(low[half], _mm256_madd_epi16(words, low2));
            }
        }
        let words = _mm256_packs_epi32(finish(high[0], low[0]), finish(high[1], low[1]));
        let bytes = _mm256_packus_epi16(words, words);
        let rows02 = _mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)) as u64;
        let rows13 = _mm_cvtsi128_si64(_mm256_extracti128_si256::<1>(bytes)) as u64;
        // The fourth byte belongs to the next pixel, which is written later, or to the slack.
        let pixels = [rows02 as u32, rows13 as u32, (rows02 >> 32) as u32, (rows13 >> 32) as u32];
        for (row, pixel) in pixels.into_iter().enumerate() {
            outputs[row][3 * slot..3 * slot + 4].copy_from_slice(&pixel.to_le_bytes());
        }
    }
}

/// As `vertical_portable`, 16 bytes at a time. Rows extend SLACK bytes behind their end.
#[inline]
#[target_feature(enable = "avx2")]
pub fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
    let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
    let highs = &axis.high[at * axis.taps..][..axis.taps];
    let lows = &axis.low[at * axis.taps..][..axis.taps];
    for part in 0..out.len().div_ceil(16) {
        let zero = _mm256_setzero_si256();
        let (mut high0, mut high1, mut low0, mut low1) = (zero, zero, zero, zero);
        for tap in (0..taps).step_by(2) {
            let begin = (first + tap) * stride + 16 * part;
            let a = load(rows, begin);
            let b = if tap + 1 < taps { load(rows, begin + stride) } else { a };
            let (high, low) = (pair(highs, tap), pair(lows, tap));
            let words = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
            high0 = _mm256_add_epi32(high0, _mm256_madd_epi16(words, high));
            low0 = _mm256_add_epi32(low0, _mm256_madd_epi16(words, low));
            let words = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
            high1 = _mm256_add_epi32(high1, _mm256_madd_epi16(words, high));
            low1 = _mm256_add_epi32(low1, _mm256_madd_epi16(words, low));
        }
        let words = _mm256_packs_epi32(finish(high0, low0), finish(high1, low1));
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
        let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        let mut all = [0_u8; 16];
        // SAFETY: the array has 16 bytes.
        unsafe { _mm_storeu_si128(all.as_mut_ptr().cast(), bytes) };
        let out = &mut out[16 * part..];
        match out.first_chunk_mut() {
            Some(out) => *out = all,
            None => out.copy_from_slice(&all[..out.len()]),
        }
    }
}
