//! Crops of JPEGs with Pillow's pixels, to the bit, decoded only where the crop is.
//!
//! The way of an image: `header` (tables and size), `segments` (data without stuffing), `scan` with `huffman` and `idct`
//! (samples of the blocks under the crop), `color` (RGB), `resample` (Pillow's fixed point). `crop` connects them,
//! `batch` runs many, `python` is the extension module. What is unusual is refused, and Python decodes it.
#![warn(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

pub mod batch;
mod color;
pub mod crop;
pub mod header;
mod huffman;
mod idct;
mod kernels;
pub mod refusal;
pub mod resample;
mod scan;
mod segments;

#[cfg(feature = "python")]
mod python;
