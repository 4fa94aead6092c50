//! Decoding of the blocks under a region, in both dimensions; all others are only passed over.

use std::ops::Range;

use crate::block::{Block, Codes, Tables, decode_block, pass_block, read_coefficients, read_pair, write_block};
use crate::coefficients::{GROUP, Packer};
use crate::header::Header;
use crate::index::{Builder, Cursor, State};
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
    /// Prepare the plane for a region; `blocks` is the number of its blocks in an MCU, horizontally and vertically.
    pub fn place(&mut self, region: &Region, blocks: (usize, usize)) {
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

/// Entropy decoder with its memory, which is kept between images.
#[derive(Default)]
pub struct ScanDecoder {
    segments: Segments,
    tables: Tables,
    pub planes: [Plane; 3],
}

/// Scan with the position of the next MCU.
#[derive(Clone)]
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
    data: &'a [u8],
    /// Bits of the data read so far.
    position: usize,
    segment: usize,
    /// End of the segment in the data, bytes.
    segment_end: usize,
    next_mcu: usize,
    /// DC values of the previous blocks.
    predictors: [i32; 3],
    index: Option<Cursor<'a>>,
    /// After a jump to an entry of the index: MCU of the next entry, which checks it. `CHECKED`: no check is left.
    check_mcu: usize,
}

/// Number that no MCU has.
const CHECKED: usize = usize::MAX;

impl ScanDecoder {
    /// Decode the blocks of a region into `planes`. An index must be the file's.
    pub fn decode<K: Kernels>(
        &mut self,
        header: &Header,
        region: &Region,
        index: Option<Cursor>,
    ) -> Result<(), Refusal> {
        let interval = self.fill_segments(header)?;
        let (h, v) = header.frame.sampling.luma_blocks();
        for (number, plane) in self.planes.iter_mut().enumerate().take(header.frame.sampling.components()) {
            plane.place(region, if number == 0 { (h, v) } else { (1, 1) });
        }
        let mut scan = Scan::new(&self.segments, interval, header, self.tables.build(header)?, index);
        let mut rows = region.rows.clone();
        if index.is_some() && rows.len() > 1 {
            let mut other = scan.clone();
            while rows.len() > 1 {
                decode_two_rows::<K>((&mut scan, &mut other), region, rows.start, &mut self.planes)?;
                rows.start += 2;
            }
            other.check_last_entry::<K>()?;
        }
        for row in rows {
            scan.decode_row::<K>(region, row, &mut self.planes)?;
        }
        scan.check_last_entry::<K>()
    }

    /// Return the index of a file, of which all MCUs are read. None: it needs none, or its values do not fit.
    pub fn index<K: Kernels>(
        &mut self,
        file: &[u8],
        header: &Header,
        interval: u16,
        max_percent: usize,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(mut builder) = Builder::new(file, header, interval, max_percent) else { return Ok(None) };
        let (across, down) = header.frame.mcus();
        let segment_mcus = self.fill_segments(header)?;
        let codes = self.tables.build(header)?;
        let mut scan = Scan::new(&self.segments, segment_mcus, header, codes, None);
        for mcu in (builder.interval()..across * down).step_by(builder.interval()) {
            scan.pass::<K>(mcu)?;
            if builder.add(&scan.state()).is_none() {
                return Ok(None);
            }
        }
        scan.pass::<K>(across * down)?;
        if builder.add(&scan.state()).is_none() {
            return Ok(None);
        }
        Ok(Some(builder.finish(file)))
    }

    /// Pack the coefficients of all blocks of a file into `packed`. Returns false if they have more than `limit` bytes.
    pub fn pack<K: Kernels>(&mut self, header: &Header, limit: usize, packed: &mut Vec<u8>) -> Result<bool, Refusal> {
        let interval = self.fill_segments(header)?;
        let (across, down) = header.frame.mcus();
        let codes = self.tables.build(header)?;
        let mut scan = Scan::new(&self.segments, interval, header, codes, None);
        let mut packer = Packer::new(packed, header, &codes)?;
        for row in 0..down {
            for column in (0..across).step_by(GROUP) {
                if packer.size() > limit || !packer.begin_group() {
                    return Ok(false);
                }
                let end = row * across + across.min(column + GROUP);
                while scan.next_mcu < end {
                    let stop = scan.begin_run(end)?;
                    K::pack_mcus(&mut scan, stop, &mut packer)?;
                    scan.check()?;
                }
            }
        }
        let fits = packer.size() <= limit;
        packer.finish();
        Ok(fits)
    }

    /// Prepare the data of a scan. Returns the MCUs of a segment.
    fn fill_segments(&mut self, header: &Header) -> Result<usize, Refusal> {
        self.segments.fill(header.scan)?;
        let (across, down) = header.frame.mcus();
        let interval = if header.restart_interval == 0 { across * down } else { header.restart_interval };
        if self.segments.count() != (across * down).div_ceil(interval) {
            return Err(Refusal::Data);
        }
        Ok(interval)
    }
}

