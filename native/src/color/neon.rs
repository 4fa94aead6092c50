//! Conversion to RGB with NEON.

use std::arch::aarch64::*;

use super::*;

/// As `convert_portable`, 16 pixels at a time.
///
/// The factors are split so that they fit into signed words: 1.402 = 1 + 0.402, 1.772 = 2 - 0.228,
/// -0.71414 = -1 + 0.28586.
#[inline]
#[target_feature(enable = "neon")]
pub fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
    let count = y.len().min(cb.len()).min(cr.len()).min(pixels.len() / 4);
    let whole = count - count % 16;
    for at in (0..whole).step_by(16) {
        let (y, cb, cr) = (load(&y[at..]), load(&cb[at..]), load(&cr[at..]));
        let low = convert_8(vget_low_u8(y), vget_low_u8(cb), vget_low_u8(cr));
        let high = convert_8(vget_high_u8(y), vget_high_u8(cb), vget_high_u8(cr));
        let [red, green, blue] = std::array::from_fn(|color| vcombine_u8(low[color], high[color]));
        let out: &mut [u8; 64] = pixels[4 * at..].first_chunk_mut().expect("64 bytes");
        // SAFETY: the array has 64 bytes.
        unsafe { vst4q_u8(out.as_mut_ptr(), uint8x16x4_t(red, green, blue, vdupq_n_u8(255))) };
    }
    convert_portable(&y[whole..count], &cb[whole..count], &cr[whole..count], &mut pixels[4 * whole..4 * count]);
}

#[inline]
#[target_feature(enable = "neon")]
fn load(samples: &[u8]) -> uint8x16_t {
    let samples: &[u8; 16] = samples.first_chunk().expect("16 samples");
    // SAFETY: the array has 16 bytes.
    unsafe { vld1q_u8(samples.as_ptr()) }
}

/// Return red, green and blue of 8 pixels.
#[inline]
#[target_feature(enable = "neon")]
fn convert_8(y: uint8x8_t, cb: uint8x8_t, cr: uint8x8_t) -> [uint8x8_t; 3] {
    let y = vreinterpretq_s16_u16(vmovl_u8(y));
    // The difference of bytes is a word of 16 bits, below 0 if its first bit is set.
    let [cb, cr] = [cb, cr].map(|chroma| vreinterpretq_s16_u16(vsubl_u8(chroma, vdup_n_u8(128))));
    let products = |a, by: i32| [vmull_n_s16(vget_low_s16(a), by as i16), vmull_high_n_s16(a, by as i16)];
    let sums = |a: [_; 2], b: [_; 2]| [vaddq_s32(a[0], b[0]), vaddq_s32(a[1], b[1])];
    // Divided by 2^16 and rounded, as with HALF.
    let scaled = |[low, high]: [_; 2]| vcombine_s16(vrshrn_n_s32::<16>(low), vrshrn_n_s32::<16>(high));
    let red = vaddq_s16(vaddq_s16(scaled(products(cr, CR_RED - 65_536)), cr), y);
    let blue = vaddq_s16(vaddq_s16(scaled(products(cb, CB_BLUE - 131_072)), vaddq_s16(cb, cb)), y);
    let green = scaled(sums(products(cb, -CB_GREEN), products(cr, 65_536 - CR_GREEN)));
    let green = vaddq_s16(vsubq_s16(green, cr), y);
    [red, green, blue].map(|color| vqmovun_s16(color))
}
