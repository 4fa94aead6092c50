//! Inverse DCT, equal to libjpeg-turbo's `islow`.
//!
//! libjpeg's SIMD kernels keep 16-bit values between steps. No step overflows if the sum of the coefficients' absolute
//! values is at most SAFE_SUM: the first pass multiplies by less than 5.55. Blocks with a larger sum are computed with
//! checks, and refused if a step overflows, because libjpeg's result then depends on the machine.

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

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
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
}
