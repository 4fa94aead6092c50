//! The inverse DCT with AVX-512.

use std::arch::x86_64::*;

use super::*;

/// As `dequantise_portable`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn dequantise(block: &mut Block, steps: &Block) -> u32 {
    let mut sums = _mm512_setzero_si512();
    for (values, steps) in block.0.chunks_exact_mut(32).zip(steps.0.chunks_exact(32)) {
        // SAFETY: the slices have 64 bytes, and loads and stores need no alignment.
        unsafe {
            let value = _mm512_loadu_si512(values.as_ptr().cast());
            let step = _mm512_loadu_si512(steps.as_ptr().cast());
            sums = _mm512_dpwssd_epi32(sums, _mm512_abs_epi16(value), step);
            _mm512_storeu_si512(values.as_mut_ptr().cast(), _mm512_mullo_epi16(value, step));
        }
    }
    _mm512_reduce_add_epi32(sums) as u32
}

/// As `idct_portable`.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn idct(block: &Block, samples: &mut [u8], stride: usize) {
    // SAFETY: the block has 128 bytes, and the loads need no alignment.
    let [upper, lower] = [0, 1].map(|half| unsafe { _mm512_loadu_si512(block.0.as_ptr().add(32 * half).cast()) });
    idct_halves(upper, lower, samples, stride);
}

/// As `idct` for rows 0 to 3 of a block, and rows 4 to 7.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn idct_halves(upper: __m512i, lower: __m512i, samples: &mut [u8], stride: usize) {
    let (upper, lower) = pass::<11>(upper, lower);
    let (upper, lower) = pass::<18>(upper, lower);
    // Saturated as signed bytes around 0, then shifted to 0 to 255. Each quarter has rows n and n + 4.
    let bytes = _mm512_add_epi8(_mm512_packs_epi16(upper, lower), _mm512_set1_epi8(-128));
    let pairs = [
        _mm512_castsi512_si128(bytes),
        _mm512_extracti32x4_epi32::<1>(bytes),
        _mm512_extracti32x4_epi32::<2>(bytes),
        _mm512_extracti32x4_epi32::<3>(bytes),
    ];
    for (row, pair) in pairs.into_iter().enumerate() {
        let (at, below) = (row * stride, (row + 4) * stride);
        samples[at..at + 8].copy_from_slice(&_mm_cvtsi128_si64(pair).to_le_bytes());
        samples[below..below + 8].copy_from_slice(&_mm_extract_epi64::<1>(pair).to_le_bytes());
    }
}

/// Words of a block that make up a register; from 32 on they are in the lower half.
type Words = [i16; 32];

/// Pairs of the words of two rows, and of two others.
const fn pairs(first: [i16; 2], second: [i16; 2]) -> Words {
    let mut words = [0; 32];
    let mut at = 0;
    while at < 32 {
        let rows = if at < 16 { first } else { second };
        words[at] = 8 * rows[at % 2] + (at % 16 / 2) as i16;
        at += 1;
    }
    words
}

/// Four columns, the words of each in the order of the rows; `lanes` are the places of the rows.
const fn columns(begin: i16, lanes: [i16; 8]) -> Words {
    let mut words = [0; 32];
    let mut at = 0;
    while at < 32 {
        words[at] = 8 * lanes[at % 8] + begin + (at / 8) as i16;
        at += 1;
    }
    words
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words(places: &Words) -> __m512i {
    // SAFETY: the array has 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(places.as_ptr().cast()) }
}

/// Factors of the words of each pair, for the lower half of a register and for the upper one.
#[inline]
#[target_feature(enable = "avx512f")]
fn factors(first: [i32; 2], second: [i32; 2]) -> __m512i {
    let [first, second] = [first, second].map(|[a, b]| _mm256_set1_epi32((a & 0xFFFF) | b << 16));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
}

/// One-dimensional transform of the columns, divided by 2^SHIFT and transposed.
///
/// The names are libjpeg's. A register has two of its values, each for 8 columns.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
fn pass<const SHIFT: u32>(upper: __m512i, lower: __m512i) -> (__m512i, __m512i) {
    const ROWS_26: Words = pairs([2, 6], [2, 6]);
    const ROWS_71_53: Words = pairs([7, 1], [5, 3]);
    const SUMS_31: Words = pairs([3, 1], [3, 1]);
    /// Places of rows 0 to 7 in the registers of the results.
    const RESULTS: [i16; 8] = [0, 1, 3, 2, 6, 7, 5, 4];
    const COLUMNS_0: Words = columns(0, RESULTS);
    const COLUMNS_4: Words = columns(4, RESULTS);
    let sums = _mm512_add_epi16(upper, lower); // of rows 0 and 4, 1 and 5, 2 and 6, 3 and 7
    let difference = _mm512_castsi512_si128(_mm512_sub_epi16(upper, lower)); // of rows 0 and 4
    let even_odd = _mm256_inserti128_si256::<1>(_mm512_castsi512_si256(sums), difference);
    let even_odd = _mm512_slli_epi32::<13>(_mm512_cvtepi16_epi32(even_odd));
    let even_odd = _mm512_add_epi32(even_odd, _mm512_set1_epi32(1 << (SHIFT - 1)));
    let p26 = _mm512_permutex2var_epi16(upper, words(&ROWS_26), lower);
    let (a, b) = ([F_0_541 + F_0_765, F_0_541], [F_0_541, F_0_541 - F_1_847]);
    let tmp10_11 = _mm512_dpwssd_epi32(even_odd, p26, factors(a, b));
    let tmp13_12 = _mm512_dpwssd_epi32(even_odd, p26, factors(a.map(|by| -by), b.map(|by| -by)));

    let p34 = _mm512_permutexvar_epi16(words(&SUMS_31), sums);
    let z3_4 = _mm512_madd_epi16(p34, factors([F_1_175 - F_1_961, F_1_175], [F_1_175, F_1_175 - F_0_390]));
    let z4_3 = _mm512_shuffle_i64x2::<0b01_00_11_10>(z3_4, z3_4);
    let p71_53 = _mm512_permutex2var_epi16(upper, words(&ROWS_71_53), lower);
    let (a, b) = ([-F_0_899, F_1_501 - F_0_899], [-F_2_562, F_3_072 - F_2_562]);
    let tmp3_2 = _mm512_dpwssd_epi32(z4_3, p71_53, factors(a, b));
    let (a, b) = ([F_0_298 - F_0_899, -F_0_899], [F_2_053 - F_2_562, -F_2_562]);
    let tmp0_1 = _mm512_dpwssd_epi32(z3_4, p71_53, factors(a, b));

    let narrow = |values| _mm512_cvtsepi32_epi16(_mm512_srai_epi32::<SHIFT>(values));
    let (rows01, rows76) = (narrow(_mm512_add_epi32(tmp10_11, tmp3_2)), narrow(_mm512_sub_epi32(tmp10_11, tmp3_2)));
    let (rows32, rows45) = (narrow(_mm512_add_epi32(tmp13_12, tmp0_1)), narrow(_mm512_sub_epi32(tmp13_12, tmp0_1)));
    let first = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rows01), rows32);
    let second = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rows76), rows45);
    (
        _mm512_permutex2var_epi16(first, words(&COLUMNS_0), second),
        _mm512_permutex2var_epi16(first, words(&COLUMNS_4), second),
    )
}
