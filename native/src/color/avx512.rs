//! Conversion to RGB with AVX-512.

use std::arch::x86_64::*;

use super::*;

/// As `avx2::convert`, 32 pixels at a time.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw")]
pub fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
    let count = y.len().min(cb.len()).min(cr.len()).min(pixels.len() / 4);
    let whole = count / 32 * 32;
    for at in (0..whole).step_by(32) {
        let block = convert_32(load(&y[at..]), load(&cb[at..]), load(&cr[at..]));
        let out: &mut [u8; 128] = pixels[4 * at..].first_chunk_mut().expect("128 bytes");
        for (half, register) in block.into_iter().enumerate() {
            // SAFETY: 64 bytes at 64 * half, which is at most 64, lie in the 128 bytes of `out`.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(64 * half).cast(), register) };
        }
    }
    avx2::convert(&y[whole..count], &cb[whole..count], &cr[whole..count], &mut pixels[4 * whole..4 * count]);
}

/// Load 32 samples as words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load(samples: &[u8]) -> __m512i {
    let samples: &[u8; 32] = samples.first_chunk().expect("32 samples");
    // SAFETY: the reference is to 32 readable bytes, and the load needs no alignment.
    _mm512_cvtepu8_epi16(unsafe { _mm256_loadu_si256(samples.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn convert_32(y: __m512i, cb: __m512i, cr: __m512i) -> [__m512i; 2] {
    let (center, one) = (_mm512_set1_epi16(128), _mm512_set1_epi16(1));
    let (cb, cr) = (_mm512_sub_epi16(cb, center), _mm512_sub_epi16(cr, center));
    let (cb2, cr2) = (_mm512_add_epi16(cb, cb), _mm512_add_epi16(cr, cr));
    let halved = |product| _mm512_srai_epi16::<1>(_mm512_add_epi16(product, one));
    let red = halved(_mm512_mulhi_epi16(cr2, _mm512_set1_epi16((CR_RED - 65_536) as i16)));
    let red = _mm512_add_epi16(_mm512_add_epi16(red, cr), y);
    let blue = halved(_mm512_mulhi_epi16(cb2, _mm512_set1_epi16((CB_BLUE - 131_072) as i16)));
    let blue = _mm512_add_epi16(_mm512_add_epi16(blue, cb2), y);
    let by = _mm512_set1_epi32((-CB_GREEN & 0xFFFF) | (65_536 - CR_GREEN) << 16);
    let half = _mm512_set1_epi32(HALF);
    let scaled = |both| _mm512_srai_epi32::<16>(_mm512_add_epi32(_mm512_madd_epi16(both, by), half));
    let green = _mm512_packs_epi32(scaled(_mm512_unpacklo_epi16(cb, cr)), scaled(_mm512_unpackhi_epi16(cb, cr)));
    let green = _mm512_add_epi16(_mm512_sub_epi16(green, cr), y);

    // Per quarter: 8 red bytes and 8 blue ones; 8 green ones and 8 that are not used.
    let red_blue = _mm512_packus_epi16(red, blue);
    let green_rest = _mm512_packus_epi16(green, _mm512_set1_epi16(255));
    let red_green = _mm512_unpacklo_epi8(red_blue, green_rest);
    let blue_rest = _mm512_unpackhi_epi8(red_blue, green_rest);
    // Per quarter: its first four pixels, and the other four.
    let (low, high) = (_mm512_unpacklo_epi16(red_green, blue_rest), _mm512_unpackhi_epi16(red_green, blue_rest));
    [
        _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high),
        _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high),
    ]
}
