//! Coverage-guided fuzzing of the decoder, with AddressSanitizer. README.md has the commands.
//!
//! The first 8 bytes of an input choose the crop, the rest is the file. All versions of the kernels must agree, with a decode index,
//! without, and with packed coefficients. A changed entry under a right checksum must not crash, nor any change of packed
//! coefficients.
#![no_main]

use _native::Version;
use _native::crop::{Crop, Cropper, Image, Resize, build_index};
use _native::header::{self, Header};
use _native::index;
use _native::resample::Filter;
use libfuzzer_sys::fuzz_target;

const SIZE: usize = 20;

fuzz_target!(|input: &[u8]| {
    let Some((choice, file)) = input.split_first_chunk::<8>() else { return };
    let (height, width) = match header::parse(file) {
        Ok(Header { frame, .. }) if frame.height * frame.width <= 1 << 20 => (frame.height, frame.width),
        _ => return,
    };
    let part = |from: u8, of: usize| usize::from(from) * of / 256;
    let (left, top) = (part(choice[0], width), part(choice[1], height));
    let crop = Crop {
        height,
        width,
        left,
        top,
        crop_width: 1 + part(choice[2], width - left),
        crop_height: 1 + part(choice[3], height - top),
        out_width: SIZE + usize::from(choice[4] & 31),
        out_height: SIZE + usize::from(choice[5] & 31),
        out_left: i64::from(choice[6] & 15) - 4,
        out_top: i64::from(choice[6] >> 4) - 4,
        mirror: choice[7] & 1 == 1,
    };
    assert!(crop.is_valid());
    let filter = if choice[7] & 2 == 2 { Filter::Bicubic } else { Filter::Bilinear };
    let versions = Version::available();
    let run = |version: Version, image: Image| {
        let mut out = vec![0; 3 * SIZE * SIZE];
        let resize = Resize { size: SIZE, filter, rows_first: choice[7] & 4 == 4 };
        let result = Cropper::new(version).run(image, &crop, resize, &mut out);
        result.map(|()| out)
    };
    let decode = |version: Version, index: &[u8]| run(version, Image::Jpeg { file, index });
    let plain = decode(versions[0], &[]);
    for &version in &versions[1..] {
        assert_eq!(plain, decode(version, &[]));
    }
    let mut index = build_index(file, 1 + u16::from(choice[7] >> 5), usize::MAX);
    if !index.is_empty() {
        for &version in &versions {
            assert_eq!(plain, decode(version, &index));
        }
        let at = 8 + part(choice[6] ^ choice[5], index.len() - 8);
        index[at] ^= choice[7] | 1;
        index::seal(&mut index, file);
        let _ = decode(versions[0], &index);
    }
    let mut packer = Cropper::new(versions[usize::from(choice[7]) % versions.len()]);
    if let Ok(Some(packed)) = packer.pack(file, usize::MAX) {
        for &version in &versions {
            assert_eq!(plain, run(version, Image::Coefficients(packed)));
        }
        let mut packed = packed.to_vec();
        assert_eq!(packer.pack(file, packed.len() - 1), Ok(None));
        for (byte, change) in [(choice[6] ^ choice[5], choice[7] | 1), (choice[4] ^ choice[3], choice[2])] {
            let at = part(byte, packed.len());
            packed[at] ^= change;
        }
        packed.truncate(packed.len() - usize::from(choice[1] & choice[0]));
        for &version in &versions {
            let _ = run(version, Image::Coefficients(&packed));
        }
    }
});
