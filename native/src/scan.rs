//! Decoding of the blocks under a region, in both dimensions; all others are only passed over.

use std::ops::Range;

use crate::header::{Header, NATURAL, RawTable};
use crate::huffman::{BitReader, END_OF_BLOCK, Table};
use crate::index::{Builder, Cursor, State};
use crate::idct::{LARGEST_SUM, SAFE_SUM, dc_sample, idct_checked};
use crate::kernels::{Kernels, Portable};
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
pub struct Scan<'a> {
    segments: &'a Segments,
    /// MCUs of a segment.
    interval: usize,
    /// MCUs of a row, and of the image.
    across: usize,
    mcus: usize,
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
    /// True from a jump to an entry of the index until the next entry is reached.
    is_unchecked: bool,
}

impl ScanDecoder {
    /// Decode the blocks of a region into `planes`. An index must be the file's.
    pub fn decode<K: Kernels>(
        &mut self,
        header: &Header,
        region: &Region,
        index: Option<Cursor>,
    ) -> Result<(), Refusal> {
        let interval = self.fill_segments(header)?;
        let (h, v) = header.sampling.luma_blocks();
        for (number, plane) in self.planes.iter_mut().enumerate().take(header.sampling.components()) {
            plane.place(region, if number == 0 { (h, v) } else { (1, 1) });
        }
        let mut scan = Scan::new(&self.segments, interval, header, build(&mut self.dc, &mut self.ac, header)?, index);
        for row in region.rows.clone() {
            let begin = row * scan.across;
            scan.seek::<K>(begin + region.columns.start)?;
            scan.pass::<K>(begin + region.columns.start)?;
            let end = begin + region.columns.end;
            while scan.next_mcu < end {
                let place = (scan.next_mcu - begin - region.columns.start, row - region.rows.start);
                let stop = scan.begin_run(end)?;
                K::decode_mcus(&mut scan, &mut self.planes, place, stop)?;
                scan.check()?;
            }
        }
        scan.check_last_entry::<K>()
    }

