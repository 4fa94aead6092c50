use std::time::Instant;
fn main() {
    // args: file with lines "path height width left top cw ch"
    let list = std::fs::read_to_string(std::env::args().nth(1).unwrap()).unwrap();
    let jobs: Vec<(Vec<u8>, _native::crop::Crop)> = list.lines().map(|l| {
        let f: Vec<&str> = l.split(' ').collect();
        let n = |i: usize| f[i].parse::<usize>().unwrap();
        (std::fs::read(f[0]).unwrap(), _native::crop::Crop { height: n(1), width: n(2), left: n(3), top: n(4), crop_width: n(5), crop_height: n(6), out_width: 224, out_height: 224, out_left: 0, out_top: 0, mirror: n(7) != 0 })
    }).collect();
    let mut c = _native::crop::Cropper::new(false);
    let mut out = vec![0u8; 224*224*3];
    let rounds: usize = std::env::args().nth(2).unwrap().parse().unwrap();
    let mut best = f64::MAX;
    for _ in 0..rounds {
        let t = Instant::now();
        for (f, crop) in &jobs {
            let _ = c.run(_native::crop::Image::Jpeg(f), crop, 224, _native::resample::Filter::Bilinear, &mut out);
        }
        best = best.min(t.elapsed().as_secs_f64());
    }
    println!("{:.0} us/img wall best", best / jobs.len() as f64 * 1e6);
}
