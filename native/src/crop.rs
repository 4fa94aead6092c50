//! A crop of a JPEG, decoded, resized and mirrored as Pillow does it.

use std::ops::Range;

use crate::coefficients::Packed;
use crate::color::{ColorRows, Decoded, Pixels, Rows};
use crate::header::{self, Frame};
use crate::index::Cursor;
#[cfg(target_arch = "aarch64")]
use crate::kernels::Neon;
#[cfg(target_arch = "x86_64")]
use crate::kernels::{Avx2, Avx512};
use crate::kernels::{Kernels, Portable, Version};
use crate::memory::reserve;
use crate::refusal::Refusal;
use crate::resample::{Axis, Filter, ROWS, SLACK};
use crate::scan::{Region, ScanDecoder};

/// Largest region that is decoded, pixels; the reference path has its own limits.
const MAX_PIXELS: usize = 1 << 27;

/// Crop of an image, as in `podscale.data.crop.CropParams`. All values are pixels.
#[derive(Clone, Copy, Debug)]
pub struct Crop {
    /// Size that the image must have.
    pub height: usize,
    pub width: usize,
    /// Rectangle of the image.
    pub left: usize,
    pub top: usize,
    pub crop_width: usize,
    pub crop_height: usize,
    /// Size of the resized rectangle.
    pub out_width: usize,
    pub out_height: usize,
    /// Square of the resized rectangle; it may extend beyond it, and is black there.
    pub out_left: i64,
    pub out_top: i64,
    pub mirror: bool,
}

impl Crop {
    /// Return true if the rectangle lies in the image and no size is 0.
    pub fn is_valid(&self) -> bool {
        self.crop_width > 0
            && self.crop_height > 0
            && self.left + self.crop_width <= self.width
            && self.top + self.crop_height <= self.height
            && self.out_width > 0
            && self.out_height > 0
    }
}

/// Memory of the rows that are resampled together.
#[derive(Default)]
struct RowGroup {
    rows: [Vec<u8>; ROWS],
}

impl RowGroup {
    fn reserve(&mut self, bytes: usize) -> [&mut [u8]; ROWS] {
        self.rows.each_mut().map(|row| reserve(row, bytes))
    }
}