impl<'a> Scan<'a> {
    fn new(
        segments: &'a Segments,
        interval: usize,
        header: &Header,
        codes: [Codes<'a>; 3],
        index: Option<Cursor<'a>>,
    ) -> Self {
        let (across, down) = header.frame.mcus();
        Scan {
            segments,
            interval,
            across,
            mcus: across * down,
            codes,
            components: header.frame.sampling.components(),
            luma_blocks: header.frame.sampling.luma_blocks(),
            data: segments.bytes(),
            position: 0,
            segment: 0,
            segment_end: segments.range(0).end,
            next_mcu: 0,
            predictors: [0; 3],
            index,
            check_mcu: CHECKED,
        }
    }

    /// Go to the first MCU of a region in a row.
    fn begin_row<K: Kernels>(&mut self, region: &Region, row: usize) -> Result<(), Refusal> {
        let mcu = row * self.across + region.columns.start;
        self.seek::<K>(mcu)?;
        self.pass::<K>(mcu)
    }

    /// Decode the MCUs of a region in a row.
    fn decode_row<K: Kernels>(&mut self, region: &Region, row: usize, planes: &mut [Plane; 3]) -> Result<(), Refusal> {
        self.begin_row::<K>(region, row)?;
        let begin = self.next_mcu;
        let end = begin + region.columns.len();
        while self.next_mcu < end {
            let place = (self.next_mcu - begin, row - region.rows.start);
            let stop = self.begin_run(end)?;
            K::decode_mcus(self, planes, place, stop)?;
            self.check()?;
        }
        Ok(())
    }

    /// Refuse data that ended before the blocks that were read from it.
    fn check(&self) -> Result<(), Refusal> {
        if self.position > 8 * self.segment_end { Err(Refusal::Data) } else { Ok(()) }
    }

    /// Begin to read MCUs, at most those before `end`. Returns the MCU at which the reading must stop: there a segment
    /// ends, or an entry of the index is checked.
    fn begin_run(&mut self, end: usize) -> Result<usize, Refusal> {
        if self.next_mcu == self.check_mcu {
            self.check_entry()?;
        }
        self.end_segment()?;
        Ok(end.min((self.segment + 1) * self.interval).min(self.check_mcu))
    }

    /// Begin the next segment if all MCUs of the present one are read.
    fn end_segment(&mut self) -> Result<(), Refusal> {
        if self.next_mcu == (self.segment + 1) * self.interval {
            if self.position.div_ceil(8) != self.segment_end {
                return Err(Refusal::Data);
            }
            self.begin(self.segment + 1);
        }
        Ok(())
    }

    fn begin(&mut self, segment: usize) {
        let range = self.segments.range(segment);
        self.position = 8 * range.start;
        (self.segment, self.segment_end) = (segment, range.end);
        (self.next_mcu, self.predictors) = (segment * self.interval, [0; 3]);
    }

    /// Return the state before the next MCU.
    fn state(&self) -> State {
        State { position: self.position, predictors: self.predictors }
    }

    /// Refuse an index that has another state at the next MCU.
    fn check_entry(&mut self) -> Result<(), Refusal> {
        self.check_mcu = CHECKED;
        let state = self.index.and_then(|cursor| cursor.state());
        if state == Some(self.state()) { Ok(()) } else { Err(Refusal::Index) }
    }

    /// Go to the last MCU before `target` at which decoding can begin: that of an entry of the index, or that behind a
    /// restart marker, where libjpeg also starts again. All markers are there in their order.
    fn seek<K: Kernels>(&mut self, target: usize) -> Result<(), Refusal> {
        let segment = target / self.interval;
        let segment_mcu = segment * self.interval;
        let segment_end = (segment_mcu + self.interval).min(self.mcus);
        let indexed_mcu = self.index.map_or(0, |cursor| cursor.mcu_before(target, segment_end));
        let mcu = indexed_mcu.max(segment_mcu);
        if mcu > self.check_mcu {
            self.check_last_entry::<K>()?;
        }
        if self.check_mcu != CHECKED || mcu < self.next_mcu || (mcu == self.next_mcu && segment == self.segment) {
            return Ok(()); // read on
        }
        if mcu > segment_mcu {
            return self.jump(mcu);
        }
        self.begin(segment);
        Ok(())
    }

    /// Check the entry of the index at which the reading began, if that is still to be done: read on to the next one.
    fn check_last_entry<K: Kernels>(&mut self) -> Result<(), Refusal> {
        if self.check_mcu == CHECKED {
            return Ok(());
        }
        self.pass::<K>(self.check_mcu)?;
        self.check_entry()
    }

    /// Go to an MCU whose state the index has.
    fn jump(&mut self, mcu: usize) -> Result<(), Refusal> {
        let cursor = self.index.as_mut().ok_or(Refusal::Index)?;
        cursor.go_to_mcu(mcu);
        let state = cursor.state().ok_or(Refusal::Index)?;
        let segment = mcu / self.interval;
        let range = self.segments.range(segment);
        if !(8 * range.start..=8 * range.end).contains(&state.position) {
            return Err(Refusal::Index);
        }
        self.position = state.position;
        (self.segment, self.segment_end) = (segment, range.end);
        (self.next_mcu, self.predictors) = (mcu, state.predictors);
        cursor.advance();
        self.check_mcu = cursor.mcu();
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
                pass_block(self.data, &mut self.position, &self.codes[0], &mut self.predictors[0])?;
            }
            for component in 1..self.components {
                pass_block(self.data, &mut self.position, &self.codes[component], &mut self.predictors[component])?;
            }
        }
        Ok(())
    }

    /// Pack the MCUs before `stop`, all of one segment.
    #[inline(always)]
    pub fn pack_mcus(&mut self, stop: usize, packer: &mut Packer) -> Result<(), Refusal> {
        let (h, v) = self.luma_blocks;
        while self.next_mcu < stop {
            self.next_mcu += 1;
            for component in 0..self.components {
                let (codes, predictor) = (&self.codes[component], &mut self.predictors[component]);
                for _ in 0..if component == 0 { h * v } else { 1 } {
                    let mut block = Block::default();
                    read_coefficients(self.data, &mut self.position, codes, predictor, &mut block)?;
                    packer.push(&block);
                }
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
                        decode_block::<K>(self.data, &mut self.position, codes, predictor, samples, plane.stride)?;
                    }
                }
            }
            column += 1;
        }
        Ok(())
    }
}

