//! Quantised DCT coefficients of an image, packed so that reading can start at any MCU.
//!
//! A memory cache keeps them in place of pixels. A crop then costs no Huffman decoding. Layout, little-endian:
//!
//! - height and width (u16), sampling (u8), number of the quantisation table of each component (3 x u8);
//! - quantisation tables (64 x u16 each, natural order);
//! - for each row of MCUs and each GROUP of them: place of its first block (u32), from the first block on;
//! - the blocks of the MCUs in their order, and zeros behind them, so that WINDOW bytes can be read of any block.
//!
//! A block has a bit for each of its 8 rows that is not empty (u8), the DC value (i16), the row masks of those rows (u8
//! each, a bit for each AC coefficient that is not 0), and the coefficients (i8), all in natural order. The place of the
//! DC value in the mask is a flag: coefficients have 16 bits, of which the upper bytes follow the lower ones.
//!
//! The bytes stay in the memory of one host. Reading them is safe whatever they are; wrong ones are refused or give other pixels.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::block::{Block, Codes, write_block};
use crate::header::{Frame, Header, Sampling};
use crate::idct::{MAX_STEP, SAFE_SUM};
use crate::kernels::{Kernels, Portable};
use crate::refusal::Refusal;
use crate::scan::{Plane, Region};

/// MCUs between two places from which reading can start, in a row.
pub const GROUP: usize = 8;

/// Bytes that are read at a block: the largest block, and the rest of a load.
pub const WINDOW: usize = 152;

const PREFIX_BYTES: usize = 8;
const TABLE_BYTES: usize = 128;
/// Bytes of a block in front of its row masks.
const BLOCK_PREFIX: usize = 3;
const SAMPLINGS: [Sampling; 4] = [Sampling::Gray, Sampling::Full, Sampling::Half, Sampling::Quarter];

pub type Window = [u8; WINDOW];

/// Writer of packed coefficients.
pub struct Packer<'a> {
    bytes: &'a mut Vec<u8>,
    /// Place of the next entry in `bytes`, and of the first block.
    entry: usize,
    blocks: usize,
}

impl<'a> Packer<'a> {
    /// Begin an image in `bytes`, whose content is dropped.
    pub fn new(bytes: &'a mut Vec<u8>, header: &Header, codes: &[Codes; 3]) -> Result<Self, Refusal> {
        let Frame { height, width, sampling } = header.frame;
        let side = |length: usize| u16::try_from(length).map_err(|_| Refusal::Format);
        bytes.clear();
        bytes.extend_from_slice(&side(height)?.to_le_bytes());
        bytes.extend_from_slice(&side(width)?.to_le_bytes());
        bytes.push(SAMPLINGS.iter().position(|&other| other == sampling).unwrap_or(0) as u8);
        let mut tables = Vec::new();
        for (component, codes) in header.components[..sampling.components()].iter().zip(codes) {
            let number = tables.iter().position(|&(table, _)| table == component.quant).unwrap_or(tables.len());
            if number == tables.len() {
                tables.push((component.quant, codes.steps()));
            }
            bytes.push(number as u8);
        }
        bytes.resize(PREFIX_BYTES, 0);
        for (_, steps) in tables {
            bytes.extend(steps.0.iter().flat_map(|step| step.to_le_bytes()));
        }
        let (across, down) = header.frame.mcus();
        let entry = bytes.len();
        let blocks = entry + 4 * across.div_ceil(GROUP) * down;
        bytes.resize(blocks, 0);
        Ok(Packer { bytes, entry, blocks })
    }

    /// Begin the next group of MCUs. Returns false if its place does not fit into 32 bits.
    pub fn begin_group(&mut self) -> bool {
        let Ok(place) = u32::try_from(self.bytes.len() - self.blocks) else { return false };
        self.bytes[self.entry..self.entry + 4].copy_from_slice(&place.to_le_bytes());
        self.entry += 4;
        true
    }

