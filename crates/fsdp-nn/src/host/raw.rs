//! The only unsafe code of this crate: calls of `gemm`, and of functions compiled for wider vectors or for bf16
//! instructions.
//!
//! The wrappers are sound for all callers: matrices are `ndarray` views, whose pointers and strides are valid by
//! construction, and a function for specific CPU features is called only after their detection.

use std::sync::LazyLock;

use gemm::Parallelism;
use ndarray::{ArrayView2, ArrayViewMut2};
#[cfg(target_arch = "x86_64")]
use raw_cpuid::CpuId;

use super::element::Float;

/// `dst = lhs * rhs`, or `dst += lhs * rhs`, on `threads` threads of the current rayon pool (1: inline). The bits do
/// not depend on the number of threads.
///
/// # Panics
/// If the shapes do not fit each other.
pub(crate) fn product<A: Float>(
    mut dst: ArrayViewMut2<'_, A>,
    accumulate: bool,
    lhs: ArrayView2<'_, A>,
    rhs: ArrayView2<'_, A>,
    threads: usize,
) {
    let (m, k) = lhs.dim();
    let (rhs_rows, n) = rhs.dim();
    assert!(rhs_rows == k && dst.dim() == (m, n), "{m} x {k} times {rhs_rows} x {n} into {:?}", dst.dim());
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            dst.fill(A::ZERO);
        }
        return;
    }
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let (dst_strides, lhs_strides, rhs_strides) = (
        [dst.strides()[0], dst.strides()[1]],
        [lhs.strides()[0], lhs.strides()[1]],
        [rhs.strides()[0], rhs.strides()[1]],
    );
    // SAFETY: pointers, shapes and strides come from live ndarray views, so every element gemm touches is in bounds;
    // `dst` is a mutable view, so it overlaps neither input and no two of its elements coincide; the shapes were
    // checked to fit above; `A` is f32 or f64 (the only `Float`s), which gemm supports.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            dst_strides[1],
            dst_strides[0],
            accumulate,
            lhs.as_ptr(),
            lhs_strides[1],
            lhs_strides[0],
            rhs.as_ptr(),
            rhs_strides[1],
            rhs_strides[0],
            A::ONE,
            A::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Number of rows in a tile of [`Bf16Dot`].
pub(crate) const TILE_ROWS: usize = 12;
/// Number of columns in a tile of [`Bf16Dot`].
pub(crate) const TILE_COLS: usize = 32;

/// Instructions that multiply pairs of bf16 and add in f32. A value of this type proves that the CPU has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Dot(());

impl Bf16Dot {
    /// Returns the instructions if this CPU has them.
    pub(crate) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
            return Some(Self(()));
        }
        None
    }

    /// Returns the instructions if this CPU has them and their products are faster than in f32. That is so on AMD
    /// CPUs since Zen 4, where they are nearly twice as fast. Intel's (Sapphire Rapids) process half as many pairs
    /// per second as elements of f32.
    pub(crate) fn where_fast() -> Option<Self> {
        static IS_AMD: LazyLock<bool> = LazyLock::new(|| {
            #[cfg(target_arch = "x86_64")]
            return CpuId::new().get_vendor_info().is_some_and(|vendor| vendor.as_str() == "AuthenticAMD");
            #[cfg(not(target_arch = "x86_64"))]
            return false;
        });
        Self::detect().filter(|_| *IS_AMD)
    }

    /// Computes the products of rows with columns into `tile`. An entry holds a pair of elements of each row and
    /// column; both products are added. Products are exact, sums are rounded; subnormal numbers count as zero.
    ///
    /// # Panics
    /// If the numbers of entries of rows and columns differ.
    pub(crate) fn tile(
        self,
        rows: &[[u32; TILE_ROWS]],
        columns: &[[u32; TILE_COLS]],
        tile: &mut [[f32; TILE_COLS]; TILE_ROWS],
    ) {
        assert_eq!(rows.len(), columns.len(), "rows and columns are summed together");
        // SAFETY: `self` exists only if `detect` found the features that `bf16_tile` is compiled for.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            bf16_tile(rows, columns, tile);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("`detect` has found nothing to fill {tile:?} with");
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_tile(
    rows: &[[u32; TILE_ROWS]],
    columns: &[[u32; TILE_COLS]],
    tile: &mut [[f32; TILE_COLS]; TILE_ROWS],
) {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
        _mm512_storeu_ps,
    };
    // SAFETY: both types are 64 bytes of plain bits.
    let pairs = |bits: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) };
    // The sums stay in registers: two registers of 16 columns for every row.
    let mut sums = [[_mm512_setzero_ps(); 2]; TILE_ROWS];
    for (row, columns) in rows.iter().zip(columns) {
        let (halves, _) = columns.as_chunks::<16>();
        // SAFETY: each half is 64 bytes; the load needs no alignment.
        let [left, right] =
            [0, 1].map(|half| pairs(unsafe { _mm512_loadu_si512(halves[half].as_ptr().cast()) }));
        for (sums, &element) in sums.iter_mut().zip(row) {
            let element = pairs(_mm512_set1_epi32(element.cast_signed()));
            sums[0] = _mm512_dpbf16_ps(sums[0], element, left);
            sums[1] = _mm512_dpbf16_ps(sums[1], element, right);
        }
    }
    for (row, sums) in tile.iter_mut().zip(sums) {
        let (halves, _) = row.as_chunks_mut::<16>();
        for (half, sum) in halves.iter_mut().zip(sums) {
            // SAFETY: a half is 64 bytes; the store needs no alignment.
            unsafe { _mm512_storeu_ps(half.as_mut_ptr(), sum) };
        }
    }
}

/// The vector width that the CPU supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    /// The features that the build assumes.
    Baseline,
    /// 256 bits: AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Wide,
    /// 512 bits: AVX-512 F, BW, DQ and VL, and FMA.
    #[cfg(target_arch = "x86_64")]
    Widest,
}

/// Returns the widest vectors of this CPU; the standard library caches the detection.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn vectors() -> Vectors {
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("fma")
    {
        Vectors::Widest
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        Vectors::Wide
    } else {
        Vectors::Baseline
    }
}

/// Returns the widest vectors of this CPU.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn vectors() -> Vectors {
    Vectors::Baseline
}

/// Defines a function whose body is compiled for several vector widths and selected at run time. The body must call
/// only functions that are inlined into it. Floating-point results are the same for every width, because the compiler
/// may neither reorder nor fuse operations.
macro_rules! vectorized {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident$(<$($generic:ident: $bound:path),+>)?($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?
        $body:block
    ) => {
        $(#[$meta])*
        #[allow(unsafe_code)]
        $vis fn $name$(<$($generic: $bound),+>)?($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body$(<$($generic: $bound),+>)?($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn wide$(<$($generic: $bound),+>)?($($arg: $type),*) $(-> $result)? {
                body$(::<$($generic),+>)?($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma,avx512f,avx512bw,avx512dq,avx512vl")]
            fn widest$(<$($generic: $bound),+>)?($($arg: $type),*) $(-> $result)? {
                body$(::<$($generic),+>)?($($arg),*)
            }

            match $crate::host::raw::vectors() {
                $crate::host::raw::Vectors::Baseline => body$(::<$($generic),+>)?($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `vectors` found the features that `wide` is compiled for.
                $crate::host::raw::Vectors::Wide => unsafe { wide$(::<$($generic),+>)?($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `vectors` found the features that `widest` is compiled for.
                $crate::host::raw::Vectors::Widest => unsafe { widest$(::<$($generic),+>)?($($arg),*) },
            }
        }
    };
}
pub(crate) use vectorized;
