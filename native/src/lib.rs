//! Crops of JPEGs with Pillow's pixels, to the bit, decoded only where the crop is.
//!
//! Order of the modules for an image: `header` (tables and size), `segments` (data without stuffing), `scan` with
//! `index`, `block`, `huffman` and `idct` (samples of the blocks under the crop), `color` (RGB), `resample` (Pillow's
//! fixed point). `coefficients` packs what `huffman` decoded, for a cache, and `shared` is the memory of a cache that the
//! processes of a host share. `crop` connects them, `batch` runs many, `python` is the extension module. Unusual
//! images are refused, and Python decodes them. `augment` has the slow operations of augmentation after the crop.
#![warn(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

pub mod augment;
pub mod batch;
mod block;
mod coefficients;
mod color;
pub mod crop;
pub mod header;
mod huffman;
mod idct;
pub mod index;
mod kernels;
mod memory;
pub mod refusal;
pub mod resample;
mod scan;
mod segments;
pub mod shared;

pub use kernels::Version;

#[cfg(feature = "python")]
mod python;
