//! Kernels in three versions, with equal results: portable Rust, AVX2 if the processor has it, and NEON on ARM.

use crate::block::Block;
use crate::coefficients::{self, Packed, Packer, Window};
use crate::color;
use crate::idct;
use crate::refusal::Refusal;
use crate::resample::{self, Axis, ROWS};
use crate::scan::{self, Plane, Region, Scan};

/// Kernels, and the loops around them. A version that needs code for other instructions than the rest of the program
/// compiles the loops for them too.
pub trait Kernels: Sized {
    /// Read the MCUs before `stop`; see `Scan::pass_mcus`.
    #[inline(always)]
    fn pass_mcus(scan: &mut Scan, stop: usize) -> Result<(), Refusal> {
        scan.pass_mcus(stop)
    }

    /// Pack the MCUs before `stop`; see `Scan::pack_mcus`.
    #[inline(always)]
    fn pack_mcus(scan: &mut Scan, stop: usize, packer: &mut Packer) -> Result<(), Refusal> {
        scan.pack_mcus(stop, packer)
    }

    /// Decode packed MCUs; see `Packed::decode_row`.
    #[inline(always)]
    fn decode_packed(packed: &Packed, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
        packed.decode_row::<Self>(region, row, planes)
    }

    /// Decode the MCUs before `stop`; see `Scan::decode_mcus`.
    #[inline(always)]
    fn decode_mcus(
        scan: &mut Scan,
        planes: &mut [Plane; 3],
        place: (usize, usize),
        stop: usize,
    ) -> Result<(), Refusal> {
        scan.decode_mcus::<Self>(planes, place, stop)
    }

    /// Decode `count` MCUs of two scans; see `scan::decode_pairs`.
    #[inline(always)]
    fn decode_pairs(
        scans: (&mut Scan, &mut Scan),
        planes: &mut [Plane; 3],
        place: (usize, usize),
        count: usize,
    ) -> Result<(), Refusal> {
        scan::decode_pairs::<Self>(scans, planes, place, count)
    }

    /// Write the samples of a packed block.
    fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal>;

    /// Multiply the coefficients of a block by the quantisation steps; see `idct::dequantise_portable`.
    fn dequantise(block: &mut Block, steps: &Block) -> u32;

    /// Write the 8 x 8 samples of a block whose sum is at most `idct::SAFE_SUM`.
    fn idct(block: &Block, samples: &mut [u8], stride: usize);

    /// Convert a row of YCbCr to RGB with a fourth byte; `pixels` has 4 bytes for each sample.
    fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]);

    /// Resample rows of 4 bytes a pixel to 3 bytes a pixel, reversed if `mirror`. The rows and the outputs extend
    /// `resample::SLACK` bytes behind their last pixel.
    fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool);

    /// Write output `at` of an axis from rows of `stride` bytes; `out` has as many bytes as are needed of a row.
    fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]);
}

pub struct Portable;

impl Kernels for Portable {
    fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
        coefficients::write_packed_portable(window, steps, samples, stride)
    }

    fn dequantise(block: &mut Block, steps: &Block) -> u32 {
        idct::dequantise_portable(block, steps)
    }

    fn idct(block: &Block, samples: &mut [u8], stride: usize) {
        idct::idct_portable(block, samples, stride);
    }

    fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
        color::convert_portable(y, cb, cr, pixels);
    }

    fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
        for (row, output) in rows.into_iter().zip(outputs) {
            resample::horizontal_portable(axis, row, output, mirror);
        }
    }

    fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
        resample::vertical_portable(axis, at, rows, stride, out);
    }
}

/// Version of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Version {
    /// Return the fastest version that this processor runs.
    pub fn fastest() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
        {
            return Version::Avx2;
        }
        #[cfg(target_arch = "aarch64")]
        let others = Version::Neon; // part of every such processor
        #[cfg(not(target_arch = "aarch64"))]
        let others = Version::Portable;
        others
    }

    pub fn name(self) -> &'static str {
        match self {
            Version::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Version::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Version::Neon => "neon",
        }
    }
}

