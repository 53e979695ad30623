//! Kernels: sources, their compilation on first use, and their launches.
//!
//! A source is compiled once per pair of element types and device; its kernels see the types as `T` and `S` (see
//! `common.cuh`). Results round like the host's kernels wherever the order of operations is the same: products and sums
//! are fused only where a source says so.

mod dropout;
mod fused;
mod launch;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::DType;

use crate::error::DeviceError;
use crate::ffi::driver::{Function, Gpu};
use crate::ffi::nvrtc;

pub(crate) use launch::{Arg, GRID_HEIGHT_MAX, Launch};

/// Prepended to every source.
const COMMON: &str = include_str!("../../kernels/common.cuh");

/// A file of kernels.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

impl Source {
    /// The names of its kernels: the text between `__global__ void` and the parameters.
    fn kernels(&self) -> Vec<&'static str> {
        let after = self.text.split("__global__ void ").skip(1);
        after.filter_map(|text| Some(text.split_once('(')?.0)).collect()
    }
}

macro_rules! sources {
    ($($ident:ident = $name:literal;)*) => {
        $(pub(crate) static $ident: Source =
            Source { name: $name, text: include_str!(concat!("../../kernels/", $name)) };)*
    };
}

sources! {
    CONVERT = "convert.cu";
    INTEGERS = "integers.cu";
    NORMS = "norms.cu";
    POINTWISE = "pointwise.cu";
    LOSS = "loss.cu";
    FACTORED = "factored.cu";
    EXACT = "exact.cu";
}

/// The names of a source and of a kernel, and the element types.
type Key = (&'static str, &'static str, DType, DType);

/// The compiled kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    gpu: Arc<Gpu>,
    loaded: Mutex<BTreeMap<Key, Function>>,
}

impl Kernels {
    /// The kernels of a device, shared by all ranks on it.
    pub(crate) fn of(gpu: &Arc<Gpu>) -> Arc<Self> {
        static DEVICES: Mutex<BTreeMap<usize, Arc<Kernels>>> = Mutex::new(BTreeMap::new());
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = devices
            .entry(gpu.ordinal())
            .or_insert_with(|| Arc::new(Self { gpu: Arc::clone(gpu), loaded: Mutex::default() }));
        Arc::clone(kernels)
    }

    /// The device.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The kernel for element types `t` and `s`; compiles its source on first use.
    fn get(
        &self,
        source: &'static Source,
        kernel: &'static str,
        (t, s): (DType, DType),
    ) -> Result<Function, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.get(&(source.name, kernel, t, s)) {
            return Ok(*function);
        }
        let image = image(source, (t, s), &self.gpu.architecture())?;
        let names = source.kernels();
        let functions = self.gpu.load(&image, &names)?;
        loaded.extend(
            names.into_iter().zip(functions).map(|(name, function)| ((source.name, name, t, s), function)),
        );
        let function = loaded.get(&(source.name, kernel, t, s));
        Ok(*function.unwrap_or_else(|| panic!("{} has a kernel {kernel}", source.name)))
    }
}

/// Compiles a source for element types and an architecture.
fn image(source: &Source, (t, s): (DType, DType), arch: &str) -> Result<Vec<u8>, DeviceError> {
    let text = format!("{COMMON}\n#line 1 \"{}\"\n{}", source.name, source.text);
    let macros = [format!("ELEMENT={}", c_type(t)), format!("OTHER={}", c_type(s))];
    nvrtc::compile(source.name, &text, arch, &macros)
}

/// The C type of elements.
fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        DType::U8 => "u8",
        DType::U32 => "u32",
        DType::I64 => "i64",
    }
}
