//! Unpacking of coefficients with AVX2.

use std::arch::x86_64::*;

use super::*;
use crate::idct::avx2::idct_rows;
use crate::kernels::Avx2;

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub fn decode_row(packed: &Packed, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
    packed.decode_row::<Avx2>(region, row, planes)
}

/// Move the first bytes at an offset to the bits of a mask, in their order; the others are 0.
#[inline]
#[target_feature(enable = "avx2")]
fn expand(window: &Window, at: usize, mask: u8) -> __m128i {
    let bytes = i64::from_le_bytes(*window[at..].first_chunk().expect("8 bytes"));
    _mm_shuffle_epi8(_mm_cvtsi64_si128(bytes), _mm_cvtsi64_si128(SPREAD[usize::from(mask)] as i64))
}

/// As `write_packed_portable`.
#[inline]
#[target_feature(enable = "avx2,popcnt")]
pub fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
    if window[0] == 0 {
        let mut block = Block::default();
        block.0[0] = dc(window);
        return write_block::<Avx2>(&mut block, steps, samples, stride);
    }
    let mask = _mm_cvtsi128_si64(expand(window, BLOCK_PREFIX, window[0])) as u64;
    if mask & 1 == 1 {
        return write_block::<Avx2>(&mut unpack(window), steps, samples, stride);
    }
    let rows = mask.to_le_bytes();
    let mut at = BLOCK_PREFIX + window[0].count_ones() as usize;
    let mut sums = _mm_setzero_si128();
    let dequantised = std::array::from_fn(|row| {
        let mut values = _mm_cvtepi8_epi16(expand(window, at, rows[row]));
        at += rows[row].count_ones() as usize;
        if row == 0 {
            values = _mm_insert_epi16::<0>(values, i32::from(dc(window)));
        }
        // SAFETY: the row has 16 bytes, and the load needs no alignment.
        let steps = unsafe { _mm_loadu_si128(steps.0[8 * row..8 * row + 8].as_ptr().cast()) };
        sums = _mm_add_epi32(sums, _mm_madd_epi16(_mm_abs_epi16(values), steps));
        _mm_mullo_epi16(values, steps)
    });
    let sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
    let sum = (_mm_cvtsi128_si32(sums) as u32).wrapping_add(_mm_extract_epi32::<1>(sums) as u32);
    if sum > SAFE_SUM {
        return write_block::<Avx2>(&mut unpack(window), steps, samples, stride);
    }
    idct_rows(dequantised, samples, stride);
    Ok(())
}
