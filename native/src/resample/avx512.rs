//! Resampling with AVX-512: products of bytes with the digits of the weights.

use std::arch::x86_64::*;

use super::*;

/// A digit of each of GROUP weights, for every sum.
#[inline]
#[target_feature(enable = "avx512f")]
fn broadcast(group: &[i8; 3 * GROUP], digit: usize) -> __m512i {
    let digits: &[i8; GROUP] = group[GROUP * digit..].first_chunk().expect("four digits");
    _mm512_set1_epi32(i32::from_le_bytes(digits.map(|digit| digit as u8)))
}

/// Sums of products with each digit of the weights, the last one first. The last one's begin at ROUND.
type Sums = [__m512i; 3];

#[inline]
#[target_feature(enable = "avx512f")]
fn begin() -> Sums {
    [_mm512_set1_epi32(ROUND), _mm512_setzero_si512(), _mm512_setzero_si512()]
}

/// Add the products of four bytes for each sum with the four weights of a group.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add(sums: &mut Sums, bytes: __m512i, group: &[i8; 3 * GROUP]) {
    for (digit, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_dpbusd_epi32(*sum, bytes, broadcast(group, digit));
    }
}

/// Return the sums, cut to 8 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn finish([last, middle, first]: Sums) -> __m128i {
    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(first), middle);
    let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(sum), last);
    let sum = _mm512_srai_epi32::<{ PRECISION as u32 }>(sum);
    _mm512_cvtusepi32_epi8(_mm512_max_epi32(sum, _mm512_setzero_si512()))
}

/// Byte shuffle that puts the four reds of four pixels side by side, and so on.
const CHANNELS: [i8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// As `horizontal_portable`, for a pixel of four rows at a time: a row in each quarter of a register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
    // SAFETY: the constant has 16 bytes.
    let channels = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(CHANNELS.as_ptr().cast()) });
    let count = axis.outputs();
    for slot in 0..count {
        let at = if mirror { count - 1 - slot } else { slot };
        let (first, taps) = axis.bounds[at];
        let groups = &axis.digits[at * axis.taps / GROUP..][..(taps as usize).div_ceil(GROUP)];
        let mut sums = begin();
        for (number, group) in groups.iter().enumerate() {
            let from = 4 * (first as usize + GROUP * number);
            let [row0, row1, row2, row3] = rows.map(|row| {
                let bytes: &[u8; 16] = row[from..].first_chunk().expect("16 bytes");
                // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
                unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
            });
            let four = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(row0), row1);
            let four = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(four, row2), row3);
            add(&mut sums, _mm512_shuffle_epi8(four, channels), group);
        }
        let bytes = finish(sums);
        let (rows01, rows23) = (_mm_cvtsi128_si64(bytes) as u64, _mm_extract_epi64::<1>(bytes) as u64);
        // The fourth byte belongs to the next pixel, which is written later, or to the slack.
        let pixels = [rows01 as u32, (rows01 >> 32) as u32, rows23 as u32, (rows23 >> 32) as u32];
        for (row, pixel) in pixels.into_iter().enumerate() {
            outputs[row][3 * slot..3 * slot + 4].copy_from_slice(&pixel.to_le_bytes());
        }
    }
}

/// As `vertical_portable`, 64 bytes at a time. Rows extend SLACK bytes behind their end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
    const PART: usize = 64;
    let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
    let groups = &axis.digits[at * axis.taps / GROUP..][..taps.div_ceil(GROUP)];
    for (part, out) in out.chunks_mut(PART).enumerate() {
        // Of bytes 0 to 3 of each 16, 4 to 7, 8 to 11, and 12 to 15.
        let mut sums = [begin(); 4];
        for (number, group) in groups.iter().enumerate() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|tap| {
                let row = first + (GROUP * number + tap).min(taps - 1); // taps behind the last have weights of 0
                let bytes: &[u8; PART] = rows[row * stride + PART * part..].first_chunk().expect("64 bytes");
                // SAFETY: the reference is to 64 readable bytes, and the load needs no alignment.
                unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
            });
            let (low01, high01) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
            let (low23, high23) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
            add(&mut sums[0], _mm512_unpacklo_epi16(low01, low23), group);
            add(&mut sums[1], _mm512_unpackhi_epi16(low01, low23), group);
            add(&mut sums[2], _mm512_unpacklo_epi16(high01, high23), group);
            add(&mut sums[3], _mm512_unpackhi_epi16(high01, high23), group);
        }
        let [q0, q1, q2, q3] = sums.map(|sums| finish(sums));
        // Each quarter has four bytes of every 16.
        let (low01, high01) = (_mm_unpacklo_epi32(q0, q1), _mm_unpackhi_epi32(q0, q1));
        let (low23, high23) = (_mm_unpacklo_epi32(q2, q3), _mm_unpackhi_epi32(q2, q3));
        let bytes = [
            _mm_unpacklo_epi64(low01, low23),
            _mm_unpackhi_epi64(low01, low23),
            _mm_unpacklo_epi64(high01, high23),
            _mm_unpackhi_epi64(high01, high23),
        ];
        let mut all = [0_u8; PART];
        for (part, bytes) in all.chunks_exact_mut(16).zip(bytes) {
            // SAFETY: the part has 16 bytes.
            unsafe { _mm_storeu_si128(part.as_mut_ptr().cast(), bytes) };
        }
        match out.first_chunk_mut() {
            Some(out) => *out = all,
            None => out.copy_from_slice(&all[..out.len()]),
        }
    }
}
