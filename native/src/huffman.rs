//! Huffman tables and the bit reader. One lookup gives run, value and length of most coefficients.

use crate::header::RawTable;
use crate::refusal::Refusal;

/// Bits of a lookup.
const LOOK: u32 = 10;

/// Advance of an end of block: more than any position.
pub const END_OF_BLOCK: usize = 128;

/// Code of a symbol that one lookup finds, or whose value bits do not fit into it.
///
/// Layout: bits 0 to 7 the length (code and value bits, or the code alone if `LONG`), bits 8 to 15 the advance in zigzag
/// order (or the symbol if `LONG`), bits 16 to 31 the value. 0: the code is longer than a lookup.
type Entry = u32;

const LONG: Entry = 1 << 7;

pub struct Table {
    lookup: [Entry; 1 << LOOK],
    /// By length: one more than the largest code, aligned to 16 bits; 0 if no code has the length.
    limits: [u32; 17],
    /// By length: index of a symbol minus its code.
    offsets: [i32; 17],
    symbols: [u8; 256],
    /// Source of the table that was built last, so that equal tables of the next image are not built again.
    counts: [u8; 16],
    count: usize,
    is_dc: bool,
}

impl Default for Table {
    fn default() -> Self {
        Table {
            lookup: [0; 1 << LOOK],
            limits: [0; 17],
            offsets: [0; 17],
            symbols: [0; 256],
            counts: [0; 16],
            count: 0,
            is_dc: false,
        }
    }
}

impl Table {
    /// Build the table; it refuses what libjpeg refuses. DC symbols are at most 15.
    pub fn build(&mut self, raw: &RawTable, is_dc: bool) -> Result<(), Refusal> {
        let count = raw.symbols.len();
        if count > 0
            && self.is_dc == is_dc
            && self.counts == *raw.counts
            && self.symbols[..self.count] == *raw.symbols
        {
            return Ok(());
        }
        self.count = 0; // until it is built
        if is_dc && raw.symbols.iter().any(|&symbol| symbol > 15) {
            return Err(Refusal::Format);
        }
        self.symbols[..count].copy_from_slice(raw.symbols);
        self.lookup.fill(0);
        let (mut code, mut index) = (0_u32, 0_usize);
        let longest = raw.counts.iter().rposition(|&of_length| of_length > 0).map_or(0, |at| at + 1);
        let mut begun = false;
        for length in 1..=16_usize {
            let of_length = usize::from(raw.counts[length - 1]);
            self.offsets[length] = index as i32 - code as i32;
            for symbol in &raw.symbols[index..index + of_length] {
                if length as u32 <= LOOK {
                    self.fill(*symbol, code, length as u32, is_dc);
                }
                code += 1;
            }
            index += of_length;
            begun |= of_length > 0;
            if begun && length <= longest && code >= 1 << length {
                return Err(Refusal::Format); // too many codes, or one that is all ones
            }
            self.limits[length] = if of_length > 0 { code << (16 - length) } else { 0 };
            code <<= 1;
        }
        self.counts.copy_from_slice(raw.counts);
        (self.count, self.is_dc) = (count, is_dc);
        Ok(())
    }

    /// Fill all lookups that begin with a code.
    fn fill(&mut self, symbol: u8, code: u32, length: u32, is_dc: bool) {
        let free = LOOK - length;
        let first = code << free;
        if first + (1 << free) > 1 << LOOK {
            return; // an impossible code, which `build` refuses
        }
        let size = u32::from(symbol & 15);
        let advance = if is_dc {
            0
        } else if symbol == 0 || (size == 0 && symbol != 0xF0) {
            END_OF_BLOCK as u32
        } else {
            u32::from(symbol >> 4) + 1
        };
        for rest in 0..1_u32 << free {
            let entry = if size == 0 {
                length | advance << 8
            } else if size <= free {
                let bits = (rest >> (free - size)) as i32;
                let value = extend(bits, size);
                (length + size) | advance << 8 | (value as u16 as u32) << 16
            } else {
                length | LONG | u32::from(symbol) << 8
            };
            self.lookup[(first + rest) as usize] = entry;
        }
    }

