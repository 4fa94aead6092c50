//! Extension module `podscale.data._native`.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::augment;
use crate::batch::{BatchDecoder, Job, PackJob};
use crate::crop::{self, Crop, Image, Resize};
use crate::kernels::Version;
use crate::resample::Filter;
use crate::shared;

/// Columns of a crop: height and width of the image, left, top, width and height of the rectangle, width and height of
/// the resized rectangle, left and top of the square, mirrored or not.
const FIELDS: usize = 11;

/// Largest side of an image, pixels. A long image that is resized by its short side becomes longer.
const MAX_SIDE: usize = 1 << 20;

/// Decoder of batches of crops.
#[pyclass(frozen)]
struct CropDecoder(BatchDecoder);

#[pymethods]
impl CropDecoder {
    #[new]
    #[pyo3(signature = (threads, kernels = None))]
    fn new(threads: usize, kernels: Option<&str>) -> PyResult<Self> {
        let version = match kernels {
            None => Version::fastest(),
            Some(name) => Version::named(name)
                .ok_or_else(|| PyValueError::new_err(format!("this processor has no kernels {name:?}")))?,
        };
        Ok(CropDecoder(BatchDecoder::new(threads, version)))
    }

    /// Decode crops of JPEGs without the GIL.
    ///
    /// `records`: list of n buffers of uint8, files [bytes] or decoded images [height, width, 3].
    /// `packed`: list of n bools, true for a record that has the coefficients of `pack`.
    /// `indexes`: list of n buffers of uint8, decode indexes of the files; empty for a file without one.
    /// `crops`: int64 [n, 11], the columns `FIELDS`.
    /// `images`: uint8 [n, size, size, 3], written.
    /// `rows_first`: resize in the order of Pillow before version 13.
    /// `status`: uint8 [n], written: 0 if the image was decoded, else the reason of the refusal.
    #[allow(clippy::too_many_arguments)]
    fn decode(
        &self,
        py: Python<'_>,
        records: &Bound<'_, PyList>,
        packed: Vec<bool>,
        indexes: &Bound<'_, PyList>,
        crops: PyBuffer<i64>,
        images: PyBuffer<u8>,
        status: PyBuffer<u8>,
        size: usize,
        bicubic: bool,
        rows_first: bool,
    ) -> PyResult<()> {
        let count = records.len();
        let bytes = size.checked_mul(size).and_then(|pixels| pixels.checked_mul(3)).unwrap_or(usize::MAX);
        let crops = parse_crops(py, &crops, count)?;
        if status.item_count() != count || images.item_count() != bytes.saturating_mul(count) || bytes == 0 {
            return Err(PyValueError::new_err("images and status must have a place for each record"));
        }
        let files = records.iter().map(|record| PyBuffer::<u8>::get(&record)).collect::<PyResult<Vec<_>>>()?;
        let indexes = indexes.iter().map(|index| PyBuffer::<u8>::get(&index)).collect::<PyResult<Vec<_>>>()?;
        if indexes.len() != count || packed.len() != count {
            return Err(PyValueError::new_err("indexes and packed must have an element for each record"));
        }
        let files = files.iter().zip(&indexes).zip(packed).map(image).collect::<PyResult<Vec<_>>>()?;
        let (images, status) = (writable(&images)?, writable(&status)?);
        let mut jobs: Vec<Job> = files
            .into_iter()
            .zip(crops)
            .zip(images.chunks_exact_mut(bytes).zip(status))
            .map(|((image, crop), (out, status))| Job { image, crop, out, status })
            .collect();
        let filter = if bicubic { Filter::Bicubic } else { Filter::Bilinear };
        py.detach(|| self.0.decode(&mut jobs, Resize { size, filter, rows_first }));
        Ok(())
    }

