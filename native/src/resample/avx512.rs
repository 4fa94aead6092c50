//! Resampling with AVX-512.

use std::arch::x86_64::*;

use super::*;

/// The words of two weights, in every pair of words.
#[inline]
#[target_feature(enable = "avx512f")]
fn pair(weights: &[i16], at: usize) -> __m512i {
    let [first, second] = *weights[at..].first_chunk().expect("two weights");
    _mm512_set1_epi32((first as u16 as i32) | i32::from(second) << 16)
}

/// Sums of products with the upper halves of the weights and with the lower ones, which began at ROUND, cut to 8 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn finish(high: __m512i, low: __m512i) -> __m128i {
    let sum =
        _mm512_srai_epi32::<{ PRECISION as u32 }>(_mm512_add_epi32(_mm512_slli_epi32::<{ LOW as u32 }>(high), low));
    _mm512_cvtusepi32_epi8(_mm512_max_epi32(sum, _mm512_setzero_si512()))
}

/// As `horizontal_portable`, for a pixel of four rows at a time: a row in each quarter of a register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
    // SAFETY: the constants have 16 bytes.
    let [first_two, second_two] =
        PIXEL_PAIRS.map(|mask| _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(mask.as_ptr().cast()) }));
    let count = axis.outputs();
    for slot in 0..count {
        let at = if mirror { count - 1 - slot } else { slot };
        let (first, taps) = axis.bounds[at];
        let taps = (taps as usize).next_multiple_of(GROUP);
        let highs = axis.high[at * axis.taps..][..taps].chunks_exact(GROUP);
        let lows = axis.low[at * axis.taps..][..taps].chunks_exact(GROUP);
        let (mut high, mut low) = (_mm512_setzero_si512(), _mm512_set1_epi32(ROUND));
        for (group, (highs, lows)) in highs.zip(lows).enumerate() {
            let from = 4 * (first as usize + GROUP * group);
            let [row0, row1, row2, row3] = rows.map(|row| {
                let bytes: &[u8; 16] = row[from..].first_chunk().expect("16 bytes");
                // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
                unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
            });
            let four = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(row0), row1);
            let four = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(four, row2), row3);
            let words = _mm512_shuffle_epi8(four, first_two);
            high = _mm512_dpwssd_epi32(high, words, pair(highs, 0));
            low = _mm512_dpwssd_epi32(low, words, pair(lows, 0));
            let words = _mm512_shuffle_epi8(four, second_two);
            high = _mm512_dpwssd_epi32(high, words, pair(highs, 2));
            low = _mm512_dpwssd_epi32(low, words, pair(lows, 2));
        }
        let bytes = finish(high, low);
        let (rows01, rows23) = (_mm_cvtsi128_si64(bytes) as u64, _mm_extract_epi64::<1>(bytes) as u64);
        // The fourth byte belongs to the next pixel, which is written later, or to the slack.
        let pixels = [rows01 as u32, (rows01 >> 32) as u32, rows23 as u32, (rows23 >> 32) as u32];
        for (row, pixel) in pixels.into_iter().enumerate() {
            outputs[row][3 * slot..3 * slot + 4].copy_from_slice(&pixel.to_le_bytes());
        }
    }
}

/// As `vertical_portable`, 32 bytes at a time. Rows extend SLACK bytes behind their end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
    const PART: usize = 32;
    let load = |at: usize| {
        let bytes: &[u8; PART] = rows[at..].first_chunk().expect("32 bytes");
        // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    };
    let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
    let highs = &axis.high[at * axis.taps..][..axis.taps];
    let lows = &axis.low[at * axis.taps..][..axis.taps];
    for (part, out) in out.chunks_mut(PART).enumerate() {
        // Of bytes 0 to 7 and 16 to 23, and of the others.
        let (zero, round) = (_mm512_setzero_si512(), _mm512_set1_epi32(ROUND));
        let (mut high0, mut high1, mut low0, mut low1) = (zero, zero, round, round);
        for tap in (0..taps).step_by(2) {
            let begin = (first + tap) * stride + PART * part;
            let a = load(begin);
            let b = if tap + 1 < taps { load(begin + stride) } else { a };
            let (high, low) = (pair(highs, tap), pair(lows, tap));
            let words = _mm512_cvtepu8_epi16(_mm256_unpacklo_epi8(a, b));
            high0 = _mm512_dpwssd_epi32(high0, words, high);
            low0 = _mm512_dpwssd_epi32(low0, words, low);
            let words = _mm512_cvtepu8_epi16(_mm256_unpackhi_epi8(a, b));
            high1 = _mm512_dpwssd_epi32(high1, words, high);
            low1 = _mm512_dpwssd_epi32(low1, words, low);
        }
        let (even, odd) = (finish(high0, low0), finish(high1, low1));
        let bytes = _mm256_set_m128i(_mm_unpackhi_epi64(even, odd), _mm_unpacklo_epi64(even, odd));
        let mut all = [0_u8; PART];
        // SAFETY: the array has 32 bytes.
        unsafe { _mm256_storeu_si256(all.as_mut_ptr().cast(), bytes) };
        match out.first_chunk_mut() {
            Some(out) => *out = all,
            None => out.copy_from_slice(&all[..out.len()]),
        }
    }
}
