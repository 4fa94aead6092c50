//! Decoding of the blocks under a region, in both dimensions; all others are only passed over.

use std::ops::Range;

use crate::header::{Header, NATURAL, RawTable};
use crate::huffman::{BitReader, END_OF_BLOCK, Table};
use crate::index::{Builder, Cursor, State};
use crate::idct::{LARGEST_SUM, SAFE_SUM, dc_sample, idct_checked};
use crate::kernels::Kernels;
use crate::memory::reserve;
use crate::refusal::Refusal;
use crate::segments::Segments;

/// MCUs to decode.
#[derive(Clone, Debug)]
pub struct Region {
    pub columns: Range<usize>,
    pub rows: Range<usize>,
}

/// Decoded samples of a component in the region, row by row.
#[derive(Default)]
pub struct Plane {
    pub samples: Vec<u8>,
    pub stride: usize,
    /// Column and row of the component at which the plane begins.
    pub left: usize,
    pub top: usize,
}

impl Plane {
    fn place(&mut self, region: &Region, blocks: (usize, usize)) {
        self.stride = 8 * blocks.0 * region.columns.len();
        (self.left, self.top) = (8 * blocks.0 * region.columns.start, 8 * blocks.1 * region.rows.start);
        reserve(&mut self.samples, self.stride * 8 * blocks.1 * region.rows.len());
    }

    /// Return a row of the component from its column `from` to the plane's right end.
    #[inline(always)]
    pub fn row(&self, row: usize, from: usize) -> &[u8] {
        let begin = (row - self.top) * self.stride;
        &self.samples[begin + from - self.left..begin + self.stride]
    }
}

/// Dequantised coefficients of a block, in natural order.
#[repr(align(32))]
pub struct Block(pub [i16; 64]);

/// Entropy decoder with its memory, which is kept between images.
#[derive(Default)]
pub struct ScanDecoder {
    segments: Segments,
    dc: [Table; 3],
    ac: [Table; 3],
    pub planes: [Plane; 3],
}

/// Tables of a component.
#[derive(Clone, Copy)]
struct Codes<'a> {
    dc: &'a Table,
    ac: &'a Table,
    /// Quantisation table in zigzag order.
    quant: &'a [u16; 64],
}

/// Scan with the position of the next MCU.
struct Scan<'a> {
    segments: &'a Segments,
    /// MCUs of a segment.
    interval: usize,
    codes: [Codes<'a>; 3],
    components: usize,
    luma_blocks: (usize, usize),
    reader: BitReader<'a>,
    segment: usize,
    segment_bytes: usize,
    next_mcu: usize,
    /// DC values of the previous blocks.
    predictors: [i32; 3],
    index: Option<Cursor<'a>>,
    /// Next MCU whose state the index has.
    indexed_mcu: usize,
}

impl ScanDecoder {
    /// Decode the blocks of a region into `planes`. An index must be the file's.
    #[inline(always)]
    pub fn decode<K: Kernels>(
        &mut self,
        header: &Header,
        region: &Region,
        index: Option<Cursor>,
    ) -> Result<(), Refusal> {
        let across = header.mcus().0;
        let interval = self.fill_segments(header)?;
        let (h, v) = header.sampling.luma_blocks();
        for (number, plane) in self.planes.iter_mut().enumerate().take(header.sampling.components()) {
            plane.place(region, if number == 0 { (h, v) } else { (1, 1) });
        }
        let mut scan = Scan::new(&self.segments, interval, header, build(&mut self.dc, &mut self.ac, header)?, index);
        for row in region.rows.clone() {
            scan.pass_to(row * across + region.columns.start, across)?;
            for column in 0..region.columns.len() {
                scan.decode_mcu::<K>(&mut self.planes, column, row - region.rows.start)?;
            }
            scan.check()?;
        }
        scan.pass_to_entry(across)
    }

