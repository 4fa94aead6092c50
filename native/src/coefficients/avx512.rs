//! Unpacking of coefficients with AVX-512.

use std::arch::x86_64::*;

use super::*;
use crate::idct::avx512::idct_halves;
use crate::kernels::Avx512;

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vnni")]
pub fn decode_row(packed: &Packed, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
    packed.decode_row::<Avx512>(region, row, planes)
}

/// As `write_packed_portable`.
#[inline]
#[target_feature(enable = "avx2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vnni")]
pub fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
    if window[0] == 0 {
        let mut block = Block::default();
        block.0[0] = dc(window);
        return write_block::<Avx512>(&mut block, steps, samples, stride);
    }
    let masks = i64::from_le_bytes(*window[BLOCK_PREFIX..].first_chunk().expect("8 bytes"));
    let mask = _mm_cvtsi128_si64(_mm_maskz_expand_epi8(u16::from(window[0]), _mm_cvtsi64_si128(masks))) as u64;
    if mask & 1 == 1 {
        return write_block::<Avx512>(&mut unpack(window), steps, samples, stride);
    }
    let at = BLOCK_PREFIX + window[0].count_ones() as usize;
    let bytes: &[u8; 64] = window[at..].first_chunk().expect("64 bytes");
    // SAFETY: the reference is to 64 readable bytes, and the load needs no alignment.
    let bytes = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    let bytes = _mm512_maskz_expand_epi8(mask, bytes);
    let upper = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes));
    let upper = _mm512_mask_set1_epi16(upper, 1, dc(window));
    let lower = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(bytes));
    // SAFETY: the block has 128 bytes, and the loads need no alignment.
    let [upper_steps, lower_steps] =
        [0, 1].map(|half| unsafe { _mm512_loadu_si512(steps.0.as_ptr().add(32 * half).cast()) });
    let sums = _mm512_madd_epi16(_mm512_abs_epi16(upper), upper_steps);
    let sums = _mm512_dpwssd_epi32(sums, _mm512_abs_epi16(lower), lower_steps);
    if _mm512_reduce_add_epi32(sums) as u32 > SAFE_SUM {
        return write_block::<Avx512>(&mut unpack(window), steps, samples, stride);
    }
    let (upper, lower) = (_mm512_mullo_epi16(upper, upper_steps), _mm512_mullo_epi16(lower, lower_steps));
    idct_halves(upper, lower, samples, stride);
    Ok(())
}