/// Decode the MCUs of a region in a row and in that below it, in turn.
fn decode_two_rows<K: Kernels>(
    scans: (&mut Scan, &mut Scan),
    region: &Region,
    row: usize,
    planes: &mut [Plane; 3],
) -> Result<(), Refusal> {
    let (a, b) = scans;
    a.begin_row::<K>(region, row)?;
    b.begin_row::<K>(region, row + 1)?;
    let width = region.columns.len();
    let mut column = 0;
    while column < width {
        let stops = (a.begin_run(a.next_mcu + width - column)?, b.begin_run(b.next_mcu + width - column)?);
        let count = (stops.0 - a.next_mcu).min(stops.1 - b.next_mcu);
        K::decode_pairs((a, b), planes, (column, row - region.rows.start), count)?;
        a.check()?;
        b.check()?;
        column += count;
    }
    Ok(())
}

/// Decode `count` MCUs of two scans, into the planes from a (column, row) of MCUs on, the second's a row below.
#[inline(always)]
pub fn decode_pairs<K: Kernels>(
    scans: (&mut Scan, &mut Scan),
    planes: &mut [Plane; 3],
    place: (usize, usize),
    count: usize,
) -> Result<(), Refusal> {
    let (a, b) = scans;
    let (column, row) = place;
    a.next_mcu += count;
    b.next_mcu += count;
    for column in column..column + count {
        for (component, plane) in planes.iter_mut().enumerate().take(a.components) {
            let (h, v) = if component == 0 { a.luma_blocks } else { (1, 1) };
            let codes = &a.codes[component];
            for y in 0..v {
                let begin = (row * v + y) * 8 * plane.stride + 8 * h * column;
                for x in 0..h {
                    let predictors = (&mut a.predictors[component], &mut b.predictors[component]);
                    let mut blocks = read_pair(a.data, (&mut a.position, &mut b.position), codes, predictors)?;
                    let samples = &mut plane.samples[begin + 8 * x..];
                    write_block::<K>(&mut blocks.0, codes.steps(), samples, plane.stride)?;
                    write_block::<K>(&mut blocks.1, codes.steps(), &mut samples[8 * v * plane.stride..], plane.stride)?;
                }
            }
        }
    }
    Ok(())
}

/// The hot loops, compiled for the instructions of a version of the kernels.
#[cfg(target_arch = "x86_64")]
macro_rules! loops {
    ($module:ident, $kernels:ident, $features:literal) => {
        pub mod $module {
            use super::{Packer, Plane, Refusal, Scan};
            use crate::kernels::$kernels;

            #[target_feature(enable = $features)]
            pub fn pass_mcus(scan: &mut Scan, stop: usize) -> Result<(), Refusal> {
                scan.pass_mcus(stop)
            }

            #[target_feature(enable = $features)]
            pub fn pack_mcus(scan: &mut Scan, stop: usize, packer: &mut Packer) -> Result<(), Refusal> {
                scan.pack_mcus(stop, packer)
            }

            #[target_feature(enable = $features)]
            pub fn decode_mcus(
                scan: &mut Scan,
                planes: &mut [Plane; 3],
                place: (usize, usize),
                stop: usize,
            ) -> Result<(), Refusal> {
                scan.decode_mcus::<$kernels>(planes, place, stop)
            }

            #[target_feature(enable = $features)]
            pub fn decode_pairs(
                scans: (&mut Scan, &mut Scan),
                planes: &mut [Plane; 3],
                place: (usize, usize),
                count: usize,
            ) -> Result<(), Refusal> {
                super::decode_pairs::<$kernels>(scans, planes, place, count)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
loops!(avx2, Avx2, "avx2,bmi1,bmi2,popcnt");
#[cfg(target_arch = "x86_64")]
loops!(avx512, Avx512, "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2,avx512vnni");
