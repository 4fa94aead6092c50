//! The inverse DCT with NEON.

use std::arch::aarch64::*;

use super::*;

/// As `dequantise_portable`.
#[inline]
#[target_feature(enable = "neon")]
pub fn dequantise(block: &mut Block, steps: &Block) -> u32 {
    let mut sums = [vdupq_n_s32(0); 2];
    for (values, steps) in block.0.chunks_exact_mut(8).zip(steps.0.chunks_exact(8)) {
        let (value, step) = (load(values), load(steps));
        sums = add_products(sums, value, step);
        // SAFETY: the slice has 16 bytes.
        unsafe { vst1q_s16(values.as_mut_ptr(), vmulq_s16(value, step)) };
    }
    sum(sums)
}

/// Load 8 words.
#[inline]
#[target_feature(enable = "neon")]
pub fn load(row: &[i16]) -> int16x8_t {
    let row: &[i16; 8] = row.first_chunk().expect("8 words");
    // SAFETY: the array has 16 bytes.
    unsafe { vld1q_s16(row.as_ptr()) }
}

/// Add the magnitudes of the products of two rows.
#[inline]
#[target_feature(enable = "neon")]
pub fn add_products(sums: [int32x4_t; 2], value: int16x8_t, step: int16x8_t) -> [int32x4_t; 2] {
    let size = vabsq_s16(value);
    let low = vmlal_s16(sums[0], vget_low_s16(size), vget_low_s16(step));
    [low, vmlal_high_s16(sums[1], size, step)]
}

/// Return the sum of magnitudes.
#[inline]
#[target_feature(enable = "neon")]
pub fn sum(sums: [int32x4_t; 2]) -> u32 {
    vaddvq_s32(vaddq_s32(sums[0], sums[1])) as u32
}

/// As `idct_portable`.
#[inline]
#[target_feature(enable = "neon")]
pub fn idct(block: &Block, samples: &mut [u8], stride: usize) {
    idct_rows(std::array::from_fn(|row| load(&block.0[8 * row..])), samples, stride);
}

/// As `idct` for the rows of a block.
#[inline]
#[target_feature(enable = "neon")]
pub fn idct_rows(rows: [int16x8_t; 8], samples: &mut [u8], stride: usize) {
    let columns = transpose(pass::<11>(rows));
    let rows = transpose(pass::<18>(columns));
    for (row, values) in rows.into_iter().enumerate() {
        // Saturated as signed bytes around 0, then shifted to 0 to 255.
        let bytes = veor_u8(vreinterpret_u8_s8(vqmovn_s16(values)), vdup_n_u8(128));
        let out: &mut [u8; 8] = samples[row * stride..].first_chunk_mut().expect("8 samples");
        // SAFETY: the array has 8 bytes.
        unsafe { vst1_u8(out.as_mut_ptr(), bytes) };
    }
}

/// One-dimensional transform of 8 columns, divided by 2^SHIFT.
#[inline]
#[target_feature(enable = "neon")]
fn pass<const SHIFT: i32>(input: [int16x8_t; 8]) -> [int16x8_t; 8] {
    let low = four_columns::<SHIFT>(input.map(|row| vget_low_s16(row)));
    let high = four_columns::<SHIFT>(input.map(|row| vget_high_s16(row)));
    std::array::from_fn(|row| vcombine_s16(low[row], high[row]))
}

/// Return a * by + b * other.
#[inline]
#[target_feature(enable = "neon")]
fn products(a: int16x4_t, by: i32, b: int16x4_t, other: i32) -> int32x4_t {
    vmlal_n_s16(vmull_n_s16(a, by as i16), b, other as i16)
}

/// As `pass` for four columns.
#[inline]
#[target_feature(enable = "neon")]
fn four_columns<const SHIFT: i32>(input: [int16x4_t; 8]) -> [int16x4_t; 8] {
    let tmp3 = products(input[2], F_0_541 + F_0_765, input[6], F_0_541);
    let tmp2 = products(input[2], F_0_541, input[6], F_0_541 - F_1_847);
    let even = vshll_n_s16::<13>(vadd_s16(input[0], input[4]));
    let odd = vshll_n_s16::<13>(vsub_s16(input[0], input[4]));
    let (tmp10, tmp13) = (vaddq_s32(even, tmp3), vsubq_s32(even, tmp3));
    let (tmp11, tmp12) = (vaddq_s32(odd, tmp2), vsubq_s32(odd, tmp2));

    let (z3, z4) = (vadd_s16(input[7], input[3]), vadd_s16(input[5], input[1]));
    let (by_z3, by_z4) = (products(z3, F_1_175 - F_1_961, z4, F_1_175), products(z3, F_1_175, z4, F_1_175 - F_0_390));
    let tmp0 = vaddq_s32(products(input[7], F_0_298 - F_0_899, input[1], -F_0_899), by_z3);
    let tmp3 = vaddq_s32(products(input[7], -F_0_899, input[1], F_1_501 - F_0_899), by_z4);
    let tmp1 = vaddq_s32(products(input[5], F_2_053 - F_2_562, input[3], -F_2_562), by_z4);
    let tmp2 = vaddq_s32(products(input[5], -F_2_562, input[3], F_3_072 - F_2_562), by_z3);

    // Rounded and saturated; the sums fit into words.
    let narrow = |value| vqmovn_s32(vrshrq_n_s32::<SHIFT>(value));
    [
        narrow(vaddq_s32(tmp10, tmp3)),
        narrow(vaddq_s32(tmp11, tmp2)),
        narrow(vaddq_s32(tmp12, tmp1)),
        narrow(vaddq_s32(tmp13, tmp0)),
        narrow(vsubq_s32(tmp13, tmp0)),
        narrow(vsubq_s32(tmp12, tmp1)),
        narrow(vsubq_s32(tmp11, tmp2)),
        narrow(vsubq_s32(tmp10, tmp3)),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn transpose(rows: [int16x8_t; 8]) -> [int16x8_t; 8] {
    // Pairs of words, then of two, then of four.
    let words = |a, b| (vreinterpretq_s32_s16(vtrn1q_s16(a, b)), vreinterpretq_s32_s16(vtrn2q_s16(a, b)));
    let twos = |a, b| (vreinterpretq_s64_s32(vtrn1q_s32(a, b)), vreinterpretq_s64_s32(vtrn2q_s32(a, b)));
    let fours = |a, b| (vreinterpretq_s16_s64(vtrn1q_s64(a, b)), vreinterpretq_s16_s64(vtrn2q_s64(a, b)));
    let [a, b, c, d, e, f, g, h] = rows;
    let ((a, b), (c, d), (e, f), (g, h)) = (words(a, b), words(c, d), words(e, f), words(g, h));
    let ((a, c), (b, d), (e, g), (f, h)) = (twos(a, c), twos(b, d), twos(e, g), twos(f, h));
    let ((a, e), (b, f), (c, g), (d, h)) = (fours(a, e), fours(b, f), fours(c, g), fours(d, h));
    [a, b, c, d, e, f, g, h]
}