    /// Bytes so far, with those that `finish` adds.
    pub fn size(&self) -> usize {
        self.bytes.len() + WINDOW
    }

    pub fn finish(self) {
        self.bytes.resize(self.size(), 0);
    }

    #[inline(always)]
    pub fn push(&mut self, block: &Block) {
        let ac = || block.0.iter().enumerate().skip(1);
        let mask = ac().fold(0, |mask, (position, &value)| mask | u64::from(value != 0) << position);
        let is_wide = ac().fold(false, |is_wide, (_, &value)| is_wide | i8::try_from(value).is_err());
        let mut packed = [0; WINDOW];
        packed[1..BLOCK_PREFIX].copy_from_slice(&block.0[0].to_le_bytes());
        let mut at = BLOCK_PREFIX;
        for (row, bits) in (mask | u64::from(is_wide)).to_le_bytes().into_iter().enumerate() {
            if bits != 0 {
                packed[0] |= 1 << row;
                packed[at] = bits;
                at += 1;
            }
        }
        let count = mask.count_ones() as usize;
        let mut rest = mask;
        for at in at..at + count {
            let [low, high] = block.0[rest.trailing_zeros() as usize & 63].to_le_bytes();
            packed[at] = low;
            if is_wide {
                packed[at + count] = high;
            }
            rest &= rest - 1;
        }
        self.bytes.extend_from_slice(&packed[..at + (count << u32::from(is_wide))]);
    }
}

/// Packed coefficients of an image.
pub struct Packed<'a> {
    pub frame: Frame,
    /// Quantisation steps of each component.
    steps: [Block; 3],
    entries: &'a [u8],
    blocks: &'a [u8],
}

impl<'a> Packed<'a> {
    pub fn open(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let (prefix, rest) = bytes.split_first_chunk::<PREFIX_BYTES>().ok_or(Refusal::Data)?;
        let frame = Frame {
            height: usize::from(u16::from_le_bytes([prefix[0], prefix[1]])),
            width: usize::from(u16::from_le_bytes([prefix[2], prefix[3]])),
            sampling: *SAMPLINGS.get(usize::from(prefix[4])).ok_or(Refusal::Data)?,
        };
        let tables = &prefix[5..5 + frame.sampling.components()];
        let count = 1 + usize::from(tables.iter().copied().max().unwrap_or(0));
        let mut steps: [Block; 3] = Default::default();
        for (steps, &table) in steps.iter_mut().zip(tables) {
            let values = rest.get(TABLE_BYTES * usize::from(table)..).and_then(|rest| rest.get(..TABLE_BYTES));
            for (step, value) in steps.0.iter_mut().zip(values.ok_or(Refusal::Data)?.chunks_exact(2)) {
                let value = u16::from_le_bytes([value[0], value[1]]);
                *step = if value <= MAX_STEP { value as i16 } else { return Err(Refusal::Data) };
            }
        }
        let (across, down) = frame.mcus();
        let rest = rest.get(TABLE_BYTES * count..).ok_or(Refusal::Data)?;
        let (entries, blocks) = rest.split_at_checked(4 * across.div_ceil(GROUP) * down).ok_or(Refusal::Data)?;
        Ok(Packed { frame, steps, entries, blocks })
    }

    /// Decode the blocks of a region into `planes`.
    pub fn decode<K: Kernels>(&self, region: &Region, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
        let (h, v) = self.frame.sampling.luma_blocks();
        for (number, plane) in planes.iter_mut().enumerate().take(self.frame.sampling.components()) {
            plane.place(region, if number == 0 { (h, v) } else { (1, 1) });
        }
        for row in region.rows.clone() {
            K::decode_packed(self, region, row, planes)?;
        }
        Ok(())
    }

