//! Batches: the crops of many images, by several threads, into one output.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::crop::{Crop, Cropper, Image, Resize};
use crate::kernels::Version;
use crate::refusal::Refusal;

/// Crop of a batch.
pub struct Job<'a> {
    pub image: Image<'a>,
    pub crop: Crop,
    /// Pixels of the crop, 3 * size * size bytes.
    pub out: &'a mut [u8],
    /// Written: 0, or the number of a `Refusal`.
    pub status: &'a mut u8,
}

/// File whose coefficients are wanted.
pub struct PackJob<'a> {
    pub file: &'a [u8],
    /// Size above which they are not wanted, bytes.
    pub limit: usize,
    /// Written: the packed coefficients; None if the file is refused or they are too large.
    pub packed: Option<Vec<u8>>,
}

/// Threads' decoders, whose memory is kept between batches.
pub struct BatchDecoder {
    croppers: Mutex<Vec<Cropper>>,
    threads: usize,
    version: Version,
}

impl BatchDecoder {
    pub fn new(threads: usize, version: Version) -> Self {
        BatchDecoder { croppers: Mutex::new(Vec::new()), threads: threads.max(1), version }
    }

    /// Decode the jobs. Several batches at a time are allowed; each uses `threads` threads.
    pub fn decode(&self, jobs: &mut [Job], resize: Resize) {
        self.run_all(jobs, |cropper, job| run(cropper, job, resize));
    }

    /// Pack the coefficients of files.
    pub fn pack(&self, jobs: &mut [PackJob]) {
        self.run_all(jobs, |cropper, job| {
            // A panic as in `run`.
            let packed =
                catch_unwind(AssertUnwindSafe(|| cropper.pack(job.file, job.limit).map(|it| it.map(Vec::from))));
            job.packed = packed.ok().and_then(Result::ok).flatten();
        });
    }

    fn run_all<J: Send>(&self, jobs: &mut [J], body: impl Fn(&mut Cropper, &mut J) + Sync) {
        let threads = self.threads.min(jobs.len());
        let jobs = Mutex::new(jobs.iter_mut());
        let next = || jobs.lock().ok().and_then(|mut jobs| jobs.next());
        let work = || {
            self.with_cropper(|cropper| {
                while let Some(job) = next() {
                    body(cropper, job);
                }
            });
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If the system has no thread left, the others do the work.
                let _ = std::thread::Builder::new().name("podscale-decode".into()).spawn_scoped(scope, work);
            }
            work();
        });
    }

    fn with_cropper(&self, body: impl FnOnce(&mut Cropper)) {
        let kept = self.croppers.lock().ok().and_then(|mut croppers| croppers.pop());
        let mut cropper = kept.unwrap_or_else(|| Cropper::new(self.version));
        body(&mut cropper);
        if let Ok(mut croppers) = self.croppers.lock() {
            croppers.push(cropper);
        }
    }
}

fn run(cropper: &mut Cropper, job: &mut Job, resize: Resize) {
    // A panic would be a defect of this crate. The reference path then decodes the image, and the training goes on.
    let result = catch_unwind(AssertUnwindSafe(|| cropper.run(job.image, &job.crop, resize, job.out)));
    *job.status = match result {
        Ok(Ok(())) => 0,
        Ok(Err(refusal)) => refusal as u8,
        Err(_) => Refusal::Data as u8,
    };
}
