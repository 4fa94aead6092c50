//! Upsampling of chroma and conversion to RGB, equal to libjpeg-turbo's.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

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
