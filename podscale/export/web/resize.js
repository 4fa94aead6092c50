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

// Resizes RGB pixels, uint8 [height, width, 3].
function resize(pixels, width, height, newWidth, newHeight, name) {
  const filter = FILTERS[name];
  if (newWidth !== width) {
    const layout = { lines: height, inLine: width * 3, inStep: 3, outLine: newWidth * 3, outStep: 3 };
    pixels = pass(pixels, coefficients(width, newWidth, filter), newWidth, layout);
  }
  if (newHeight !== height) {
    const layout = { lines: newWidth, inLine: 3, inStep: newWidth * 3, outLine: 3, outStep: newWidth * 3 };
    pixels = pass(pixels, coefficients(height, newHeight, filter), newHeight, layout);
  }
  return pixels;
}

// Rounds half to even, as NumPy.
function rint(value) {
  const low = Math.floor(value), rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

// Prepares RGB pixels as the evaluation does: short side to round(size / crop fraction), then the centre square.
function prepare(pixels, width, height, { image_size: size, crop_fraction: fraction, interpolation }) {
  const short = Math.max(size, rint(size / fraction)), smaller = Math.min(width, height);
  const newWidth = Math.floor((short * width) / smaller), newHeight = Math.floor((short * height) / smaller);
  const resized = resize(pixels, width, height, newWidth, newHeight, interpolation);
  const left = rint((newWidth - size) / 2), top = rint((newHeight - size) / 2);
  const square = new Uint8Array(size * size * 3);
  for (let y = 0; y < size; y++) {
    const from = ((top + y) * newWidth + left) * 3;
    square.set(resized.subarray(from, from + size * 3), y * size * 3);
  }
  return square;
}
