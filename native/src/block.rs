//! Blocks of 8 x 8 samples: their coefficients from Huffman codes, and their samples.

use crate::header::{Header, NATURAL, RawTable};
use crate::huffman::{BitReader, END_OF_BLOCK, SYMBOLS, Table};
use crate::idct::{LARGEST_SUM, MAX_STEP, SAFE_SUM, dc_sample, idct_checked};
use crate::kernels::Kernels;
use crate::refusal::Refusal;

/// AC symbols that one refill is enough for, besides the DC symbol.
const AC_SYMBOLS: usize = SYMBOLS - 1;

/// End of a block, as a position in zigzag order from 1.
const END: usize = 64;

/// Natural position by the position in zigzag order from 1; 0 for positions behind the end of a block. The DC coefficient,
/// which is there, is set last.
const PLACES: [u8; 256] = {
    let mut places = [0; 256];
    let mut position = 0;
    while position < END {
        places[position + 1] = NATURAL[position];
        position += 1;
    }
    places
};

/// Coefficients of a block or their quantisation steps, in natural order.
#[repr(align(32))]
pub struct Block(pub [i16; 64]);

impl Default for Block {
    #[inline(always)]
    fn default() -> Self {
        Block([0; 64])
    }
}

impl Block {
    /// Set a coefficient by its position in zigzag order from 1, which is below 256.
    #[inline(always)]
    fn set(&mut self, at: usize, value: i32) {
        self.0[usize::from(PLACES[at & 255] & 63)] = value as i16;
    }

    /// Set the DC coefficient. Refuses one whose magnitude does not fit into 16 bits.
    #[inline(always)]
    fn set_dc(&mut self, value: i32) -> Result<(), Refusal> {
        self.0[0] = i16::try_from(value).ok().filter(|&value| value > i16::MIN).ok_or(Refusal::Data)?;
        Ok(())
    }
}

/// Tables of the components.
#[derive(Default)]
pub struct Tables {
    dc: [Table; 3],
    ac: [Table; 3],
    steps: [Block; 3],
}

/// Tables of a component.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    dc: &'a Table,
    ac: &'a Table,
    steps: &'a Block,
}

impl<'a> Codes<'a> {
    /// Return the quantisation steps, in natural order.
    pub fn steps(&self) -> &'a Block {
        self.steps
    }
}

impl Tables {
    /// Build the tables that the components name; components often share them.
    pub fn build(&mut self, header: &Header) -> Result<[Codes<'_>; 3], Refusal> {
        let count = header.frame.sampling.components();
        let of = &header.components[..count];
        let dc_slots = fill(&mut self.dc, &header.dc, of.iter().map(|component| component.dc), true)?;
        let ac_slots = fill(&mut self.ac, &header.ac, of.iter().map(|component| component.ac), false)?;
        for (steps, component) in self.steps.iter_mut().zip(of) {
            for (position, &step) in header.quant[component.quant].as_ref().ok_or(Refusal::Format)?.iter().enumerate() {
                if step > MAX_STEP {
                    return Err(Refusal::Format);
                }
                steps.set(position + 1, i32::from(step));
            }
        }
        Ok(std::array::from_fn(|number| Codes {
            dc: &self.dc[dc_slots[number]],
            ac: &self.ac[ac_slots[number]],
            steps: &self.steps[number],
        }))
    }
}

/// Build each named table once. Returns the place of each component's table.
fn fill(
    tables: &mut [Table; 3],
    raw: &[Option<RawTable>; 4],
    names: impl Iterator<Item = usize>,
    is_dc: bool,
) -> Result<[usize; 3], Refusal> {
    let mut named = [usize::MAX; 3];
    let mut slots = [0; 3];
    for (number, name) in names.enumerate() {
        named[number] = name;
        slots[number] = named.iter().position(|&other| other == name).unwrap_or(number);
        if slots[number] == number {
            tables[number].build(raw[name].as_ref().ok_or(Refusal::Format)?, is_dc)?;
        }
    }
    Ok(slots)
}

/// Read the blocks at two positions of the data, a symbol of each in turn, so that the processor overlaps their table
/// lookups.
#[inline(always)]
pub fn read_pair(
    data: &[u8],
    positions: (&mut usize, &mut usize),
    codes: &Codes,
    predictors: (&mut i32, &mut i32),
) -> Result<(Block, Block), Refusal> {
    let mut blocks = (Block::default(), Block::default());
    let mut a = BitReader::at(*positions.0, data).ok_or(Refusal::Data)?;
    let mut b = BitReader::at(*positions.1, data).ok_or(Refusal::Data)?;
    *predictors.0 = predictors.0.wrapping_add(read_dc(&mut a, codes)?);
    *predictors.1 = predictors.1.wrapping_add(read_dc(&mut b, codes)?);
    let (mut at_a, mut at_b) = (1, 1);
    'blocks: loop {
        for _ in 0..AC_SYMBOLS {
            read_ac(&mut a, codes, &mut at_a, |at, value| blocks.0.set(at, value))?;
            read_ac(&mut b, codes, &mut at_b, |at, value| blocks.1.set(at, value))?;
            if at_a | at_b >= END {
                break 'blocks;
            }
        }
        a.refill();
        b.refill();
    }
    a.refill();
    read_rest(&mut a, codes, at_a, |at, value| blocks.0.set(at, value))?;
    b.refill();
    read_rest(&mut b, codes, at_b, |at, value| blocks.1.set(at, value))?;
    blocks.0.set_dc(*predictors.0)?;
    blocks.1.set_dc(*predictors.1)?;
    (*positions.0, *positions.1) = (a.end(*positions.0), b.end(*positions.1));
    Ok(blocks)
}