    /// Return the index of a file, of which all MCUs are read. None: it needs none, or its values do not fit.
    pub fn index(&mut self, file: &[u8], header: &Header, interval: u16) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(mut builder) = Builder::new(file, header, interval) else { return Ok(None) };
        let (across, down) = header.mcus();
        let segment_mcus = self.fill_segments(header)?;
        let codes = build(&mut self.dc, &mut self.ac, header)?;
        let mut scan = Scan::new(&self.segments, segment_mcus, header, codes, None);
        for mcu in (builder.interval()..across * down).step_by(builder.interval()) {
            scan.pass(mcu, across)?;
            scan.end_segment()?;
            if builder.add(&scan.state()).is_none() {
                return Ok(None);
            }
        }
        scan.pass(across * down, across)?;
        Ok(Some(builder.finish(file)))
    }

    /// Prepare the data of a scan. Returns the MCUs of a segment.
    fn fill_segments(&mut self, header: &Header) -> Result<usize, Refusal> {
        self.segments.fill(header.scan)?;
        let (across, down) = header.mcus();
        let interval = if header.restart_interval == 0 { across * down } else { header.restart_interval };
        if self.segments.count() != (across * down).div_ceil(interval) {
            return Err(Refusal::Data);
        }
        Ok(interval)
    }
}

/// Build the tables that the components name; components often share them.
fn build<'a>(dc: &'a mut [Table; 3], ac: &'a mut [Table; 3], header: &'a Header) -> Result<[Codes<'a>; 3], Refusal> {
    let count = header.sampling.components();
    let of = &header.components[..count];
    let dc_slots = fill(dc, &header.dc, of.iter().map(|component| component.dc), true)?;
    let ac_slots = fill(ac, &header.ac, of.iter().map(|component| component.ac), false)?;
    let quant = |number: usize| header.quant[of[number.min(count - 1)].quant].as_ref().ok_or(Refusal::Format);
    let codes = |number: usize| -> Result<Codes<'a>, Refusal> {
        Ok(Codes { dc: &dc[dc_slots[number]], ac: &ac[ac_slots[number]], quant: quant(number)? })
    };
    Ok([codes(0)?, codes(1)?, codes(2)?])
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

