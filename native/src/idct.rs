//! Inverse DCT, equal to libjpeg-turbo's `islow`.
//!
//! libjpeg's SIMD kernels keep 16-bit values between steps. No step overflows if the sum of the coefficients' absolute
//! values is at most SAFE_SUM: the first pass multiplies by less than 5.55. Blocks with a larger sum are computed with
//! checks, and refused if a step overflows, because libjpeg's result then depends on the machine.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::block::Block;

pub const SAFE_SUM: u32 = 5800;
/// Largest sum for which a coefficient cannot have been cut to 16 bits.
pub const LARGEST_SUM: u32 = 32_767;

const F_0_298: i32 = 2446;
const F_0_390: i32 = 3196;
const F_0_541: i32 = 4433;
const F_0_765: i32 = 6270;
const F_0_899: i32 = 7373;
const F_1_175: i32 = 9633;
const F_1_501: i32 = 12299;
const F_1_847: i32 = 15137;
const F_1_961: i32 = 16069;
const F_2_053: i32 = 16819;
const F_2_562: i32 = 20995;
const F_3_072: i32 = 25172;

/// Largest quantisation step for which the sum of a block's magnitudes fits into 32 bits.
pub const MAX_STEP: u16 = 1023;

/// Multiply the coefficients of a block, whose magnitudes fit into 16 bits, by the quantisation steps, which are at most
/// MAX_STEP. Returns the sum of the products' magnitudes. If that is above LARGEST_SUM, the products have no meaning.
pub fn dequantise_portable(block: &mut Block, steps: &Block) -> u32 {
    let mut sum = 0;
    for (value, &step) in block.0.iter_mut().zip(&steps.0) {
        let product = i32::from(*value) * i32::from(step);
        sum += product.unsigned_abs();
        *value = product as i16;
    }
    sum
}

/// Sample of a block that has only a DC coefficient.
#[inline(always)]
pub fn dc_sample(dc: i32) -> u8 {
    (((dc + 4) >> 3) + 128).clamp(0, 255) as u8
}

/// Write the 8 x 8 samples of a block whose sum is at most SAFE_SUM.
pub fn idct_portable(block: &Block, samples: &mut [u8], stride: usize) {
    let done = transform::<false>(block, samples, stride);
    debug_assert!(done.is_some());
}

/// Write the samples of a block, or return None if a 16-bit step overflows.
#[cold]
pub fn idct_checked(block: &Block, samples: &mut [u8], stride: usize) -> Option<()> {
    transform::<true>(block, samples, stride)
}

#[inline(always)]
fn transform<const CHECKED: bool>(block: &Block, samples: &mut [u8], stride: usize) -> Option<()> {
    let mut middle = [0_i32; 64];
    for column in 0..8 {
        let values = one_dimension::<CHECKED, 11>(std::array::from_fn(|row| i32::from(block.0[8 * row + column])))?;
        for (row, value) in values.into_iter().enumerate() {
            middle[8 * row + column] = value;
        }
    }
    for (row, line) in samples.chunks_mut(stride).take(8).enumerate() {
        let values = one_dimension::<CHECKED, 18>(std::array::from_fn(|column| middle[8 * row + column]))?;
        for (sample, value) in line.iter_mut().zip(values) {
            *sample = (value + 128).clamp(0, 255) as u8;
        }
    }
    Some(())
}

/// Return the transform of 8 values, divided by 2^SHIFT.
#[inline(always)]
fn one_dimension<const CHECKED: bool, const SHIFT: i32>(input: [i32; 8]) -> Option<[i32; 8]> {
    let fits = |value: i32| i16::try_from(value).is_ok();
    let (z3, z4) = (input[7] + input[3], input[5] + input[1]);
    let (even, odd) = (input[0] + input[4], input[0] - input[4]);
    if CHECKED && !(input.into_iter().all(fits) && [z3, z4, even, odd].into_iter().all(fits)) {
        return None;
    }
    let mul = |value: i32, by: i32| value.wrapping_mul(by);
    let tmp2 = mul(input[2], F_0_541).wrapping_add(mul(input[6], F_0_541 - F_1_847));
    let tmp3 = mul(input[2], F_0_541 + F_0_765).wrapping_add(mul(input[6], F_0_541));
    let (tmp0, tmp1) = (even << 13, odd << 13);
    let (tmp10, tmp13) = (tmp0.wrapping_add(tmp3), tmp0.wrapping_sub(tmp3));
    let (tmp11, tmp12) = (tmp1.wrapping_add(tmp2), tmp1.wrapping_sub(tmp2));

    let z5 = mul(z3.wrapping_add(z4), F_1_175);
    let z3 = mul(z3, -F_1_961).wrapping_add(z5);
    let z4 = mul(z4, -F_0_390).wrapping_add(z5);
    let z1 = mul(input[7] + input[1], -F_0_899);
    let z2 = mul(input[5] + input[3], -F_2_562);
    let tmp0 = mul(input[7], F_0_298).wrapping_add(z1).wrapping_add(z3);
    let tmp1 = mul(input[5], F_2_053).wrapping_add(z2).wrapping_add(z4);
    let tmp2 = mul(input[3], F_3_072).wrapping_add(z2).wrapping_add(z3);
    let tmp3 = mul(input[1], F_1_501).wrapping_add(z1).wrapping_add(z4);

    let scale = |value: i32| value.wrapping_add(1 << (SHIFT - 1)) >> SHIFT;
    Some([
        scale(tmp10.wrapping_add(tmp3)),
        scale(tmp11.wrapping_add(tmp2)),
        scale(tmp12.wrapping_add(tmp1)),
        scale(tmp13.wrapping_add(tmp0)),
        scale(tmp13.wrapping_sub(tmp0)),
        scale(tmp12.wrapping_sub(tmp1)),
        scale(tmp11.wrapping_sub(tmp2)),
        scale(tmp10.wrapping_sub(tmp3)),
    ])
}
