//! Pillow's affine transform and its smoothing filter, for augmentation after the crop.
//!
//! The transform computes in f64 as Pillow does, operation by operation, so that its pixels are equal to the bit where
//! Pillow was compiled without fused multiplication and addition. Python checks that before it uses this module.

use crate::resample::Filter;

/// Pixel with a fourth value, so that it fills a register. Bytes are exact in f32, which needs half the memory of f64.
type Pixel = [f32; 4];

/// Where each pixel of the output lies in the input: (a x + b y + c, d x + e y + f) for pixel centres.
pub type Matrix = [f64; 6];

/// Image of 3 bytes a pixel.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    pub bytes: &'a [u8],
    pub width: usize,
    pub height: usize,
}

/// Transform an image to one of the same size; pixels from outside are `fill`. `out` has as many bytes as the image.
pub fn affine(image: Image, matrix: &Matrix, filter: Filter, fill: [u8; 3], out: &mut [u8]) {
    assert!(image.bytes.len() == 3 * image.width * image.height && out.len() == image.bytes.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2::affine(image, matrix, filter, fill, out) };
    }
    affine_with::<[f64; 4]>(image, matrix, filter, fill, out);
}

/// The four values of a pixel in f64.
trait Values: Copy {
    fn load(pixel: &Pixel) -> Self;
    fn all(value: f64) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Clip to 0 and 255, and cut to whole numbers.
    fn bytes(self) -> [u8; 4];

    /// Value at a distance from `self` towards `other`.
    #[inline(always)]
    fn linear(self, other: Self, distance: Self) -> Self {
        self.add(other.sub(self).mul(distance))
    }

    /// Keys's cubic with a = -1 through four values, at a distance behind the second one.
    #[inline(always)]
    fn cubic([a, b, c, d]: [Self; 4], distance: Self) -> Self {
        // Pillow's order of the operations; -a + c is c - a, to the bit.
        let first = c.sub(a);
        let second = Self::all(2.0).mul(a.sub(b)).add(c).sub(d);
        let third = b.sub(a).sub(c).add(d);
        b.add(distance.mul(first.add(distance.mul(second.add(distance.mul(third))))))
    }
}

impl Values for [f64; 4] {
    #[inline(always)]
    fn load(pixel: &Pixel) -> Self {
        pixel.map(f64::from)
    }

    #[inline(always)]
    fn all(value: f64) -> Self {
        [value; 4]
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|at| self[at] + other[at])
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        std::array::from_fn(|at| self[at] - other[at])
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        std::array::from_fn(|at| self[at] * other[at])
    }

    #[inline(always)]
    fn bytes(self) -> [u8; 4] {
        self.map(|value| value as u8)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::*;

    #[target_feature(enable = "avx2")]
    pub fn affine(image: Image, matrix: &Matrix, filter: Filter, fill: [u8; 3], out: &mut [u8]) {
        affine_with::<__m256d>(image, matrix, filter, fill, out);
    }

    /// Only `affine` uses it, for a processor with AVX2.
    impl Values for __m256d {
        #[inline(always)]
        fn load(pixel: &Pixel) -> Self {
            // SAFETY: the processor has AVX2. So below. The reference is to 16 readable bytes.
            unsafe { _mm256_cvtps_pd(_mm_loadu_ps(pixel.as_ptr())) }
        }

        #[inline(always)]
        fn all(value: f64) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_set1_pd(value) }
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_add_pd(self, other) }
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_sub_pd(self, other) }
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { _mm256_mul_pd(self, other) }
        }

        #[inline(always)]
        fn bytes(self) -> [u8; 4] {
            // SAFETY: as above.
            unsafe {
                let whole = _mm256_cvttpd_epi32(self);
                let words = _mm_packs_epi32(whole, whole);
                _mm_cvtsi128_si32(_mm_packus_epi16(words, words)).to_le_bytes()
            }
        }
    }
}

#[inline(always)]
fn affine_with<V: Values>(image: Image, matrix: &Matrix, filter: Filter, fill: [u8; 3], out: &mut [u8]) {
    let pixels = image.bytes.chunks_exact(3).map(|rgb| [rgb[0].into(), rgb[1].into(), rgb[2].into(), 0.0]);
    let pixels: Vec<Pixel> = pixels.collect();
    let source = Source { pixels: &pixels, width: image.width, height: image.height };
    let [a, b, c, d, e, f] = *matrix;
    let (width, height) = (image.width as f64, image.height as f64);
    for (row, line) in out.chunks_exact_mut(3 * image.width).enumerate() {
        for (column, pixel) in line.chunks_exact_mut(3).enumerate() {
            let (x, y) = (column as f64 + 0.5, row as f64 + 0.5);
            let (x, y) = (a * x + b * y + c, d * x + e * y + f);
            if !(x >= 0.0 && x < width && y >= 0.0 && y < height) {
                pixel.copy_from_slice(&fill);
                continue;
            }
            let (x, y) = (x - 0.5, y - 0.5);
            let (left, top) = (floor(x), floor(y));
            let (right, below) = (V::all(x - left as f64), V::all(y - top as f64));
            let value = match filter {
                Filter::Bilinear => source.bilinear(left, top, right, below),
                Filter::Bicubic => source.bicubic(left, top, right, below),
            };
            pixel.copy_from_slice(&value.bytes()[..3]);
        }
    }
}

