//! Header of a sequential JPEG: frame, tables and the start of its only scan.
//!
//! Anything unusual is `Refusal::Format`, because the reference path decodes it. So every header that is accepted here is
//! one that libjpeg-turbo accepts too, without a warning.

use crate::refusal::Refusal;

/// Largest side that libjpeg accepts, pixels.
const MAX_SIDE: usize = 65_500;

/// Natural position of each coefficient in zigzag order.
pub const NATURAL: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21,
    28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54,
    47, 55, 62, 63,
];

/// Chroma sampling: how many luma samples a chroma sample covers, horizontally x vertically.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sampling {
    Gray,
    /// 4:4:4.
    Full,
    /// 4:2:2, two columns.
    Half,
    /// 4:2:0, two columns and two rows.
    Quarter,
}

impl Sampling {
    /// Blocks of luma in an MCU, horizontally and vertically.
    pub fn luma_blocks(self) -> (usize, usize) {
        match self {
            Sampling::Gray | Sampling::Full => (1, 1),
            Sampling::Half => (2, 1),
            Sampling::Quarter => (2, 2),
        }
    }

    pub fn components(self) -> usize {
        if self == Sampling::Gray { 1 } else { 3 }
    }
}

/// Huffman table as the file has it: number of codes by length, and symbols.
#[derive(Clone, Copy)]
pub struct RawTable<'a> {
    pub counts: &'a [u8],
    pub symbols: &'a [u8],
}

/// Component of the frame, with the tables that its scan names.
#[derive(Clone, Copy, Default)]
pub struct Component {
    id: u8,
    horizontal: u8,
    vertical: u8,
    pub quant: usize,
    pub dc: usize,
    pub ac: usize,
}

/// Size of an image, pixels, and its chroma sampling.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub height: usize,
    pub width: usize,
    pub sampling: Sampling,
}

impl Frame {
    /// MCUs of the image, horizontally and vertically.
    pub fn mcus(&self) -> (usize, usize) {
        let (h, v) = self.sampling.luma_blocks();
        (self.width.div_ceil(8 * h), self.height.div_ceil(8 * v))
    }

    /// Samples of the chroma components, horizontally and vertically.
    pub fn chroma_size(&self) -> (usize, usize) {
        let (h, v) = self.sampling.luma_blocks();
        (self.width.div_ceil(h), self.height.div_ceil(v))
    }
}

