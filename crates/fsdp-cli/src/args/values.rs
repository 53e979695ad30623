//! Values of options, as other crates have them.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use fsdp_config::{Device, Quantize};
use fsdp_core::{Axis, DType, Mesh};

/// The name of a value, its help, and the value.
pub(super) type Named<T> = (&'static str, &'static str, T);

/// What computes.
pub(super) const DEVICES: [Named<Device>; 4] = [
    ("cpu", "The kernels of fsdp", Device::Cpu),
    ("torch-cpu", "libtorch's kernels (feature `torch`)", Device::TorchCpu),
    ("cuda", "NVIDIA GPUs (feature `cuda`)", Device::Cuda),
    ("xla", "The PJRT plugin that `PJRT_PLUGIN_LIBRARY_PATH` names (feature `xla`)", Device::Xla),
];

/// How frozen bases are kept.
pub(super) const FORMATS: [Named<Quantize>; 4] = [
    ("none", "As floats", Quantize::None),
    ("nf4", "NF4 with double quantization", Quantize::Nf4),
    ("nf4-single", "NF4", Quantize::Nf4Single),
    ("mxfp4", "Experts in MXFP4", Quantize::Mxfp4),
];

/// Dtypes of parameters.
pub(super) const DTYPES: [Named<DType>; 4] = [
    ("f32", "IEEE 754 single precision", DType::F32),
    ("bf16", "bfloat16", DType::Bf16),
    ("f16", "IEEE 754 half precision", DType::F16),
    ("f64", "IEEE 754 double precision", DType::F64),
];

/// A parser that takes the names of these values.
pub(super) fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [Named<T>],
) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    let value = |name: String| values.iter().find(|(known, ..)| *known == name).map(|(.., value)| *value);
    PossibleValuesParser::new(names).map(move |name| value(name).expect("clap takes no other"))
}

/// Parses an integer of at least 1.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected an integer of at least 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

/// The axis that adds no ranks.
const EXPERT: &str = "expert";

/// Parses the sizes of a mesh's axes: `shard=2,context=2`.
pub(super) fn mesh(text: &str) -> Result<Mesh, String> {
    let mut sizes: Vec<(&str, usize)> = Vec::new();
    for axis in text.split(',') {
        let (name, size) = axis.split_once('=').ok_or("expected sizes of axes, as in shard=2,context=2")?;
        let name = name.trim();
        if sizes.iter().any(|(other, _)| *other == name) {
            return Err(format!("the axis {name} has two sizes"));
        }
        sizes.push((name, positive(size.trim())?));
    }
    let (expert, axes): (Vec<_>, Vec<_>) = sizes.into_iter().partition(|(name, _)| *name == EXPERT);
    let axis = |(name, size): (&str, usize)| {
        let axis = Axis::ALL.into_iter().find(|axis| axis.name() == name).ok_or_else(|| {
            format!("there is no axis `{name}`, but {}, {EXPERT}", Axis::ALL.map(Axis::name).join(", "))
        })?;
        Ok::<_, String>((axis, size))
    };
    let axes = axes.into_iter().map(axis).collect::<Result<Vec<_>, _>>()?;
    let mesh = Mesh::new(axes).and_then(|mesh| mesh.with_expert(expert.first().map_or(1, |(_, size)| *size)));
    mesh.map_err(|error| error.to_string())
}