/// Floor of a value above -1.
#[inline(always)]
fn floor(value: f64) -> isize {
    if value < 0.0 { -1 } else { value as isize }
}

struct Source<'a> {
    pixels: &'a [Pixel],
    width: usize,
    height: usize,
}

impl Source<'_> {
    #[inline(always)]
    fn bilinear<V: Values>(&self, left: isize, top: isize, right: V, below: V) -> V {
        let upper = self.linear(top, left, right);
        let lower = if self.has_row(top + 1) { self.linear(top + 1, left, right) } else { upper };
        upper.linear(lower, below)
    }

    #[inline(always)]
    fn bicubic<V: Values>(&self, left: isize, top: isize, right: V, below: V) -> V {
        // A row outside is the one before it; the first is that of the edge.
        let first = self.cubic(top - 1, left - 1, right);
        let second = if self.has_row(top) { self.cubic(top, left - 1, right) } else { first };
        let third = if self.has_row(top + 1) { self.cubic(top + 1, left - 1, right) } else { second };
        let fourth = if self.has_row(top + 2) { self.cubic(top + 2, left - 1, right) } else { third };
        V::cubic([first, second, third, fourth], below)
    }

    #[inline(always)]
    fn linear<V: Values>(&self, row: isize, first: isize, distance: V) -> V {
        let mut edge = [Pixel::default(); 2];
        let [a, b] = self.neighbours(row, first, &mut edge);
        V::load(a).linear(V::load(b), distance)
    }

    #[inline(always)]
    fn cubic<V: Values>(&self, row: isize, first: isize, distance: V) -> V {
        let mut edge = [Pixel::default(); 4];
        let [a, b, c, d] = self.neighbours(row, first, &mut edge);
        V::cubic([V::load(a), V::load(b), V::load(c), V::load(d)], distance)
    }

    #[inline(always)]
    fn has_row(&self, at: isize) -> bool {
        at >= 0 && at < self.height as isize
    }

    /// Return some pixels side by side; those outside are the nearest ones of the edge, and are written to `edge`.
    #[inline(always)]
    fn neighbours<'b, const N: usize>(&'b self, row: isize, first: isize, edge: &'b mut [Pixel; N]) -> &'b [Pixel; N] {
        let begin = row.clamp(0, self.height as isize - 1) as usize * self.width;
        let line = &self.pixels[begin..begin + self.width];
        if first >= 0
            && let Some(inside) = line.get(first as usize..).and_then(|rest| rest.first_chunk())
        {
            return inside;
        }
        for (step, pixel) in edge.iter_mut().enumerate() {
            *pixel = line[(first + step as isize).clamp(0, self.width as isize - 1) as usize];
        }
        edge
    }
}

/// Smooth an image as Pillow's SMOOTH: the mean of 3 x 3 pixels with the middle one five times. Edges stay.
pub fn smooth(image: Image, out: &mut [u8]) {
    assert!(image.bytes.len() == 3 * image.width * image.height && out.len() == image.bytes.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { smooth_avx2(image, out) };
    }
    smooth_portable(image, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn smooth_avx2(image: Image, out: &mut [u8]) {
    smooth_portable(image, out);
}

#[inline(always)]
fn smooth_portable(image: Image, out: &mut [u8]) {
    out.copy_from_slice(image.bytes);
    let stride = 3 * image.width;
    if image.width < 3 {
        return;
    }
    let mut sums = vec![0_u16; stride];
    for row in 1..image.height.saturating_sub(1) {
        let [above, this, below] = [row - 1, row, row + 1].map(|row| &image.bytes[row * stride..][..stride]);
        for (((sum, &a), &b), &c) in sums.iter_mut().zip(above).zip(this).zip(below) {
            *sum = u16::from(a) + u16::from(b) + u16::from(c);
        }
        let (left, middle, right) = (&sums[..stride - 6], &sums[3..stride - 3], &sums[6..]);
        let line = &mut out[row * stride + 3..][..stride - 6];
        for ((((value, &a), &b), &c), &center) in line.iter_mut().zip(left).zip(middle).zip(right).zip(&this[3..]) {
            // At most 13 * 255; 13 is odd, so no quotient lies in the middle between two levels.
            let sum = u32::from(a + b + c + 4 * u16::from(center));
            *value = ((2 * sum + 13) / 26) as u8;
        }
    }
}
