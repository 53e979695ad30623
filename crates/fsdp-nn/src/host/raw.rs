//! The only unsafe code of this crate: calls of `gemm`, and of functions compiled for wider vectors.
//!
//! Both are wrapped so that callers can not break them: matrices come as `ndarray` views, whose pointers and
//! strides are valid by construction, and a wide function is entered only after the CPU was asked.

use gemm::Parallelism;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::element::Float;

/// `dst = lhs * rhs`, or `dst += lhs * rhs`, on `threads` threads of the current rayon pool (1: inline). The
/// bits do not depend on the number of threads.
///
/// # Panics
/// When the shapes do not fit each other.
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
    // SAFETY: pointers, shapes and strides are those of live ndarray views, so every element gemm touches is
    // in bounds; `dst` is a mutable view, so it overlaps neither input and no two of its elements coincide;
    // the shapes were checked to fit above; `A` is f32 or f64 (the only `Float`s), which gemm supports.
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

/// What the CPU was found to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    /// What the build assumes.
    Baseline,
    /// 256 bits: AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Wide,
    /// 512 bits: AVX-512 F, BW, DQ and VL, and FMA.
    #[cfg(target_arch = "x86_64")]
    Widest,
}

/// The widest vectors of this CPU; detection is cached by the standard library.
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

/// The widest vectors of this CPU.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn vectors() -> Vectors {
    Vectors::Baseline
}

/// Defines a function whose body is compiled for several vector widths, chosen when it is called. The body
/// must call only functions that are inlined into it. Floating-point results are the same for every width,
/// because the compiler may neither reorder nor fuse operations.
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