impl<'a> Scan<'a> {
    fn new(segments: &'a Segments, interval: usize, header: &Header, codes: [Codes<'a>; 3], index: Option<Cursor<'a>>) -> Self {
        let (data, segment_bytes) = segments.get(0);
        Scan {
            segments,
            interval,
            codes,
            components: header.sampling.components(),
            luma_blocks: header.sampling.luma_blocks(),
            reader: BitReader::new(data),
            segment: 0,
            segment_bytes,
            next_mcu: 0,
            predictors: [0; 3],
            index,
            indexed_mcu: index.map_or(usize::MAX, |cursor| cursor.mcu()),
        }
    }

    /// Refuse data that ended before the blocks that were read from it.
    fn check(&self) -> Result<(), Refusal> {
        if self.reader.position() > 8 * self.segment_bytes { Err(Refusal::Data) } else { Ok(()) }
    }

    /// Begin the next MCU, and its segment if that has just changed.
    #[inline(always)]
    fn enter_mcu(&mut self) -> Result<(), Refusal> {
        self.end_segment()?;
        if self.next_mcu == self.indexed_mcu {
            self.check_entry()?;
        }
        self.next_mcu += 1;
        Ok(())
    }

    /// Begin the next segment if all MCUs of the present one are read.
    #[inline(always)]
    fn end_segment(&mut self) -> Result<(), Refusal> {
        if self.next_mcu == (self.segment + 1) * self.interval {
            if self.reader.position().div_ceil(8) != self.segment_bytes {
                return Err(Refusal::Data);
            }
            self.begin(self.segment + 1);
        }
        Ok(())
    }

    fn begin(&mut self, segment: usize) {
        let (data, bytes) = self.segments.get(segment);
        (self.reader, self.segment, self.segment_bytes) = (BitReader::new(data), segment, bytes);
        (self.next_mcu, self.predictors) = (segment * self.interval, [0; 3]);
    }

    /// Return the state before the next MCU, whose segment has begun.
    fn state(&self) -> State {
        let begin = 8 * self.segments.begin(self.segment);
        State { position: begin + self.reader.position(), predictors: self.predictors }
    }

    /// Refuse an index that has another state at the next MCU.
    #[inline(never)]
    fn check_entry(&mut self) -> Result<(), Refusal> {
        let state = self.state();
        let Some(cursor) = self.index.as_mut() else { return Ok(()) };
        if cursor.state() != Some(state) {
            return Err(Refusal::Index);
        }
        cursor.advance();
        self.indexed_mcu = cursor.mcu();
        Ok(())
    }

    /// Pass over the MCUs before `target`. What the index or a restart marker allows is not read: libjpeg also starts
    /// again at each restart marker, and all of them are there in their order.
    #[inline(always)]
    fn pass_to(&mut self, target: usize, across: usize) -> Result<(), Refusal> {
        let segment = target / self.interval;
        let begins_segment = segment > self.segment && segment < self.segments.count();
        let segment_mcu = if begins_segment { segment * self.interval } else { 0 };
        let indexed_mcu = self.index.map_or(0, |cursor| cursor.mcu_before(target));
        if indexed_mcu.max(segment_mcu) > self.indexed_mcu {
            self.pass_to_entry(across)?;
        }
        if indexed_mcu > segment_mcu.max(self.next_mcu) {
            self.jump(indexed_mcu)?;
        } else if begins_segment {
            self.begin(segment);
            self.find_entry();
        }
        self.pass(target, across)
    }

    /// Read on to the next entry of the index and check it, after MCUs that began at an earlier one.
    #[inline(always)]
    fn pass_to_entry(&mut self, across: usize) -> Result<(), Refusal> {
        if self.next_mcu == 0 || self.indexed_mcu == usize::MAX {
            return Ok(());
        }
        self.pass(self.indexed_mcu, across)?;
        self.end_segment()?;
        self.check_entry()
    }

    /// Go to an MCU whose state the index has.
    fn jump(&mut self, mcu: usize) -> Result<(), Refusal> {
        let cursor = self.index.as_mut().ok_or(Refusal::Index)?;
        cursor.advance_to_mcu(mcu);
        let state = cursor.state().ok_or(Refusal::Index)?;
        let segment = mcu / self.interval;
        let (data, bytes) = self.segments.get(segment);
        let position = state.position.checked_sub(8 * self.segments.begin(segment)).ok_or(Refusal::Index)?;
        if position > 8 * bytes {
            return Err(Refusal::Index);
        }
        (self.reader, self.segment, self.segment_bytes) = (BitReader::at(data, position), segment, bytes);
        (self.next_mcu, self.predictors) = (mcu, state.predictors);
        cursor.advance();
        self.indexed_mcu = cursor.mcu();
        Ok(())
    }

    /// Find the first entry that is not before the next MCU.
    fn find_entry(&mut self) {
        if let Some(cursor) = self.index.as_mut() {
            cursor.advance_to_mcu(self.next_mcu);
            self.indexed_mcu = cursor.mcu();
        }
    }

    /// Read the MCUs before `target`.
    #[inline(always)]
    fn pass(&mut self, target: usize, across: usize) -> Result<(), Refusal> {
        while self.next_mcu < target {
            let stop = target.min(self.next_mcu + across);
            while self.next_mcu < stop {
                self.enter_mcu()?;
                let (h, v) = self.luma_blocks;
                for _ in 0..h * v {
                    pass_block(&mut self.reader, &self.codes[0], &mut self.predictors[0])?;
                }
                for component in 1..self.components {
                    pass_block(&mut self.reader, &self.codes[component], &mut self.predictors[component])?;
                }
            }
            self.check()?;
        }
        Ok(())
    }

    /// Decode the next MCU into a column and row of MCUs of the planes.
    #[inline(always)]
    fn decode_mcu<K: Kernels>(&mut self, planes: &mut [Plane; 3], column: usize, row: usize) -> Result<(), Refusal> {
        self.enter_mcu()?;
        let (h, v) = self.luma_blocks;
        for (component, plane) in planes.iter_mut().enumerate().take(self.components) {
            let (h, v) = if component == 0 { (h, v) } else { (1, 1) };
            let (codes, predictor) = (&self.codes[component], &mut self.predictors[component]);
            for y in 0..v {
                let begin = (row * v + y) * 8 * plane.stride + 8 * h * column;
                for x in 0..h {
                    let at = begin + 8 * x;
                    decode_block::<K>(&mut self.reader, codes, predictor, &mut plane.samples[at..], plane.stride)?;
                }
            }
        }
        Ok(())
    }
}

