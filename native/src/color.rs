//! Upsampling of chroma and conversion to RGB, equal to libjpeg-turbo's.

use std::ops::Range;

use crate::header::{Frame, Sampling};
use crate::kernels::Kernels;
use crate::memory::reserve;
use crate::scan::Plane;

const CR_RED: i32 = 91_881; // 1.40200 * 2^16
const CB_BLUE: i32 = 116_130; // 1.77200
const CR_GREEN: i32 = 46_802; // 0.71414
const CB_GREEN: i32 = 22_554; // 0.34414
const HALF: i32 = 1 << 15;

/// Memory of a row, kept between images.
#[derive(Default)]
pub struct ColorRows {
    /// Chroma of a row before horizontal upsampling, with a neighbour at each end.
    sums: Vec<u16>,
    chroma: [Vec<u8>; 2],
}

/// Rows of an image in RGB.
pub trait Rows {
    /// Write some columns of a row to `pixels`, 4 bytes a pixel.
    fn write<K: Kernels>(&self, memory: &mut ColorRows, row: usize, columns: Range<usize>, pixels: &mut [u8]);
}

/// Image of 3 bytes a pixel.
pub struct Pixels<'a> {
    pub bytes: &'a [u8],
    pub width: usize,
}

impl Rows for Pixels<'_> {
    #[inline(always)]
    fn write<K: Kernels>(&self, _: &mut ColorRows, row: usize, columns: Range<usize>, pixels: &mut [u8]) {
        let begin = row * self.width;
        let source = &self.bytes[3 * (begin + columns.start)..3 * (begin + columns.end)];
        for (pixel, rgb) in pixels.chunks_exact_mut(4).zip(source.chunks_exact(3)) {
            pixel.copy_from_slice(&[rgb[0], rgb[1], rgb[2], 255]);
        }
    }
}

/// Samples of the decoded region of a JPEG.
pub struct Decoded<'a> {
    pub frame: Frame,
    pub planes: &'a [Plane; 3],
}

impl Rows for Decoded<'_> {
    #[inline(always)]
    fn write<K: Kernels>(&self, memory: &mut ColorRows, row: usize, columns: Range<usize>, pixels: &mut [u8]) {
        let count = columns.len();
        let y = &self.planes[0].row(row, columns.start)[..count];
        match self.frame.sampling {
            Sampling::Gray => {
                for (pixel, &value) in pixels.chunks_exact_mut(4).zip(y) {
                    pixel.copy_from_slice(&[value; 4]);
                }
            }
            Sampling::Full => {
                let [cb, cr] = [1, 2].map(|number: usize| &self.planes[number].row(row, columns.start)[..count]);
                K::convert(y, cb, cr, &mut pixels[..4 * count]);
            }
            Sampling::Half | Sampling::Quarter => {
                for (number, chroma) in memory.chroma.iter_mut().enumerate() {
                    upsample(self.frame, &self.planes[number + 1], &mut memory.sums, row, &columns, chroma);
                }
                let begin = columns.start % 2;
                let [cb, cr] = [0, 1].map(|number: usize| &memory.chroma[number][begin..begin + count]);
                K::convert(y, cb, cr, &mut pixels[..4 * count]);
            }
        }
    }
}

/// Upsample a row of chroma for luma `columns`; `out` begins at an even column.
///
/// libjpeg's triangle filter, 3/4 of the nearer sample and 1/4 of the further one. At an edge of the image it uses the
/// sample itself as the further one. Chroma of at most two columns is repeated instead.
#[inline(always)]
fn upsample(frame: Frame, plane: &Plane, sums: &mut Vec<u16>, row: usize, columns: &Range<usize>, out: &mut Vec<u8>) {
    let (width, height) = frame.chroma_size();
    let (first, last) = (columns.start / 2, (columns.end - 1) / 2);
    let count = last - first + 1;
    let out = reserve(out, 2 * count);
    let is_quarter = frame.sampling == Sampling::Quarter;
    let near = if is_quarter { row / 2 } else { row };
    if width <= 2 {
        for (pair, &value) in out.chunks_exact_mut(2).zip(&plane.row(near, first)[..count]) {
            pair.copy_from_slice(&[value; 2]);
        }
        return;
    }
    let (begin, end) = (first.saturating_sub(1), (last + 2).min(width));
    let near_row = &plane.row(near, begin)[..end - begin];
    let sums = reserve(sums, count + 2);
    let skip = usize::from(first == 0);
    let inner = &mut sums[skip..skip + end - begin];
    let (even, odd, shift) = if is_quarter {
        let far = if row.is_multiple_of(2) { near.saturating_sub(1) } else { (near + 1).min(height - 1) };
        let far_row = &plane.row(far, begin)[..end - begin];
        for ((sum, &near), &far) in inner.iter_mut().zip(near_row).zip(far_row) {
            *sum = 3 * u16::from(near) + u16::from(far);
        }
        (8, 7, 4)
    } else {
        for (sum, &near) in inner.iter_mut().zip(near_row) {
            *sum = u16::from(near);
        }
        (1, 2, 2)
    };
    if first == 0 {
        sums[0] = sums[1];
    }
    if last + 1 == width {
        sums[count + 1] = sums[count];
    }
    let (left, this, right) = (&sums[..count], &sums[1..=count], &sums[2..count + 2]);
    for (((pair, &left), &this), &right) in out.chunks_exact_mut(2).zip(left).zip(this).zip(right) {
        pair[0] = ((3 * this + left + even) >> shift) as u8;
        pair[1] = ((3 * this + right + odd) >> shift) as u8;
    }
}

#[inline(always)]
pub fn convert_portable(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
    for (((pixel, &y), &cb), &cr) in pixels.chunks_exact_mut(4).zip(y).zip(cb).zip(cr) {
        let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
        let red = y + ((CR_RED * cr + HALF) >> 16);
        let green = y + ((HALF - CB_GREEN * cb - CR_GREEN * cr) >> 16);
        let blue = y + ((CB_BLUE * cb + HALF) >> 16);
        pixel.copy_from_slice(&[red, green, blue, 255].map(|value| value.clamp(0, 255) as u8));
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
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
}