    /// Decode a symbol whose code is longer than a lookup.
    #[cold]
    fn long_code(&self, bits16: u32) -> Option<(u8, u32)> {
        for length in LOOK as usize + 1..=16 {
            if bits16 < self.limits[length] {
                let index = (bits16 >> (16 - length)) as i32 + self.offsets[length];
                return Some((*self.symbols.get(usize::try_from(index).ok()?)?, length as u32));
            }
        }
        None
    }
}

/// Value of the bits that follow a code of this size.
#[inline(always)]
fn extend(bits: i32, size: u32) -> i32 {
    let smallest = 1 << (size - 1);
    if bits < smallest { bits - 2 * smallest + 1 } else { bits }
}

/// Reader of the bits of a segment without stuffing, most significant first. Behind the end it reads what follows, or
/// zeros: compare `position` with the segment's length.
pub struct BitReader<'a> {
    data: &'a [u8],
    next: usize,
    buffer: u64,
    bits: u32,
}

impl<'a> BitReader<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        BitReader { data, next: 0, buffer: 0, bits: 0 }
    }

    /// Begin at a bit of the data.
    pub fn at(data: &'a [u8], bit: usize) -> Self {
        let mut reader = BitReader { data, next: bit / 8, buffer: 0, bits: 0 };
        reader.refill();
        reader.consume((bit % 8) as u32);
        reader
    }

    /// Bits read so far.
    pub fn position(&self) -> usize {
        8 * self.next - self.bits as usize
    }

    /// Fill the buffer to at least 56 bits.
    #[inline(always)]
    fn refill(&mut self) {
        let word = match self.data.get(self.next..self.next + 8) {
            Some(bytes) => u64::from_be_bytes(bytes.try_into().unwrap_or_default()),
            None => self.last_bytes(),
        };
        self.buffer |= word >> self.bits;
        self.next += ((63 - self.bits) >> 3) as usize;
        self.bits |= 56;
    }

    #[cold]
    fn last_bytes(&self) -> u64 {
        let mut bytes = [0; 8];
        if let Some(rest) = self.data.get(self.next..) {
            let count = rest.len().min(8);
            bytes[..count].copy_from_slice(&rest[..count]);
        }
        u64::from_be_bytes(bytes)
    }

    #[inline(always)]
    fn consume(&mut self, count: u32) {
        self.buffer <<= count;
        self.bits -= count;
    }

    /// Decode a DC difference.
    #[inline(always)]
    pub fn dc(&mut self, table: &Table) -> Option<i32> {
        self.refill();
        let entry = table.lookup[(self.buffer >> (64 - LOOK)) as usize];
        if entry & LONG == 0 && entry != 0 {
            self.consume(entry & 0x7F);
            return Some(i32::from((entry >> 16) as i16));
        }
        let (symbol, length) = self.symbol(table, entry)?;
        self.consume(length);
        Some(self.value(u32::from(symbol & 15)))
    }

    /// Decode an AC symbol: advance in zigzag order and value. After an advance of END_OF_BLOCK the block ends; an
    /// advance of 16 with value 0 is a run of zeros.
    #[inline(always)]
    pub fn ac(&mut self, table: &Table) -> Option<(usize, i32)> {
        if self.bits < 32 {
            self.refill();
        }
        let entry = table.lookup[(self.buffer >> (64 - LOOK)) as usize];
        if entry & LONG == 0 && entry != 0 {
            self.consume(entry & 0x7F);
            return Some((((entry >> 8) & 0xFF) as usize, i32::from((entry >> 16) as i16)));
        }
        let (symbol, length) = self.symbol(table, entry)?;
        self.consume(length);
        let size = u32::from(symbol & 15);
        if size == 0 {
            return Some((if symbol == 0xF0 { 16 } else { END_OF_BLOCK }, 0));
        }
        Some((usize::from(symbol >> 4) + 1, self.value(size)))
    }

    #[inline(always)]
    fn symbol(&self, table: &Table, entry: Entry) -> Option<(u8, u32)> {
        if entry != 0 {
            Some(((entry >> 8) as u8, entry & 0x7F))
        } else {
            table.long_code((self.buffer >> 48) as u32)
        }
    }

    /// Read the value bits of a symbol; the buffer has them, because a code and its bits are at most 31.
    #[inline(always)]
    fn value(&mut self, size: u32) -> i32 {
        if size == 0 {
            return 0;
        }
        let bits = (self.buffer >> (64 - size)) as i32;
        self.consume(size);
        extend(bits, size)
    }
}
