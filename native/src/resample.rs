//! Pillow's antialiased resampling of 8-bit images, in its fixed point: 22 bits, rounded and clipped after each pass.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use std::ops::Range;

/// Bits behind the point of a weight.
const PRECISION: i32 = 22;
/// Bits of the lower half of a weight. Both halves fit into signed words, so that pmaddwd multiplies them.
const LOW: i32 = 11;
/// Bytes that kernels may read or write behind a row.
pub const SLACK: usize = 64;
/// Rows that are resampled horizontally at a time.
pub const ROWS: usize = 4;
/// Taps are padded to a multiple of this with weights of 0.
const GROUP: usize = 4;

/// Byte shuffles that give words of two pixels side by side (red 0, red 1, green 0, green 1, ...): of the first two of four
/// pixels, and of the others.
#[cfg(target_arch = "x86_64")]
const PIXEL_PAIRS: [[i8; 16]; 2] = [
    [0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1],
    [8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1],
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filter {
    Bilinear,
    Bicubic,
}

impl Filter {
    fn support(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
        }
    }

    /// Weight at a distance; the expressions are Pillow's, because others round differently.
    #[inline(always)]
    fn weight(self, distance: f64) -> f64 {
        const A: f64 = -0.5;
        let x = distance.abs();
        match self {
            Filter::Bilinear if x < 1.0 => 1.0 - x,
            Filter::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Filter::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }
}

/// Weights of one axis for some of its outputs.
#[derive(Default)]
pub struct Axis {
    /// The size stays the same, so that there is no pass.
    pub is_identity: bool,
    /// Inputs that the outputs need.
    pub source: Range<usize>,
    /// First tap of each output, from `source.start`, and number of taps.
    bounds: Vec<(u32, u32)>,
    /// Taps of an output in the tables, a multiple of GROUP.
    taps: usize,
    weights: Vec<i32>,
    /// `weights` >> LOW, and the rest.
    high: Vec<i16>,
    low: Vec<i16>,
    /// Weights as bytes, `weight = (a << 16) + (b << 8) + c`: for GROUP taps the c, then the b, then the a.
    digits: Vec<[i8; 3 * GROUP]>,
    exact: Vec<f64>,
}

impl Axis {
    /// Compute the weights of the outputs `wanted` of an axis that is resized from `from` to `to` pixels.
    pub fn fill(&mut self, filter: Filter, from: usize, to: usize, wanted: Range<usize>) {
        self.is_identity = from == to;
        self.bounds.clear();
        if self.is_identity {
            self.source = wanted;
            return;
        }
        let scale = from as f64 / to as f64;
        let filter_scale = scale.max(1.0);
        let support = filter.support() * filter_scale;
        let inverse = 1.0 / filter_scale;
        let taps = (support.ceil() as usize * 2 + 1).min(from);
        self.taps = taps.next_multiple_of(GROUP);
        let size = self.taps * wanted.len();
        for table in [&mut self.high, &mut self.low] {
            table.clear();
            table.resize(size, 0);
        }
        self.weights.clear();
        self.weights.resize(size, 0);
        self.digits.clear();
        self.digits.resize(size / GROUP, [0; 3 * GROUP]);
        self.exact.resize(self.taps, 0.0);
        self.source = from..0;
        for (slot, output) in wanted.enumerate() {
            let center = (output as f64 + 0.5) * scale;
            let first = ((center - support + 0.5) as i64).max(0) as usize; // `as` cuts towards 0, as in C
            let end = ((center + support + 0.5) as i64).min(from as i64) as usize;
            let exact = &mut self.exact[..end - first];
            let mut sum = 0.0;
            for (tap, weight) in exact.iter_mut().enumerate() {
                *weight = filter.weight((tap as f64 + first as f64 - center + 0.5) * inverse);
                sum += *weight;
            }
            let at = slot * self.taps;
            for (tap, weight) in exact.iter().enumerate() {
                let share = if sum == 0.0 { *weight } else { weight / sum };
                let scaled = share * f64::from(1 << PRECISION);
                let fixed = (if share < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32;
                self.weights[at + tap] = fixed;
                self.high[at + tap] = (fixed >> LOW) as i16;
                self.low[at + tap] = (fixed & ((1 << LOW) - 1)) as i16;
                let group = &mut self.digits[(at + tap) / GROUP];
                for (digit, value) in digits(fixed).into_iter().enumerate() {
                    group[GROUP * digit + tap % GROUP] = value;
                }
            }
            self.bounds.push((first as u32, (end - first) as u32));
            self.source = self.source.start.min(first)..self.source.end.max(end);
        }
        for (first, _) in &mut self.bounds {
            *first -= self.source.start as u32;
        }
    }

    /// Number of outputs; 0 for an identity.
    pub fn outputs(&self) -> usize {
        self.bounds.len()
    }

    /// Bytes that `horizontal` may read behind the last pixel of a row.
    pub fn row_slack(&self) -> usize {
        4 * self.taps + SLACK
    }
}

/// Return the digits of a weight to base 256, the last one first; each is from -128 to 127.
#[inline(always)]
fn digits(weight: i32) -> [i8; 3] {
    let last = weight as i8;
    let rest = (weight - i32::from(last)) >> 8;
    let middle = rest as i8;
    let first = (rest - i32::from(middle)) >> 8;
    debug_assert!(i8::try_from(first).is_ok(), "a share is far below 127 << 16");
    [last, middle, first as i8]
}

#[inline(always)]
fn clip(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

const ROUND: i32 = 1 << (PRECISION - 1);

/// Resample a row of 4 bytes a pixel to 3 bytes a pixel.
#[inline(always)]
pub fn horizontal_portable(axis: &Axis, row: &[u8], output: &mut [u8], mirror: bool) {
    let count = axis.outputs();
    for (slot, pixel) in output.chunks_exact_mut(3).take(count).enumerate() {
        let at = if mirror { count - 1 - slot } else { slot };
        let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
        let weights = &axis.weights[at * axis.taps..][..taps];
        let mut sums = [ROUND; 3];
        for (source, &weight) in row[4 * first..].chunks_exact(4).zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(source) {
                *sum = sum.wrapping_add(i32::from(value).wrapping_mul(weight));
            }
        }
        pixel.copy_from_slice(&sums.map(clip));
    }
}

#[inline(always)]
pub fn vertical_portable(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
    let (first, taps) = (axis.bounds[at].0 as usize, axis.bounds[at].1 as usize);
    let weights = &axis.weights[at * axis.taps..][..taps];
    const PART: usize = 64;
    for (part, out) in out.chunks_mut(PART).enumerate() {
        let mut sums = [ROUND; PART];
        for (tap, &weight) in weights.iter().enumerate() {
            let row = &rows[(first + tap) * stride + part * PART..][..out.len()];
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum = sum.wrapping_add(i32::from(value).wrapping_mul(weight));
            }
        }
        for (value, sum) in out.iter_mut().zip(sums) {
            *value = clip(sum);
        }
    }
}
