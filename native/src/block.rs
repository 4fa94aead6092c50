//! Blocks of 8 x 8 samples: their coefficients from Huffman codes, and their samples.

use crate::header::{Header, NATURAL, RawTable};
use crate::huffman::{BitReader, Coded, END_OF_BLOCK, Table};
use crate::idct::{LARGEST_SUM, MAX_STEP, SAFE_SUM, dc_sample, idct_checked};
use crate::kernels::Kernels;
use crate::refusal::Refusal;

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
    /// Set a coefficient by its position in zigzag order, which is below 64.
    #[inline(always)]
    fn set(&mut self, position: usize, value: i32) {
        self.0[usize::from(NATURAL[position & 63] & 63)] = value as i16;
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
                steps.set(position, i32::from(step));
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

/// Read a block of two readers of the same data, a symbol of each in turn, so that the processor overlaps their table
/// lookups.
#[inline(always)]
pub fn read_pair(
    data: &[u8],
    readers: (&mut BitReader, &mut BitReader),
    codes: &Codes,
    predictors: (&mut i32, &mut i32),
) -> Result<(Block, Block), Refusal> {
    let mut blocks = (Block::default(), Block::default());
    let (mut a, mut b) = (*readers.0, *readers.1);
    a.refill(data);
    b.refill(data);
    read_dc(&mut a, codes, predictors.0, &mut blocks.0, data)?;
    read_dc(&mut b, codes, predictors.1, &mut blocks.1, data)?;
    let (mut at_a, mut at_b) = (0, 0);
    let (mut symbol_a, mut symbol_b);
    loop {
        // One refill for two symbols; the DC symbol was the first.
        symbol_a = a.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        symbol_b = b.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        at_a += symbol_a.advance;
        at_b += symbol_b.advance;
        if at_a.max(at_b) >= 63 {
            break;
        }
        blocks.0.set(at_a, symbol_a.value);
        blocks.1.set(at_b, symbol_b.value);
        a.refill(data);
        b.refill(data);
        symbol_a = a.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        symbol_b = b.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        at_a += symbol_a.advance;
        at_b += symbol_b.advance;
        if at_a.max(at_b) >= 63 {
            break;
        }
        blocks.0.set(at_a, symbol_a.value);
        blocks.1.set(at_b, symbol_b.value);
    }
    finish_block(data, &mut a, codes, at_a, symbol_a, &mut blocks.0)?;
    finish_block(data, &mut b, codes, at_b, symbol_b, &mut blocks.1)?;
    (*readers.0, *readers.1) = (a, b);
    Ok(blocks)
}

#[inline(always)]
fn read_dc(
    bits: &mut BitReader,
    codes: &Codes,
    predictor: &mut i32,
    block: &mut Block,
    data: &[u8],
) -> Result<(), Refusal> {
    let difference = bits.symbol(codes.dc, data).ok_or(Refusal::Data)?.value;
    *predictor = predictor.wrapping_add(difference);
    block.set_dc(*predictor)
}

/// Read the rest of a block, from a symbol on that was read last.
#[inline(always)]
fn finish_block(
    data: &[u8],
    bits: &mut BitReader,
    codes: &Codes,
    mut position: usize,
    mut symbol: Coded,
    block: &mut Block,
) -> Result<(), Refusal> {
    while position < 63 {
        block.set(position, symbol.value);
        bits.refill(data);
        symbol = bits.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        position += symbol.advance;
    }
    if position == 63 {
        block.set(63, symbol.value);
    } else if symbol.advance != END_OF_BLOCK {
        return Err(Refusal::Data); // libjpeg would write to the last position
    }
    Ok(())
}

/// Read a block and write its samples.
#[inline(always)]
pub fn decode_block<K: Kernels>(
    data: &[u8],
    reader: &mut BitReader,
    codes: &Codes,
    predictor: &mut i32,
    samples: &mut [u8],
    stride: usize,
) -> Result<(), Refusal> {
    let mut block = Block::default();
    read_coefficients(data, reader, codes, predictor, &mut block)?;
    write_block::<K>(&mut block, codes.steps, samples, stride)
}

/// Read the coefficients of a block into one that is empty.
#[inline(always)]
pub fn read_coefficients(
    data: &[u8],
    reader: &mut BitReader,
    codes: &Codes,
    predictor: &mut i32,
    block: &mut Block,
) -> Result<(), Refusal> {
    let difference = read_block(data, reader, codes, |position, value| block.set(position, value))?;
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
pub fn pass_block(data: &[u8], reader: &mut BitReader, codes: &Codes, predictor: &mut i32) -> Result<(), Refusal> {
    let difference = read_block(data, reader, codes, |_, _| ())?;
    *predictor = predictor.wrapping_add(difference);
    Ok(())
}

/// Read a block: call `coefficient` with the position in zigzag order and the value of its AC coefficients, some of
/// which are 0. Returns the difference of the DC value.
#[inline(always)]
fn read_block(
    data: &[u8],
    reader: &mut BitReader,
    codes: &Codes,
    mut coefficient: impl FnMut(usize, i32),
) -> Result<i32, Refusal> {
    let mut bits = *reader; // in registers
    bits.refill(data);
    let difference = bits.symbol(codes.dc, data).ok_or(Refusal::Data)?.value;
    let mut position = 0;
    // One refill for two symbols; the DC symbol was the first.
    let mut symbol = bits.symbol(codes.ac, data).ok_or(Refusal::Data)?;
    loop {
        position += symbol.advance;
        if position >= 63 {
            break;
        }
        coefficient(position, symbol.value);
        bits.refill(data);
        symbol = bits.symbol(codes.ac, data).ok_or(Refusal::Data)?;
        position += symbol.advance;
        if position >= 63 {
            break;
        }
        coefficient(position, symbol.value);
        symbol = bits.symbol(codes.ac, data).ok_or(Refusal::Data)?;
    }
    *reader = bits;
    if position == 63 {
        coefficient(63, symbol.value);
    } else if symbol.advance != END_OF_BLOCK {
        return Err(Refusal::Data); // libjpeg would write to the last position
    }
    Ok(difference)
}
