//! Resampling with NEON.
//!
//! A product of a byte and a weight has 32 bits, and NEON multiplies and adds four of them at a time.

use std::arch::aarch64::*;

use super::*;

/// Load 16 bytes at an offset.
#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[u8], at: usize) -> uint8x16_t {
    let bytes: &[u8; 16] = bytes[at..].first_chunk().expect("16 bytes");
    // SAFETY: the array has 16 bytes.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

/// Return 16 bytes in 32 bits each.
#[inline]
#[target_feature(enable = "neon")]
fn widen(bytes: uint8x16_t) -> [int32x4_t; 4] {
    let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
    [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
        .map(|four| vreinterpretq_s32_u32(four))
}

/// Return sums as bytes; they hold ROUND from the start.
#[inline]
#[target_feature(enable = "neon")]
fn finish(sums: [int32x4_t; 2]) -> uint8x8_t {
    let [low, high] = sums.map(|sum| vqmovn_s32(vshrq_n_s32::<PRECISION>(sum)));
    vqmovun_s16(vcombine_s16(low, high))
}

/// As `horizontal_portable`, for a pixel of four rows at a time.
#[inline]
#[target_feature(enable = "neon")]
pub fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
    let count = axis.outputs();
    for slot in 0..count {
        let at = if mirror { count - 1 - slot } else { slot };
        let (first, taps) = axis.bounds[at];
        let taps = (taps as usize).next_multiple_of(GROUP);
        let weights = axis.weights[at * axis.taps..][..taps].chunks_exact(GROUP);
        let mut sums = [vdupq_n_s32(ROUND); ROWS];
        for (group, weights) in weights.enumerate() {
            // SAFETY: the slice has 16 bytes.
            let weights = unsafe { vld1q_s32(weights.as_ptr()) };
            let from = 4 * (first as usize + GROUP * group);
            for (sum, row) in sums.iter_mut().zip(rows) {
                let [a, b, c, d] = widen(load(row, from));
                *sum = vmlaq_laneq_s32::<0>(*sum, a, weights);
                *sum = vmlaq_laneq_s32::<1>(*sum, b, weights);
                *sum = vmlaq_laneq_s32::<2>(*sum, c, weights);
                *sum = vmlaq_laneq_s32::<3>(*sum, d, weights);
            }
        }
        // The fourth byte belongs to the next pixel, which is written later, or to the slack.
        for half in 0..ROWS / 2 {
            let two = vreinterpret_u32_u8(finish([sums[2 * half], sums[2 * half + 1]]));
            let pixels = [vget_lane_u32::<0>(two), vget_lane_u32::<1>(two)];
            for (row, pixel) in pixels.into_iter().enumerate() {
                outputs[2 * half + row][3 * slot..3 * slot + 4].copy_from_slice(&pixel.to_le_bytes());
            }
        }
    }
}

/// As `vertical_portable`, 16 bytes at a time. Rows extend SLACK bytes behind their end.
#[inline]
#[target_feature(enable = "neon")]
pub fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
    let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
    let weights = &axis.weights[at * axis.taps..][..taps];
    for (part, out) in out.chunks_mut(16).enumerate() {
        let mut sums = [vdupq_n_s32(ROUND); 4];
        for (tap, &weight) in weights.iter().enumerate() {
            let values = widen(load(rows, (first + tap) * stride + 16 * part));
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = vmlaq_n_s32(*sum, value, weight);
            }
        }
        let mut all = [0_u8; 16];
        // SAFETY: the array has 16 bytes.
        unsafe { vst1q_u8(all.as_mut_ptr(), vcombine_u8(finish([sums[0], sums[1]]), finish([sums[2], sums[3]]))) };
        out.copy_from_slice(&all[..out.len()]);
    }
}