/// Image whose crop is wanted.
#[derive(Clone, Copy)]
pub enum Image<'a> {
    Jpeg {
        file: &'a [u8],
        /// Decode index; empty if there is none.
        index: &'a [u8],
    },
    /// Packed coefficients, of `pack`.
    Coefficients(&'a [u8]),
    /// Decoded, 3 bytes a pixel.
    Pixels(&'a [u8]),
}

/// Height over width above which Pillow before version 13 resizes vertically first.
const VERY_HIGH: u64 = 100;

/// Output size and filter of a batch of crops.
#[derive(Clone, Copy)]
pub struct Resize {
    /// Side of the output, pixels.
    pub size: usize,
    pub filter: Filter,
    /// Resize horizontally first unless the crop is very high, as Pillow does before version 13.
    pub rows_first: bool,
}

/// Decoder of crops with its memory, which is kept between images.
pub struct Cropper {
    version: Version,
    decoder: Decoder,
}

#[derive(Default)]
struct Decoder {
    scan: ScanDecoder,
    resizer: Resizer,
    packed: Vec<u8>,
}

#[derive(Default)]
struct Resizer {
    across: Axis,
    down: Axis,
    colors: ColorRows,
    wide: RowGroup,
    narrow: RowGroup,
    image: Vec<u8>,
}

impl Cropper {
    /// Create a decoder with a version of the kernels, which `Version::available` has.
    pub fn new(version: Version) -> Self {
        assert!(Version::available().contains(&version));
        Cropper { version, decoder: Decoder::default() }
    }

    /// Write a crop of an image to `out`, `size` x `size` pixels of 3 bytes. On a refusal `out` has no meaning.
    pub fn run(&mut self, image: Image, crop: &Crop, resize: Resize, out: &mut [u8]) -> Result<(), Refusal> {
        match self.version {
            Version::Portable => self.decoder.run::<Portable>(image, crop, resize, out),
            // SAFETY: the processor has these instructions.
            #[cfg(target_arch = "x86_64")]
            Version::Avx2 => unsafe { self.decoder.run_avx2(image, crop, resize, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Version::Avx512 => unsafe { self.decoder.run_avx512(image, crop, resize, out) },
            #[cfg(target_arch = "aarch64")]
            Version::Neon => self.decoder.run::<Neon>(image, crop, resize, out),
        }
    }

    /// Return the packed coefficients of a file; None if they have more than `limit` bytes.
    pub fn pack(&mut self, file: &[u8], limit: usize) -> Result<Option<&[u8]>, Refusal> {
        match self.version {
            Version::Portable => self.decoder.pack::<Portable>(file, limit),
            #[cfg(target_arch = "x86_64")]
            Version::Avx2 => self.decoder.pack::<Avx2>(file, limit),
            #[cfg(target_arch = "x86_64")]
            Version::Avx512 => self.decoder.pack::<Avx512>(file, limit),
            #[cfg(target_arch = "aarch64")]
            Version::Neon => self.decoder.pack::<Neon>(file, limit),
        }
    }
}

/// Return the decode index of a file with an entry at every `interval`-th MCU, or at fewer if it would have more than
/// `max_percent` of the file's bytes. Empty: the file is refused, or it is so small that it needs none.
pub fn build_index(file: &[u8], interval: u16, max_percent: usize) -> Vec<u8> {
    let build = || {
        let header = header::parse(file)?;
        let mut decoder = ScanDecoder::default();
        match Version::fastest() {
            Version::Portable => decoder.index::<Portable>(file, &header, interval, max_percent),
            #[cfg(target_arch = "x86_64")]
            Version::Avx2 => decoder.index::<Avx2>(file, &header, interval, max_percent),
            #[cfg(target_arch = "x86_64")]
            Version::Avx512 => decoder.index::<Avx512>(file, &header, interval, max_percent),
            #[cfg(target_arch = "aarch64")]
            Version::Neon => decoder.index::<Neon>(file, &header, interval, max_percent),
        }
    };
    build().ok().flatten().unwrap_or_default()
}

impl Decoder {
    fn pack<K: Kernels>(&mut self, file: &[u8], limit: usize) -> Result<Option<&[u8]>, Refusal> {
        let fits = self.scan.pack::<K>(&header::parse(file)?, limit, &mut self.packed)?;
        Ok(fits.then_some(&self.packed))
    }

    /// As `run`, compiled for a processor with AVX2 and BMI.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn run_avx2(&mut self, image: Image, crop: &Crop, resize: Resize, out: &mut [u8]) -> Result<(), Refusal> {
        self.run::<Avx2>(image, crop, resize, out)
    }

    /// As `run`, compiled for a processor with AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vnni")]
    fn run_avx512(&mut self, image: Image, crop: &Crop, resize: Resize, out: &mut [u8]) -> Result<(), Refusal> {
        self.run::<Avx512>(image, crop, resize, out)
    }

    #[inline(always)]
    fn run<K: Kernels>(&mut self, image: Image, crop: &Crop, resize: Resize, out: &mut [u8]) -> Result<(), Refusal> {
        let Resize { size, filter, rows_first } = resize;
        let Decoder { scan, resizer, .. } = self;
        let columns = visible(crop.out_left, size, crop.out_width).ok_or(Refusal::Format)?;
        let rows = visible(crop.out_top, size, crop.out_height).ok_or(Refusal::Format)?;
        let target = Target::new(crop, &columns, &rows, size);
        resizer.across.fill(filter, crop.crop_width, crop.out_width, columns);
        resizer.down.fill(filter, crop.crop_height, crop.out_height, rows);
        let source = Source {
            columns: shifted(&resizer.across.source, crop.left),
            rows: shifted(&resizer.down.source, crop.top),
        };
        let columns_first = resizer.is_columns_first(crop, rows_first);
        if source.columns.len().saturating_mul(source.rows.len()) > MAX_PIXELS {
            return Err(Refusal::Format);
        }
        match image {
            Image::Pixels(bytes) => {
                if bytes.len() != 3 * crop.height * crop.width {
                    return Err(Refusal::Size);
                }
                resizer.run::<K, _>(&Pixels { bytes, width: crop.width }, columns_first, &source, &target, out);
            }
            Image::Coefficients(bytes) => {
                let packed = Packed::open(bytes)?;
                if (packed.frame.height, packed.frame.width) != (crop.height, crop.width) {
                    return Err(Refusal::Size);
                }
                packed.decode::<K>(&region(packed.frame, &source), &mut scan.planes)?;
                let decoded = Decoded { frame: packed.frame, planes: &scan.planes };
                resizer.run::<K, _>(&decoded, columns_first, &source, &target, out);
            }
            Image::Jpeg { file, index } => {
                let header = header::parse(file)?;
                if (header.frame.height, header.frame.width) != (crop.height, crop.width) {
                    return Err(Refusal::Size);
                }
                let cursor = if index.is_empty() { None } else { Some(Cursor::open(index, file, &header)?) };
                scan.decode::<K>(&header, &region(header.frame, &source), cursor)?;
                let decoded = Decoded { frame: header.frame, planes: &scan.planes };
                resizer.run::<K, _>(&decoded, columns_first, &source, &target, out);
            }
        }
        Ok(())
    }
}

/// Return the outputs of an axis that lie in a window.
fn visible(begin: i64, size: usize, length: usize) -> Option<Range<usize>> {
    let first = begin.max(0);
    let end = (begin.saturating_add(size as i64)).min(length as i64);
    (first < end).then_some(first as usize..end as usize)
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Pixels of the image that are needed.
struct Source {
    columns: Range<usize>,
    rows: Range<usize>,
}

/// Place of the pixels in the output.
struct Target {
    left: usize,
    top: usize,
    width: usize,
    height: usize,
    /// Side of the output.
    size: usize,
    mirror: bool,
}

impl Target {
    /// Return the place of the visible columns and rows of the resized rectangle.
    fn new(crop: &Crop, columns: &Range<usize>, rows: &Range<usize>, size: usize) -> Self {
        let left = (columns.start as i64 - crop.out_left) as usize;
        let left = if crop.mirror { size - left - columns.len() } else { left };
        let top = (rows.start as i64 - crop.out_top) as usize;
        Target { left, top, width: columns.len(), height: rows.len(), size, mirror: crop.mirror }
    }

    /// Return the bytes of a row, without those that stay black.
    #[inline(always)]
    fn row<'a>(&self, out: &'a mut [u8], row: usize) -> &'a mut [u8] {
        let begin = 3 * ((self.top + row) * self.size + self.left);
        &mut out[begin..begin + 3 * self.width]
    }
}

/// Return the MCUs of the source, with those that the upsampling of chroma also reads.
fn region(frame: Frame, source: &Source) -> Region {
    let (h, v) = frame.sampling.luma_blocks();
    let mcus = |range: &Range<usize>, factor: usize, length: usize| {
        let margin = if factor > 1 { 2 } else { 0 };
        let end = (range.end + margin).min(length);
        range.start.saturating_sub(margin) / (8 * factor)..end.div_ceil(8 * factor)
    };
    Region { columns: mcus(&source.columns, h, frame.width), rows: mcus(&source.rows, v, frame.height) }
}

impl Resizer {
    /// Return true if Pillow resizes vertically first: since version 13 if that saves more.
    fn is_columns_first(&self, crop: &Crop, rows_first: bool) -> bool {
        let lost_rows = crop.crop_height as i64 - crop.out_height as i64;
        let lost_columns = crop.crop_width as i64 - crop.out_width as i64;
        let has_both = !self.across.is_identity && !self.down.is_identity;
        let saves = if rows_first {
            crop.crop_height as u64 > VERY_HIGH * crop.crop_width as u64
        } else {
            lost_rows > 2 * lost_columns
        };
        has_both && lost_rows > 0 && saves
    }

    /// Write the crop; `across` and `down` have its weights.
    #[inline(always)]
    fn run<K: Kernels, R: Rows>(
        &mut self,
        image: &R,
        columns_first: bool,
        source: &Source,
        target: &Target,
        out: &mut [u8],
    ) {
        if (target.width, target.height) != (target.size, target.size) {
            out.fill(0);
        }
        if columns_first {
            self.vertical_first::<K, R>(image, source, target, out);
        } else {
            self.horizontal_first::<K, R>(image, source, target, out);
        }
    }

    #[inline(always)]
    fn horizontal_first<K: Kernels, R: Rows>(&mut self, image: &R, source: &Source, target: &Target, out: &mut [u8]) {
        let stride = 3 * target.width + SLACK;
        let rows = source.rows.len();
        let bytes = stride * rows.next_multiple_of(ROWS) + SLACK;
        let narrow = reserve(&mut self.image, bytes);
        let wide_bytes = 4 * source.columns.len() + self.across.row_slack();
        for (group, outputs) in narrow.chunks_exact_mut(ROWS * stride).enumerate() {
            let mut wide = self.wide.reserve(wide_bytes);
            for (row, pixels) in (ROWS * group..rows).zip(&mut wide) {
                image.write::<K>(&mut self.colors, source.rows.start + row, source.columns.clone(), pixels);
            }
            let mut outputs = outputs.chunks_exact_mut(stride);
            let outputs = std::array::from_fn(|_| outputs.next().unwrap_or_default());
            horizontal::<K>(&self.across, wide.map(|row| &*row), outputs, target);
        }
        for row in 0..target.height {
            let bytes = target.row(out, row);
            if self.down.is_identity {
                bytes.copy_from_slice(&narrow[row * stride..][..bytes.len()]);
            } else {
                K::vertical(&self.down, row, narrow, stride, bytes);
            }
        }
    }

    #[inline(always)]
    fn vertical_first<K: Kernels, R: Rows>(&mut self, image: &R, source: &Source, target: &Target, out: &mut [u8]) {
        let columns = source.columns.len();
        let stride = 4 * columns + SLACK;
        let bytes = stride * source.rows.len() + SLACK;
        let decoded = reserve(&mut self.image, bytes);
        for (row, pixels) in source.rows.clone().zip(decoded.chunks_exact_mut(stride)) {
            image.write::<K>(&mut self.colors, row, source.columns.clone(), pixels);
        }
        let wide_bytes = 4 * columns + self.across.row_slack();
        for begin in (0..target.height).step_by(ROWS) {
            let mut wide = self.wide.reserve(wide_bytes);
            for (row, pixels) in (begin..target.height).zip(&mut wide) {
                K::vertical(&self.down, row, decoded, stride, &mut pixels[..4 * columns]);
            }
            let mut narrow = self.narrow.reserve(3 * target.width + SLACK);
            horizontal::<K>(&self.across, wide.map(|row| &*row), narrow.each_mut().map(|row| &mut **row), target);
            for (row, pixels) in (begin..target.height).zip(&narrow) {
                let bytes = target.row(out, row);
                bytes.copy_from_slice(&pixels[..bytes.len()]);
            }
        }
    }
}

/// Resample or only copy rows of 4 bytes a pixel to 3 bytes a pixel.
#[inline(always)]
fn horizontal<K: Kernels>(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], target: &Target) {
    if !axis.is_identity {
        return K::horizontal(axis, rows, outputs, target.mirror);
    }
    for (row, output) in rows.into_iter().zip(outputs) {
        let pixels = output.chunks_exact_mut(3).take(target.width);
        let sources = row.chunks_exact(4).take(target.width);
        let copy = |(pixel, source): (&mut [u8], &[u8])| pixel.copy_from_slice(&source[..3]);
        if target.mirror {
            pixels.zip(sources.rev()).for_each(copy);
        } else {
            pixels.zip(sources).for_each(copy);
        }
    }
}