    /// Decode the MCUs of a region in a row.
    #[inline(always)]
    pub fn decode_row<K: Kernels>(&self, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
        let components = self.frame.sampling.components();
        let (h, v) = self.frame.sampling.luma_blocks();
        let mut at = self.first_block(row, region.columns.start)?;
        for column in 0..region.columns.len() {
            for (component, plane) in planes.iter_mut().enumerate().take(components) {
                let (h, v) = if component == 0 { (h, v) } else { (1, 1) };
                for y in 0..v {
                    let begin = ((row - region.rows.start) * v + y) * 8 * plane.stride + 8 * h * column;
                    for x in 0..h {
                        let window = self.window(at)?;
                        at += packed_bytes(window);
                        let samples = &mut plane.samples[begin + 8 * x..];
                        K::write_packed(window, &self.steps[component], samples, plane.stride)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Return the place of the first block of an MCU.
    #[inline(always)]
    fn first_block(&self, row: usize, column: usize) -> Result<usize, Refusal> {
        let entry = 4 * (row * self.frame.mcus().0.div_ceil(GROUP) + column / GROUP);
        let place = self.entries.get(entry..).and_then(|rest| rest.first_chunk()).ok_or(Refusal::Data)?;
        let mut at = u32::from_le_bytes(*place) as usize;
        let (h, v) = self.frame.sampling.luma_blocks();
        let blocks = h * v + self.frame.sampling.components() - 1;
        for _ in 0..column % GROUP * blocks {
            at += packed_bytes(self.window(at)?);
        }
        Ok(at)
    }

    #[inline(always)]
    fn window(&self, at: usize) -> Result<&'a Window, Refusal> {
        self.blocks.get(at..).and_then(|rest| rest.first_chunk()).ok_or(Refusal::Data)
    }
}

/// Row masks of a block, without those of empty rows.
#[inline(always)]
fn compact_masks(window: &Window) -> u64 {
    let masks = u64::from_le_bytes(*window[BLOCK_PREFIX..].first_chunk().expect("8 bytes"));
    masks & u64::MAX.checked_shr(64 - 8 * window[0].count_ones()).unwrap_or(0)
}

/// Return the bytes of a packed block.
#[inline(always)]
fn packed_bytes(window: &Window) -> usize {
    let masks = compact_masks(window);
    let is_wide = masks & u64::from(window[0]) & 1;
    BLOCK_PREFIX + window[0].count_ones() as usize + (((masks.count_ones() as u64 - is_wide) as usize) << is_wide)
}

/// Write the samples of a packed block.
pub fn write_packed_portable(window: &Window, steps: &Block, samples: &mut [u8], stride: usize) -> Result<(), Refusal> {
    write_block::<Portable>(&mut unpack(window), steps, samples, stride)
}

/// Return the coefficients of a packed block.
fn unpack(window: &Window) -> Block {
    let mut masks = [0; 8];
    let mut at = BLOCK_PREFIX;
    for (row, mask) in masks.iter_mut().enumerate() {
        if window[0] >> row & 1 == 1 {
            *mask = window[at];
            at += 1;
        }
    }
    let mask = u64::from_le_bytes(masks);
    let (is_wide, mut rest) = (mask & 1 == 1, mask & !1);
    let count = rest.count_ones() as usize;
    let mut block = Block::default();
    for at in at..at + count {
        let (low, position) = (window[at], rest.trailing_zeros() as usize & 63);
        block.0[position] = if is_wide { i16::from_le_bytes([low, window[at + count]]) } else { i16::from(low as i8) };
        rest &= rest - 1;
    }
    block.0[0] = dc(window);
    block
}

fn dc(window: &Window) -> i16 {
    i16::from_le_bytes([window[1], window[2]])
}

/// By mask: for each of its bits, the number of the bits that are set below it, or -1 if it is not set itself.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
static SPREAD: [u64; 256] = spread();

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn spread() -> [u64; 256] {
    let mut table = [0; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut bytes, mut bit, mut next) = ([0xFF_u8; 8], 0, 0);
        while bit < 8 {
            if mask >> bit & 1 == 1 {
                bytes[bit] = next;
                next += 1;
            }
            bit += 1;
        }
        table[mask] = u64::from_le_bytes(bytes);
        mask += 1;
    }
    table
}
