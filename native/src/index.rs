//! Decode index of an image: the state of the entropy decoder at every k-th MCU, from which decoding can start.
//!
//! Layout, little-endian: checksum u64, interval k u16, then an entry for each of the MCUs k, 2 k, ..., and one for the end:
//! bits since the previous entry (u16), and the DC predictor of each component (i16). Bits are counted in the data
//! without stuffed bytes and restart markers. At a restart marker the entry has the state before it, because that behind
//! it is known. The checksum is the XXH3-64 of the file, with the XXH3-64 of all that
//! follows the checksum as its seed. So it binds the entries to the bytes of the file.

use twox_hash::XxHash3_64;

use crate::header::Header;
use crate::refusal::Refusal;

const CHECKSUM_BYTES: usize = 8;
const PREFIX_BYTES: usize = CHECKSUM_BYTES + 2;

/// Bytes that the container of the indexes needs for each.
const CONTAINER_BYTES: usize = 8;

/// State of the entropy decoder before an MCU, or before the restart marker in front of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct State {
    /// Bits before the MCU.
    pub position: usize,
    /// DC values of the previous blocks, by component.
    pub predictors: [i32; 3],
}

/// Entries of an image, read from the first to the last.
#[derive(Clone, Copy)]
pub struct Cursor<'a> {
    entries: &'a [u8],
    entry_bytes: usize,
    /// MCUs between two entries.
    interval: usize,
    /// Number of the present entry, from 1.
    number: usize,
    position: usize,
    /// MCUs of the image.
    mcus: usize,
}

impl<'a> Cursor<'a> {
    /// Return the entries of an index, at the first one. An index that is not this file's is refused.
    pub fn open(index: &'a [u8], file: &[u8], header: &Header) -> Result<Self, Refusal> {
        let (checksum, rest) = index.split_first_chunk::<CHECKSUM_BYTES>().ok_or(Refusal::Index)?;
        let (interval, entries) = rest.split_first_chunk::<2>().ok_or(Refusal::Index)?;
        let interval = usize::from(u16::from_le_bytes(*interval));
        let entry_bytes = entry_bytes(header);
        let mcus = count_mcus(header);
        if interval == 0
            || entries.len() != entry_bytes * mcus.div_ceil(interval)
            || u64::from_le_bytes(*checksum) != checksum_of(file, rest)
        {
            return Err(Refusal::Index);
        }
        let mut cursor = Cursor { entries, entry_bytes, interval, number: 0, position: 0, mcus };
        cursor.advance_to(1);
        Ok(cursor)
    }

    /// Return the MCU of the present entry; for the last entry, which is the end, the number of MCUs.
    pub fn mcu(&self) -> usize {
        (self.number * self.interval).min(self.mcus)
    }

    /// Return the last MCU that is not behind `mcu` and has an entry whose successor is in the same segment; else 0. The
    /// successor then checks the entry, before a restart marker sets the DC predictors to 0.
    pub fn mcu_before(&self, mcu: usize, segment_end: usize) -> usize {
        let last = mcu - mcu % self.interval;
        let is_checked = (last + self.interval).min(self.mcus) <= segment_end;
        if is_checked { last } else { last.saturating_sub(self.interval) }
    }

    /// Return the state at the present entry.
    pub fn state(&self) -> Option<State> {
        let mut state = State { position: self.position, ..State::default() };
        let values = self.entry(self.number)?[2..].chunks_exact(2);
        for (predictor, value) in state.predictors.iter_mut().zip(values) {
            *predictor = i32::from(i16::from_le_bytes([value[0], value[1]]));
        }
        Some(state)
    }

    /// Go to the next entry.
    pub fn advance(&mut self) {
        self.advance_to(self.number + 1);
    }

    /// Go to the entry of `mcu`.
    pub fn go_to_mcu(&mut self, mcu: usize) {
        self.advance_to(mcu / self.interval);
    }

    fn advance_to(&mut self, number: usize) {
        while self.number < number {
            self.number += 1;
            self.position +=
                self.entry(self.number).map_or(0, |entry| usize::from(entry[0]) | usize::from(entry[1]) << 8);
        }
    }

    fn entry(&self, number: usize) -> Option<&'a [u8]> {
        let begin = self.entry_bytes * number.checked_sub(1)?;
        self.entries.get(begin..begin + self.entry_bytes)
    }
}

/// Builder of the index of one image.
pub struct Builder {
    bytes: Vec<u8>,
    components: usize,
    interval: usize,
    position: usize,
}

impl Builder {
    /// Begin an index. The interval is raised until the index has at most `max_percent` of the file's bytes. Returns None
    /// if no MCU but the first is left.
    pub fn new(file: &[u8], header: &Header, interval: u16, max_percent: usize) -> Option<Self> {
        let mcus = count_mcus(header);
        let limit = (file.len().saturating_mul(max_percent) / 100).checked_sub(CONTAINER_BYTES + PREFIX_BYTES)?;
        let fewest = mcus.div_ceil((limit / entry_bytes(header)).clamp(1, mcus));
        let interval = u16::try_from(fewest).ok()?.max(interval).max(1);
        if mcus <= usize::from(interval) {
            return None;
        }
        let mut bytes = vec![0; CHECKSUM_BYTES];
        bytes.reserve(2 + entry_bytes(header) * mcus.div_ceil(usize::from(interval)));
        bytes.extend_from_slice(&interval.to_le_bytes());
        let components = header.frame.sampling.components();
        Some(Builder { bytes, components, interval: usize::from(interval), position: 0 })
    }

    /// MCUs between two entries.
    pub fn interval(&self) -> usize {
        self.interval
    }

    /// Add the next entry. Returns None if it does not fit into its bits.
    pub fn add(&mut self, state: &State) -> Option<()> {
        let bits = u16::try_from(state.position - self.position).ok()?;
        self.bytes.extend_from_slice(&bits.to_le_bytes());
        for &predictor in &state.predictors[..self.components] {
            self.bytes.extend_from_slice(&i16::try_from(predictor).ok()?.to_le_bytes());
        }
        self.position = state.position;
        Some(())
    }

    /// Return the index.
    pub fn finish(mut self, file: &[u8]) -> Vec<u8> {
        seal(&mut self.bytes, file);
        self.bytes
    }
}

/// Write the checksum of an index, whatever its entries.
pub fn seal(index: &mut [u8], file: &[u8]) {
    if let Some((checksum, rest)) = index.split_first_chunk_mut::<CHECKSUM_BYTES>() {
        *checksum = checksum_of(file, rest).to_le_bytes();
    }
}

fn entry_bytes(header: &Header) -> usize {
    2 + 2 * header.frame.sampling.components()
}

fn count_mcus(header: &Header) -> usize {
    let (across, down) = header.frame.mcus();
    across * down
}

fn checksum_of(file: &[u8], rest: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(rest), file)
}
