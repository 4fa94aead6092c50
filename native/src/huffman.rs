//! Huffman tables and the bit reader. One lookup gives length, run and size of nearly every symbol.

use crate::header::RawTable;
use crate::refusal::Refusal;

/// Bits of a lookup.
const LOOK: u32 = 11;

/// Advance of an end of block: more than any position.
pub const END_OF_BLOCK: usize = 127;

/// Symbol that a lookup found. Bits 0 to 6: bits of its code and its value together. Bit 7: the value is not in the
/// entry. Bits 8 to 15: advance in zigzag order, 0 for DC. Bits 16 to 31: the value, or with bit 7 its bits.
type Entry = u32;

/// Bit of entries without a value.
const READ_VALUE: Entry = 1 << 7;

/// Entry if the code is longer than a lookup.
const LONG_CODE: Entry = READ_VALUE;

/// Symbols that one refill is enough for.
pub const SYMBOLS: usize = 5;
const _: () = assert!(SYMBOLS as u32 * LOOK <= 57);

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
            lookup: [LONG_CODE; 1 << LOOK],
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
        if count > 0 && self.is_dc == is_dc && self.counts == *raw.counts && self.symbols[..self.count] == *raw.symbols
        {
            return Ok(());
        }
        (self.count, self.is_dc) = (0, is_dc); // not known until it is built
        if is_dc && raw.symbols.iter().any(|&symbol| symbol > 15) {
            return Err(Refusal::Format);
        }
        self.symbols[..count].copy_from_slice(raw.symbols);
        self.lookup.fill(LONG_CODE);
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
        self.count = count;
        Ok(())
    }

    /// Fill all lookups that begin with a code.
    fn fill(&mut self, symbol: u8, code: u32, length: u32, is_dc: bool) {
        let free = LOOK - length;
        let first = (code << free) as usize;
        // `build` refuses a table with impossible codes.
        let Some(entries) = self.lookup.get_mut(first..first + (1 << free)) else { return };
        let entry = entry(symbol, length, is_dc);
        let size = u32::from(symbol & 15);
        if size > free {
            return entries.fill(entry);
        }
        // The bits behind the code are the value and, behind it, those of other symbols.
        for (bits, entries) in (0..).zip(entries.chunks_exact_mut(1 << (free - size))) {
            entries.fill(entry & 0xFF7F | (extend(bits, size) as Entry) << 16);
        }
    }

    /// Find a symbol whose code is longer than a lookup.
    #[cold]
    fn long_code(&self, bits16: u32) -> Option<Entry> {
        for length in LOOK as usize + 1..=16 {
            if bits16 < self.limits[length] {
                let index = (bits16 >> (16 - length)) as i32 + self.offsets[length];
                return Some(entry(*self.symbols.get(usize::try_from(index).ok()?)?, length as u32, self.is_dc));
            }
        }
        None
    }
}

/// Return the entry of a symbol without its value.
fn entry(symbol: u8, length: u32, is_dc: bool) -> Entry {
    let size = Entry::from(symbol & 15);
    let advance = match symbol {
        _ if is_dc => 0,
        0xF0 => 16,
        _ if size == 0 => END_OF_BLOCK as Entry,
        _ => Entry::from(symbol >> 4) + 1,
    };
    (length + size) | READ_VALUE | advance << 8 | size << 16
}

/// Return the value that `size` bits stand for. One whose first bit is 0 is negative.
#[inline(always)]
fn extend(bits: i32, size: u32) -> i32 {
    if size > 0 && bits >> (size - 1) == 0 { bits + 1 - (1 << size) } else { bits }
}

/// Bytes of the longest block, and of a refill behind it.
pub const WINDOW: usize = MASK + 1 + 8;

/// Largest place of a refill in the window. A block has at most 7 + 64 * 31 bits from there.
const MASK: usize = 255;

/// Reader of the bits of one block from data without stuffing, most significant first. Behind the end of a segment it
/// reads what follows, or zeros: compare the position with the segment's end.
pub struct BitReader<'a> {
    window: &'a [u8; WINDOW],
    /// The next bits; at least 57 after a refill.
    buffer: u64,
    /// Bits of the window before the last refill.
    position: usize,
    /// Sum of the entries since then. Its last 6 bits are the bits read.
    entries: Entry,
}

/// Symbol with its value.
pub struct Coded {
    pub advance: usize,
    pub value: i32,
}

impl<'a> BitReader<'a> {
    /// Begin behind the first `position` bits. None: the data ended before.
    #[inline(always)]
    pub fn at(position: usize, data: &'a [u8]) -> Option<Self> {
        let window = data.get(position / 8..)?.first_chunk()?;
        let mut reader = BitReader { window, buffer: 0, position: position % 8, entries: 0 };
        reader.refill();
        Some(reader)
    }

    /// Return the position behind a block that began at `begin`.
    #[inline(always)]
    pub fn end(&self, begin: usize) -> usize {
        begin - begin % 8 + self.position + (self.entries & 63) as usize
    }

    /// Fill the buffer to at least 57 bits.
    #[inline(always)]
    pub fn refill(&mut self) {
        self.position += (self.entries & 63) as usize;
        self.entries = 0;
        let at = (self.position / 8) & MASK;
        let bytes: &[u8; 8] = self.window[at..].first_chunk().unwrap_or(&[0; 8]);
        self.buffer = u64::from_be_bytes(*bytes) << (self.position % 8);
    }

    /// Decode a symbol. A `refill` must come before every `SYMBOLS` symbols.
    #[inline(always)]
    pub fn symbol(&mut self, table: &Table) -> Option<Coded> {
        let entry = table.lookup[(self.buffer >> (64 - LOOK)) as usize];
        if entry & READ_VALUE != 0 {
            return self.symbol_with_value(table, entry);
        }
        self.skip(entry);
        Some(Coded { advance: (entry >> 8 & 0xFF) as usize, value: entry as i32 >> 16 })
    }

    /// Read a symbol whose value is not in the lookup, so that it may have more bits than a lookup.
    #[inline(always)]
    fn symbol_with_value(&mut self, table: &Table, mut entry: Entry) -> Option<Coded> {
        self.refill();
        if entry == LONG_CODE {
            entry = table.long_code((self.buffer >> 48) as u32)?;
        }
        let (total, size) = (entry & 63, entry >> 16 & 15);
        let rest = self.buffer << (total - size);
        let value = extend((rest >> 1 >> (63 - size)) as i32, size);
        self.skip(entry);
        self.refill();
        Some(Coded { advance: (entry >> 8 & 0xFF) as usize, value })
    }

    /// Pass over the bits of a symbol.
    #[inline(always)]
    fn skip(&mut self, entry: Entry) {
        self.buffer <<= entry & 63;
        self.entries = self.entries.wrapping_add(entry);
    }
}