pub struct Header<'a> {
    pub frame: Frame,
    pub components: [Component; 3],
    /// Quantisation tables in zigzag order.
    pub quant: [Option<[u16; 64]>; 4],
    pub dc: [Option<RawTable<'a>>; 4],
    pub ac: [Option<RawTable<'a>>; 4],
    /// MCUs between restart markers; 0: none.
    pub restart_interval: usize,
    /// Entropy-coded data, without the end marker.
    pub scan: &'a [u8],
}

#[derive(Default)]
struct ColorMarkers {
    jfif: bool,
    adobe_transform: Option<u8>,
}

/// Parse a whole JPEG file. It must end with an end marker, as a file that was not truncated does.
pub fn parse(file: &[u8]) -> Result<Header<'_>, Refusal> {
    if !file.starts_with(&[0xFF, 0xD8]) || !file.ends_with(&[0xFF, 0xD9]) {
        return Err(Refusal::Format);
    }
    let mut header = Header {
        frame: Frame { height: 0, width: 0, sampling: Sampling::Gray },
        components: [Component::default(); 3],
        quant: [None; 4],
        dc: [None; 4],
        ac: [None; 4],
        restart_interval: 0,
        scan: &[],
    };
    let mut colors = ColorMarkers::default();
    let mut count = 0;
    let mut at = 2;
    loop {
        let lead = file.get(at..at + 4).ok_or(Refusal::Format)?;
        let length = usize::from(be16(&lead[2..]));
        if lead[0] != 0xFF || length < 2 {
            return Err(Refusal::Format);
        }
        let body = file.get(at + 4..at + 2 + length).ok_or(Refusal::Format)?;
        at += 2 + length;
        match lead[1] {
            0xC0 | 0xC1 if count == 0 => count = parse_frame(body, &mut header)?,
            0xC4 => parse_huffman(body, &mut header)?,
            0xDB => parse_quant(body, &mut header)?,
            0xDD if body.len() == 2 => header.restart_interval = usize::from(be16(body)),
            0xE0 => colors.jfif |= body.len() >= 14 && body.starts_with(b"JFIF\0"),
            0xEE if body.len() >= 12 && body.starts_with(b"Adobe") => colors.adobe_transform = Some(body[11]),
            0xE1..=0xEF | 0xFE => {}
            0xDA if count > 0 => {
                parse_scan(body, &mut header, count)?;
                header.scan = file.get(at..file.len() - 2).ok_or(Refusal::Format)?;
                header.frame.sampling = sampling(&header.components[..count], &colors)?;
                return Ok(header);
            }
            _ => return Err(Refusal::Format),
        }
    }
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

/// Parse a frame header. Returns the number of components.
fn parse_frame(body: &[u8], header: &mut Header) -> Result<usize, Refusal> {
    if body.len() < 6 || body[0] != 8 {
        return Err(Refusal::Format);
    }
    let (height, width) = (usize::from(be16(&body[1..])), usize::from(be16(&body[3..])));
    let count = usize::from(body[5]);
    let sides = 1..=MAX_SIDE;
    if !matches!(count, 1 | 3) || body.len() != 6 + 3 * count || !sides.contains(&height) || !sides.contains(&width) {
        return Err(Refusal::Format);
    }
    (header.frame.height, header.frame.width) = (height, width);
    for (component, entry) in header.components.iter_mut().zip(body[6..].chunks_exact(3)) {
        *component = Component {
            id: entry[0],
            horizontal: entry[1] >> 4,
            vertical: entry[1] & 15,
            quant: usize::from(entry[2]),
            ..Component::default()
        };
        if !(1..=4).contains(&component.horizontal) || !(1..=4).contains(&component.vertical) || component.quant > 3 {
            return Err(Refusal::Format);
        }
    }
    Ok(count)
}

fn parse_scan(body: &[u8], header: &mut Header, count: usize) -> Result<(), Refusal> {
    if body.len() != 4 + 2 * count || usize::from(body[0]) != count || body[1 + 2 * count..] != [0, 63, 0] {
        return Err(Refusal::Format);
    }
    for (component, entry) in header.components.iter_mut().zip(body[1..].chunks_exact(2)).take(count) {
        (component.dc, component.ac) = (usize::from(entry[1] >> 4), usize::from(entry[1] & 15));
        if entry[0] != component.id || component.dc > 3 || component.ac > 3 {
            return Err(Refusal::Format);
        }
    }
    Ok(())
}

fn parse_quant(mut body: &[u8], header: &mut Header) -> Result<(), Refusal> {
    while let Some((&kind, rest)) = body.split_first() {
        let (wide, number) = (kind >> 4, usize::from(kind & 15));
        let bytes = 64 << wide.min(1);
        if wide > 1 || number > 3 || rest.len() < bytes {
            return Err(Refusal::Format);
        }
        let mut table = [0; 64];
        for (position, value) in table.iter_mut().enumerate() {
            *value = if wide == 1 { be16(&rest[2 * position..]) } else { u16::from(rest[position]) };
        }
        header.quant[number] = Some(table);
        body = &rest[bytes..];
    }
    Ok(())
}

fn parse_huffman<'a>(mut body: &'a [u8], header: &mut Header<'a>) -> Result<(), Refusal> {
    while let Some((&kind, rest)) = body.split_first() {
        let (class, number) = (kind >> 4, usize::from(kind & 15));
        let counts = rest.get(..16).ok_or(Refusal::Format)?;
        let total: usize = counts.iter().map(|&count| usize::from(count)).sum();
        let symbols = rest.get(16..16 + total).ok_or(Refusal::Format)?;
        if class > 1 || number > 3 || total > 256 {
            return Err(Refusal::Format);
        }
        let tables = if class == 0 { &mut header.dc } else { &mut header.ac };
        tables[number] = Some(RawTable { counts, symbols });
        body = &rest[16 + total..];
    }
    Ok(())
}

/// Return the sampling, if the components are gray or the usual luma and chroma.
fn sampling(components: &[Component], colors: &ColorMarkers) -> Result<Sampling, Refusal> {
    if components.len() == 1 {
        return Ok(Sampling::Gray);
    }
    let ids = [components[0].id, components[1].id, components[2].id];
    // libjpeg's rule: a JFIF marker means YCbCr, else Adobe's marker decides, else the components' numbers.
    let is_ycc = colors.jfif || colors.adobe_transform.map_or(ids == [1, 2, 3], |transform| transform == 1);
    let factors = |component: &Component| (component.horizontal, component.vertical);
    let unique = ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2];
    if !is_ycc || !unique || factors(&components[1]) != (1, 1) || factors(&components[2]) != (1, 1) {
        return Err(Refusal::Format);
    }
    match factors(&components[0]) {
        (1, 1) => Ok(Sampling::Full),
        (2, 1) => Ok(Sampling::Half),
        (2, 2) => Ok(Sampling::Quarter),
        _ => Err(Refusal::Format),
    }
}