/// Kernels for processors with AVX2. Only `crop` names them, for `Version::Avx2`.
#[cfg(target_arch = "x86_64")]
pub struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Kernels for Avx2 {
    #[inline(always)]
    fn pass_mcus(scan: &mut Scan, stop: usize) -> Result<(), Refusal> {
        // SAFETY: the processor has AVX2 and BMI, or this type would not have been named. So in the functions below.
        unsafe { scan::avx2::pass_mcus(scan, stop) }
    }

    #[inline(always)]
    fn pack_mcus(scan: &mut Scan, stop: usize, packer: &mut Packer) -> Result<(), Refusal> {
        // SAFETY: as above.
        unsafe { scan::avx2::pack_mcus(scan, stop, packer) }
    }

    #[inline(always)]
    fn decode_packed(packed: &Packed, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
        // SAFETY: as above.
        unsafe { coefficients::avx2::decode_row(packed, region, row, planes) }
    }

    #[inline(always)]
    fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
        // SAFETY: as above.
        unsafe { coefficients::avx2::write_packed(window, steps, samples, stride) }
    }

    #[inline(always)]
    fn decode_mcus(
        scan: &mut Scan,
        planes: &mut [Plane; 3],
        place: (usize, usize),
        stop: usize,
    ) -> Result<(), Refusal> {
        // SAFETY: as above.
        unsafe { scan::avx2::decode_mcus(scan, planes, place, stop) }
    }

    #[inline(always)]
    fn decode_pairs(
        scans: (&mut Scan, &mut Scan),
        planes: &mut [Plane; 3],
        place: (usize, usize),
        count: usize,
    ) -> Result<(), Refusal> {
        // SAFETY: as above.
        unsafe { scan::avx2::decode_pairs(scans, planes, place, count) }
    }

    #[inline(always)]
    fn dequantise(block: &mut Block, steps: &Block) -> u32 {
        // SAFETY: as above.
        unsafe { idct::avx2::dequantise(block, steps) }
    }

    #[inline(always)]
    fn idct(block: &Block, samples: &mut [u8], stride: usize) {
        // SAFETY: as above.
        unsafe { idct::avx2::idct(block, samples, stride) }
    }

    #[inline(always)]
    fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
        // SAFETY: as above.
        unsafe { color::avx2::convert(y, cb, cr, pixels) }
    }

    #[inline(always)]
    fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
        // SAFETY: as above.
        unsafe { resample::avx2::horizontal(axis, rows, outputs, mirror) }
    }

    #[inline(always)]
    fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
        // SAFETY: as above.
        unsafe { resample::avx2::vertical(axis, at, rows, stride, out) }
    }
}

/// Kernels for ARM processors of 64 bits, which all have NEON.
#[cfg(target_arch = "aarch64")]
pub struct Neon;

#[cfg(target_arch = "aarch64")]
impl Kernels for Neon {
    #[inline(always)]
    fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
        // SAFETY: the processor has NEON. So in the functions below.
        unsafe { coefficients::neon::write_packed(window, steps, samples, stride) }
    }

    #[inline(always)]
    fn dequantise(block: &mut Block, steps: &Block) -> u32 {
        // SAFETY: as above.
        unsafe { idct::neon::dequantise(block, steps) }
    }

    #[inline(always)]
    fn idct(block: &Block, samples: &mut [u8], stride: usize) {
        // SAFETY: as above.
        unsafe { idct::neon::idct(block, samples, stride) }
    }

    #[inline(always)]
    fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
        // SAFETY: as above.
        unsafe { color::neon::convert(y, cb, cr, pixels) }
    }

    #[inline(always)]
    fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
        // SAFETY: as above.
        unsafe { resample::neon::horizontal(axis, rows, outputs, mirror) }
    }

    #[inline(always)]
    fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
        // SAFETY: as above.
        unsafe { resample::neon::vertical(axis, at, rows, stride, out) }
    }
}
