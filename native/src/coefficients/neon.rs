//! Unpacking of coefficients with NEON.

use std::arch::aarch64::*;

use super::*;
use crate::idct::neon::{add_products, idct_rows, load, sum};
use crate::kernels::Neon;

/// Move the first bytes at an offset to the bits of a mask, in their order; the others are 0.
#[inline]
#[target_feature(enable = "neon")]
fn expand(window: &Window, at: usize, mask: u8) -> uint8x8_t {
    let bytes: &[u8; 8] = window[at..].first_chunk().expect("8 bytes");
    // SAFETY: the array has 8 bytes.
    let bytes = unsafe { vld1_u8(bytes.as_ptr()) };
    // The table gives 0 for places behind its end, as 255.
    vtbl1_u8(bytes, vcreate_u8(SPREAD[usize::from(mask)]))
}

/// As `write_packed_portable`.
#[inline]
#[target_feature(enable = "neon")]
pub fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
    if window[0] == 0 {
        let mut block = Block::default();
        block.0[0] = dc(window);
        return write_block::<Neon>(&mut block, steps, samples, stride);
    }
    let mask = vget_lane_u64::<0>(vreinterpret_u64_u8(expand(window, BLOCK_PREFIX, window[0])));
    if mask & 1 == 1 {
        return write_block::<Neon>(&mut unpack(window), steps, samples, stride);
    }
    let rows = mask.to_le_bytes();
    let mut at = BLOCK_PREFIX + window[0].count_ones() as usize;
    let mut sums = [vdupq_n_s32(0); 2];
    let dequantised = std::array::from_fn(|row| {
        let mut values = vmovl_s8(vreinterpret_s8_u8(expand(window, at, rows[row])));
        at += rows[row].count_ones() as usize;
        if row == 0 {
            values = vsetq_lane_s16::<0>(dc(window), values);
        }
        let steps = load(&steps.0[8 * row..]);
        sums = add_products(sums, values, steps);
        vmulq_s16(values, steps)
    });
    if sum(sums) > SAFE_SUM {
        return write_block::<Neon>(&mut unpack(window), steps, samples, stride);
    }
    idct_rows(dequantised, samples, stride);
    Ok(())
}
