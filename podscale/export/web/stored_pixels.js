// Pixels as they are stored in a file, which Pillow gives: not rotated by Exif, colours not multiplied by the opacity.
"use strict";
const EXIF_IN_JPEG = [0x45, 0x78, 0x69, 0x66, 0, 0]; // "Exif\0\0"
const PNG_SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];

function hasBytes(bytes, at, expected) {
  return expected.every((value, index) => bytes[at + index] === value);
}

// Returns a JPEG without its Exif segments, which have the rotation.
function withoutExif(bytes) {
  const kept = [bytes.subarray(0, 2)];
  let at = 2;
  while (at + 4 <= bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda) {
    const end = at + 2 + (bytes[at + 2] << 8) + bytes[at + 3];
    if (bytes[at + 1] !== 0xe1 || !hasBytes(bytes, at + 4, EXIF_IN_JPEG)) kept.push(bytes.subarray(at, end));
    at = end;
  }
  return [...kept, bytes.subarray(at)];
}

// Returns the chunks of a PNG, as type and content with length and checksum.
function chunksOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length), chunks = [];
  for (let at = 8; at + 12 <= bytes.length; ) {
    const end = at + 12 + view.getUint32(at);
    chunks.push({ type: String.fromCharCode(...bytes.subarray(at + 4, at + 8)), bytes: bytes.subarray(at, end) });
    at = end;
  }
  return chunks;
}

// Reverses the filters of a PNG's lines (PNG specification, 9.2), in place; `step` is the bytes of a pixel.
function unfilter(data, height, stride, step) {
  for (let line = 0; line < height; line++) {
    const begin = line * (stride + 1) + 1, kind = data[begin - 1];
    for (let i = 0; i < stride; i++) {
      const at = begin + i, up = line ? data[at - stride - 1] : 0, left = i < step ? 0 : data[at - step];
      if (kind === 1) data[at] += left;
      else if (kind === 2) data[at] += up;
      else if (kind === 3) data[at] += (left + up) >> 1;
      else if (kind === 4) {
        const corner = line && i >= step ? data[at - stride - 1 - step] : 0, guess = left + up - corner;
        const [a, b, c] = [left, up, corner].map((value) => Math.abs(guess - value));
        data[at] += a <= b && a <= c ? left : b <= c ? up : corner;
      }
    }
  }
}

// Returns the colours of a PNG with an opacity for each pixel; undefined for others, and for 16 bits or interlacing.
// A canvas would multiply them by the opacity.
async function colorsBesideOpacity(bytes) {
  const [width, height] = [16, 20].map((at) => new DataView(bytes.buffer, bytes.byteOffset).getUint32(at));
  const [depth, color, , , interlaced] = bytes.subarray(24, 29);
  if (depth !== 8 || (color !== 4 && color !== 6) || interlaced) return undefined;
  const packed = chunksOf(bytes).filter(({ type }) => type === "IDAT").map((chunk) => chunk.bytes.slice(8, -4));
  const stream = new Blob(packed).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  const step = color === 6 ? 4 : 2, stride = width * step, pixels = new Uint8Array(width * height * 3);
  unfilter(data, height, stride, step);
  for (let y = 0, to = 0; y < height; y++) {
    for (let x = 0, at = y * (stride + 1) + 1; x < width; x++, at += step, to += 3) {
      for (let c = 0; c < 3; c++) pixels[to + c] = data[at + (color === 6 ? c : 0)];
    }
  }
  return { pixels, width, height };
}

// Returns { blob } whose pixels a canvas gives as Pillow does, with { pixels, width, height } if they are known already.
async function stored(blob, isUpright) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (hasBytes(bytes, 0, [0xff, 0xd8])) return { blob: isUpright ? blob : new Blob(withoutExif(bytes)) };
  if (!hasBytes(bytes, 0, PNG_SIGNATURE) || bytes.length < 33) return { blob };
  const kept = chunksOf(bytes).filter(({ type }) => type !== "eXIf" && type !== "tRNS");
  const opaque = new Blob([bytes.subarray(0, 8), ...kept.map((chunk) => chunk.bytes)]);
  return { blob: opaque, ...(await colorsBesideOpacity(bytes)) };
}