    /// Return the packed coefficients of JPEGs, a list of bytes, without the GIL. None: the file is refused, or its
    /// coefficients have more bytes than its limit.
    ///
    /// `records`: list of n buffers of uint8, files [bytes].
    /// `limits`: list of n sizes, bytes.
    fn pack<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'_, PyList>,
        limits: Vec<usize>,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let files = records.iter().map(|record| PyBuffer::<u8>::get(&record)).collect::<PyResult<Vec<_>>>()?;
        if limits.len() != files.len() {
            return Err(PyValueError::new_err("limits must have an element for each record"));
        }
        let jobs =
            files.iter().zip(limits).map(|(file, limit)| Ok(PackJob { file: readable(file)?, limit, packed: None }));
        let mut jobs = jobs.collect::<PyResult<Vec<_>>>()?;
        py.detach(|| self.0.pack(&mut jobs));
        Ok(jobs.into_iter().map(|job| job.packed.map(|packed| PyBytes::new(py, &packed))).collect())
    }
}

/// Images that the processes of a host keep in a memory that each of them maps.
#[pyclass(frozen)]
struct SharedImages {
    images: shared::SharedImages,
    /// Keeps the memory mapped.
    _memory: PyBuffer<u8>,
}

#[pymethods]
impl SharedImages {
    /// `memory`: the shared memory, uint8, zero at first.
    /// `rows`: number of the images.
    /// `identity`: number of the images' split, not 0.
    #[new]
    fn new(memory: PyBuffer<u8>, rows: usize, identity: u64) -> PyResult<Self> {
        if !memory.is_c_contiguous() || memory.readonly() {
            return Err(PyValueError::new_err("the memory must be contiguous and writable"));
        }
        // SAFETY: the memory has these bytes, is writable, and `_memory` keeps it mapped. The processes of a host share
        // it for this type only.
        let images =
            unsafe { shared::SharedImages::open(memory.buf_ptr().cast(), memory.item_count(), rows, identity) };
        let images = images.ok_or_else(|| PyValueError::new_err("too small, or in use for another shard set"))?;
        Ok(SharedImages { images, _memory: memory })
    }

    /// Return place, bytes and kind of an image; None if it is not kept.
    fn find(&self, row: usize) -> Option<(usize, usize, u64)> {
        self.images.find(row).map(|found| (found.begin, found.length, found.kind))
    }

    /// Copy an image into the memory, without the GIL, unless its row is taken. Returns false if it does not fit.
    fn keep(&self, py: Python<'_>, row: usize, kind: u64, image: PyBuffer<u8>) -> PyResult<bool> {
        let image = readable(&image)?;
        Ok(py.detach(|| self.images.keep(row, kind, image)))
    }

    /// Bytes that images take.
    #[getter]
    fn used(&self) -> usize {
        self.images.used()
    }

    /// Bytes that images may take.
    #[getter]
    fn limit(&self) -> usize {
        self.images.capacity()
    }

    /// Bytes that are left.
    #[getter]
    fn free(&self) -> usize {
        self.images.free()
    }
}

/// Read the crops, int64 [n, FIELDS]; all must lie in their images.
fn parse_crops(py: Python<'_>, crops: &PyBuffer<i64>, count: usize) -> PyResult<Vec<Crop>> {
    if crops.shape() != [count, FIELDS] {
        return Err(PyValueError::new_err(format!("crops must be int64 [{count}, {FIELDS}]")));
    }
    let values = crops.to_vec(py)?;
    let rows = values.chunks_exact(FIELDS);
    rows.map(|row| parse_crop(row).ok_or_else(|| PyValueError::new_err(format!("impossible crop: {row:?}")))).collect()
}

fn parse_crop(row: &[i64]) -> Option<Crop> {
    let resized = |at: usize| u32::try_from(row[at]).ok().map(|length| length as usize);
    let size = |at: usize| resized(at).filter(|&length| length <= MAX_SIDE);
    let crop = Crop {
        height: size(0)?,
        width: size(1)?,
        left: size(2)?,
        top: size(3)?,
        crop_width: size(4)?,
        crop_height: size(5)?,
        out_width: resized(6)?,
        out_height: resized(7)?,
        out_left: row[8],
        out_top: row[9],
        mirror: row[10] != 0,
    };
    crop.is_valid().then_some(crop)
}

