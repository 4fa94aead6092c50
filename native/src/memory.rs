//! Memory that is kept between images, so that it is allocated once.

/// Return the first `length` values, which are those of earlier images or 0. The memory grows if it is shorter.
#[inline(always)]
pub fn reserve<T: Copy + Default>(memory: &mut Vec<T>, length: usize) -> &mut [T] {
    if memory.len() < length {
        memory.resize(length, T::default());
    }
    &mut memory[..length]
}
