//! Reasons for which an image is left to the reference path.

/// Reason; the numbers are those of `podscale.data.native.REASONS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Refusal {
    /// Not a sequential 8-bit JPEG in gray or YCbCr 4:4:4, 4:2:2 or 4:2:0, or its header is unusual.
    Format = 1,
    /// The size is not the one that the caller expects.
    Size = 2,
    /// The entropy-coded data is damaged or unusual.
    Data = 3,
    /// The decode index is damaged, or is not that of the file.
    Index = 4,
}
