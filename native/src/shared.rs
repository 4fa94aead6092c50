//! Images that the processes of a host keep in one shared memory, by row of the split.
//!
//! Layout, in the byte order of the host:
//!
//! - a header of HEADER bytes: identity of the images (u64), bytes of the reserved blocks (u64);
//! - the table: for each row EMPTY, CLAIMED, or the place of its block in the memory (u64);
//! - the blocks: length and kind of an image (u64 each), and its bytes.
//!
//! A writer claims the row, reserves a block, writes it, and at last stores its place with release order. A reader loads
//! the place with acquire order, so it sees the whole block on any processor, and it takes no lock. A published block
//! never changes. A writer that is killed leaves its row claimed: the row is not kept, and nobody waits for it.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const HEADER: usize = 4096;
const IDENTITY: usize = 0;
const USED: usize = 64;
/// Bytes of an entry of the table.
const ENTRY: usize = 8;
/// Bytes in front of an image, and alignment of the blocks.
const PREFIX: usize = 16;

const EMPTY: u64 = 0;
const CLAIMED: u64 = 1;

/// Place, length and kind of an image.
pub struct Found {
    pub begin: usize,
    pub length: usize,
    pub kind: u64,
}

/// Images in a memory that other processes map too.
pub struct SharedImages {
    memory: *mut u8,
    length: usize,
    rows: usize,
}

// SAFETY: threads and processes change the memory as described above, by atomic operations and in blocks of their own.
unsafe impl Send for SharedImages {}
// SAFETY: as above.
unsafe impl Sync for SharedImages {}

impl SharedImages {
    /// Open the memory, which is zero at first. None: it is too small, or it has the images of another identity.
    ///
    /// # Safety
    ///
    /// `memory` has `length` bytes, can be written, and stays mapped as long as the value lives. All processes that map
    /// it use it through this type.
    pub unsafe fn open(memory: *mut u8, length: usize, rows: usize, identity: u64) -> Option<Self> {
        let table = rows.checked_mul(ENTRY)?;
        if memory.align_offset(PREFIX) != 0 || identity == 0 || length < HEADER.checked_add(table)? + PREFIX {
            return None;
        }
        let images = SharedImages { memory, length, rows };
        match images.word(IDENTITY).compare_exchange(0, identity, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != identity => None,
            _ => Some(images),
        }
    }

    /// Return the place of an image that is kept.
    pub fn find(&self, row: usize) -> Option<Found> {
        let place = self.entry(row)?.load(Ordering::Acquire);
        if place <= CLAIMED {
            return None;
        }
        let begin = usize::try_from(place).ok()?.checked_add(PREFIX).filter(|&begin| begin <= self.length)?;
        // SAFETY: the prefix lies in the memory, is aligned, and was written before its place was stored.
        let [length, kind] = unsafe { ptr::read(self.memory.add(begin - PREFIX).cast::<[u64; 2]>()) };
        let length = usize::try_from(length).ok().filter(|&length| length <= self.length - begin)?;
        Some(Found { begin, length, kind })
    }

    /// Keep an image, unless another writer has its row. Returns false if it does not fit.
    pub fn keep(&self, row: usize, kind: u64, image: &[u8]) -> bool {
        let Some(entry) = self.entry(row) else { return false };
        if entry.compare_exchange(EMPTY, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return true;
        }
        let Some(place) = self.reserve(image.len()) else {
            entry.store(EMPTY, Ordering::Release);
            return false;
        };
        // SAFETY: the block lies in the memory, is aligned, and only this call has its place.
        unsafe {
            ptr::write(self.memory.add(place).cast::<[u64; 2]>(), [image.len() as u64, kind]);
            ptr::copy_nonoverlapping(image.as_ptr(), self.memory.add(place + PREFIX), image.len());
        }
        entry.store(place as u64, Ordering::Release);
        true
    }

    /// Bytes of the blocks that are reserved.
    pub fn used(&self) -> usize {
        self.word(USED).load(Ordering::Relaxed) as usize
    }

    /// Bytes that are left, without the prefix of the next image.
    pub fn free(&self) -> usize {
        (self.capacity() - self.used()).saturating_sub(PREFIX)
    }

    /// Reserve the block of an image of `length` bytes and return its place.
    fn reserve(&self, length: usize) -> Option<usize> {
        let size = length.checked_add(PREFIX)?.checked_next_multiple_of(PREFIX)?;
        let grow = |used: u64| used.checked_add(size as u64).filter(|&used| used <= self.capacity() as u64);
        let used = self.word(USED).fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).ok()?;
        Some(self.blocks() + used as usize)
    }

    /// Place of the first block.
    fn blocks(&self) -> usize {
        (HEADER + self.rows * ENTRY).next_multiple_of(PREFIX)
    }

    /// Bytes of all blocks that fit, a multiple of the alignment.
    pub fn capacity(&self) -> usize {
        (self.length - self.blocks()) / PREFIX * PREFIX
    }

    fn entry(&self, row: usize) -> Option<&AtomicU64> {
        (row < self.rows).then(|| self.word(HEADER + row * ENTRY))
    }

    fn word(&self, place: usize) -> &AtomicU64 {
        // SAFETY: the callers' places are aligned and lie in the header or the table, which hold atomic values only.
        unsafe { AtomicU64::from_ptr(self.memory.add(place).cast()) }
    }
}