/// Read the difference of the DC value.
#[inline(always)]
fn read_dc(bits: &mut BitReader, codes: &Codes) -> Result<i32, Refusal> {
    Ok(bits.symbol(codes.dc).ok_or(Refusal::Data)?.value)
}

/// Read an AC symbol: move `at`, the position in zigzag order from 1, by its advance, and call `coefficient` with that and
/// the value. The value may be 0, and the last position may lie behind the end of the block.
#[inline(always)]
fn read_ac(
    bits: &mut BitReader,
    codes: &Codes,
    at: &mut usize,
    coefficient: impl FnOnce(usize, i32),
) -> Result<(), Refusal> {
    let symbol = bits.symbol(codes.ac).ok_or(Refusal::Data)?;
    *at += symbol.advance;
    coefficient(*at, symbol.value);
    Ok(())
}

/// Read the AC symbols behind a position; refuses a block whose last coefficient lies behind its end, where libjpeg would
/// write to the last position.
#[inline(always)]
fn read_rest(
    bits: &mut BitReader,
    codes: &Codes,
    mut at: usize,
    mut coefficient: impl FnMut(usize, i32),
) -> Result<(), Refusal> {
    'rest: while at < END {
        for _ in 0..AC_SYMBOLS {
            read_ac(bits, codes, &mut at, &mut coefficient)?;
            if at >= END {
                break 'rest;
            }
        }
        bits.refill();
    }
    if (END + 1..END_OF_BLOCK).contains(&at) { Err(Refusal::Data) } else { Ok(()) }
}

/// Read a block and write its samples.
#[inline(always)]
pub fn decode_block<K: Kernels>(
    data: &[u8],
    position: &mut usize,
    codes: &Codes,
    predictor: &mut i32,
    samples: &mut [u8],
    stride: usize,
) -> Result<(), Refusal> {
    let mut block = Block::default();
    read_coefficients(data, position, codes, predictor, &mut block)?;
    write_block::<K>(&mut block, codes.steps, samples, stride)
}

/// Read the coefficients of a block into one that is empty.
#[inline(always)]
pub fn read_coefficients(
    data: &[u8],
    position: &mut usize,
    codes: &Codes,
    predictor: &mut i32,
    block: &mut Block,
) -> Result<(), Refusal> {
    let difference = read_block(data, position, codes, |at, value| block.set(at, value))?;
    *predictor = predictor.wrapping_add(difference);
    block.set_dc(*predictor)
}

/// Write the samples of a block.
#[inline(always)]
pub fn write_block<K: Kernels>(
    block: &mut Block,
    steps: &Block,
    samples: &mut [u8],
    stride: usize,
) -> Result<(), Refusal> {
    let dc = i32::from(block.0[0]) * i32::from(steps.0[0]);
    let sum = K::dequantise(block, steps);
    if sum <= SAFE_SUM {
        if sum > dc.unsigned_abs() {
            K::idct(block, samples, stride);
            return Ok(());
        }
        let value = [dc_sample(dc); 8];
        for row in samples.chunks_mut(stride).take(8) {
            row[..8].copy_from_slice(&value);
        }
        return Ok(());
    }
    if sum > LARGEST_SUM {
        return Err(Refusal::Data);
    }
    idct_checked(block, samples, stride).ok_or(Refusal::Data)
}

/// Read a block of which nothing is needed.
#[inline(always)]
pub fn pass_block(data: &[u8], position: &mut usize, codes: &Codes, predictor: &mut i32) -> Result<(), Refusal> {
    let difference = read_block(data, position, codes, |_, _| ())?;
    *predictor = predictor.wrapping_add(difference);
    Ok(())
}

/// Read a block: call `coefficient` as `read_ac` does. Returns the difference of the DC value.
#[inline(always)]
fn read_block(
    data: &[u8],
    position: &mut usize,
    codes: &Codes,
    coefficient: impl FnMut(usize, i32),
) -> Result<i32, Refusal> {
    let mut bits = BitReader::at(*position, data).ok_or(Refusal::Data)?;
    let difference = read_dc(&mut bits, codes)?;
    read_rest(&mut bits, codes, 1, coefficient)?;
    *position = bits.end(*position);
    Ok(difference)
}