    /// Return the index of a file, of which all MCUs are read. None: it needs none, or its values do not fit.
    pub fn index(&mut self, file: &[u8], header: &Header, interval: u16) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(mut builder) = Builder::new(file, header, interval) else { return Ok(None) };
        let (across, down) = header.mcus();
        let segment_mcus = self.fill_segments(header)?;
        let codes = build(&mut self.dc, &mut self.ac, header)?;
        let mut scan = Scan::new(&self.segments, segment_mcus, header, codes, None);
        for mcu in (builder.interval()..across * down).step_by(builder.interval()) {
            scan.pass::<Portable>(mcu)?;
            scan.end_segment()?;
            if builder.add(&scan.state()).is_none() {
                return Ok(None);
            }
        }
        scan.pass::<Portable>(across * down)?;
        if builder.add(&scan.state()).is_none() {
            return Ok(None);
        }
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
    fn new(
        segments: &'a Segments,
        interval: usize,
        header: &Header,
        codes: [Codes<'a>; 3],
        index: Option<Cursor<'a>>,
    ) -> Self {
        let (data, segment_bytes) = segments.get(0);
        let (across, down) = header.mcus();
        Scan {
            segments,
            interval,
            across,
            mcus: across * down,
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
            is_unchecked: false,
        }
    }

    /// Refuse data that ended before the blocks that were read from it.
    fn check(&self) -> Result<(), Refusal> {
        if self.reader.position() > 8 * self.segment_bytes { Err(Refusal::Data) } else { Ok(()) }
    }

    /// Begin to read MCUs, at most those before `end`. Returns the MCU at which the reading must stop: there a segment
    /// ends, or an entry of the index follows.
    fn begin_run(&mut self, end: usize) -> Result<usize, Refusal> {
        self.end_segment()?;
        if self.next_mcu == self.indexed_mcu {
            self.check_entry()?;
        }
        Ok(end.min((self.segment + 1) * self.interval).min(self.indexed_mcu))
    }

    /// Begin the next segment if all MCUs of the present one are read.
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
    fn check_entry(&mut self) -> Result<(), Refusal> {
        let state = self.state();
        let Some(cursor) = self.index.as_mut() else { return Ok(()) };
        if cursor.state() != Some(state) {
            return Err(Refusal::Index);
        }
        cursor.advance();
        (self.indexed_mcu, self.is_unchecked) = (cursor.mcu(), false);
        Ok(())
    }

    /// Go to the last MCU before `target` at which decoding can begin: that of an entry of the index, or that behind a
    /// restart marker, where libjpeg also starts again. All markers are there in their order.
    fn seek<K: Kernels>(&mut self, target: usize) -> Result<(), Refusal> {
        let segment_mcu = target - target % self.interval;
        let mcu = self.index.map_or(segment_mcu, |cursor| cursor.mcu_before(target).max(segment_mcu));
        if mcu > self.indexed_mcu {
            self.check_last_entry::<K>()?;
        }
        if mcu <= self.next_mcu {
            return Ok(());
        }
        if mcu > segment_mcu {
            return self.jump(mcu);
        }
        self.begin(mcu / self.interval);
        if let Some(cursor) = self.index.as_mut() {
            cursor.advance_to_mcu(mcu);
            (self.indexed_mcu, self.is_unchecked) = (cursor.mcu(), false);
        }
        Ok(())
    }

    /// Check the entry of the index at which the reading began, by the next one. If no MCU behind that was read, read on.
    fn check_last_entry<K: Kernels>(&mut self) -> Result<(), Refusal> {
        if !self.is_unchecked {
            return Ok(());
        }
        self.pass::<K>(self.indexed_mcu)?;
        if self.indexed_mcu < self.mcus {
            self.end_segment()?;
        }
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
        (self.indexed_mcu, self.is_unchecked) = (cursor.mcu(), true);
        Ok(())
    }

    /// Read the MCUs before `target`.
    fn pass<K: Kernels>(&mut self, target: usize) -> Result<(), Refusal> {
        while self.next_mcu < target {
            let stop = self.begin_run(target.min(self.next_mcu + self.across))?;
            K::pass_mcus(self, stop)?;
            self.check()?;
        }
        Ok(())
    }

    /// Read the MCUs before `stop`, all of one segment.
    #[inline(always)]
    pub fn pass_mcus(&mut self, stop: usize) -> Result<(), Refusal> {
        let (h, v) = self.luma_blocks;
        while self.next_mcu < stop {
            self.next_mcu += 1;
            for _ in 0..h * v {
                pass_block(&mut self.reader, &self.codes[0], &mut self.predictors[0])?;
            }
            for component in 1..self.components {
                pass_block(&mut self.reader, &self.codes[component], &mut self.predictors[component])?;
            }
        }
        Ok(())
    }

    /// Decode the MCUs before `stop`, all of one segment, into the planes from a (column, row) of MCUs on.
    #[inline(always)]
    pub fn decode_mcus<K: Kernels>(
        &mut self,
        planes: &mut [Plane; 3],
        place: (usize, usize),
        stop: usize,
    ) -> Result<(), Refusal> {
        let (mut column, row) = place;
        while self.next_mcu < stop {
            self.next_mcu += 1;
            for (component, plane) in planes.iter_mut().enumerate().take(self.components) {
                let (h, v) = if component == 0 { self.luma_blocks } else { (1, 1) };
                let (codes, predictor) = (&self.codes[component], &mut self.predictors[component]);
                for y in 0..v {
                    let begin = (row * v + y) * 8 * plane.stride + 8 * h * column;
                    for x in 0..h {
                        let samples = &mut plane.samples[begin + 8 * x..];
                        decode_block::<K>(&mut self.reader, codes, predictor, samples, plane.stride)?;
                    }
                }
            }
            column += 1;
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

/// The hot loops, compiled for a processor with AVX2 and BMI.
#[cfg(target_arch = "x86_64")]
pub mod avx2 {
    use super::{Plane, Refusal, Scan};
    use crate::kernels::Avx2;

    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn pass_mcus(scan: &mut Scan, stop: usize) -> Result<(), Refusal> {
        scan.pass_mcus(stop)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2")]
    pub fn decode_mcus(
        scan: &mut Scan,
        planes: &mut [Plane; 3],
        place: (usize, usize),
        stop: usize,
    ) -> Result<(), Refusal> {
        scan.decode_mcus::<Avx2>(planes, place, stop)
    }
}