/// An array of three dimensions is a decoded image.
fn image<'a>(((buffer, index), is_packed): ((&'a PyBuffer<u8>, &'a PyBuffer<u8>), bool)) -> PyResult<Image<'a>> {
    let bytes = readable(buffer)?;
    Ok(if is_packed {
        Image::Coefficients(bytes)
    } else if buffer.dimensions() == 3 {
        Image::Pixels(bytes)
    } else {
        Image::Jpeg { file: bytes, index: readable(index)? }
    })
}

fn readable(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("a record must be contiguous"));
    }
    if buffer.item_count() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the buffer is contiguous, holds item_count() bytes and lives as long as the borrow. Nothing writes to
    // records: they are shards mapped read-only, which are never changed in place, images of the caller, or published
    // blocks of a shared memory, which never change.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) })
}

#[allow(clippy::mut_from_ref)]
fn writable(buffer: &PyBuffer<u8>) -> PyResult<&mut [u8]> {
    if !buffer.is_c_contiguous() || buffer.readonly() {
        return Err(PyValueError::new_err("images and status must be contiguous and writable"));
    }
    // SAFETY: the buffer is contiguous, writable, holds item_count() bytes and lives as long as the borrow. The caller
    // hands over an array that no other thread uses until the call returns.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast(), buffer.item_count()) })
}

/// Return the versions of the kernels that this processor runs, the fastest first: avx512, avx2, neon, portable.
#[pyfunction]
fn kernels() -> Vec<&'static str> {
    Version::available().into_iter().map(Version::name).collect()
}

/// Transform an image as Pillow does, to one of the same size, without the GIL.
///
/// `image`: uint8 [height, width, 3]; pixels from outside become `fill`.
/// `matrix`: where pixel (x, y) lies in the image: (a x + b y + c, d x + e y + f) for pixel centres.
/// `out`: uint8 [height, width, 3]; written.
#[pyfunction]
fn affine(
    py: Python<'_>,
    image: PyBuffer<u8>,
    matrix: augment::Matrix,
    bicubic: bool,
    fill: [u8; 3],
    out: PyBuffer<u8>,
) -> PyResult<()> {
    let (image, out) = (whole_image(&image, &out)?, writable(&out)?);
    let filter = if bicubic { Filter::Bicubic } else { Filter::Bilinear };
    py.detach(|| augment::affine(image, &matrix, filter, fill, out));
    Ok(())
}

/// Smooth an image as Pillow's filter SMOOTH does, without the GIL. Arguments as those of `affine`.
#[pyfunction]
fn smooth(py: Python<'_>, image: PyBuffer<u8>, out: PyBuffer<u8>) -> PyResult<()> {
    let (image, out) = (whole_image(&image, &out)?, writable(&out)?);
    py.detach(|| augment::smooth(image, out));
    Ok(())
}

/// Check that an image is uint8 [height, width, 3], and that the output has its shape.
fn whole_image<'a>(image: &'a PyBuffer<u8>, out: &PyBuffer<u8>) -> PyResult<augment::Image<'a>> {
    match image.shape() {
        &[height, width, 3] if height * width > 0 && out.shape() == image.shape() => {
            Ok(augment::Image { bytes: readable(image)?, width, height })
        }
        _ => Err(PyValueError::new_err("image and out must be uint8 [height, width, 3], not empty and of one shape")),
    }
}

/// Return the decode index of a JPEG, at most `max_percent` of its bytes; empty if it needs none or is refused.
#[pyfunction]
fn build_index<'py>(
    py: Python<'py>,
    record: PyBuffer<u8>,
    interval: u16,
    max_percent: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let file = readable(&record)?;
    let index = py.detach(|| crop::build_index(file, interval, max_percent));
    Ok(PyBytes::new(py, &index))
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CropDecoder>()?;
    module.add_class::<SharedImages>()?;
    module.add_function(wrap_pyfunction!(affine, module)?)?;
    module.add_function(wrap_pyfunction!(build_index, module)?)?;
    module.add_function(wrap_pyfunction!(kernels, module)?)?;
    module.add_function(wrap_pyfunction!(smooth, module)?)
}
