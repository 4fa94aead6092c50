// Resizing as Pillow does it: two passes with 8-bit results and coefficients of 22 bits, so that the pixels are the same.
"use strict";
const PRECISION = 22;
const FILTERS = {
  bilinear: { support: 1, at: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: {
    support: 2,
    at: (x) => {
      const t = Math.abs(x);
      if (t < 1) return (1.5 * t - 2.5) * t * t + 1;
      return t < 2 ? ((-0.5 * t + 2.5) * t - 4) * t + 2 : 0;
    },
  },
};

// Returns, for each output pixel, its first input pixel and the integer coefficients from there.
function coefficients(inputs, outputs, filter) {
  const scale = inputs / outputs, stretch = Math.max(scale, 1), support = filter.support * stretch;
  return Array.from({ length: outputs }, (_, index) => {
    const center = (index + 0.5) * scale;
    const begin = Math.max(0, Math.trunc(center - support + 0.5));
    const end = Math.min(inputs, Math.trunc(center + support + 0.5));
    const weights = [];
    for (let x = begin; x < end; x++) weights.push(filter.at((x - center + 0.5) / stretch));
    const sum = weights.reduce((a, b) => a + b, 0);
    const factors = weights.map((w) => Math.trunc((w / sum) * (1 << PRECISION) + (w < 0 ? -0.5 : 0.5)));
    return { begin, factors: Int32Array.from(factors) };
  });
}

// Resizes one axis of RGB pixels: `count` lines, whose pixels are `step` apart and which begin `stride` apart.
function pass(pixels, rows, outputs, layout) {
  const { lines, inLine, inStep, outLine, outStep } = layout;
  const out = new Uint8Array(outputs * lines * 3);
  for (let line = 0; line < lines; line++) {
    for (let x = 0; x < outputs; x++) {
      const { begin, factors } = rows[x];
      for (let channel = 0; channel < 3; channel++) {
        let sum = 1 << (PRECISION - 1), at = line * inLine + begin * inStep + channel;
        for (let k = 0; k < factors.length; k++, at += inStep) sum += pixels[at] * factors[k];
        const value = Math.floor(sum / (1 << PRECISION));
        out[line * outLine + x * outStep + channel] = value < 0 ? 0 : value > 255 ? 255 : value;
      }
    }
  }
  return out;
}

// Returns true if Pillow resizes columns first: since version 13 if that saves more, before for very high pictures.
function isColumnsFirst(width, height, newWidth, newHeight, order) {
  if (newWidth === width || newHeight >= height) return false;
  return order === "rows first" ? height > 100 * width : height - newHeight > 2 * (width - newWidth);
}

// Resizes RGB pixels, uint8 [height, width, 3]; `order` is that of the passes.
function resize(pixels, width, height, newWidth, newHeight, name, order) {
  const filter = FILTERS[name];
  const across = (rows) => {
    if (newWidth === width) return;
    const layout = { lines: rows, inLine: width * 3, inStep: 3, outLine: newWidth * 3, outStep: 3 };
    pixels = pass(pixels, coefficients(width, newWidth, filter), newWidth, layout);
  };
  const down = (columns) => {
    if (newHeight === height) return;
    const layout = { lines: columns, inLine: 3, inStep: columns * 3, outLine: 3, outStep: columns * 3 };
    pixels = pass(pixels, coefficients(height, newHeight, filter), newHeight, layout);
  };
  if (isColumnsFirst(width, height, newWidth, newHeight, order)) {
    down(width);
    across(newHeight);
  } else {
    across(height);
    down(newWidth);
  }
  return pixels;
}

// Rounds half to even, as NumPy.
function rint(value) {
  const low = Math.floor(value), rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

// Shrinks pixels as the shard set of the run did (data.resize_short), but without the JPEG coding that follows there.
function shrink(pixels, width, height, { resize_short: limit, pass_order: order }) {
  const scale = limit / Math.min(width, height);
  if (!limit || scale >= 1) return [pixels, width, height];
  const newWidth = Math.max(1, rint(width * scale)), newHeight = Math.max(1, rint(height * scale));
  return [resize(pixels, width, height, newWidth, newHeight, "bicubic", order), newWidth, newHeight];
}

// Prepares RGB pixels as the evaluation does: short side to round(size / crop fraction), then the centre square.
function prepare(decoded, decodedWidth, decodedHeight, options) {
  const { image_size: size, crop_fraction: fraction, interpolation, pass_order: order } = options;
  const [pixels, width, height] = shrink(decoded, decodedWidth, decodedHeight, options);
  const short = Math.max(size, rint(size / fraction)), smaller = Math.min(width, height);
  const newWidth = Math.floor((short * width) / smaller), newHeight = Math.floor((short * height) / smaller);
  const resized = resize(pixels, width, height, newWidth, newHeight, interpolation, order);
  const left = rint((newWidth - size) / 2), top = rint((newHeight - size) / 2);
  const square = new Uint8Array(size * size * 3);
  for (let y = 0; y < size; y++) {
    const from = ((top + y) * newWidth + left) * 3;
    square.set(resized.subarray(from, from + size * 3), y * size * 3);
  }
  return square;
}
