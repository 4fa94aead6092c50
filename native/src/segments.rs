//! Entropy-coded data without its stuffed bytes, cut at the restart markers.

use std::ops::Range;

use crate::huffman::WINDOW;
use crate::refusal::Refusal;

/// Data of a scan, kept between images so that it is allocated once.
#[derive(Default)]
pub struct Segments {
    /// All segments, and zeros behind them for a reader at the end.
    bytes: Vec<u8>,
    /// End of each segment in `bytes`.
    ends: Vec<usize>,
}

impl Segments {
    /// Copy the data of a scan. Refuses markers other than restart markers in their order.
    pub fn fill(&mut self, scan: &[u8]) -> Result<(), Refusal> {
        self.bytes.clear();
        self.bytes.reserve(scan.len() + WINDOW);
        self.ends.clear();
        let mut rest = scan;
        while let Some(at) = memchr::memchr(0xFF, rest) {
            match rest.get(at + 1) {
                Some(0) => self.bytes.extend_from_slice(&rest[..=at]),
                Some(&marker @ 0xD0..=0xD7) if usize::from(marker & 7) == self.ends.len() % 8 => {
                    self.bytes.extend_from_slice(&rest[..at]);
                    self.ends.push(self.bytes.len());
                }
                _ => return Err(Refusal::Data),
            }
            rest = &rest[at + 2..];
        }
        self.bytes.extend_from_slice(rest);
        self.ends.push(self.bytes.len());
        self.bytes.resize(self.bytes.len() + WINDOW, 0);
        Ok(())
    }

    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Return the data of all segments, with `WINDOW` zeros behind it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Return the place of a segment in the data.
    pub fn range(&self, number: usize) -> Range<usize> {
        let begin = if number == 0 { 0 } else { self.ends[number - 1] };
        begin..self.ends[number]
    }
}
