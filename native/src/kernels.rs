//! Kernels in several versions, with equal results: portable Rust, AVX2 and AVX-512 if the processor has them, and NEON
//! on ARM.

use std::sync::OnceLock;

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
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Version {
    /// Return the versions that this processor runs, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut versions = vec![Version::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
        {
            versions.insert(0, Version::Avx2);
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("avx512vnni")
            {
                versions.insert(0, Version::Avx512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        versions.insert(0, Version::Neon); // part of every such processor
        versions
    }

    /// Return the fastest version that this processor runs.
    pub fn fastest() -> Self {
        static FASTEST: OnceLock<Version> = OnceLock::new();
        *FASTEST.get_or_init(|| Version::available()[0])
    }

    /// Return the version of a name; None if there is none that this processor runs.
    pub fn named(name: &str) -> Option<Self> {
        Version::available().into_iter().find(|version| version.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Version::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Version::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Version::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Version::Neon => "neon",
        }
    }
}

/// The kernels of a module of each room, which are compiled for instructions that not every processor has.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! kernels_of {
    ($module:ident) => {
        #[inline(always)]
        fn write_packed(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
            // SAFETY: the processor has the instructions, or the type would not have been named. So in the others.
            unsafe { coefficients::$module::write_packed(window, steps, samples, stride) }
        }

        #[inline(always)]
        fn dequantise(block: &mut Block, steps: &Block) -> u32 {
            // SAFETY: as above.
            unsafe { idct::$module::dequantise(block, steps) }
        }

        #[inline(always)]
        fn idct(block: &Block, samples: &mut [u8], stride: usize) {
            // SAFETY: as above.
            unsafe { idct::$module::idct(block, samples, stride) }
        }

        #[inline(always)]
        fn convert(y: &[u8], cb: &[u8], cr: &[u8], pixels: &mut [u8]) {
            // SAFETY: as above.
            unsafe { color::$module::convert(y, cb, cr, pixels) }
        }

        #[inline(always)]
        fn horizontal(axis: &Axis, rows: [&[u8]; ROWS], outputs: [&mut [u8]; ROWS], mirror: bool) {
            // SAFETY: as above.
            unsafe { resample::$module::horizontal(axis, rows, outputs, mirror) }
        }

        #[inline(always)]
        fn vertical(axis: &Axis, at: usize, rows: &[u8], stride: usize, out: &mut [u8]) {
            // SAFETY: as above.
            unsafe { resample::$module::vertical(axis, at, rows, stride, out) }
        }
    };
}

/// The loops around the kernels, compiled for the same instructions.
#[cfg(target_arch = "x86_64")]
macro_rules! loops_of {
    ($module:ident) => {
        #[inline(always)]
        fn pass_mcus(scan: &mut Scan, stop: usize) -> Result<(), Refusal> {
            // SAFETY: the processor has the instructions, or the type would not have been named. So in the others.
            unsafe { scan::$module::pass_mcus(scan, stop) }
        }

        #[inline(always)]
        fn pack_mcus(scan: &mut Scan, stop: usize, packer: &mut Packer) -> Result<(), Refusal> {
            // SAFETY: as above.
            unsafe { scan::$module::pack_mcus(scan, stop, packer) }
        }

        #[inline(always)]
        fn decode_packed(packed: &Packed, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
            // SAFETY: as above.
            unsafe { coefficients::$module::decode_row(packed, region, row, planes) }
        }

        #[inline(always)]
        fn decode_mcus(
            scan: &mut Scan,
            planes: &mut [Plane; 3],
            place: (usize, usize),
            stop: usize,
        ) -> Result<(), Refusal> {
            // SAFETY: as above.
            unsafe { scan::$module::decode_mcus(scan, planes, place, stop) }
        }

        #[inline(always)]
        fn decode_pairs(
            scans: (&mut Scan, &mut Scan),
            planes: &mut [Plane; 3],
            place: (usize, usize),
            count: usize,
        ) -> Result<(), Refusal> {
            // SAFETY: as above.
            unsafe { scan::$module::decode_pairs(scans, planes, place, count) }
        }
    };
}

/// Kernels for processors with AVX2 and BMI. Only `crop` names them, for `Version::Avx2`.
#[cfg(target_arch = "x86_64")]
pub struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Kernels for Avx2 {
    loops_of!(avx2);
    kernels_of!(avx2);
}

/// Kernels for processors with AVX-512, from Ice Lake and Zen 4 on. Only `crop` names them, for `Version::Avx512`.
#[cfg(target_arch = "x86_64")]
pub struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Kernels for Avx512 {
    loops_of!(avx512);
    kernels_of!(avx512);
}

/// Kernels for ARM processors of 64 bits, which all have NEON, so the loops need no code of their own.
#[cfg(target_arch = "aarch64")]
pub struct Neon;

#[cfg(target_arch = "aarch64")]
impl Kernels for Neon {
    kernels_of!(neon);
}