/// Read a block and write its samples.
#[inline(always)]
fn decode_block<K: Kernels>(
    reader: &mut BitReader,
    codes: &Codes,
    predictor: &mut i32,
    samples: &mut [u8],
    stride: usize,
) -> Result<(), Refusal> {
    let mut block = Block([0; 64]);
    let mut sum = 0;
    let difference = read_block(reader, codes, |position, value| {
        let coefficient = value * i32::from(codes.quant[position]);
        sum += u64::from(coefficient.unsigned_abs());
        block.0[usize::from(NATURAL[position] & 63)] = coefficient as i16;
    })?;
    *predictor = predictor.wrapping_add(difference);
    let dc = i64::from(i16::try_from(*predictor).map_err(|_| Refusal::Data)?) * i64::from(codes.quant[0]);
    block.0[0] = dc as i16;
    if sum == 0 && dc.unsigned_abs() <= SAFE_SUM {
        let value = [dc_sample(dc as i32); 8];
        for row in samples.chunks_mut(stride).take(8) {
            row[..8].copy_from_slice(&value);
        }
        return Ok(());
    }
    sum += dc.unsigned_abs();
    if sum > SAFE_SUM {
        if sum > LARGEST_SUM {
            return Err(Refusal::Data);
        }
        return idct_checked(&block, samples, stride).ok_or(Refusal::Data);
    }
    K::idct(&block, samples, stride);
    Ok(())
}

/// Read a block of which nothing is needed.
#[inline(always)]
fn pass_block(reader: &mut BitReader, codes: &Codes, predictor: &mut i32) -> Result<(), Refusal> {
    let difference = read_block(reader, codes, |_, _| ())?;
    *predictor = predictor.wrapping_add(difference);
    Ok(())
}

/// Read a block: call `coefficient` with the position in zigzag order and the value of its AC coefficients, some of
/// which are 0. Returns the difference of the DC value.
#[inline(always)]
fn read_block(reader: &mut BitReader, codes: &Codes, mut coefficient: impl FnMut(usize, i32)) -> Result<i32, Refusal> {
    let mut bits = *reader; // in registers
    bits.refill();
    let difference = bits.symbol(codes.dc).ok_or(Refusal::Data)?.value;
    let mut position = 0;
    // One refill for two symbols; the DC symbol was the first.
    let mut symbol = bits.symbol(codes.ac).ok_or(Refusal::Data)?;
    loop {
        position += symbol.advance;
        if position >= 63 {
            break;
        }
        coefficient(position, symbol.value);
        bits.refill();
        symbol = bits.symbol(codes.ac).ok_or(Refusal::Data)?;
        position += symbol.advance;
        if position >= 63 {
            break;
        }
        coefficient(position, symbol.value);
        symbol = bits.symbol(codes.ac).ok_or(Refusal::Data)?;
    }
    *reader = bits;
    if position == 63 {
        coefficient(63, symbol.value);
    } else if symbol.advance != END_OF_BLOCK {
        return Err(Refusal::Data); // libjpeg would write to the last position
    }
    Ok(difference)
}
