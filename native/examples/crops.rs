//! Crops of the images on standard input, for the tests of other processors' kernels under an emulator.
//!
//! Usage: `crops [KERNELS]`. The version of the kernels is written to standard error. An image has, little-endian: 13
//! numbers (i64) and its bytes. Three results are written of each: decoded without a decode index, with one, and from
//! packed coefficients. A result is a byte of 0 and the pixels, or the number of the refusal.

use std::io::{self, BufWriter, Read, Write};

use _native::Version;
use _native::crop::{Crop, Cropper, Image, Resize, build_index};
use _native::refusal::Refusal;
use _native::resample::Filter;

const NUMBERS: usize = 13;
/// MCUs between two entries of the decode index.
const INTERVAL: u16 = 4;

fn main() -> io::Result<()> {
    let version = match std::env::args().nth(1) {
        None => Version::fastest(),
        Some(name) => Version::named(&name).expect("kernels of this processor"),
    };
    eprintln!("{}", version.name());
    let mut input = Vec::new();
    io::stdin().read_to_end(&mut input)?;
    let (mut rest, mut output) = (&input[..], BufWriter::new(io::stdout()));
    let mut cropper = Cropper::new(version);
    while !rest.is_empty() {
        let (numbers, bytes) = rest.split_at(8 * NUMBERS);
        let number = |at: usize| i64::from_le_bytes(numbers[8 * at..8 * at + 8].try_into().expect("8 bytes"));
        let crop = Crop {
            height: number(0) as usize,
            width: number(1) as usize,
            left: number(2) as usize,
            top: number(3) as usize,
            crop_width: number(4) as usize,
            crop_height: number(5) as usize,
            out_width: number(6) as usize,
            out_height: number(7) as usize,
            out_left: number(8),
            out_top: number(9),
            mirror: number(10) & 1 == 1,
        };
        assert!(crop.is_valid());
        let filter = if number(10) & 2 == 2 { Filter::Bicubic } else { Filter::Bilinear };
        let resize = Resize { size: number(11) as usize, filter, rows_first: number(10) & 4 == 4 };
        let (file, after) = bytes.split_at(number(12) as usize);
        rest = after;
        let mut write = |result: Result<Vec<u8>, Refusal>| match result {
            Ok(pixels) => output.write_all(&[0]).and_then(|()| output.write_all(&pixels)),
            Err(refusal) => output.write_all(&[refusal as u8]),
        };
        let mut run = |image: Image| {
            let mut out = vec![0; 3 * resize.size * resize.size];
            cropper.run(image, &crop, resize, &mut out).map(|()| out)
        };
        write(run(Image::Jpeg { file, index: &[] }))?;
        let index = build_index(file, INTERVAL, usize::MAX);
        write(run(Image::Jpeg { file, index: &index }))?;
        let mut packer = Cropper::new(version);
        let packed = packer.pack(file, usize::MAX);
        write(packed.and_then(|packed| run(Image::Coefficients(packed.unwrap_or_default()))))?;
    }
    output.flush()
}
