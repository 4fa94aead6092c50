//! Conversion to RGB with AVX2.

use std::arch::x86_64::*;

use super::*;

/// As `convert_portable`, 16 pixels at a time.
///
/// The factors are split as libjpeg-turbo does, so that they fit into signed words: 1.402 = 1 + 0.402,
/// 1.772 = 2 - 0.228, -0.71414 = -1 + 0.28586.
#[inline]
#[target_feature(enable = "avx2")]
pub fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
    let count = y.len().min(cb.len()).min(cr.len()).min(pixels.len() / 4);
    let mut at = 0;
    while at + 16 <= count {
        let block = convert_16(load(&y[at..]), load(&cb[at..]), load(&cr[at..]));
        let out: &mut [u8; 64] = pixels[4 * at..].first_chunk_mut().expect("64 bytes");
        for (part, register) in block.into_iter().enumerate() {
            // SAFETY: 16 bytes at 16 * part, which is at most 48, lie in the 64 bytes of `out`.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().add(16 * part).cast(), register) };
        }
        at += 16;
    }
    convert_portable(&y[at..count], &cb[at..count], &cr[at..count], &mut pixels[4 * at..4 * count]);
}

/// Load 16 samples as words.
#[inline]
#[target_feature(enable = "avx2")]
fn load(samples: &[u8]) -> __m256i {
    let samples: &[u8; 16] = samples.first_chunk().expect("16 samples");
    // SAFETY: the reference is to 16 readable bytes, and the load needs no alignment.
    _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(samples.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn convert_16(y: __m256i, cb: __m256i, cr: __m256i) -> [__m128i; 4] {
    let (center, one) = (_mm256_set1_epi16(128), _mm256_set1_epi16(1));
    let (cb, cr) = (_mm256_sub_epi16(cb, center), _mm256_sub_epi16(cr, center));
    let (cb2, cr2) = (_mm256_add_epi16(cb, cb), _mm256_add_epi16(cr, cr));
    let halved = |product| _mm256_srai_epi16::<1>(_mm256_add_epi16(product, one));
    let red = halved(_mm256_mulhi_epi16(cr2, _mm256_set1_epi16((CR_RED - 65_536) as i16)));
    let red = _mm256_add_epi16(_mm256_add_epi16(red, cr), y);
    let blue = halved(_mm256_mulhi_epi16(cb2, _mm256_set1_epi16((CB_BLUE - 131_072) as i16)));
    let blue = _mm256_add_epi16(_mm256_add_epi16(blue, cb2), y);
    let by = _mm256_set1_epi32((-CB_GREEN & 0xFFFF) | (65_536 - CR_GREEN) << 16);
    let half = _mm256_set1_epi32(HALF);
    let scaled = |both| _mm256_srai_epi32::<16>(_mm256_add_epi32(_mm256_madd_epi16(both, by), half));
    let green = _mm256_packs_epi32(scaled(_mm256_unpacklo_epi16(cb, cr)), scaled(_mm256_unpackhi_epi16(cb, cr)));
    let green = _mm256_add_epi16(_mm256_sub_epi16(green, cr), y);

    // Per lane: 8 red bytes and 8 blue ones; 8 green ones and 8 that are not used.
    let red_blue = _mm256_packus_epi16(red, blue);
    let green_rest = _mm256_packus_epi16(green, _mm256_set1_epi16(255));
    let red_green = _mm256_unpacklo_epi8(red_blue, green_rest);
    let blue_rest = _mm256_unpackhi_epi8(red_blue, green_rest);
    let (low, high) = (_mm256_unpacklo_epi16(red_green, blue_rest), _mm256_unpackhi_epi16(red_green, blue_rest));
    [
        _mm256_castsi256_si128(low),
        _mm256_castsi256_si128(high),
        _mm256_extracti128_si256::<1>(low),
        _mm256_extracti128_si256::<1>(high),
    ]
}
