// Page of a model: pictures in, classes with probabilities out. Nothing leaves the page.
"use strict";
const data = JSON.parse(document.getElementById("description").textContent);
const size = data.preprocessing.image_size;
const LONGEST_SIDE = 8192; // pixels; larger pictures are not decoded
const TOP = 5;
const statusLine = document.getElementById("status");

function bytesOf(id) {
  const text = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function unpack(id) {
  const stream = new Blob([bytesOf(id)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function openSession() {
  const [module, wasm, model] = await Promise.all(["runtime", "wasm", "model"].map(unpack));
  const address = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
  const ort = await import(address);
  URL.revokeObjectURL(address);
  Object.assign(ort.env.wasm, { numThreads: 1, proxy: false, wasmBinary: wasm.buffer });
  return [ort, await ort.InferenceSession.create(model, { executionProviders: ["wasm"] })];
}

const opened = openSession();

// Returns the RGB pixels of an encoded picture, uint8 [height, width, 3]. JPEGs are upright if the run converted its
// images, else as they are stored.
async function decode(blob, isUpright = data.preprocessing.upright) {
  const file = await stored(blob, isUpright);
  const bitmap = await createImageBitmap(file.blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const { width, height } = bitmap;
  if (Math.max(width, height) > LONGEST_SIDE) throw new Error(`${width}x${height} pixels are too many`);
  if (file.pixels) return file;
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const rgba = context.getImageData(0, 0, width, height).data;
  const pixels = new Uint8Array(width * height * 3);
  for (let i = 0, j = 0; j < pixels.length; i += 4, j += 3) {
    pixels[j] = rgba[i];
    pixels[j + 1] = rgba[i + 1];
    pixels[j + 2] = rgba[i + 2];
  }
  return { pixels, width, height };
}

// Returns the model's input of a picture; a sample of this page is prepared already.
async function inputOf(blob, isPrepared) {
  const { pixels, width, height } = await decode(blob);
  return isPrepared ? pixels : prepare(pixels, width, height, data.preprocessing);
}

// Returns the probabilities of a prepared picture, by class.
async function probabilitiesOf(pixels) {
  const [ort, session] = await opened;
  const images = new ort.Tensor("uint8", pixels, [1, size, size, 3]);
  const outputs = await session.run({ [session.inputNames[0]]: images });
  return outputs[session.outputNames[0]].data;
}

let queue = opened; // one picture at a time: a session has one run
function classify(blob, isPrepared = false) {
  const result = queue.then(async () => {
    const pixels = await inputOf(blob, isPrepared);
    return { pixels, probabilities: Array.from(await probabilitiesOf(pixels)) };
  });
  queue = result.catch(() => {});
  return result;
}

function element(name, text = "", className = "") {
  const node = document.createElement(name);
  node.textContent = text;
  node.className = className;
  return node;
}

function picture(pixels) {
  const canvas = element("canvas");
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let i = 0, j = 0; j < pixels.length; i += 4, j += 3) {
    image.data.set([pixels[j], pixels[j + 1], pixels[j + 2], 255], i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function show(name, { pixels, probabilities }, label) {
  const best = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a] || a - b).slice(0, TOP);
  const rows = best.map((index) => {
    const row = element("div", "", "row"), bar = element("i");
    bar.style.width = `${100 * probabilities[index]}%`;
    row.append(element("span", data.classes[index]), element("b", `${(100 * probabilities[index]).toFixed(1)} %`), bar);
    return row;
  });
  const card = element("li"), text = element("div");
  text.append(element("div", label === undefined ? name : `${name}, true class ${label}`, "name"), ...rows);
  card.append(picture(pixels), text);
  document.getElementById("results").prepend(card);
}

async function add(name, blob, sample) {
  try {
    show(name, await classify(blob, sample !== undefined), sample?.label);
  } catch (error) {
    const card = element("li");
    card.append(element("div", `${name}: no picture that this browser reads (${error.message})`, "name"));
    document.getElementById("results").prepend(card);
  }
}

function addFiles(files) {
  for (const file of files) add(file.name || "pasted picture", file);
}

const drop = document.getElementById("drop");
drop.querySelector("input").addEventListener("change", (event) => addFiles(event.target.files));
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") addFiles(event.dataTransfer.files);
  });
}

data.samples.forEach((sample, index) => {
  const bytes = Uint8Array.from(atob(sample.png), (c) => c.charCodeAt(0));
  const button = element("button"), image = element("img"), name = `sample ${index + 1}`;
  image.src = `data:image/png;base64,${sample.png}`;
  image.alt = name;
  button.append(image);
  button.addEventListener("click", () => add(name, new Blob([bytes], { type: "image/png" }), sample));
  document.getElementById("samples").append(button);
});

opened.then(
  () => (statusLine.textContent = "The model is ready."),
  (error) => (statusLine.textContent = `The model cannot be loaded: ${error.message}`),
);
